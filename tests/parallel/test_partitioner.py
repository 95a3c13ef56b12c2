"""A strategy bound to devices: rows of a host, their placement, and errors before any array exists."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from core import logical, optimizers, slices, stack
from core.errors import UserError
from core.types import LossOutput
from models.agreement_subjects import random_batches
from models.decoder.experts import Experts
from models.decoder.layers import Attention, Mlp
from models.decoder.transformer import Transformer, preset
from models.haiku_model import HaikuModel
from models.lora import Lora
from models.mixers.s5 import S5
from parallel import strategies
from parallel.partitioner import Partitioner
from parallel.verify import agreement
from tasks import streams
from tests.lab import subjects

TINY = Transformer(
    vocab_size=64, num_layers=1, embed_dim=16, mlp_dim=16, num_heads=4, num_kv_heads=4, vocab_multiple=16
)
# Measured on two kinds of processors: by how much gradients, losses, parameters and optimizer state differ.
ULP_WITHOUT_LOOP = (5, 1, 1, 6.5)
ULP_OF_LORA = (5, 1, 13, 6.5)  # its second matrix is zero at first, and AdamW divides its small gradients by their size
EXPERTS, LORA = (
    Experts(num_experts=4, top_k=2, load_balance_coef=0.1),
    Lora(rank=2, alpha=4.0, targets=("query", "down")),
)
STATES = S5(states=8, chunk=4)
GROUP = {"mixer": (STATES, Attention()), "feed_forward": (Mlp(), STATES)}
KINDS = {"mixer": (Attention(window=4), Attention(window=4), Attention())}
ADAMW = optimizers.adamw(learning_rate=optimizers.constant(1e-3))


def batch_spec(rows, length=8):
    return streams.batch_spec(rows, length=length)


def bind(tables, slice_name, devices=None):
    return Partitioner(tables, slice=slices.get(slice_name), devices=devices or jax.devices())


def layouts(bound, batch_size, monkeypatch):
    """The layout that each host of the slice computes."""
    found = []
    for host in range(bound.slice.hosts):
        monkeypatch.setattr(jax, "process_index", lambda host=host: host)
        found.append(bound.data_layout(batch_size))
    return found


FSDP, BY_FOUR = strategies.fsdp(), strategies.fsdp_tensor(tensor=4)


class WithKey(HaikuModel):
    """A model of one parameter whose carry is a random key."""

    def sums(self, batch, *, is_training):
        scale = logical.param("scale", (), (), jnp.ones)
        return LossOutput(scale * jnp.sum(batch["weights"]), jnp.sum(batch["weights"]), {})

    def init_carry(self, batch):
        return {"key": jax.random.key(0)}


def test_a_random_key_in_the_carry_is_refused_before_it_would_have_to_be_saved():
    with pytest.raises(ValueError, match=r"the carry of WithKey has a random key .*jax\.random\.key_data"):
        bind(FSDP, "v4-8").program(WithKey(), ADAMW, batch_spec(8), seed=0)


class WithTable(HaikuModel):
    """A model with a parameter and a table of ids, which is not trained."""

    def sums(self, batch, *, is_training):
        scale = logical.param("scale", (), (), jnp.ones)
        ids = logical.param("ids", (4,), (None,), jnp.ones, dtype=jnp.int32, trainable=False)
        return LossOutput(scale * ids[0] * jnp.sum(batch["weights"]), jnp.sum(batch["weights"]), {})


def test_parameters_without_a_gradient_are_refused_before_the_first_step():
    with pytest.raises(UserError, match=r"parameters of WithTable are not floating-point numbers: ids: int32\. "):
        bind(FSDP, "v4-8").program(WithTable(), ADAMW, batch_spec(8), seed=0)


@pytest.mark.covers("D01", "D02")
@pytest.mark.parametrize(
    ("name", "tables", "batch_size", "host_0", "host_1"),
    [
        ("v4-32", FSDP, 16, (0, 4, 8, 12), (1, 5, 9, 13)),
        ("v4-32", FSDP, 32, (0, 1, 8, 9, 16, 17, 24, 25), (2, 3, 10, 11, 18, 19, 26, 27)),
        ("v4-32", BY_FOUR, 16, (0, 1, 2, 3), (4, 5, 6, 7)),
        ("v4-32", strategies.mesh3d(tensor=2, data=2), 16, (0, 1, 8, 9), (2, 3, 10, 11)),
        ("v4-64", FSDP, 32, (0, 4, 16, 20), (8, 12, 24, 28)),
        ("v4-64", BY_FOUR, 16, (0, 1, 8, 9), (0, 1, 8, 9)),
        ("v5p-128", FSDP, 64, (0, 4, 16, 20), (32, 36, 48, 52)),
    ],
)
def test_rows_of_the_hosts_of_real_slices(name, tables, batch_size, host_0, host_1, tpu_topology, monkeypatch):
    bound = bind(tables, name, tpu_topology(name))
    hosts = layouts(bound, batch_size, monkeypatch)
    assert (hosts[0].rows, hosts[1].rows) == (host_0, host_1)
    owned = [row for layout in hosts for row in layout.owned_rows]
    assert sorted(owned) == list(range(batch_size))  # disjoint and complete
    assert all(set(layout.owned_rows) <= set(layout.rows) for layout in hosts)


def test_rows_that_several_hosts_need_are_owned_by_the_first(tpu_topology, monkeypatch):
    bound = bind(BY_FOUR, "v4-64", tpu_topology("v4-64"))  # groups of four chips span hosts
    hosts = layouts(bound, 16, monkeypatch)
    assert [h.rows for h in hosts[:2]] == [(0, 1, 8, 9)] * 2
    assert [h.owned_rows for h in hosts[:2]] == [(0, 1, 8, 9), ()]
    assert sum(len(h.owned_rows) > 0 for h in hosts) == 4


@pytest.mark.covers("D01")
def test_512_rows_on_v4_64_are_64_to_a_host_and_16_to_a_chip(tpu_topology, monkeypatch):
    bound = bind(strategies.data_parallel(), "v4-64", tpu_topology("v4-64"))
    assert [len(layout.rows) for layout in layouts(bound, 512, monkeypatch)] == [64] * 8
    assert bound.batch_shardings(batch_spec(512))["inputs"].shard_shape((512, 8)) == (16, 8)
    with pytest.raises(ValueError, match=r"batch = 500 does not divide over data = 32\. Nearest that do: 480, 512"):
        bound.data_layout(500)


@pytest.mark.covers("M04", "M15")
def test_layout_of_the_state_without_an_array():
    program = bind(strategies.fsdp_tensor(tensor=2), "v4-8").program(TINY, ADAMW, batch_spec(4), seed=0)
    block = program.state_shardings.params["layers/block"]
    assert block["query"].spec == PartitionSpec(None, "fsdp", "tensor", None)
    assert block["down"].spec == PartitionSpec(None, "tensor", "fsdp")
    assert program.state_shardings.opt_state[1].nu["layers/block"]["down"].spec == block["down"].spec
    assert program.batch_shardings["weights"].spec == PartitionSpec("fsdp", None)
    shapes, axes = program.abstract_state.params, program.axes.params
    jax.tree.map(lambda s, a: len(s.shape) == len(a.names) or pytest.fail(f"{s} {a}"), shapes, axes)


@pytest.mark.covers("M08")
def test_optimizer_state_may_be_stored_otherwise_than_parameters():
    table = strategies.data_parallel()
    zero_1 = strategies.Strategy(
        name="zero_1",
        mesh_shape=table.mesh_shape,
        param_rules=table.param_rules,
        activation_rules=table.activation_rules,
        optimizer_rules={**table.param_rules, "embed": "data"},
    )
    program = bind(zero_1, "v4-8").program(TINY, ADAMW, batch_spec(4), seed=0)
    assert program.state_shardings.params["layers/block"]["up"].is_fully_replicated
    assert program.state_shardings.opt_state[1].mu["layers/block"]["up"].spec == PartitionSpec(None, "data", None)


@pytest.mark.covers("T01", "M11")
def test_the_step_donates_its_state_and_keeps_every_layout():
    program = bind(FSDP, "v4-8").program(TINY, ADAMW, batch_spec(4), seed=0)
    state = program.init()
    assert jax.tree.map(lambda a: a.sharding, state) == program.state_shardings
    rows = np.ones((4, 8), np.int32)
    batch = program.put({k: rows.astype(s.dtype) for k, s in batch_spec(4).items()})
    before = jax.tree.leaves(state.params)[0]
    after, metrics = program.train_step(state, batch)
    assert before.is_deleted()
    assert jax.tree.map(lambda a: a.sharding.spec, after) == jax.tree.map(lambda a: a.spec, program.state_shardings)
    assert all(m.is_fully_replicated for m in jax.tree.leaves(metrics))
    sums = program.eval_step(after, batch)
    assert not after.step.is_deleted()  # evaluation consumes nothing
    assert float(sums["loss"].weight) == 32.0


def test_tracing_sees_the_mesh_and_the_table():
    bound = bind(FSDP, "v4-8")
    assert jax.sharding.get_abstract_mesh().empty
    with bound.tracing():
        assert jax.sharding.get_abstract_mesh().shape == {"stage": 1, "data": 1, "fsdp": 4, "sequence": 1, "tensor": 1}
    assert jax.sharding.get_abstract_mesh().empty


@pytest.mark.covers("M05")
def test_a_wrong_batch_and_a_wrong_model_are_reported_together():
    bound = bind(strategies.fsdp_tensor(tensor=4), "v4-32")
    two_key_heads = preset("tiny")
    with pytest.raises(ValueError, match=r"batch_size = 6 does not divide(?s:.*)kv_heads = 2 does not divide") as error:
        bound.program(two_key_heads, ADAMW, batch_spec(6), seed=0)
    assert "Nearest that do: 4, 8" in str(error.value)


def test_problems_of_batch_and_model_are_reported_at_once_and_once_each():
    odd = dataclasses.replace(TINY, embed_dim=18, head_dim=4)
    with pytest.raises(ValueError, match="does not fit") as error:
        bind(strategies.context(sequence=2), "v4-8").program(odd, ADAMW, batch_spec(3, length=9), seed=0)
    said = str(error.value)
    assert "batch_size = 3 does not divide over 2 groups" in said
    assert "length = 9 does not divide over sequence = 2. Nearest that do: 8, 10" in said
    assert said.count("embed = 18 does not divide over fsdp x sequence = 4") == 1
    assert "(also layers/block/gate, layers/block/key, " in said
    assert "Degrees of fsdp x sequence that do: 1, 2; or replicate it" in said


@pytest.mark.parametrize(("accum_steps", "spec"), [(0, batch_spec(4)), (1, {})])
def test_a_program_needs_microbatches_and_features(accum_steps, spec):
    with pytest.raises(ValueError, match="expected at least 1 step"):
        bind(FSDP, "v4-8").program(TINY, ADAMW, spec, seed=0, accum_steps=accum_steps)


def test_rows_of_a_table_that_microbatches_used_cannot_be_added_up():
    tables = dataclasses.replace(ADAMW, live=("table",))
    with pytest.raises(ValueError, match=r"accum_steps = 2: the optimizer changes only the rows of a table"):
        bind(FSDP, "v4-8").program(TINY, tables, batch_spec(8), seed=0, accum_steps=2)


@pytest.mark.parametrize(
    ("slice_name", "changes", "loops"),
    [
        ("cpu:2", {"num_layers": 3}, 0),
        ("cpu:2", {"num_layers": stack.UNROLLED + 1}, 2),
        ("cpu:2", {"num_layers": 3, "remat": "full"}, 2),  # which saves no memory without a loop
        ("v4-8", {"num_layers": 3}, 2),
    ],
)
def test_a_few_layers_run_without_a_loop_on_cpus(slice_name, changes, loops):
    """The backward pass is a second loop."""
    bound = bind(FSDP, slice_name, jax.devices()[: slices.get(slice_name).devices])
    program = bound.program(dataclasses.replace(TINY, **changes), ADAMW, batch_spec(4), seed=0)
    with bound.tracing():
        traced = program.jitted_train_step.trace(program.abstract_state, program.abstract_batch)
    assert str(traced.jaxpr).count("scan[") == loops


def test_without_a_loop_the_weights_of_a_layer_are_gathered_as_the_layer_reads_them():
    """XLA copied slices [1, ...] of the stack once more after it had gathered them."""
    bound = bind(FSDP, "cpu:2", jax.devices()[:2])
    program = bound.program(dataclasses.replace(TINY, num_layers=2), ADAMW, batch_spec(4), seed=0)
    with bound.tracing():
        text = program.jitted_train_step.lower(program.abstract_state, program.abstract_batch).compile().as_text()
    gathered = re.findall(r"= \w+\[([\d,]*)\]\S* all-gather\(", text)
    assert len(gathered) >= 14  # seven matrices of each layer
    assert not [shape for shape in gathered if shape.startswith("1,")]


@pytest.mark.parametrize(("slice_name", "traced_for_tpus"), [("cpu:1", False), ("v4-8", True)])
def test_a_simulated_slice_traces_the_kernels_of_tpus_and_a_slice_of_cpus_does_not(slice_name, traced_for_tpus):
    bound = bind(FSDP, slice_name, jax.devices()[: 1 if slice_name == "cpu:1" else 4])
    model = dataclasses.replace(TINY, num_heads=1, num_kv_heads=1, head_dim=128)
    program = bound.program(model, ADAMW, batch_spec(4, length=128), seed=0)
    with bound.tracing():
        traced = program.jitted_train_step.trace(program.abstract_state, program.abstract_batch)
    assert ("pallas_call" in str(traced.jaxpr)) == traced_for_tpus


@pytest.mark.covers("T04")
def test_a_loop_without_rematerialization_saves_no_copy_of_the_weights():
    bound = bind(FSDP, "v4-8", jax.devices()[:4])
    model = dataclasses.replace(TINY, num_layers=2, mlp_dim=24, dtype="float32")
    program = bound.program(model, ADAMW, batch_spec(4), seed=0)

    def saved(params, batch):
        def loss(params):
            return model.loss(params, (), jax.random.key(0), batch, is_training=True)[1].loss_sum

        return jax.vjp(loss, params)[1]

    params = program.abstract_state.params
    with bound.tracing():
        traced = jax.make_jaxpr(saved)(params, program.abstract_batch).jaxpr
    shapes = {leaf.shape for leaf in params["layers/block"].values() if leaf.ndim > 2}
    kept = [variable for variable in traced.outvars if variable.aval.shape in shapes]
    assert len(kept) >= 7
    assert set(kept) <= set(traced.invars)


@pytest.mark.slow  # core/test_stack.py compares both runners with a loop by hand, quickly
@pytest.mark.parametrize(
    ("changes", "measured"),
    [
        pytest.param({}, ULP_WITHOUT_LOOP, id="usual"),
        pytest.param({"feed_forward": EXPERTS}, ULP_WITHOUT_LOOP, id="experts"),
        pytest.param({"lora": LORA}, ULP_OF_LORA, id="lora"),
        pytest.param({"num_layers": 4, **GROUP}, ULP_WITHOUT_LOOP, id="group"),
        pytest.param({"num_layers": 4, **KINDS}, ULP_WITHOUT_LOOP, id="kinds"),
    ],
)
def test_layers_without_a_loop_give_the_numbers_of_the_loop(changes, measured):
    model = dataclasses.replace(TINY, **{"num_layers": 2, "dtype": "float32", **changes})
    data = list(random_batches(model.vocab_size, steps=2))
    on_cpus, simulated = (
        agreement.run(subjects.bind(model, agreement.Example(name, FSDP), data[0]), data) for name in ("cpu:4", "v4-8")
    )
    found, limits = agreement.compare(on_cpus, simulated), agreement.limits(measured)
    assert not {part: apart for part, apart in found.items() if apart.ulp > limits[part]}


@pytest.mark.slow  # of speed alone: that initial parameters are equal has quick tests
def test_initialization_on_cpus_is_compiled_at_a_lower_level(monkeypatch):
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    given, jit = [], jax.jit
    monkeypatch.setattr(
        jax, "jit", lambda fn, **options: given.append(options.get("compiler_options")) or jit(fn, **options)
    )
    program = bind(FSDP, "cpu:2", jax.devices()[:2]).program(TINY, ADAMW, batch_spec(4), seed=0)
    given.clear()
    params = program.init_params()
    assert program.jitted_init
    assert given == [{"xla_backend_optimization_level": 1}] * 2
    assert jax.tree.all(jax.tree.map(lambda a, b: (a == b).all(), params, program.init().params))


def test_chosen_parameters_are_initialized_alone_to_the_same_numbers():
    program = bind(FSDP, "v4-8", jax.devices()[:4]).program(TINY, ADAMW, batch_spec(4), seed=0)
    whole, some = program.init_params(), program.init_params({"layers/block/up"})
    assert jax.tree.map(lambda a: a.sharding, some) == {
        "layers/block": {"up": program.state_shardings.params["layers/block"]["up"]}
    }
    np.testing.assert_array_equal(some["layers/block"]["up"], whole["layers/block"]["up"])


def test_the_traces_of_the_checks_are_those_of_the_steps():
    """Overlapped reductions have derivatives of their own, so the check traces the training step, too."""
    traced = []

    class Counted(HaikuModel):
        def sums(self, batch, *, is_training):
            traced.append(is_training)
            scale = logical.param("scale", (), (), jnp.ones)
            return LossOutput(scale * jnp.sum(batch["weights"]), jnp.sum(batch["weights"]), {})

    program = bind(strategies.fsdp(overlap_reduction=True), "v4-8", jax.devices()[:4]).program(
        Counted(), ADAMW, batch_spec(8), seed=0
    )
    rows = np.ones((8, 8), np.int32)
    state, batch = program.init(), program.put({k: rows.astype(s.dtype) for k, s in batch_spec(8).items()})
    seen = len(traced)
    program.eval_step(state, batch)
    program.train_step(state, batch)
    assert len(traced) == seen
