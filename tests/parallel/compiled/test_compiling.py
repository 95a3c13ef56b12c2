"""Compiling for slices that this machine does not have."""

import dataclasses
import math
import re
import types

import jax
import pytest

from core import optimizers, slices
from core.slices import GIB
from launch import environment
from launch.config import loader
from launch.runs import smoke
from models.decoder import transformer
from models.decoder.experts import Experts
from models.decoder.layers import Attention, Mlp
from models.mixers.latent_attention import LatentAttention
from parallel import partitioner, strategies
from parallel.compiled import analysis, compiling, report
from parallel.verify.agreement import EXAMPLES
from tasks import streams

GIN = environment.WORKSPACE / "gin"


def program(model, tables, slice_name, *, rows, length, accum_steps=1):
    slice_ = slices.get(slice_name)
    spec = streams.batch_spec(rows, length=length)
    bound = partitioner.Partitioner(tables, slice=slice_, devices=compiling.devices_of(slice_))
    optimizer = optimizers.adamw(learning_rate=optimizers.constant(1e-4))
    return bound.program(model, optimizer, spec, seed=0, accum_steps=accum_steps)


SMALL = transformer.Transformer(
    vocab_size=1000, num_layers=2, embed_dim=512, mlp_dim=1024, num_heads=8, num_kv_heads=4, head_dim=128, remat="full"
)


@pytest.mark.covers("X04")
@pytest.mark.compiled("v4-8", "v4-32", "2xv4-16")
@pytest.mark.slow  # test_every_experiment_compiles_for_its_slice is quick for a model under fsdp, with splash inside
@pytest.mark.parametrize("name", EXAMPLES)
def test_a_step_compiles_with_splash_inside(name):
    example = EXAMPLES[name]
    model = dataclasses.replace(SMALL, num_layers=4)  # two stages of two turns
    length = 1024 if name == "context_ring" else 512  # 128 positions on each of 4 chips, or in both of their chunks
    bound = program(model, example.strategy, example.slice, rows=16, length=length)
    result = compiling.compile_for_slice(bound)
    assert "tpu_custom_call" in result.hlo
    sizes = report.totals(bound)
    assert result.argument_bytes + result.temp_bytes <= result.peak_bytes
    whole = sum(math.prod(a.shape) * 4 for a in jax.tree.leaves(bound.abstract_state.params))
    if sizes.params < whole and bound.partitioner.row_shards > 1:
        assert result.temp_bytes < whole  # gradients in pieces; what fits lives in CMEM, so there is no lower bound
    batch = sum(math.prod(a.sharding.shard_shape(a.shape)) * 4 for a in bound.abstract_batch.values())
    assert result.argument_bytes == pytest.approx(sizes.everything + batch, rel=0.02)


NEAR = Attention(window=256)
FAMILIES = {  # with few layers, short windows and small vocabularies
    "gpt2": {"max_positions": 2048},
    "llama-2-7b": {},
    "llama-3.2-1b": {},
    "mistral-7b-v0.1": {"mixer": NEAR},
    "qwen2.5-0.5b": {},
    "qwen3-0.6b": {},
    "gemma-2-2b": {"mixer": (NEAR, Attention())},
    "gemma-3-1b": {"mixer": (*[NEAR] * 5, Attention())},
    "smollm2-135m": {},
}


@pytest.mark.slow
@pytest.mark.covers("N02", "N03")
@pytest.mark.compiled("v4-8")
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_compiles_with_splash_inside(name):
    """2,048 positions are four blocks of keys, of which a layer with a window of 256 visits two for each of queries."""
    model = transformer.preset(name, **{"remat": "full", "vocab_size": 1024, "mlp_dim": 1024, **FAMILIES[name]})
    model = dataclasses.replace(model, num_layers=len(model.layer_kinds) + 1)
    found = analysis.analyze(program(model, strategies.fsdp(), "v4-8", rows=4, length=2048))
    forward = {kernel.operands[0] for kernel in found.costs.kernels if "splash_mha_fwd" in kernel.op_name}
    assert forward == {"s8[1,4,2]" if kind.mixers == (NEAR,) else "s8[1,4,4]" for kind in model.layer_kinds}


@pytest.mark.slow
@pytest.mark.compiled("v4-8")
def test_latent_attention_after_which_experts_follow_a_dense_layer_compiles_with_splash_inside():
    """Heads as in DeepSeek-V3: 192 dimensions of queries and keys, 128 of values."""
    model = dataclasses.replace(
        SMALL,
        num_kv_heads=8,
        head_dim=64,
        num_layers=3,
        mixer=LatentAttention(latent_dim=128, query_latent_dim=256),
        feed_forward=Experts(
            num_experts=8, top_k=2, mlp_dim=256, scores="sigmoid", has_correction=True, num_groups=4, top_groups=2
        ),
        first_feed_forward=(Mlp(),),
    )
    result = compiling.compile_for_slice(program(model, strategies.fsdp(), "v4-8", rows=4, length=512))
    assert "splash_mha_fwd" in result.hlo


def dimensions(hlo):
    """Every size of a dimension of an array of the program."""
    return {int(n) for shape in re.findall(r"\b[a-z]+\d+\[([\d,]+)\]", hlo) for n in shape.split(",")}


