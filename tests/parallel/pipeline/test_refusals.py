"""Models that a pipeline cannot run are refused before compiling, with a fix."""

import dataclasses

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from core import logical, optimizers, slices
from core.batches import Field
from core.stack import Tail, layer_stack
from core.types import LossOutput
from models import agreement_subjects
from models.decoder import transformer
from parallel import partitioner, strategies
from parallel.pipeline import schedules
from tests.haiku_model import HaikuModel

ROWS, WIDTH = 16, 8
SPEC = {"x": Field((ROWS, 4, WIDTH), jnp.float32, ("batch", "length", None))}


@dataclasses.dataclass(frozen=True)
class Linear(HaikuModel):
    """Layers `tanh(x w)`, in a stack or not, and ways to go wrong.

    Attributes:
      scaled: the side depends on a parameter.
      closed: a layer reads rows of its own.
      side_rows: rows of the side.
      halved: the stack sees a row in four.
      tail: "closes" over rows, gives extras of "rows", or has a "table" of integers.
    """

    layers: int = 4
    stacked: bool = True
    scaled: bool = False
    closed: bool = False
    side_rows: int = ROWS
    halved: bool = False
    tail: str = ""

    def _loss(self, batch):
        def block(x, side):
            w = logical.param("w", (WIDTH, WIDTH), ("embed", None), hk.initializers.RandomNormal(0.3))
            return jnp.tanh(x @ w) * side + (batch["x"] if self.closed else 0)

        def last(table, x, side):
            rows = {"rows": side[:, 0, 0]} if self.tail == "rows" else {}
            more = jnp.sum(batch["x"]) if self.tail == "closes" else 0.0
            return LossOutput(jnp.sum(x**2) + more, jnp.float32(x.shape[0]), {}, rows)

        scale = logical.param("scale", (), (), jnp.ones) if self.scaled else 1.0
        side, x = jnp.full((self.side_rows, 1, 1), scale), batch["x"]
        if self.halved:
            side, x = side[::4], x[::4]
        if self.tail:
            return layer_stack(block, self.layers, tail=Tail(last, jnp.arange(3) if self.tail == "table" else ()))(
                x, side
            )
        x = layer_stack(block, self.layers)(x, side) if self.stacked else block(x, side)
        return LossOutput(jnp.sum(x**2), jnp.float32(ROWS), {})


def bind(schedule, model=Linear(), slice_name="v4-8", **options):
    tables = strategies.pipeline(stage=4 if slice_name == "v4-8" else 2, schedule=schedule, **options)
    bound = partitioner.Partitioner(tables, slice=slices.get(slice_name), devices=jax.devices())
    return bound.program(model, optimizers.adamw(learning_rate=optimizers.constant(1e-3)), SPEC, seed=0)


@pytest.mark.parametrize(
    ("layers", "stages", "fix"),
    [
        (12, 8, "12 layers do not divide over stage = 2 x 4 slices; use stage = 1, or a multiple of 8 layers"),
        (6, 4, "6 layers do not divide over stage = 1 x 4 slices; use fewer slices, or a multiple of 4 layers"),
    ],
)
def test_a_hint_counts_the_stages_of_one_slice(layers, stages, fix):
    shapes, axes = {"w": jax.ShapeDtypeStruct((layers, 3), jnp.float32)}, {"w": logical.Axes(("layers", None))}
    schedule = schedules.gpipe(num_microbatches=8)
    assert schedules.problems(schedule, shapes, axes, stages=stages, chips=32, slices=4) == [f"gpipe: {fix}"]


@pytest.mark.parametrize(
    ("schedule", "model", "message"),
    [
        (
            schedules.gpipe(num_microbatches=3),
            Linear(),
            r"batch_size = 16 does not divide in num_microbatches = 3 of the pipeline over 1 group of chips .*"
            r"Nearest that do: 15, 18; or num_microbatches one of 1, 2, 4, 8, 16",
        ),
        (
            schedules.circular(num_microbatches=3, repeats=1),
            Linear(),
            r"Nearest that do: 15, 18; or num_microbatches one of 4, 8, 16\n",
        ),
        (
            schedules.gpipe(num_microbatches=4),
            Linear(layers=6),
            "gpipe: 6 layers do not divide over stage = 4; use stage = 1 or 2, or a multiple of 4 layers",
        ),
        (
            schedules.circular(num_microbatches=4, repeats=2),
            Linear(layers=4),
            "circular: 4 layers do not divide over stage = 4 x 2 repeats; use stage = 1 or 2, or a multiple of 8",
        ),
        (
            schedules.circular(num_microbatches=2, repeats=1),
            Linear(),
            "circular: num_microbatches = 2 is below stage = 4: .* use at least 4, or gpipe",
        ),
        (schedules.gpipe(num_microbatches=4), Linear(stacked=False), "no layer stack to split into stages"),
        (
            schedules.gpipe(num_microbatches=4),
            Linear(closed=True),
            r"the block closes over 1 array.*pass arrays that belong to rows through side",
        ),
        (
            schedules.one_f_one_b(num_microbatches=4),
            Linear(),
            "1F1B: .* must be the stack's tail and return a LossOutput",
        ),
        (schedules.gpipe(num_microbatches=4), Linear(scaled=True), "the side of the layer stack depends on parameters"),
        (
            schedules.gpipe(num_microbatches=4),
            Linear(side_rows=4),
            r"side is float32\[4, 1, 1\], but x has 16 rows: a side belongs to rows",
        ),
        (
            schedules.one_f_one_b(num_microbatches=4),
            Linear(tail="closes"),
            r"the tail closes over 1 array.*A tail may use only tail.params, x and side",
        ),
        (
            schedules.one_f_one_b(num_microbatches=4),
            Linear(tail="rows"),
            "1F1B: the tail returns a LossOutput with extras, which are per row",
        ),
        (
            schedules.one_f_one_b(num_microbatches=4),
            Linear(tail="table"),
            r"1F1B: tail.params has arrays without a gradient \(.*int32\[3\]\)",
        ),
        (schedules.gpipe(num_microbatches=8), Linear(halved=True), "rows of the layer stack do not divide into microb"),
    ],
)
def test_models_that_do_not_fit_are_refused(schedule, model, message):
    with pytest.raises(ValueError, match=message):
        bind(schedule, model)


