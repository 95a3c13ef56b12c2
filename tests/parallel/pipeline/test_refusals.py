"""What a pipeline cannot run is refused before anything is compiled, with what it could."""

import dataclasses

import haiku as hk
import jax
import jax.numpy as jnp
import pytest

from core import logical, optimizers, slices
from core.stack import layer_stack
from core.types import LossOutput
from launch import agreement
from models import transformer
from parallel import partitioner, strategies
from parallel.pipeline import schedules

ROWS, WIDTH = 16, 8
SPEC = {"x": jax.ShapeDtypeStruct((ROWS, 4, WIDTH), jnp.float32)}


@dataclasses.dataclass(frozen=True)
class Linear:
    """Layers `tanh(x w)`, in a stack or not; `scaled` lets the side depend on a parameter, `closed` a layer on rows."""

    layers: int = 4
    stacked: bool = True
    scaled: bool = False
    closed: bool = False

    def init(self, rng, batch):
        return hk.transform(self._loss).init(rng, batch)

    def init_carry(self, batch):
        return ()

    def loss(self, params, carry, rng, batch):
        return carry, hk.transform(self._loss).apply(params, None, batch)

    def _loss(self, batch):
        def block(x, side):
            w = logical.param("w", (WIDTH, WIDTH), ("embed", None), hk.initializers.RandomNormal(0.3))
            return jnp.tanh(x @ w) * side + (batch["x"] if self.closed else 0)

        scale = logical.param("scale", (), (), jnp.ones) if self.scaled else 1.0
        side = jnp.full((ROWS, 1, 1), scale)
        x = layer_stack(block, self.layers)(batch["x"], side) if self.stacked else block(batch["x"], side)
        return LossOutput(jnp.sum(x**2), jnp.float32(ROWS), {})


def bind(schedule, model=Linear(), slice_name="v4-8", **options):
    tables = strategies.pipeline(stage=4 if slice_name == "v4-8" else 2, schedule=schedule, **options)
    bound = partitioner.Partitioner(tables, slice=slices.get(slice_name), devices=jax.devices())
    return bound.program(model, optimizers.adamw(learning_rate=optimizers.constant(1e-3)), SPEC, seed=0)


@pytest.mark.parametrize(
    ("schedule", "model", "message"),
    [
        (
            schedules.gpipe(num_microbatches=3),
            Linear(),
            r"batch_size = 16 does not divide in num_microbatches = 3 of the pipeline over 1 groups of chips .*"
            r"Nearest that do: 15, 18; or num_microbatches one of 1, 2, 4, 8, 16",
        ),
        (
            schedules.gpipe(num_microbatches=4),
            Linear(layers=6),
            "gpipe: 6 layers do not divide over stage = 4; take stage one of 1, 2, 3, 6, or a multiple of 4 layers",
        ),
        (
            schedules.circular(num_microbatches=4, repeats=2),
            Linear(layers=4),
            "circular: 4 layers do not divide over stage = 4 x 2 repeats; take stage one of 1, 2, or a multiple of 8",
        ),
        (
            schedules.circular(num_microbatches=2, repeats=1),
            Linear(),
            "circular: num_microbatches = 2 is below stage = 4: .* take at least 4, or gpipe",
        ),
        (schedules.gpipe(num_microbatches=4), Linear(stacked=False), "no layer stack to cut into stages"),
        (
            schedules.gpipe(num_microbatches=4),
            Linear(closed=True),
            r"the block closes over 1 array.*pass arrays that belong to rows through side",
        ),
        (
            schedules.one_f_one_b(num_microbatches=4),
            Linear(),
            "1F1B: .* must be the stack's tail and give a LossOutput",
        ),
        (schedules.gpipe(num_microbatches=4), Linear(scaled=True), "the side of the layer stack depends on parameters"),
    ],
)
def test_what_does_not_fit_is_refused(schedule, model, message):
    with pytest.raises(ValueError, match=message):
        bind(schedule, model)


def test_gradients_that_1f1b_has_not_are_refused():
    """Its gradients are those of the loss sum; a metric in the loss would be left out in silence."""
    tables = strategies.pipeline(stage=4, schedule=schedules.one_f_one_b(num_microbatches=4))
    bound = partitioner.Partitioner(tables, slice=slices.get("v4-8"), devices=jax.devices())
    model = transformer.Transformer(num_layers=4, embed_dim=8, mlp_dim=8, num_heads=2, num_kv_heads=2, vocab_size=128)
    batch = next(agreement.random_batches(128, steps=1))

    def loss(params):
        _, out = model.loss(params, (), jax.random.key(0), batch)
        return out.loss_sum + out.metrics["accuracy"].total

    with bound.tracing(), pytest.raises(ValueError, match="of what a tail returns, loss_sum alone has a gradient"):
        jax.eval_shape(jax.grad(loss), jax.eval_shape(model.init, jax.random.key(0), batch))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: schedules.gpipe(num_microbatches=0), "gpipe: num_microbatches = 0; expected at least 1"),
        (lambda: schedules.gpipe(num_microbatches=2, save="all"), "save = 'all'; expected one of layers, stage"),
        (lambda: schedules.circular(num_microbatches=2, repeats=0), "circular: repeats = 0; expected at least 1"),
        (
            lambda: dataclasses.replace(strategies.fsdp(), pipeline=schedules.gpipe(num_microbatches=2)),
            "a pipeline needs its layers over its stages",
        ),
    ],
)
def test_numbers_out_of_range_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