@pytest.mark.slow  # tests/parallel/test_rules.py has quick tests of rules for the vocabulary
@pytest.mark.covers("M14")
@pytest.mark.compiled("v4-32")
@pytest.mark.parametrize(("tables", "whole"), [(strategies.fsdp(), True), (strategies.fsdp_tensor(tensor=4), False)])
def test_a_vocabulary_that_is_split_is_whole_on_no_chip(tables, whole):
    """Neither looked up, nor in the logits, nor in the loss; stored as 1408, a size that nothing else has."""
    model = dataclasses.replace(SMALL, vocab_size=1400)
    found = dimensions(compiling.compile_for_slice(program(model, tables, "v4-32", rows=16, length=256)).hlo)
    assert (1408 in found) == whole
    assert whole or 1408 // 4 in found


QUICK_EXPERIMENTS = ("valkyrie_7b.gin",)  # the others differ in sizes and slice


@pytest.mark.covers("X04")
@pytest.mark.compiled("v4-8", "v4-16", "v4-32")
@pytest.mark.parametrize(
    "name",
    [
        name if name in QUICK_EXPERIMENTS else pytest.param(name, marks=pytest.mark.slow)
        for name in sorted(p.name for p in GIN.glob("*.gin"))
        if name != "defaults.gin" and not name.startswith("finetune")  # which need a folder
    ],
)
def test_every_experiment_compiles_for_its_slice(name):
    """Its smallest sizes: a fresh state, a training step and an evaluation step."""
    experiment = smoke.shrink(loader.load(f"gin/{name}").build())
    bound = experiment.bind(compiling.devices_of(slices.get(experiment.slice)))
    with bound.partitioner.tracing():
        fresh = bound.jitted_init.lower().compile()
        evaluated = bound.jitted_eval_step.lower(bound.abstract_state, bound.abstract_batch).compile()
    trained = compiling.compile_for_slice(bound)
    sizes = report.totals(bound)
    assert fresh.memory_analysis().output_size_in_bytes >= sizes.everything
    assert trained.argument_bytes >= sizes.everything
    assert evaluated.memory_analysis().argument_size_in_bytes >= sizes.params
    # The splash kernel, unless chips share a row of 128 positions, of which each has too few for it.
    is_short = experiment.strategy.name == "context"
    assert all(("tpu_custom_call" in hlo) != is_short for hlo in (trained.hlo, evaluated.as_text()))


@pytest.mark.slow  # tests/parallel/test_accumulation.py has quick tests of what is reduced when
@pytest.mark.covers("T03")
@pytest.mark.compiled("v4-32")
def test_microbatches_compile_with_an_embedding_sharded_over_both_axes():
    """The compiler ended its process when the gradient was summed in pieces inside a region manual over data."""
    model = dataclasses.replace(SMALL, num_layers=1, attention="plain")
    bound = program(model, strategies.mesh3d(data=2, fsdp=2, tensor=4), "v4-32", rows=16, length=64, accum_steps=2)
    assert bound.manual_axes == {"data"}
    assert compiling.compile_for_slice(bound).peak_bytes > 0


@pytest.mark.compiled("v4-32")
def test_a_step_that_does_not_fit_is_reported_with_the_excess():
    wide = dataclasses.replace(SMALL, embed_dim=8192, mlp_dim=65536, remat="none")
    said = r"needs [\d.]+GiB of HBM per chip, but a chip has 30.75GiB"
    with pytest.raises(compiling.OutOfHbmError, match=said) as raised:
        compiling.compile_for_slice(program(wide, strategies.data_parallel(), "v4-32", rows=16, length=256))
    assert raised.value.present_bytes == 30.75 * GIB
    assert 30.75 * GIB < raised.value.needed_bytes < 2**40


@pytest.mark.compiled("v4-8")
def test_a_step_that_needs_tebibytes_is_reported_like_any_other():
    model = dataclasses.replace(SMALL, embed_dim=2**15, mlp_dim=2**20, num_layers=4, remat="none")
    with pytest.raises(compiling.OutOfHbmError, match=r"needs [\d.]+TiB of HBM per chip") as raised:
        compiling.compile_for_slice(program(model, strategies.data_parallel(), "v4-8", rows=4, length=256))
    assert raised.value.needed_bytes > 2**40


@pytest.mark.slow
@pytest.mark.compiled("v4-32")
def test_valkyrie_7b_fits_v4_32_in_10_gib():
    model = transformer.preset("7b", remat="full")
    result = compiling.compile_for_slice(program(model, strategies.fsdp(), "v4-32", rows=32, length=2048))
    assert result.peak_bytes <= 10 * GIB


@pytest.mark.parametrize(
    ("on_host", "peak", "usable", "expected"),
    [
        (0, 1079, 2000, 1079),  # nothing on the host: the compiler's own
        (514, 856, 2000, 945),  # of the state and what is on the host alone: too little
        (642, 984, 2000, 945),
        (642, 984, 900, 900),  # it fits, so the bound is not reached
    ],
)
def test_the_peak_is_that_of_the_chip_if_arrays_are_on_the_host(on_host, peak, usable, expected):
    """Mebibytes of a decoder of 16 layers on v4-8, as the compiler gave them, with results of 3 MiB of their own."""
    memory = types.SimpleNamespace(
        peak_memory_in_bytes=peak,
        host_temp_size_in_bytes=on_host,
        argument_size_in_bytes=342,
        output_size_in_bytes=345,
        alias_size_in_bytes=342,
        temp_size_in_bytes=600,
    )
    assert compiling._peak_bytes(memory, usable=usable) == expected
