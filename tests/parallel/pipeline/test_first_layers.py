"""Layers before the first stage of a pipeline: which rows each stage computes, and the numbers of one device."""

import dataclasses

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from core import logical, slices
from core.stack import First, Tail, layer_stack
from core.types import LossOutput
from parallel import partitioner, strategies
from parallel.pipeline import schedules
from tests.haiku_model import HaikuModel

WIDTH = 8
TABLES = strategies.pipeline(stage=2, data=2, schedule=schedules.one_f_one_b(num_microbatches=3))
ROWS = {12: P(("data", "stage"), None), 6: P("data", None)}  # 6 rows divide over data, and not over stages, too


@dataclasses.dataclass(frozen=True)
class AfterOthers(HaikuModel):
    """Two layers with a vector each, and after them two with a matrix.

    Attributes:
      seen: gets the layout of rows in each layer of the first kind that is traced.
    """

    seen: list = dataclasses.field(default_factory=list, compare=False)

    def _loss(self, batch):
        init = hk.initializers.RandomNormal(0.5)

        def block(x, side, *, kind):
            x = logical.constrain(x, "batch", None)
            if kind == "vector":
                self.seen.append(logical.activation_spec("batch", None))
                return x + jnp.tanh(x * logical.param("vector", (WIDTH,), ("norm",), init))
            return x + jnp.tanh(x @ logical.param("matrix", (WIDTH, WIDTH), ("embed", None), init))

        def last(head, x, side):
            return LossOutput(jnp.sum((x @ head) ** 2), jnp.float32(x.shape[0]), {})

        tail = Tail(last, logical.param("head", (WIDTH, 2), ("embed", None), init))
        layers = layer_stack(block, 4, pattern=("matrix",), first=First(("vector",) * 2), tail=tail)
        return layers(batch["x"])


def given(rows):
    return {"x": np.random.default_rng(1).normal(size=(rows, WIDTH)).astype(np.float32)}


def gradients(model, tables, slice_name, rows, run):
    """Loss and gradients; `run` takes the function and its arguments."""
    bound = partitioner.Partitioner(tables, slice=slices.get(slice_name), devices=jax.devices())
    params = model.init(jax.random.key(3), given(rows))
    model.seen.clear()

    def loss(params, batch):
        return model.loss(params, (), jax.random.key(0), batch, is_training=True)[1].loss_sum

    with bound.tracing():
        return run(jax.value_and_grad(loss), params, given(rows))


@pytest.mark.parametrize("rows", ROWS)
def test_stages_share_the_rows_if_these_divide_and_otherwise_compute_all(rows):
    model = AfterOthers()
    gradients(model, TABLES, "v4-8", rows, jax.eval_shape)
    assert model.seen[-1] == ROWS[rows]  # the layer is traced before, too, for its shapes alone


@pytest.mark.slow
@pytest.mark.parametrize("rows", ROWS)
def test_numbers_are_those_of_one_device(rows):
    def run(fn, *args):
        return jax.device_get(jax.jit(fn)(*args))

    found = gradients(AfterOthers(), TABLES, "v4-8", rows, run)
    want = gradients(AfterOthers(), strategies.data_parallel(), "v5e-1", rows, run)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * np.abs(b).max()), found, want)
