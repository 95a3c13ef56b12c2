"""A strategy changes speed and memory, never numbers: every strategy on 16 devices against one device, in float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from core import optimizers, slices
from models import transformer
from parallel import partitioner, strategies

# Grouped-query attention, and a vocabulary that no mesh divides before it is rounded up.
MODEL = transformer.Transformer(
    vocab_size=203, num_layers=3, embed_dim=64, mlp_dim=176, num_heads=8, num_kv_heads=4, dtype="float32"
)
OPTIMIZER = optimizers.adamw(
    learning_rate=optimizers.warmup_cosine(peak=3e-3, warmup_steps=5, total_steps=20), weight_decay=0.1
)
STRATEGIES = {
    "data_parallel": strategies.data_parallel(),
    "fsdp": strategies.fsdp(),
    "fsdp over 2 replicas": strategies.fsdp(data=2),
    "fsdp_tensor 4": strategies.fsdp_tensor(tensor=4),
    "fsdp_tensor 2, 2 replicas": strategies.fsdp_tensor(tensor=2, data=2),
    "fsdp_tensor 8, whole key heads": strategies.override(
        strategies.fsdp_tensor(tensor=8), param_rules={"kv_heads": None}, activation_rules={"kv_heads": None}
    ),
}
STEPS, ROWS, LENGTH = 20, 16, 24


def batches():
    """Packed rows with uneven padding, different at every step."""
    rng = np.random.default_rng(0)
    for _ in range(STEPS):
        lengths = rng.integers(4, LENGTH // 2, ROWS)
        position = np.arange(LENGTH)[None]
        second = position >= lengths[:, None]
        padding = position >= LENGTH - rng.integers(0, 6, ROWS)[:, None]
        yield {
            "inputs": rng.integers(0, 203, (ROWS, LENGTH), dtype=np.int32),
            "targets": rng.integers(0, 203, (ROWS, LENGTH), dtype=np.int32),
            "weights": (~padding).astype(np.float32),
            "segment_ids": np.where(padding, 0, 1 + second).astype(np.int32),
            "positions": np.where(second, position - lengths[:, None], position).astype(np.int32),
        }


SPEC = {k: jax.ShapeDtypeStruct(a.shape, a.dtype) for k, a in next(batches()).items()}


def program(tables, slice_name, **options):
    bound = partitioner.Partitioner(tables, slice=slices.get(slice_name), devices=jax.devices())
    return bound.program(MODEL, OPTIMIZER, SPEC, seed=7, **options)


def gradients(bound, state):
    """Every gradient leaf of the first batch's mean loss."""

    def loss(params, batch):
        _, out = MODEL.loss(params, (), None, batch)
        return out.loss_sum / out.weight_sum

    with bound.partitioner.tracing():
        return jax.device_get(jax.jit(jax.grad(loss))(state.params, bound.put(next(batches()))))


def run(bound):
    """Fresh parameters, first gradients, loss of every step, and the state behind the last, on the host."""
    state = bound.init()
    fresh = jax.device_get(state.params)
    first = gradients(bound, state)
    losses = []
    for batch in batches():
        state, metrics = bound.train_step(state, bound.put(batch))
        losses.append(float(metrics["loss"]))
    return fresh, first, losses, jax.device_get(state)


@pytest.fixture(scope="module")
def one_device():
    return run(program(strategies.data_parallel(), "v5e-1"))


def close(a, b, *, tolerance, what):
    jax.tree_util.tree_map_with_path(
        lambda path, x, y: np.testing.assert_allclose(
            x, y, atol=tolerance, rtol=0, err_msg=what + jax.tree_util.keystr(path)
        ),
        a,
        b,
    )


@pytest.mark.covers("M04", "M06", "M07", "M09", "M10", "M13", "M16", "T13")
@pytest.mark.parametrize("name", STRATEGIES)
def test_numbers_do_not_depend_on_the_strategy(name, one_device):
    fresh, first, losses, state = run(program(STRATEGIES[name], "v4-32"))
    want_fresh, want_first, want_losses, want_state = one_device
    jax.tree.map(np.testing.assert_array_equal, fresh, want_fresh)
    close(first, want_first, tolerance=1e-6, what="gradient ")
    np.testing.assert_allclose(losses, want_losses, atol=1e-5, rtol=0)
    close(state, want_state, tolerance=1e-5, what="state after 20 steps ")


@pytest.mark.covers("T03")
@pytest.mark.parametrize("name", ["fsdp", "fsdp_tensor 4"])
def test_accumulation_equals_one_big_batch(name, one_device):
    tables = strategies.fsdp(fsdp=4) if name == "fsdp" else strategies.fsdp_tensor(tensor=2)
    _, _, losses, state = run(program(tables, "v4-8", accum_steps=4))
    _, _, want_losses, want_state = one_device
    np.testing.assert_allclose(losses, want_losses, atol=1e-5, rtol=0)
    close(state.params, want_state.params, tolerance=1e-5, what="parameters ")


@pytest.mark.covers("T07")
def test_frozen_parameters_stay_and_have_no_state():
    optimizer = optimizers.adamw(learning_rate=optimizers.constant(1e-2), frozen=("layers/*", "embedding"))
    bound = partitioner.Partitioner(strategies.fsdp(), slice=slices.get("v4-32"), devices=jax.devices())
    frozen = bound.program(MODEL, optimizer, SPEC, seed=7)
    state = frozen.init()
    before = jax.device_get(state.params)
    moments = [a.shape for a in jax.tree.leaves(state.opt_state) if a.ndim]
    assert sorted(moments) == sorted([(64,), (64,), (64, 256), (64, 256)])
    state, metrics = frozen.train_step(state, frozen.put(next(batches())))
    after = jax.device_get(state.params)
    jax.tree.map(np.testing.assert_array_equal, after["layers/block"], before["layers/block"])
    np.testing.assert_array_equal(after["~"]["embedding"], before["~"]["embedding"])
    assert not np.array_equal(after["~"]["unembedding"], before["~"]["unembedding"])
    trained = gradients(frozen, frozen.init())["~"]
    norm = np.sqrt(sum(np.sum(np.square(trained[k])) for k in ("unembedding", "final_norm")))
    np.testing.assert_allclose(metrics["gradient_norm"], norm, rtol=1e-5)


def test_sharded_bytes():
    state = program(strategies.fsdp(), "v4-32").init()
    weight = state.params["layers/block"]["query"]
    assert weight.addressable_shards[0].data.size * 16 == weight.size
    assert state.opt_state[1].mu["layers/block"]["query"].sharding == weight.sharding
    assert jnp.ndim(state.step) == 0
