"""1F1B in lockstep: computes loss and gradients in one pass, with few microbatches in flight.

In a tick every stage runs one microbatch forward, then the tail runs on the one that the last stage has just finished,
then every stage runs one microbatch backward. Three loops avoid ticks with work that no stage needs:

    warm-up     S - 1 ticks   forward
    steady      M ticks       forward, tail, backward
    cool-down   S - 1 ticks   backward

    stage s at tick t:  forward of microbatch t - s, backward of microbatch t - 2 (S - 1) + s

Saved inputs are stored in a ring of 2 S - 1 places. `stage` is manual in the two passes only: for the tail it is
automatic, so that the vocabulary can be sharded over it and all stages share the head.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from core.stack import Layer, LayerFn, Side, Stream, Tail
from parallel.derivative_rules import Trained
from parallel.pipeline import stage as one_stage
from parallel.pipeline.region import over_stages
from parallel.pipeline.schedules import Schedule
from parallel.pipeline.stage import STAGE, Stage, Travelling, Turn, put_if, take, take_tree

_BY_STAGE = P(STAGE)


class Flow(NamedTuple):
    """State of a stage between ticks.

    Outside of the region of one stage every array has an additional leading dimension, the stages.

    Attributes:
      arrived: sent by the previous stage.
      returned: the gradient sent by the next stage.
      queue: tree of [M, b, ...]; on the first stage: the inputs, each replaced by its gradient.
      ring: tree of [k, 2 S, b, ...], saved inputs, and a place for bubbles.
      grads: gradients of the stage's parameters, summed so far.
    """

    arrived: Travelling
    returned: Travelling
    queue: Stream
    ring: Stream
    grads: one_stage.Grads


class Sums(NamedTuple):
    """Sums over microbatches.

    Attributes:
      out: results of the tail, and the summed outputs of the layers.
      grads: gradients of the tail's parameters, float32.
    """

    out: tuple[Any, Any]
    grads: Any


class OnePass(NamedTuple):
    """1F1B over a stack of layers, on the rows of one group of chips.

    Attributes:
      schedule: 1F1B.
      fn: one layer.
      tail: runs after the last layer and returns a `core.types.LossOutput`.
      layers: gathered weights and keys of all stages, leaves [L, ...].
      sides: arrays that belong to rows, leaves [M, b, ...].
      stages: S.
      trained: parameters of a layer that get gradients.
    """

    schedule: Schedule
    fn: LayerFn
    tail: Tail
    layers: Layer
    sides: Side
    stages: int
    trained: Trained

    def run(self, xs: Stream) -> tuple[Sums, Any, Stream]:
        """Returns the tail's sums, gradients of the layers in float32, k trees [S, ...], and of the input, [M, b, ...].

        Args:
          xs: [M, b, ...], the input of the first layer.
        """
        filled, fed = self.stages - 1, self.stages - 1 + self.schedule.num_microbatches
        flow = self._on_stages(_start, xs)
        flow = _loop(lambda flow, t: self._forward(flow, t)[0], flow, 0, filled)
        flow, sums = _loop(self._steady, (flow, self._no_sums(jax.tree.map(lambda a: a[0], xs))), filled, fed)
        flow = _loop(lambda flow, t: self._on_stages(_backward, t, None, flow=flow), flow, fed, fed + filled)
        return sums, *self._on_stages(_finish, flow=flow, out_specs=(P(STAGE), P()))

    def _forward(self, flow: Flow, t: jax.Array) -> tuple[Flow, Travelling]:
        return self._on_stages(_forward, t, flow=flow, out_specs=(P(STAGE), P()))

    def _steady(self, carry: tuple[Flow, Sums], t: jax.Array) -> tuple[Flow, Sums]:
        flow, sums = carry
        flow, left = self._forward(flow, t)
        side = jax.tree.map(lambda a: take(a, t - (self.stages - 1)), self.sides)
        dleft, sums = self._run_tail(left, side, sums)
        return self._on_stages(_backward, t, dleft, flow=flow), sums

    def _run_tail(self, left: Travelling, side: Side, sums: Sums) -> tuple[Travelling, Sums]:
        """Returns the gradient of the loss sum by what leaves the last layer, and the updated sums."""

        def loss_sum(params: Any, left: Travelling) -> tuple[jax.Array, Any]:
            out = self.tail.fn(params, left.x, side, left.sums)
            return out.loss_sum, out

        (dw, dleft), out = jax.grad(loss_sum, argnums=(0, 1), has_aux=True)(self.tail.params, left)
        add = functools.partial(jax.tree.map, lambda total, new: total + new.astype(total.dtype))
        return dleft, Sums(add(sums.out, (out, left.sums)), add(sums.grads, dw))

    def _no_sums(self, x: Stream) -> Sums:
        side = jax.tree.map(lambda a: a[0], self.sides)
        out = jax.eval_shape(self.tail.fn, self.tail.params, x, side, self.fn.outputs.summed)
        zeros = functools.partial(jax.tree.map, lambda a: jnp.zeros(a.shape, a.dtype))
        return Sums(
            (zeros(out), self.fn.zero_sums()), jax.tree.map(lambda a: jnp.zeros(a.shape, jnp.float32), self.tail.params)
        )

    def _on_stages(self, fn: Callable, *args: Any, flow: Flow | None = None, out_specs: Any = _BY_STAGE) -> Any:
        """Runs `fn(schedule, stage, flow, *args)` on every stage."""

        def local(layers: Layer, sides: Side, flow: Flow | None, *args: Any) -> Any:
            depth = jax.tree.leaves(layers.params)[0].shape[0]
            stage = Stage(self.fn, layers, sides, depth, self.schedule.save, self.schedule.bubble_input, self.trained)
            return fn(self.schedule, stage, jax.tree.map(lambda a: a[0], flow), *args)

        specs = (P(STAGE), P(), P(STAGE), *(P() for _ in args))
        return over_stages(local, in_specs=specs, out_specs=out_specs)(self.layers, self.sides, flow, *args)


def _start(schedule: Schedule, stage: Stage, _: None, xs: Stream) -> Flow:
    first = jax.tree.map(lambda a: a[0], xs)
    one_stage.check_microbatch(stage, first)
    ring = one_stage.empty_saved(stage, first, places=schedule.kept(jax.lax.axis_size(STAGE)))
    nothing = Travelling(jax.tree.map(lambda a: jnp.zeros_like(a[0]), xs), stage.fn.zero_sums())
    return _over_stages(Flow(nothing, nothing, xs, ring, one_stage.zero_grads(stage)))


def _forward(schedule: Schedule, stage: Stage, flow: Flow, t: jax.Array) -> tuple[Flow, Travelling]:
    """Runs one microbatch forward; also returns the output of the last stage, on every stage."""
    at = _turn(schedule, t - _index())
    is_first = _index() == 0
    start = Travelling(take_tree(flow.queue, at.microbatch), stage.fn.zero_sums())
    y = _where(is_first, start, flow.arrived)
    y, ring = one_stage.forward(stage, at, stage.input(at, y), flow.ring, _place(flow, at))
    left = one_stage.broadcast(y, source=_last())
    return _over_stages(flow._replace(arrived=one_stage.send(y, toward=1), ring=ring)), left


def _backward(schedule: Schedule, stage: Stage, flow: Flow, t: jax.Array, dleft: Travelling | None) -> Flow:
    """Runs one microbatch backward, from the gradient of the last stage's output at this tick, if there is one."""
    at = _turn(schedule, t - 2 * _last() + _index())
    dy = flow.returned if dleft is None else _where(_index() == _last(), dleft, flow.returned)
    dy, grads = one_stage.backward(stage, at, flow.ring, _place(flow, at), stage.input(at, dy), flow.grads)
    queue = put_if(at.valid, flow.queue, dy.x, at.microbatch)
    return _over_stages(flow._replace(returned=one_stage.send(dy, toward=-1), queue=queue, grads=grads))


def _finish(schedule: Schedule, stage: Stage, flow: Flow) -> tuple[Any, Stream]:
    del schedule, stage
    return flow.grads.layers(), one_stage.broadcast(flow.queue, source=0)


def _loop(body: Callable[[Any, jax.Array], Any], carry: Any, start: int, stop: int) -> Any:
    return jax.lax.scan(lambda carry, t: (body(carry, t), None), carry, jnp.arange(start, stop))[0]


def _over_stages(flow: Flow) -> Flow:
    return jax.tree.map(lambda a: a[None], flow)


def _turn(schedule: Schedule, number: jax.Array) -> Turn:
    return one_stage.turn(number, microbatches=schedule.num_microbatches, repeats=1)


def _place(flow: Flow, at: Turn) -> jax.Array:
    return at.microbatch % (jax.tree.leaves(flow.ring)[0].shape[1] - 1)  # the last place is for bubbles


def _where(condition: jax.Array, yes: Any, no: Any) -> Any:
    return jax.tree.map(functools.partial(jnp.where, condition), yes, no)


def _index() -> jax.Array:
    return jax.lax.axis_index(STAGE)


def _last() -> int:
    return jax.lax.axis_size(STAGE) - 1
