"""The compiler options of each chip generation: the compiler knows them, warns of none, and gin may change them."""

import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from core import slices
from launch.config import loader
from models.decoder.transformer import Transformer
from parallel.compiled import compiler_options, compiling
from parallel.compiled.hlo import messages

GENERATIONS = tuple(slices.CHIPS)

# Compiles an all-gather beside a product and an all-to-all for each generation, in a process whose compiler says what
# it warns of.
COMPILE = """
import json, sys
import jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from core import slices
from parallel.compiled import compiler_options; from parallel import mesh
from parallel.compiled.hlo import messages

def compile_for(generation, options):
    devices = mesh.topology_devices(slices.get(f"{generation}-8"))
    chips = jax.make_mesh((len(devices),), ("fsdp",), devices=devices, axis_types=(jax.sharding.AxisType.Auto,))
    split, whole = NamedSharding(chips, PartitionSpec("fsdp")), NamedSharding(chips, PartitionSpec())
    x = jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16, sharding=split)
    exchange = jax.shard_map(
        lambda y: jax.lax.all_to_all(y, "fsdp", 1, 0, tiled=True),
        mesh=chips, in_specs=PartitionSpec("fsdp"), out_specs=PartitionSpec(None, "fsdp"),
    )
    product = jax.jit(lambda x, w: exchange(jax.nn.silu(x @ jax.lax.with_sharding_constraint(w, whole))))
    with messages.compiler_messages(pass_on=False) as said:
        try:
            text = product.lower(x, x).compile(compiler_options=options).as_text()
            assert "all-gather" in text and "all-to-all" in text
        except jax.errors.JaxRuntimeError as error:
            return [str(error)]
    return messages.warnings(said.text)

print(json.dumps([compile_for(generation, options) for generation, options in json.loads(sys.argv[1])]))
"""


