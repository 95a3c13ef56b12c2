"""Reorders layers between the model's order and the order of the stages.

In the model's order, stage s has L / S consecutive layers. With repeats it runs parts s, S + s, 2 S + s, … instead:
each part is sent to the stage that runs it, in R exchanges.

    part c is stored on stage c // R, in place c % R;   it runs on stage c % S, in repeat c // S

If L does not divide over the parts, each has ceil(L / (R S)) layers, and the last layer is repeated until all are full.

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
    """Where a part is stored (`stored_on`, `place`), and where it runs (`runs_on`, `repeat`)."""

    stored_on: int
    place: int
    runs_on: int
    repeat: int


def exchanges(stages: int, repeats: int) -> list[list[Move]]:
    """Returns R exchanges; in each, every stage sends one part and receives one.

    If every stage sent its part in place i, stages S / gcd(R, S) apart would send to the same stage.
    """
    group = stages // math.gcd(stages, repeats)
    return [[_move(s, (i + s // group) % repeats, stages, repeats) for s in range(stages)] for i in range(repeats)]


def _move(stage: int, place: int, stages: int, repeats: int) -> Move:
    part = stage * repeats + place
    return Move(stage, place, part % stages, part // stages)


def to_stages(tree: Any, *, stages: int, repeats: int) -> Any:
    """Converts this stage's leaves [L / S, ...] to the order of the stages."""
    moves = [[(m.stored_on, m.place, m.runs_on, m.repeat) for m in e] for e in exchanges(stages, repeats)]
    return jax.tree.map(lambda a: _exchange(a, moves), tree)


def to_model(tree: Any, *, stages: int, repeats: int) -> Any:
    """The inverse of `to_stages`."""
    moves = [[(m.runs_on, m.repeat, m.stored_on, m.place) for m in e] for e in exchanges(stages, repeats)]
    return jax.tree.map(lambda a: _exchange(a, moves), tree)


def _exchange(a: jax.Array, exchanged: list[list[tuple[int, int, int, int]]]) -> jax.Array:
    """Parts are given as (source stage, place there, target stage, place there); all mesh axes are manual."""
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
    """Returns this stage's layers, in model order, of an array that is stored with `spec`.

    All mesh axes are manual. `layers` is the number of layers with padding.
    """
    a, dimension = _with_all_layers(a, spec)
    a = jnp.pad(a, [(0, layers - a.shape[0])] + [(0, 0)] * (a.ndim - 1), mode="edge")
    return _own_layers(a) if dimension is None else _all_to_all(a, split=0, join=dimension)


def to_storage(a: jax.Array, spec: P, layers: int) -> jax.Array:
    """The inverse of `from_storage`, but `layers` is without padding."""
    dimension = _over_stages(spec)
    other = _divisible(a) if dimension == 0 else dimension
    if other is None:
        a = jax.lax.all_gather(a, STAGE, tiled=True)[:layers]
        return _own_layers(a) if dimension == 0 else a
    a = _all_to_all(a, split=other, join=0)[:layers]
    return _all_to_all(a, split=0, join=other) if dimension == 0 else a


def _with_all_layers(a: jax.Array, spec: P) -> tuple[jax.Array, int | None]:
    """Returns the shard with all layers, and the dimension that `stage` shards instead, or None."""
    dimension = _over_stages(spec)
    if dimension != 0:
        return a, dimension
    if (other := _divisible(a)) is None:
        return jax.lax.all_gather(a, STAGE, tiled=True), None
    return _all_to_all(a, split=other, join=0), other


def _divisible(a: jax.Array) -> int | None:
    return next((i for i in range(1, a.ndim) if a.shape[i] % jax.lax.axis_size(STAGE) == 0), None)


def _own_layers(a: jax.Array) -> jax.Array:
    mine = a.shape[0] // jax.lax.axis_size(STAGE)
    return jax.lax.dynamic_slice_in_dim(a, jax.lax.axis_index(STAGE) * mine, mine)


def _all_to_all(a: jax.Array, *, split: int, join: int) -> jax.Array:
    return jax.lax.all_to_all(a, STAGE, split_axis=split, concat_axis=join, tiled=True)


def _over_stages(spec: P) -> int | None:
    return next((i for i, entry in enumerate(spec) if STAGE in logical.mesh_axes(entry)), None)


def by_stages(tree: Any, *, stages: int, repeats: int) -> Any:
    """Reorders small arrays [L, ...] to the order of the stages, with padding."""

    def reordered(a: jax.Array) -> jax.Array:
        layers = schedules.padded(a.shape[0], stages * repeats)
        if repeats == 1 and layers == a.shape[0]:
            return a
        numbers = np.minimum(np.arange(layers), a.shape[0] - 1).reshape(repeats, stages, -1)
        return a[numbers.swapaxes(0, 1).reshape(-1)]

    return jax.tree.map(reordered, tree)
