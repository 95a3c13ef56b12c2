"""A model that draws trains to the same numbers on every mesh and in every number of microbatches."""

import dataclasses

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from core import logical, optimizers, random_bits, slices
from core.stack import layer_stack
from models import losses
from parallel import partitioner, strategies

ROWS, LENGTH, VOCAB, WIDTH, STEPS = 16, 6, 24, 8, 3
SPEC = {k: jax.ShapeDtypeStruct((ROWS, LENGTH), jnp.int32) for k in ("inputs", "targets")}
SPEC["weights"] = jax.ShapeDtypeStruct((ROWS, LENGTH), jnp.float32)


@dataclasses.dataclass(frozen=True)
class Dropping:
    """Two layers with dropout; `by_row` as it should be, else by the shape of what is here."""

    by_row: bool = True

    def init(self, rng, batch):
        return hk.transform(self._loss).init(rng, batch)

    def init_carry(self, batch):
        return ()

    def loss(self, params, carry, rng, batch, *, is_training):
        return carry, hk.transform(self._loss).apply(params, rng, batch)

    def _loss(self, batch):
        init = hk.initializers.RandomNormal(0.5)
        table = logical.param("embedding", (VOCAB, WIDTH), ("vocab", "embed"), init)
        x = layer_stack(self._block, 2)(table[batch["inputs"]], random_bits.row_ids(batch))
        logits = logical.constrain(x @ table.T, "batch", "length", "vocab")
        return losses.cross_entropy(logits, batch["targets"], batch["weights"], vocab_size=VOCAB)

    def _block(self, x, rows):
        w = logical.param("w", (WIDTH, WIDTH), ("embed", None), hk.initializers.RandomNormal(0.5))
        if self.by_row:
            keys = random_bits.row_keys(hk.next_rng_key(), rows)
            kept = jax.vmap(lambda key: jax.random.bernoulli(key, 0.5, x.shape[1:]))(keys)
        else:
            kept = jax.random.bernoulli(hk.next_rng_key(), 0.5, x.shape)
        return jnp.where(kept, 2 * jnp.tanh(x @ w), 0.0)


def batches():
    rng = np.random.default_rng(2)
    for _ in range(STEPS):
        ids = rng.integers(0, VOCAB, (2, ROWS, LENGTH), dtype=np.int32)
        weights = rng.integers(0, 2, (ROWS, LENGTH)).astype(np.float32)  # uneven over rows and microbatches
        yield {"inputs": ids[0], "targets": ids[1], "weights": weights}


def trained(model, tables, slice_name, **options):
    """Losses of the training steps, and of an evaluation behind them."""
    bound = partitioner.Partitioner(tables, slice=slices.get(slice_name), devices=jax.devices())
    optimizer = optimizers.adamw(learning_rate=optimizers.constant(1e-2))
    program = bound.program(model, optimizer, SPEC, seed=0, **options)
    state, found = program.init(), []
    for batch in batches():
        state, metrics = program.train_step(state, program.put(batch))
        found.append(float(metrics["loss"]))
    sums = program.eval_step(state, program.put(batch))
    return [*found, float(sums["loss"].total / sums["loss"].weight)]


@pytest.fixture(scope="module")
def one_device():
    return trained(Dropping(), strategies.data_parallel(), "v5e-1")


@pytest.mark.covers("T12", "T03")
@pytest.mark.parametrize(
    ("tables", "slice_name", "options"),
    [
        (strategies.data_parallel(), "v5e-1", {"accum_steps": 4}),
        (strategies.data_parallel(), "v4-8", {}),
        (strategies.data_parallel(), "v4-8", {"accum_steps": 4}),  # rows are manual: every chip numbers its own
        (strategies.fsdp(), "v4-8", {"accum_steps": 4}),
        (strategies.fsdp(), "v4-8", {"accum_steps": 4, "gather_once": True}),
        (strategies.fsdp_tensor(tensor=2), "v4-8", {"accum_steps": 2}),
    ],
    ids=lambda v: getattr(v, "name", None) or str(v),
)
def test_losses_with_dropout_do_not_depend_on_mesh_or_microbatches(tables, slice_name, options, one_device):
    np.testing.assert_allclose(trained(Dropping(), tables, slice_name, **options), one_device, atol=2e-6)


def test_bits_by_shape_do_depend_on_microbatches():
    whole, split = (
        trained(Dropping(by_row=False), strategies.data_parallel(), "v5e-1", accum_steps=n)[0] for n in (1, 4)
    )
    assert abs(whole - split) > 1e-2
