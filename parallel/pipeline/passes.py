"""Forward and backward passes of a pipeline on global arrays, which enter and leave the manual region."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from core.stack import Layer, LayerFn, Side, Tail
from parallel.pipeline import gpipe, layer_order, one_f_one_b
from parallel.pipeline.region import Region, merge_rows, over_stages, split_rows
from parallel.pipeline.schedules import Schedule
from parallel.pipeline.stage import STAGE, Stage


class Passes:
    """Forward and backward passes over a stack of layers.

    Args:
      schedule: the schedule.
      at: the manual axes, and the sharding of parameters over them.
      fn: one layer.
      stages: S.
    """

    def __init__(self, schedule: Schedule, at: Region, fn: LayerFn, stages: int):
        self.schedule, self._at, self._fn = schedule, at, fn
        self._stages = stages
        self._ordered = {"stages": stages, "repeats": schedule.repeats}

    def forward(self, params: Any, x: jax.Array, keys: Any, side: Side, *, save: str) -> tuple[jax.Array, Any, Any]:
        """Runs the layers forward.

        Returns:
          The output of the last layer, [B, ...]; the gathered weights; and saved inputs, [S, k, M R + 1, rows, ...].
        """
        rows = self._at.by_rows

        def local(params: Any, keys: Any, x: jax.Array, side: Side) -> tuple[jax.Array, Any, Any]:
            gathered = self._gather(params)
            specs = (P(STAGE), P(STAGE), P(), P())
            run = over_stages(functools.partial(self._forward, save=save), in_specs=specs, out_specs=(P(), P(STAGE)))
            y, kept = run(gathered, keys, self._split(x), self._split(side))
            return merge_rows(y), gathered, kept

        keys = layer_order.keys_to_stages(keys, **self._ordered)
        specs, out_specs = (self._at.stored, P(), rows, rows), (rows, P(), _kept(rows))
        return self._at.run(local, in_specs=specs, out_specs=out_specs)(params, keys, x, side)

    def backward(self, gathered: Any, keys: Any, kept: Any, side: Side, dy: jax.Array) -> tuple[Any, jax.Array]:
        """Returns the gradients of the parameters, sharded as stored, and of the input of the first layer, [B, ...]."""
        rows = self._at.by_rows

        def local(gathered: Any, keys: Any, kept: Any, side: Side, dy: jax.Array) -> tuple[Any, jax.Array]:
            specs = (P(STAGE), P(STAGE), P(STAGE), P(), P())
            run = over_stages(self._backward, in_specs=specs, out_specs=(P(), P(STAGE)))
            dx, grads = run(gathered, keys, kept, self._split(side), self._split(dy))
            return self._reduce(grads), merge_rows(dx)

        keys = layer_order.keys_to_stages(keys, **self._ordered)
        specs, out_specs = (P(), P(), _kept(rows), rows, rows), (self._at.stored, rows)
        return self._at.run(local, in_specs=specs, out_specs=out_specs)(gathered, keys, kept, side, dy)

    def loss_and_gradients(
        self, params: Any, tail: Tail, x: jax.Array, keys: Any, side: Side
    ) -> tuple[Any, tuple[Any, Any, Any]]:
        """Runs 1F1B.

        Returns:
          The tail's result for all rows; and gradients of the parameters, of the tail's parameters, and of `x`.
        """
        rows = self._at.by_rows

        def local(params: Any, head: Any, keys: Any, x: jax.Array, side: Side) -> tuple[Any, tuple]:
            layers = Layer(self._gather(params), keys)
            one_pass = one_f_one_b.OnePass(
                self.schedule, self._fn, Tail(tail.fn, head), layers, self._split(side), self._stages
            )
            sums, grads, dx = one_pass.run(self._split(x))
            of_head = jax.tree.map(lambda g: g[None], sums.grads)  # summed outside, where it can stay sharded
            return self._at.sum(sums.out), (self._reduce(grads), of_head, merge_rows(dx))

        specs, out_specs = (self._at.stored, P(), P(), rows, rows), (P(), (self._at.stored, rows, rows))
        run = self._at.run(local, in_specs=specs, out_specs=out_specs)
        out, (grads, of_head, dx) = run(params, tail.params, keys, x, side)
        of_head = jax.tree.map(lambda g, a: jnp.sum(g, axis=0).astype(a.dtype), of_head, tail.params)
        return out, (grads, of_head, dx)

    def _gather(self, params: Any) -> Any:
        return self._at.gather(self._at.cast(params), then=functools.partial(layer_order.to_stages, **self._ordered))

    def _reduce(self, grads: Any) -> Any:
        return self._at.reduce(grads, then=functools.partial(layer_order.to_model, **self._ordered))

    def _forward(self, gathered: Any, keys: Any, xs: jax.Array, sides: Side, *, save: str) -> tuple[jax.Array, Any]:
        y, kept = gpipe.forward(self.schedule, self._stage(gathered, keys, sides, save), xs)
        return y, jax.tree.map(lambda a: a[None], kept)

    def _backward(self, gathered: Any, keys: Any, kept: Any, sides: Side, dys: jax.Array) -> tuple[jax.Array, Any]:
        stage = self._stage(gathered, keys, sides, self.schedule.save)
        return gpipe.backward(self.schedule, stage, jax.tree.map(lambda a: a[0], kept), dys)

    def _stage(self, gathered: Any, keys: Any, sides: Side, save: str) -> Stage:
        depth = jax.tree.leaves(gathered)[0].shape[0] // self.schedule.repeats
        return Stage(self._fn, Layer(gathered, keys), sides, depth, save, self.schedule.bubble_input)

    def _split(self, tree: Any) -> Any:
        return jax.tree.map(lambda a: split_rows(a, self.schedule.num_microbatches), tree)


def _kept(rows: P) -> P:
    """Returns the spec of saved inputs, [S, k, M R + 1, rows, ...]."""
    return P(None, None, None, *rows)