def test_gradients_that_1f1b_has_not_are_refused():
    """Its gradients are those of the loss sum; a metric in the loss would be left out in silence."""
    tables = strategies.pipeline(stage=4, schedule=schedules.one_f_one_b(num_microbatches=4))
    bound = partitioner.Partitioner(tables, slice=slices.get("v4-8"), devices=jax.devices())
    model = transformer.Transformer(num_layers=4, embed_dim=8, mlp_dim=8, num_heads=2, num_kv_heads=2, vocab_size=128)
    batch = next(agreement_subjects.random_batches(128, steps=1))

    def loss(params):
        _, out = model.loss(params, (), jax.random.key(0), batch)
        return out.loss_sum + out.metrics["accuracy"].total

    with bound.tracing(), pytest.raises(ValueError, match="only loss_sum of the tail"):
        jax.eval_shape(jax.grad(loss), jax.eval_shape(model.init, jax.random.key(0), batch))


def test_bubbles_compute_on_the_given_value():
    """NaN of a bubble proves something only if a layer sees it: it is then what was kept last in the bubbles' place."""

    def block(x, side):
        return jnp.tanh(x @ logical.param("w", (WIDTH, WIDTH), ("embed", None), hk.initializers.RandomNormal(0.3)))

    net = hk.transform(lambda x: layer_stack(block, 2)(x))
    schedule = dataclasses.replace(schedules.gpipe(num_microbatches=4), bubble_input=float("nan"))
    tables = strategies.pipeline(stage=2, schedule=schedule)
    bound = partitioner.Partitioner(tables, slice=slices.get("v4-8"), devices=jax.devices())
    x = jnp.ones((ROWS, WIDTH))
    params = net.init(jax.random.key(0), x)
    with bound.tracing():
        y, pull = jax.jit(lambda params: jax.vjp(lambda params: net.apply(params, None, x), params))(params)
    assert np.isfinite(y).all()
    found = [np.asarray(a) for a in jax.tree.leaves(pull) if a.shape[2:4] == (1, 5)]  # groups, stage, layer, place
    assert found
    for kept in found:
        assert np.isfinite(kept[:, :, :, :4]).all()
        assert np.isnan(kept[:, :, :, 4]).all()


def test_one_stage_is_no_pipeline():
    """Its rows need not divide into microbatches, and nothing is said of a schedule."""
    tables = strategies.pipeline(stage=1, schedule=schedules.one_f_one_b(num_microbatches=3))
    bound = partitioner.Partitioner(tables, slice=slices.get("v4-8"), devices=jax.devices())
    assert bound.pipeline is None
    bound.program(Linear(), optimizers.adamw(learning_rate=optimizers.constant(1e-3)), SPEC, seed=0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: schedules.gpipe(num_microbatches=0),
            "gpipe: num_microbatches = 0; expected a positive integer",
        ),
        (lambda: schedules.gpipe(num_microbatches=8.0), "gpipe: num_microbatches = 8.0; expected a positive integer"),
        (lambda: schedules.gpipe(num_microbatches="8"), "gpipe: num_microbatches = '8'; expected a positive integer"),
        (lambda: strategies.pipeline(schedule=schedules.gpipe), r"in gin, with parentheses: @schedules.gpipe\(\)"),
        (lambda: strategies.pipeline(schedule=None), "stage = 4 without a schedule; give one"),
        (
            lambda: strategies.override(strategies.pipeline(), param_rules={"layers": ("stage", "data")}),
            "a pipeline shards layers over stages only",
        ),
        (lambda: schedules.gpipe(num_microbatches=2, save="all"), "save = 'all'; expected one of layers, stage"),
        (
            lambda: schedules.circular(num_microbatches=2, repeats=0),
            "circular: repeats = 0; expected a positive integer",
        ),
        (
            lambda: dataclasses.replace(strategies.fsdp(), pipeline=schedules.gpipe(num_microbatches=2)),
            "a pipeline shards layers over stages",
        ),
    ],
)
def test_numbers_out_of_range_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
