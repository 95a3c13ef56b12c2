"""A model with random draws trains to the same numbers on every mesh and with every number of microbatches."""

import dataclasses

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from core import logical, optimizers, random_bits, slices
from core.batches import Field
from core.stack import layer_stack
from models import losses
from parallel import partitioner, strategies
from parallel.pipeline import schedules
from tests.haiku_model import HaikuModel

ROWS, LENGTH, VOCAB, WIDTH, STEPS = 16, 6, 24, 8, 3
SPEC = {k: Field((ROWS, LENGTH), jnp.int32, ("batch", "length")) for k in ("inputs", "targets")}
OPTIMIZER = optimizers.adamw(learning_rate=optimizers.constant(1e-2))
SPEC["weights"] = Field((ROWS, LENGTH), jnp.float32, ("batch", "length"))


@dataclasses.dataclass(frozen=True)
class Dropping(HaikuModel):
    """Two layers with dropout.

    Attributes:
      draw: "by row" as it should be, others by the shape of what is here; "one for the step" of no row at all.
    """

    draws = True

    draw: str = "by row"

    def _loss(self, batch):
        init = hk.initializers.RandomNormal(0.5)
        table = logical.param("embedding", (VOCAB, WIDTH), ("vocab", "embed"), init)
        x = layer_stack(self._block, 2)(table[batch["inputs"]], random_bits.row_ids(batch))
        logits = logical.constrain(x @ table.T, "batch", "length", "vocab")
        return losses.cross_entropy(logits, batch["targets"], batch["weights"], vocab_size=VOCAB)

    def _block(self, x, rows):
        w = logical.param("w", (WIDTH, WIDTH), ("embed", None), hk.initializers.RandomNormal(0.5))
        return self._dropout(jnp.tanh(x @ w), rows)

    def _dropout(self, x, rows):
        key = hk.next_rng_key()
        if self.draw == "hk.dropout":
            return hk.dropout(key, 0.5, x)
        if self.draw in ("bernoulli", "one for the step"):
            shape = x.shape if self.draw == "bernoulli" else x.shape[1:]
            return jnp.where(jax.random.bernoulli(key, 0.5, shape), 2 * x, 0.0)
        if self.draw == "gamma":
            return x * jax.random.gamma(key, 1.0, x.shape)
        if self.draw == "dirichlet":
            return x * jax.random.dirichlet(key, jnp.ones(x.shape[2]), x.shape[:2])
        if self.draw == "loop over rows":
            return x * jnp.stack([jax.random.uniform(key) for _ in range(x.shape[0])])[:, None, None]
        if self.draw == "gamma by row":
            keys = random_bits.row_keys(key, rows)
            return x * jax.vmap(lambda key, row: jax.random.gamma(key, 1.0, row.shape))(keys, x)
        keys = jax.random.split(key, x.shape[0]) if self.draw == "split" else random_bits.row_keys(key, rows)
        return jax.vmap(lambda key, row: hk.dropout(key, 0.5, row))(keys, x)


def batches():
    rng = np.random.default_rng(2)
    for _ in range(STEPS):
        ids = rng.integers(0, VOCAB, (2, ROWS, LENGTH), dtype=np.int32)
        weights = rng.integers(0, 2, (ROWS, LENGTH)).astype(np.float32)  # uneven over rows and microbatches
        yield {"inputs": ids[0], "targets": ids[1], "weights": weights}


def trained(model, tables, slice_name, **options):
    """Losses of the training steps, and of an evaluation behind them."""
    bound = partitioner.Partitioner(tables, slice=slices.get(slice_name), devices=jax.devices())
    program = bound.program(model, OPTIMIZER, SPEC, seed=0, **options)
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
        pytest.param(strategies.data_parallel(), "v5e-1", {"accum_steps": 4}, marks=pytest.mark.slow),
        pytest.param(strategies.data_parallel(), "v4-8", {}, marks=pytest.mark.slow),
        (strategies.data_parallel(), "v4-8", {"accum_steps": 4}),  # rows are manual: every chip numbers its own
        pytest.param(strategies.fsdp(), "v4-8", {"accum_steps": 4}, marks=pytest.mark.slow),
        pytest.param(strategies.fsdp(), "v4-8", {"accum_steps": 4, "gather_once": True}, marks=pytest.mark.slow),
        # test_pipelines_draw.py has a quick case whose weights and microbatches are split
        pytest.param(strategies.fsdp_tensor(tensor=2), "v4-8", {"accum_steps": 2}, marks=pytest.mark.slow),
    ],
    ids=lambda v: getattr(v, "name", None) or str(v),
)
def test_losses_with_dropout_do_not_depend_on_mesh_or_microbatches(tables, slice_name, options, one_device):
    np.testing.assert_allclose(trained(Dropping(), tables, slice_name, **options), one_device, atol=2e-6)


@pytest.mark.parametrize("draw", ["bernoulli", "hk.dropout", "split"])
@pytest.mark.parametrize(
    ("tables", "slice_name", "accum_steps"),
    [
        (strategies.data_parallel(), "v5e-1", 4),
        (strategies.pipeline(stage=2, schedule=schedules.gpipe(num_microbatches=2)), "v4-8", 1),
    ],
    ids=["accumulation", "pipeline"],
)
def test_one_key_for_all_rows_is_refused_with_microbatches(tables, slice_name, accum_steps, draw):
    model = Dropping(draw=draw)
    bound = partitioner.Partitioner(tables, slice=slices.get(slice_name), devices=jax.devices())
    with pytest.raises(ValueError, match="random bits for all rows from one key") as error:
        bound.program(model, OPTIMIZER, SPEC, seed=0, accum_steps=accum_steps)
    shape, source = ([ROWS], "test_random_bits.py") if draw == "split" else ([ROWS, LENGTH, WIDTH], "")
    assert f"\n  {shape} at " in str(error.value)
    assert source in str(error.value)
    assert "Draw per row instead" in str(error.value)


@pytest.mark.parametrize(
    ("draw", "listed"),
    [
        ("gamma", f"{[ROWS, LENGTH, WIDTH]} at "),
        ("dirichlet", f"{[ROWS, LENGTH, WIDTH]} at "),
        ("loop over rows", f", {ROWS} times for {ROWS} rows"),
    ],
)
def test_draws_of_every_kind_are_looked_for(draw, listed):
    shapes = jax.eval_shape(Dropping(draw=draw).init, jax.random.key(0), SPEC)
    with pytest.raises(ValueError, match="random bits for all rows from one key") as error:
        random_bits.refuse_shared_draws(Dropping(draw=draw), shapes, SPEC)
    assert listed in str(error.value)


@pytest.mark.parametrize("draw", ["by row", "gamma by row", "one for the step"])
def test_draws_by_row_and_for_a_step_are_allowed(draw):
    shapes = jax.eval_shape(Dropping(draw=draw).init, jax.random.key(0), SPEC)
    random_bits.refuse_shared_draws(Dropping(draw=draw), shapes, SPEC)


def test_one_key_for_all_rows_is_allowed_without_microbatches():
    whole = partitioner.Partitioner(strategies.data_parallel(), slice=slices.get("v4-8"), devices=jax.devices())
    whole.program(Dropping(draw="hk.dropout"), OPTIMIZER, SPEC, seed=0)
    whole.program(Dropping(draw="one for the step"), OPTIMIZER, SPEC, seed=0, accum_steps=4)
