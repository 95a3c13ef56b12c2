"""1F1B and the schedules derived from it: loss and gradients in one pass, with few microbatches in flight.

A tick can have four kinds of work. Every stage runs one microbatch forward; the tail (head and loss) runs on the one
that the last stage has finished; every stage runs one microbatch backward. In zero-bubble schedules, every stage also
computes the gradients of its matrices for one microbatch. For 1F1B:

    warm-up     S - 1 ticks   forward
    steady      M ticks       forward, tail, backward
    cool-down   S - 1 ticks   backward

    stage s at tick t:  forward of turn t - s, backward of turn t - 2 (S - 1) + s
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
from parallel.pipeline.schedules import SCOPES, OneFOneB, Phase
from parallel.pipeline.stage import STAGE, Stage, Traveling, Turn, put_if, take, take_tree

_BY_STAGE = P(STAGE)


class Flow(NamedTuple):
    """State of a stage between ticks; outside of one stage arrays have a leading dimension, the stages.

    Attributes:
      arrived, returned: sent by the previous stage, and by the next.
      queue: [M, b, ...], on the first stage: the inputs, each later replaced by its gradient.
      saved, deferred: from `stage.empty_saved` and `stage.empty_deferred`.
    """

    arrived: Traveling
    returned: Traveling
    queue: Stream
    saved: Any
    deferred: Any
    grads: one_stage.Grads


class Sums(NamedTuple):
    """Sums over microbatches: results of the tail and summed outputs; and gradients of the tail, float32."""

    out: tuple[Any, Any]
    grads: Any


class OnePass(NamedTuple):
    """1F1B over a stack of layers, on the rows of one group of chips.

    Attributes:
      tail: returns a `core.types.LossOutput`.
      layers: gathered, of all stages, leaves [L, ...], with padding.
      sides: side inputs, leaves [M, b, ...].
    """

    schedule: OneFOneB
    fn: LayerFn
    tail: Tail
    layers: Layer
    sides: Side
    stages: int
    trained: Trained
    spans_slices: bool

    def run(self, xs: Stream) -> tuple[Sums, Any, Stream]:
        """Runs all microbatches forward and backward; `xs` is the input, [M, b, ...].

        Returns sums; float32 gradients, one tree for each of the k layers that a stage runs in a tick, leaves [S R,
        ...], sharded over stages; and the gradient of the input.
        """
        carry = self._on_stages(_start, xs), self._no_sums(jax.tree.map(lambda a: a[0], xs))
        start = 0
        for times, phases in self.schedule.rounds(self.stages):
            period = sum(phase.ticks for phase in phases)

            def one_round(carry: tuple[Flow, Sums], t: jax.Array | int, phases: Any = phases) -> tuple[Flow, Sums]:
                for phase in phases:
                    carry = self._run_phase(phase, carry, t)
                    t = t + phase.ticks
                return carry

            if times == 1:
                carry = one_round(carry, start)
            else:
                carry = _loop(one_round, carry, start + period * jnp.arange(times))
            start += times * period
        flow, sums = carry
        return sums, *self._on_stages(_finish, flow=flow, out_specs=(P(STAGE), P()))

    def _run_phase(self, phase: Phase, carry: tuple[Flow, Sums], start: jax.Array | int) -> tuple[Flow, Sums]:
        ticks = start + jnp.arange(phase.ticks)
        if "T" in phase.kinds:
            return _loop(functools.partial(self._tick, phase.kinds), carry, ticks)
        flow, sums = carry  # the gradients of the tail are not part of a loop that does not change them
        return _loop(lambda flow, t: self._tick(phase.kinds, (flow, sums), t)[0], flow, ticks), sums

    def _tick(self, kinds: str, carry: tuple[Flow, Sums], t: jax.Array) -> tuple[Flow, Sums]:
        (flow, sums), dleft = carry, None
        if "F" in kinds:
            with jax.named_scope(SCOPES["F"]):
                forward = functools.partial(_forward, leaves="T" in kinds)
                flow, left = self._on_stages(forward, t, flow=flow, out_specs=(P(STAGE), P()))
        if "T" in kinds:
            number = t - self.schedule.starts(self.stages)["B"]
            at = one_stage.turn(self.schedule, number, stages=self.stages, is_backward=True)
            side = jax.tree.map(lambda a: take(a, at.microbatch), self.sides)
            with jax.named_scope(SCOPES["T"]):
                dleft, sums = self._run_tail(left, side, sums)
        if "B" in kinds:
            with jax.named_scope(SCOPES["B"]):
                flow = self._on_stages(_backward, t, dleft, flow=flow)
        if "W" in kinds:
            with jax.named_scope(SCOPES["W"]):
                flow = self._on_stages(_weights, t, flow=flow)
        return flow, sums

    def _run_tail(self, left: Traveling, side: Side, sums: Sums) -> tuple[Traveling, Sums]:
        # outside of the region where `stage` is manual, so that the vocabulary can be sharded over it
        def loss_sum(params: Any, left: Traveling) -> tuple[jax.Array, Any]:
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
        def local(layers: Layer, sides: Side, flow: Flow | None, *args: Any) -> Any:
            depth = jax.tree.leaves(layers.params)[0].shape[0]
            depth //= self.schedule.repeats
            stage = Stage(self.fn, layers, sides, depth, self.schedule, self.trained, self.spans_slices)
            return fn(self.schedule, stage, jax.tree.map(lambda a: a[0], flow), *args)

        specs = (P(STAGE), P(), P(STAGE), *(P() for _ in args))
        return over_stages(local, in_specs=specs, out_specs=out_specs)(self.layers, self.sides, flow, *args)


def _start(schedule: OneFOneB, stage: Stage, _: None, xs: Stream) -> Flow:
    first = jax.tree.map(lambda a: a[0], xs)
    one_stage.check_microbatch(stage, first)
    saved = one_stage.empty_saved(stage, first)
    nothing = Traveling(jax.tree.map(lambda a: jnp.zeros_like(a[0]), xs), stage.fn.zero_sums())
    deferred = one_stage.empty_deferred(stage, first)
    return _over_stages(Flow(nothing, nothing, xs, saved, deferred, one_stage.zero_grads(stage)))


def _forward(
    schedule: OneFOneB, stage: Stage, flow: Flow, t: jax.Array, *, leaves: bool
) -> tuple[Flow, Traveling | None]:
    """With `leaves`, also returns the output of the last stage, on every stage."""
    at = _turn(schedule, t - _index())
    is_first = (_index() == 0) & (at.repeat == 0)
    start = Traveling(take_tree(flow.queue, at.microbatch), stage.fn.zero_sums())
    y = _where(is_first, start, flow.arrived)
    y, saved = one_stage.forward(stage, at, stage.input(at, y), flow.saved, _place(schedule, at))
    left = one_stage.broadcast(stage, y, source=_last()) if leaves else None
    return _over_stages(flow._replace(arrived=one_stage.send(stage, y, toward=1), saved=saved)), left


def _backward(schedule: OneFOneB, stage: Stage, flow: Flow, t: jax.Array, dleft: Traveling | None) -> Flow:
    """`dleft` is the gradient of what left the last layer in this tick, or None."""
    number = t - schedule.starts(_last() + 1)["B"] - (_last() - _index())
    at = _turn(schedule, number, is_backward=True)
    dy = flow.returned if dleft is None else _where(_index() == _last(), dleft, flow.returned)
    place, dy = _place(schedule, at), stage.input(at, dy)
    if jax.tree.leaves(flow.deferred):
        to = number % (_last() + 1)
        dy, grads, deferred = one_stage.backward_of_inputs(
            stage, at, flow.saved, place, dy, flow.grads, flow.deferred, to
        )
    else:
        (dy, grads), deferred = one_stage.backward(stage, at, flow.saved, place, dy, flow.grads), ()
    queue = put_if(at.valid, flow.queue, dy.x, at.microbatch)
    returned = one_stage.send(stage, dy, toward=-1)
    return _over_stages(flow._replace(returned=returned, queue=queue, grads=grads, deferred=deferred))


def _weights(schedule: OneFOneB, stage: Stage, flow: Flow, t: jax.Array) -> Flow:
    number = t - schedule.starts(_last() + 1)["W"]
    at = _turn(schedule, number, is_backward=True)
    place, to = _place(schedule, at), number % (_last() + 1)
    x = flow.returned.x
    grads = one_stage.weights(stage, at, flow.saved, place, x, flow.grads, flow.deferred, to)
    return _over_stages(flow._replace(grads=grads))


def _finish(schedule: OneFOneB, stage: Stage, flow: Flow) -> tuple[Any, Stream]:
    del schedule
    return flow.grads.layers(), one_stage.broadcast(stage, flow.queue, source=0)


def _loop(body: Callable[[Any, jax.Array], Any], carry: Any, each: jax.Array) -> Any:
    return jax.lax.scan(lambda carry, t: (body(carry, t), None), carry, each)[0]


def _over_stages(flow: Flow) -> Flow:
    return jax.tree.map(lambda a: a[None], flow)


def _turn(schedule: OneFOneB, number: jax.Array, *, is_backward: bool = False) -> Turn:
    return one_stage.turn(schedule, number, stages=_last() + 1, is_backward=is_backward)


def _place(schedule: OneFOneB, at: Turn) -> jax.Array:
    return jnp.asarray(schedule.places(_last() + 1))[at.order]


def _where(condition: jax.Array, yes: Any, no: Any) -> Any:
    return jax.tree.map(functools.partial(jnp.where, condition), yes, no)


def _index() -> jax.Array:
    return jax.lax.axis_index(STAGE)


def _last() -> int:
    return jax.lax.axis_size(STAGE) - 1
