"""Runs all microbatches through all stages in one direction: the two passes of gpipe and circular.

The backward pass is the forward pass with the stages in reverse order. A turn is the work of a stage on one microbatch
in one repeat. The rank of a stage is its distance from the end where microbatches enter; at tick t it has turn t -
rank:

    rank 0:  0 1 2 3 . .      S = 3, M = 4: turn by tick; a dot is a bubble
    rank 1:  . 0 1 2 3 .
    rank 2:  . . 0 1 2 3

Rank 0 reads its input from a queue with one place per microbatch. The last rank sends its results around the ring to
rank 0, which stores them in the same places.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from parallel.pipeline import stage as one_stage
from parallel.pipeline.schedules import SCOPES, Schedule
from parallel.pipeline.stage import STAGE, Stage, Traveling, Turn, put_if, take_tree


def forward(schedule: Schedule, stage: Stage, ys: Traveling) -> tuple[Traveling, Any]:
    """Runs every microbatch through every layer.

    `ys` is the input of the first layer, [M, b, ...], and zeros for the sums, [M, ...]. Returns the output of the last
    layer and the sums, on every stage; and what this stage saves.
    """

    first = jax.tree.map(lambda a: a[0], ys.x)
    one_stage.check_microbatch(stage, first)

    def work(kept: Any, at: Turn, y: Traveling) -> tuple[Traveling, Any]:
        return one_stage.forward(stage, at, y, kept, at.order)

    return _sweep(schedule, stage, work, ys, one_stage.empty_saved(stage, first), toward=1)


def backward(schedule: Schedule, stage: Stage, kept: Any, dys: Traveling) -> tuple[Traveling, Any]:
    """Runs the gradient of every microbatch back through every layer.

    Returns gradients of the input, [M, b, ...] on every stage, and of this stage's parameters, float32, k trees with
    leaves [R, ...].

    Args:
      schedule: gpipe or circular.
      kept: saved by `forward`.
      dys: gradients of the output of the last layer, and of the sums.
    """

    def work(grads: Any, at: Turn, dy: Traveling) -> tuple[Traveling, Any]:
        return one_stage.backward(stage, at, kept, at.order, dy, grads)

    dxs, grads = _sweep(schedule, stage, work, dys, one_stage.zero_grads(stage), toward=-1)
    return dxs, grads.layers()


def _sweep(
    schedule: Schedule, stage: Stage, work: Callable[..., tuple], queue: Traveling, state: Any, *, toward: int
) -> tuple[Traveling, Any]:
    stages, index = jax.lax.axis_size(STAGE), jax.lax.axis_index(STAGE)
    first = 0 if toward == 1 else stages - 1  # of rank 0
    rank = abs(index - first)
    turn = functools.partial(one_stage.turn, schedule, stages=stages, is_backward=toward == -1)

    def tick(carry: tuple, t: jax.Array) -> tuple[tuple, None]:
        arrived, queue, state = carry
        queue = put_if(t >= stages, queue, arrived, turn(t - stages).microbatch)
        at = turn(t - rank)
        x = jax.tree.map(functools.partial(jnp.where, rank == 0), take_tree(queue, at.microbatch), arrived)
        with jax.named_scope(SCOPES["F" if toward == 1 else "B"]):
            y, state = work(state, at, stage.input(at, x))
            return (one_stage.send(stage, y, toward=toward), queue, state), None

    carry = (jax.tree.map(lambda a: jnp.zeros_like(a[0]), queue), queue, state)
    (arrived, queue, state), _ = jax.lax.scan(tick, carry, jnp.arange(schedule.ticks(stages)))
    queue = one_stage.put_tree(queue, arrived, jnp.asarray(schedule.num_microbatches - 1))  # sent in the last tick
    return one_stage.broadcast(stage, queue, source=first), state
