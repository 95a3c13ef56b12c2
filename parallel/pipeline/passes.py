"""Forward and backward passes of a pipeline on global arrays, which enter and leave the manual region."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from core.stack import Layer, LayerFn, Side, Stream, Tail
from parallel.derivative_rules import Trained
from parallel.pipeline import gpipe, layer_order, one_f_one_b
from parallel.pipeline.region import Region, merge_rows, over_stages, split_rows
from parallel.pipeline.schedules import OneFOneB, Schedule
from parallel.pipeline.stage import STAGE, Stage, Traveling


class Passes:
    """Forward and backward passes over a stack of layers."""

    def __init__(self, schedule: Schedule, at: Region, fn: LayerFn, stages: int):
        self.schedule, self._at, self._fn = schedule, at, fn
        self._stages = stages
        self._ordered = {"stages": stages, "repeats": schedule.repeats}

    def forward(
        self, params: Any, x: Stream, fixed: Layer, side: Side, trained: Trained | None
    ) -> tuple[Traveling, Any, Any]:
        """Runs the layers forward.

        Args:
          x: input of the first layer, tree of [B, ...].
          fixed: the layers without their parameters, leaves [L, ...].
          side: side inputs, tree of [B, ...].
          trained: parameters that get gradients; None if no backward pass follows.

        Returns:
          The output, [B, ...], with outputs summed over layers and rows; the gathered weights; and the saved values.
        """
        rows = self._at.by_rows

        def local(params: Any, fixed: Layer, x: Stream, side: Side) -> tuple[Traveling, Any, Any]:
            gathered = self._gather(params)
            specs = (P(STAGE), P(STAGE), P(), P())
            run = over_stages(
                functools.partial(self._forward, trained=trained), in_specs=specs, out_specs=(P(), P(STAGE))
            )
            y, kept = run(gathered, fixed, self._start(x), self._split(side))
            sums = jax.tree.map(lambda a: self._at.sum(jnp.sum(a, axis=0)), y.sums)
            return Traveling(_merge(y.x), sums), gathered, jax.tree.map(lambda a: a[None], kept)

        fixed = layer_order.by_stages(fixed, **self._ordered)
        specs, out_specs = (self._at.stored, P(), rows, rows), (Traveling(rows, P()), self._at.held, rows)
        return self._at.run(local, in_specs=specs, out_specs=out_specs)(params, fixed, x, side)

    def backward(
        self, gathered: Any, fixed: Layer, kept: Any, side: Side, dy: Traveling, trained: Trained
    ) -> tuple[list, Stream]:
        """Returns gradients of the trained parameters, sharded as stored, and of the input, [B, ...].

        Args:
          gathered, kept: from `forward`.
          fixed, side, trained: as in `forward`.
          dy: gradients of the output, leaves [B, ...], and of the sums.
        """
        rows = self._at.by_rows

        def local(gathered: Any, fixed: Layer, kept: Any, side: Side, dy: Traveling) -> tuple[Any, Stream]:
            specs = (P(STAGE), P(STAGE), P(STAGE), P(), P())
            back = functools.partial(self._backward, trained=trained)
            run = over_stages(back, in_specs=specs, out_specs=(P(), P(STAGE)))
            sides, dys = self._split(side), Traveling(self._split(dy.x), self._of_each(dy.sums))
            dx, grads = run(gathered, fixed, jax.tree.map(lambda a: a[0], kept), sides, dys)
            return self._reduce(grads, trained), _merge(dx)

        fixed = layer_order.by_stages(fixed, **self._ordered)
        specs, out_specs = (
            (self._at.held, P(), rows, rows, Traveling(rows, P())),
            (trained.pick(self._at.stored), rows),
        )
        return self._at.run(local, in_specs=specs, out_specs=out_specs)(gathered, fixed, kept, side, dy)

    def loss_and_gradients(
        self, params: Any, tail: Tail, x: Stream, fixed: Layer, side: Side, trained: Trained, of_tail: Trained
    ) -> tuple[tuple[Any, Any], tuple[list, list, Stream]]:
        """Runs 1F1B, or a schedule derived from it.

        Args:
          params, x, fixed, side, trained: as in `forward`.
          of_tail: parameters of the tail that get gradients.

        Returns:
          The tail's result and the summed outputs; and gradients of the trained parameters, of those of the tail, and
            of `x`.
        """
        rows, schedule = self._at.by_rows, self.schedule
        assert isinstance(schedule, OneFOneB)

        def local(params: Any, head: Any, fixed: Layer, x: Stream, side: Side) -> tuple[Any, tuple]:
            layers = fixed._replace(params=self._gather(params))
            own = Tail(lambda picked, *args: tail.fn(of_tail.fill(picked, head), *args), of_tail.pick(head))
            one_pass = one_f_one_b.OnePass(
                schedule, self._fn, own, layers, self._split(side), self._stages, trained, self._at.spans_slices
            )
            sums, grads, dx = one_pass.run(self._split(x))
            of_head = jax.tree.map(lambda g: g[None], sums.grads)  # summed outside, where it can stay sharded
            return self._at.sum(sums.out), (self._reduce(grads, trained), of_head, _merge(dx))

        specs, out_specs = (self._at.stored, P(), P(), rows, rows), (P(), (trained.pick(self._at.stored), rows, rows))
        run = self._at.run(local, in_specs=specs, out_specs=out_specs)
        fixed = layer_order.by_stages(fixed, **self._ordered)
        out, (grads, of_head, dx) = run(params, tail.params, fixed, x, side)
        of_head = jax.tree.map(lambda g, a: jnp.sum(g, axis=0).astype(a.dtype), of_head, of_tail.pick(tail.params))
        return out, (grads, of_head, dx)

    def _gather(self, params: Any) -> Any:
        return self._at.gather(self._at.cast(params), then=functools.partial(layer_order.to_stages, **self._ordered))

    def _reduce(self, grads: Any, trained: Trained) -> list:
        return self._at.reduce(grads, trained, then=functools.partial(layer_order.to_model, **self._ordered))

    def _forward(
        self, gathered: Any, fixed: Layer, ys: Traveling, sides: Side, *, trained: Trained | None
    ) -> tuple[Traveling, Any]:
        y, kept = gpipe.forward(self.schedule, self._stage(gathered, fixed, sides, trained), ys)
        return y, jax.tree.map(lambda a: a[None], kept)  # stages

    def _backward(
        self, gathered: Any, fixed: Layer, kept: Any, sides: Side, dys: Traveling, *, trained: Trained
    ) -> tuple[Stream, Any]:
        stage = self._stage(gathered, fixed, sides, trained)
        dxs, grads = gpipe.backward(self.schedule, stage, jax.tree.map(lambda a: a[0], kept), dys)
        return dxs.x, grads

    def _stage(self, gathered: Any, fixed: Layer, sides: Side, trained: Trained | None) -> Stage:
        depth = jax.tree.leaves(gathered)[0].shape[0] // self.schedule.repeats
        return Stage(
            self._fn, fixed._replace(params=gathered), sides, depth, self.schedule, trained, self._at.spans_slices
        )

    def _start(self, x: Stream) -> Traveling:
        return Traveling(self._split(x), self._of_each(self._fn.zero_sums()))

    def _split(self, tree: Any) -> Any:
        return jax.tree.map(lambda a: split_rows(a, self.schedule.num_microbatches), tree)

    def _of_each(self, sums: Any) -> Any:
        return jax.tree.map(lambda a: jnp.broadcast_to(a, (self.schedule.num_microbatches, *a.shape)), sums)


def _merge(tree: Any) -> Any:
    return jax.tree.map(merge_rows, tree)
