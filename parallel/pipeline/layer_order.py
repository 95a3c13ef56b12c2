"""Reorders layers between the model's order and the order of the stages.

Checkpoints, hashes and optimizer state have layers in the model's order, in which stage s stores L / S consecutive
ones. With repeats (circular, interleaved, zero-bubble) it runs parts s, S + s, 2 S + s, … instead. Before the stages
run, each part is therefore sent to the stage that runs it, in R exchanges, in each of which every stage sends one part
and receives one. Afterward, gradients are sent back in the same way.

    part c is stored on stage c // R, in place c % R;   it runs on stage c % S, in repeat c // S

If L does not divide over the parts, each has ceil(L / (R S)) layers, and the last layer is repeated until all are full.
This needs all layers of an array on a chip. If L does not divide over the stages, they are there: `stage` shards
another dimension (`parallel.strategy.stored_spec`). If it does, an all-to-all first moves `stage` from the layers to
another dimension. A further all-to-all then brings every stage its layers. Arrays without a dimension that divides over
the stages are gathered, or replicated, instead.

S stages, R repeats, R S parts.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from core import logical
from parallel.pipeline import schedules
from parallel.pipeline.stage import STAGE, put, take


class Move(NamedTuple):
    """The source and destination of one part.

    Attributes:
      stored_on, place: where it is stored.
      runs_on, repeat: where it runs, and in which repeat.
    """

    stored_on: int
    place: int
    runs_on: int
    repeat: int


def exchanges(stages: int, repeats: int) -> list[list[Move]]:
    """Returns R exchanges; in each, every stage sends one part and receives one.

    If every stage sent its part in place i, stages whose distance is a multiple of S / g, with g = gcd(R, S), would
    send to the same stage. Therefore the place is raised by one, modulo R, after every S / g stages.
    """
    group = stages // math.gcd(stages, repeats)
    return [[_move(s, (i + s // group) % repeats, stages, repeats) for s in range(stages)] for i in range(repeats)]


def _move(stage: int, place: int, stages: int, repeats: int) -> Move:
    part = stage * repeats + place
    return Move(stage, place, part % stages, part // stages)


def to_stages(tree: Any, *, stages: int, repeats: int) -> Any:
    """Converts this stage's leaves [L / S, ...] from the model's order to the order in which the stages run them."""
    moves = [[(m.stored_on, m.place, m.runs_on, m.repeat) for m in e] for e in exchanges(stages, repeats)]
    return jax.tree.map(lambda a: _exchange(a, moves), tree)


def to_model(tree: Any, *, stages: int, repeats: int) -> Any:
    """Converts leaves back from the order in which the stages run them: the inverse of `to_stages`."""
    moves = [[(m.runs_on, m.repeat, m.stored_on, m.place) for m in e] for e in exchanges(stages, repeats)]
    return jax.tree.map(lambda a: _exchange(a, moves), tree)


def _exchange(a: jax.Array, exchanged: list[list[tuple[int, int, int, int]]]) -> jax.Array:
    """Exchanges parts given as (source stage, place there, target stage, place there); all mesh axes are manual."""
    if len(exchanged) == 1:
        return a
    parts = a.reshape(len(exchanged), -1, *a.shape[1:])  # [R, L / (R S), ...]
    result, index = jax.lax.empty(parts.shape, parts.dtype), jax.lax.axis_index(STAGE)  # filled completely below
    for moves in exchanged:
        sent, received = np.zeros((2, len(moves)), np.int32)  # place in the source, in the target
        for source, place, target, to in moves:
            sent[source], received[target] = place, to
        part = take(parts, jnp.asarray(sent)[index])
        part = jax.lax.ppermute(part, STAGE, [(source, target) for source, _, target, _ in moves])
        result = put(result, part, jnp.asarray(received)[index])
    return result.reshape(a.shape)


def from_storage(a: jax.Array, spec: P, layers: int) -> jax.Array:
    """Returns this stage's layers of an array that is stored with `spec`, in model order; all mesh axes are manual.

    Args:
      a: the stored shard of [L, ...].
      spec: sharding of the stored array over manual axes.
      layers: number of layers with padding.
    """
    a, dimension = _with_all_layers(a, spec)
    a = jnp.pad(a, [(0, layers - a.shape[0])] + [(0, 0)] * (a.ndim - 1), mode="edge")
    return _own_layers(a) if dimension is None else _all_to_all(a, split=0, join=dimension)


def to_storage(a: jax.Array, spec: P, layers: int) -> jax.Array:
    """Inverse of `from_storage`, but `layers` is the number of layers without padding."""
    dimension = _over_stages(spec)
    other = _divisible(a) if dimension == 0 else dimension
    if other is None:
        a = jax.lax.all_gather(a, STAGE, tiled=True)[:layers]
        return _own_layers(a) if dimension == 0 else a
    a = _all_to_all(a, split=other, join=0)[:layers]
    return _all_to_all(a, split=0, join=other) if dimension == 0 else a


def _with_all_layers(a: jax.Array, spec: P) -> tuple[jax.Array, int | None]:
    """Returns the shard with all layers, and the dimension that `stage` shards instead; None if it is replicated."""
    dimension = _over_stages(spec)
    if dimension != 0:
        return a, dimension
    if (other := _divisible(a)) is None:
        return jax.lax.all_gather(a, STAGE, tiled=True), None
    return _all_to_all(a, split=other, join=0), other


def _divisible(a: jax.Array) -> int | None:
    """Returns the first dimension after the layers that divides over the stages; None if there is none."""
    return next((i for i in range(1, a.ndim) if a.shape[i] % jax.lax.axis_size(STAGE) == 0), None)


def _own_layers(a: jax.Array) -> jax.Array:
    mine = a.shape[0] // jax.lax.axis_size(STAGE)
    return jax.lax.dynamic_slice_in_dim(a, jax.lax.axis_index(STAGE) * mine, mine)


def _all_to_all(a: jax.Array, *, split: int, join: int) -> jax.Array:
    return jax.lax.all_to_all(a, STAGE, split_axis=split, concat_axis=join, tiled=True)


def _over_stages(spec: P) -> int | None:
    return next((i for i, entry in enumerate(spec) if STAGE in logical.mesh_axes(entry)), None)


def by_stages(tree: Any, *, stages: int, repeats: int) -> Any:
    """Reorders small arrays [L, ...], such as random keys, to the order in which the stages run them, with padding."""

    def reordered(a: jax.Array) -> jax.Array:
        layers = schedules.padded(a.shape[0], stages * repeats)
        if repeats == 1 and layers == a.shape[0]:
            return a
        numbers = np.minimum(np.arange(layers), a.shape[0] - 1).reshape(repeats, stages, -1)
        return a[numbers.swapaxes(0, 1).reshape(-1)]

    return jax.tree.map(reordered, tree)