def warnings_of(*cases, monkeypatch):
    for name, value in messages.AUDIBLE_WARNINGS.items():
        monkeypatch.setenv(name, value)
    command = [sys.executable, "-c", COMPILE, json.dumps(cases)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    return json.loads(ran.stdout)


@pytest.mark.compiled("v4-8", "v5p-8", "v5e-8", "v6e-8", "tpu7x-8")
def test_no_generation_compiles_with_a_warning(monkeypatch):
    unsafe = {**compiler_options.options("v4"), "xla_tpu_enable_async_collective_fusion_fuse_all_gather": True}
    exchanging = {"expert": 8}
    cases = [*((name, compiler_options.options(name, mesh_shape=exchanging)) for name in GENERATIONS), ("v4", unsafe)]
    *found, planted = warnings_of(*cases, monkeypatch=monkeypatch)
    assert found == [[]] * len(GENERATIONS)
    assert any("Continuation fusion for AllGather" in line for line in planted)


@pytest.mark.parametrize("generation", [*GENERATIONS, "cpu", "h100"])
def test_exchanges_of_tokens_are_asynchronous_on_tpus(generation):
    own, exchanging = (compiler_options.options(generation, mesh_shape={"expert": n}) for n in (1, 2))
    assert own == compiler_options.options(generation) == compiler_options.OPTIONS[generation]
    added = {"xla_tpu_enable_async_all_to_all": True} if generation in GENERATIONS else {}
    assert exchanging == {**own, **added}


def test_overrides_add_replace_and_remove():
    name = "xla_enable_async_all_gather"
    assert compiler_options.options("v4", {name: False})[name] is False
    assert name not in compiler_options.options("v4", {name: None})
    changed = compiler_options.options("v4", {"xla_tpu_scoped_vmem_limit_kib": 20480})
    assert changed == {**compiler_options.OPTIONS["v4"], "xla_tpu_scoped_vmem_limit_kib": 20480}


def test_options_of_tpus_stay_away_from_other_compilers():
    given = {"xla_tpu_scoped_vmem_limit_kib": 20480, "xla_sc_x": 1, "xla_jf_x": 1, "xla_gpu_x": 1}
    assert compiler_options.options("h100", given) == {**compiler_options.OPTIONS["h100"], "xla_gpu_x": 1}


SMALL = (
    "transformer.Transformer.num_layers = 1",
    "transformer.Transformer.embed_dim = 128",
    "transformer.Transformer.mlp_dim = 256",
    "transformer.Transformer.num_heads = 1",
    "transformer.Transformer.num_kv_heads = 1",
    "transformer.Transformer.attention = 'plain'",
    "LENGTH = 128",
    "VOCAB_SIZE = 256",
)
OPTIONS = "experiment.Experiment.compiler_options"


@pytest.mark.compiled("v4-8")
def test_an_option_that_libtpu_does_not_know_is_refused_by_name():
    bindings = [*SMALL, f"{OPTIONS} = {{'xla_tpu_no_such_option': True}}"]
    experiment = loader.load("gin/valkyrie_7b.gin", bindings=bindings, slice_name="v4-8").build()
    bound = experiment.bind(compiling.devices_of(slices.get("v4-8")))
    with pytest.raises(ValueError, match=r"no compiler option 'xla_tpu_no_such_option'.*compiler_options"):
        compiling.compile_for_slice(bound)


@pytest.mark.parametrize("value", ["{'fusion': True}", "{'xla_x': 1.5}"])
def test_an_override_of_another_form_is_refused(value):
    with pytest.raises(ValueError, match="compiler_options"):
        loader.load("gin/valkyrie_7b.gin", bindings=[f"{OPTIONS} = {value}"]).build()


LOG = """W1122 13:46:32.035908   13742 flag_utils.cc:282] Continuation fusion is enabled, incorrect results
W1122 13:46:32.035952   13742 flag_utils.cc:282] Continuation fusion is enabled, incorrect results
I1122 13:46:32.035952   13742 flag_utils.cc:282] about nothing
W1122 14:00:20.826888    9410 tpu_spmd_partitioner.cc:459] Collective matmul V1 is enabled. Please consider V2
E1122 13:38:34.779490   32519 slow_operation_alarm.cc:73]
********************************
[Compiling module jit_step] Very slow compile?
********************************
W1122 14:00:25.363066    9497 log_lines.cc:11] Successful retry compilation of fusion.7 after retry_count=1
W1122 14:00:25.363066    9497 log_lines.cc:11] HLO:
W1122 14:00:25.363066    9497 log_lines.cc:11]   ROOT %tuple.1 = (f32[4]{0}) tuple(add.598)
W1122 14:00:25.363066    9497 log_lines.cc:11] }, backend_config={}
W1122 14:00:25.363066    9497 other.cc:11] xla_tpu_some_flag = true is not supported on v4; incorrect results
E1122 14:00:25.363066    9497 other.cc:502] Two lines
of one message
"""


def test_warnings_are_printed_once_without_harmless_ones():
    assert messages.warnings(LOG) == [
        "Continuation fusion is enabled, incorrect results",
        "xla_tpu_some_flag = true is not supported on v4; incorrect results",
        "Two lines of one message",
    ]


def test_xla_knows_the_options_of_gpus():
    double = jax.jit(lambda x: 2 * x, compiler_options=compiler_options.options("h100"))
    assert double(3) == 6


def test_initialization_on_cpus_keeps_the_level_of_the_environment(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_x=1 --xla_backend_optimization_level=0")
    assert compiler_options.initialization_on_cpus() == {}
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_x=1")
    assert compiler_options.initialization_on_cpus() == {"xla_backend_optimization_level": 1}


@pytest.mark.slow  # compiles a program with the default options
def test_initialization_on_cpus_has_the_bits_of_the_default_level():
    model = Transformer(vocab_size=64, num_layers=2, embed_dim=32, mlp_dim=48, num_heads=4, num_kv_heads=2)
    ids = {name: jnp.zeros((1, 8), jnp.int32) for name in ("inputs", "targets", "positions", "segment_ids")}
    given = jax.random.key(0), {**ids, "weights": jnp.zeros((1, 8))}
    lowered = jax.jit(model.init).lower(*given)
    levels = [lowered.compile({"xla_backend_optimization_level": level})(*given) for level in (1, 3)]
    assert all((a == b).all() for a, b in zip(*map(jax.tree.leaves, levels), strict=True))
