"""A strategy changes speed and memory, never numbers: every strategy on 16 devices against one device, in float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from core import optimizers, slices
from launch.agreement import MODEL, bind, random_batches
from parallel import agreement, partitioner, strategies

CASES = {
    **agreement.EXAMPLES,
    "whole key heads": agreement.Example(
        "v4-32",
        strategies.override(
            strategies.fsdp_tensor(tensor=8), param_rules={"kv_heads": None}, activation_rules={"kv_heads": None}
        ),
    ),
}
CONTAINED = {  # what another case splits in the same way, and more
    "data_parallel": "zero1",
    "hsdp": "multislice",
    "fsdp_tensor": "sequence_tensor",
    "mesh3d": "multislice and sequence_tensor",
    "whole key heads": "tensor",
    **{n: "tests/parallel/pipeline" for n in CASES if n.startswith("pipeline")},
}
STEPS = 20


def batches():
    return random_batches(MODEL.vocab_size, steps=STEPS)


def program(tables, slice_name, **options):
    return bind(MODEL, agreement.Example(slice_name, tables), next(batches()), **options)


@pytest.fixture(scope="module")
def one_device():
    return agreement.run(program(strategies.data_parallel(), "v5e-1"), batches())


# In float32, after 20 AdamW steps. Adam divides by the root of the second moment, so where a gradient is nearly zero an
# update of the size of the learning rate (3e-3) rests on its last bits: parameters may differ by far more than 1 ulp.
TOLERANCE = {"fresh": 0.0, "gradients": 1e-6, "losses": 1e-5, "params": 1e-5, "opt_state": 1e-5}


@pytest.mark.covers("M04", "M06", "M07", "M08", "M09", "M10", "M13", "M16", "R11")
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in CONTAINED)) for n in CASES])
def test_numbers_do_not_depend_on_the_strategy(name, one_device):
    case = CASES[name]
    found = agreement.compare(agreement.run(program(case.strategy, case.slice), batches()), one_device)
    apart = {part: found[part] for part in TOLERANCE if found[part].absolute > TOLERANCE[part]}
    assert not apart


@pytest.mark.parametrize("part", ["gradients", "losses", "params", "opt_state"])
def test_a_wrong_number_anywhere_is_seen(part, one_device):
    tree = jax.tree.map(np.copy, getattr(one_device, part))
    leaf = max(jax.tree.leaves(tree), key=np.size)
    leaf.flat[-1] += 1e-3
    found = agreement.compare(one_device._replace(**{part: tree}), one_device)
    assert found[part].absolute > TOLERANCE[part]
    assert found[part].ulp > 100
    assert all(found[other].absolute == 0 for other in TOLERANCE if other != part)


@pytest.mark.covers("T03")
@pytest.mark.parametrize(
    ("tables", "gather_once"),
    [
        (strategies.hsdp(data=2), False),
        (strategies.fsdp_tensor(tensor=2), True),
        pytest.param(strategies.hsdp(data=2), True, marks=pytest.mark.slow),
        pytest.param(strategies.fsdp_tensor(tensor=2), False, marks=pytest.mark.slow),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_accumulation_equals_one_big_batch(tables, gather_once, one_device):
    bound = program(tables, "v4-8", accum_steps=4, gather_once=gather_once)
    found = agreement.compare(agreement.run(bound, batches()), one_device)
    assert max(found["losses"].absolute, found["params"].absolute) <= 1e-5


@pytest.mark.covers("T07")
def test_frozen_parameters_stay_and_have_no_state():
    optimizer = optimizers.adamw(learning_rate=optimizers.constant(1e-2), frozen=("layers/*", "embedding"))
    bound = partitioner.Partitioner(strategies.fsdp(), slice=slices.get("v4-32"), devices=jax.devices())
    frozen = bound.program(MODEL, optimizer, program(strategies.fsdp(), "v4-32").spec, seed=7)
    state = frozen.init()
    before = jax.device_get(state.params)
    moments = [a.shape for a in jax.tree.leaves(state.opt_state) if a.ndim]
    assert sorted(moments) == sorted([(64,), (64,), (64, 256), (64, 256)])
    state, metrics = frozen.train_step(state, frozen.put(next(batches())))
    after = jax.device_get(state.params)
    jax.tree.map(np.testing.assert_array_equal, after["layers/block"], before["layers/block"])
    np.testing.assert_array_equal(after["~"]["embedding"], before["~"]["embedding"])
    assert not np.array_equal(after["~"]["unembedding"], before["~"]["unembedding"])
    trained = agreement.run(frozen, [next(batches())]).gradients["~"]
    norm = np.sqrt(sum(np.sum(np.square(trained[k])) for k in ("unembedding", "final_norm")))
    np.testing.assert_allclose(metrics["gradient_norm"], norm, rtol=1e-5)


def test_sharded_bytes():
    state = program(strategies.fsdp(), "v4-32").init()
    weight = state.params["layers/block"]["query"]
    assert weight.addressable_shards[0].data.size * 16 == weight.size
    assert state.opt_state[1].mu["layers/block"]["query"].sharding == weight.sharding
    assert jnp.ndim(state.step) == 0
