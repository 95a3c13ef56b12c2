"""A model that draws random bits trains to the same numbers in a pipeline: keys go with layers, row ids with rows."""

import dataclasses

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from core import logical, optimizers, random_bits, slices
from core.batches import Field
from core.stack import Tail, layer_stack
from models import losses
from parallel import partitioner, strategies
from parallel.pipeline import schedules
from tests.haiku_model import HaikuModel

ROWS, LENGTH, VOCAB, WIDTH = 8, 6, 24, 8
SPEC = {k: Field((ROWS, LENGTH), jnp.int32, ("batch", "length")) for k in ("inputs", "targets")}
SPEC["weights"] = Field((ROWS, LENGTH), jnp.float32, ("batch", "length"))


@dataclasses.dataclass(frozen=True)
class Dropping(HaikuModel):
    """Four layers with dropout and a tail."""

    draws = True

    def _loss(self, batch):
        table = logical.param("embedding", (VOCAB, WIDTH), ("vocab", "embed"), hk.initializers.RandomNormal(0.5))
        side = {k: batch[k] for k in ("targets", "weights")} | {"rows": random_bits.row_ids(batch)}
        return layer_stack(self._block, 4, tail=Tail(self._tail, table))(table[batch["inputs"]], side)

    def _tail(self, table, x, side):
        logits = logical.constrain(x @ table.T, "batch", "length", "vocab")
        return losses.cross_entropy(logits, side["targets"], side["weights"], vocab_size=VOCAB)

    def _block(self, x, side):
        w = logical.param("w", (WIDTH, WIDTH), ("embed", None), hk.initializers.RandomNormal(0.5))
        keys = random_bits.row_keys(hk.next_rng_key(), side["rows"])
        kept = jax.vmap(lambda key: jax.random.bernoulli(key, 0.5, x.shape[1:]))(keys)
        return jnp.where(kept, 2 * jnp.tanh(x @ w), 0.0)


def losses_of(tables, slice_name, **options):
    bound = partitioner.Partitioner(tables, slice=slices.get(slice_name), devices=jax.devices())
    optimizer = optimizers.adamw(learning_rate=optimizers.constant(1e-2))
    program = bound.program(Dropping(), optimizer, SPEC, seed=0, **options)
    rng, state, found = np.random.default_rng(2), program.init(), []
    for _ in range(3):
        ids = rng.integers(0, VOCAB, (2, ROWS, LENGTH), dtype=np.int32)
        weights = rng.integers(0, 2, (ROWS, LENGTH)).astype(np.float32)
        batch = {"inputs": ids[0], "targets": ids[1], "weights": weights}
        state, metrics = program.train_step(state, program.put(batch))
        found.append(float(metrics["loss"]))
    return found


@pytest.fixture(scope="module")
def one_device():
    return losses_of(strategies.data_parallel(), "v5e-1")


@pytest.mark.covers("T12", "M12")
@pytest.mark.parametrize(
    ("schedule", "options"),
    [
        pytest.param(schedules.gpipe(num_microbatches=2), {"accum_steps": 2}, marks=pytest.mark.slow),
        pytest.param(schedules.circular(num_microbatches=4, repeats=2), {}, marks=pytest.mark.slow),
        pytest.param(schedules.one_f_one_b(num_microbatches=4), {}, marks=pytest.mark.slow),
        pytest.param(
            schedules.one_f_one_b(num_microbatches=2, save="stage"), {"accum_steps": 2}, marks=pytest.mark.slow
        ),
        (schedules.circular(num_microbatches=2, repeats=2), {"accum_steps": 2, "gather_once": True}),
    ],
    ids=["gpipe, accumulated", "circular", "1F1B", "1F1B by stage, accumulated", "circular, accumulated, fsdp"],
)
def test_losses_with_dropout_are_those_of_one_device(schedule, options, one_device):
    make = strategies.pipeline_fsdp if options.get("gather_once") else strategies.pipeline
    tables = make(stage=2, schedule=schedule)
    np.testing.assert_allclose(losses_of(tables, "v4-8", **options), one_device, atol=2e-6)
