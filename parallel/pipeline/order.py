"""From the model's order of layers to the stages' and back.

On disk, in hashes and in optimizer state, layers stand in the model's order, and stage s stores L / S consecutive ones.
Under the circular schedule it runs parts s, S + s, 2 S + s, … instead. So once per step each part goes to the stage
that runs it: R exchanges, in each of which every stage sends one part and receives one.

    part c is stored on stage c // R, in place c % R;   it runs on stage c % S, in repeat c // S

S stages, R repeats, R S parts.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from parallel.pipeline.stage import STAGE, put, take


class Move(NamedTuple):
    """One part's way.

    Attributes:
      stored_on, place: where it is stored.
      runs_on, repeat: where it runs, and when.
    """

    stored_on: int
    place: int
    runs_on: int
    repeat: int


def exchanges(stages: int, repeats: int) -> list[list[Move]]:
    """R exchanges; in each, every stage sends one part and every stage receives one.

    Were every stage to send its part in place i, stages that are a multiple of S / g apart, g = gcd(R, S), would send
    to the same one. So they send parts in different places.
    """
    group = stages // math.gcd(stages, repeats)
    return [[_move(s, (i + s // group) % repeats, stages, repeats) for s in range(stages)] for i in range(repeats)]


def _move(stage: int, place: int, stages: int, repeats: int) -> Move:
    part = stage * repeats + place
    return Move(stage, place, part % stages, part // stages)


def to_stages(tree: Any, *, stages: int, repeats: int) -> Any:
    """This stage's leaves [L / S, ...] in the model's order, for those in the order in which stages run them."""
    moves = [[(m.stored_on, m.place, m.runs_on, m.repeat) for m in e] for e in exchanges(stages, repeats)]
    return jax.tree.map(lambda a: _exchange(a, moves), tree)


def to_model(tree: Any, *, stages: int, repeats: int) -> Any:
    """The inverse of `to_stages`."""
    moves = [[(m.runs_on, m.repeat, m.stored_on, m.place) for m in e] for e in exchanges(stages, repeats)]
    return jax.tree.map(lambda a: _exchange(a, moves), tree)


def _exchange(a: jax.Array, exchanged: list[list[tuple[int, int, int, int]]]) -> jax.Array:
    """Parts by (from stage, its place there, to stage, its place there); every mesh axis is manual here."""
    if len(exchanged) == 1:
        return a
    parts = a.reshape(len(exchanged), -1, *a.shape[1:])  # [R, L / (R S), ...]
    result, index = jax.lax.empty(parts.shape, parts.dtype), jax.lax.axis_index(STAGE)  # every place gets a part
    for moves in exchanged:
        taken, placed = np.zeros((2, len(moves)), np.int32)
        for source, place, target, to in moves:
            taken[source], placed[target] = place, to
        part = take(parts, jnp.asarray(taken)[index])
        part = jax.lax.ppermute(part, STAGE, [(source, target) for source, _, target, _ in moves])
        result = put(result, part, jnp.asarray(placed)[index])
    return result.reshape(a.shape)


def keys_to_stages(keys: jax.Array | None, *, stages: int, repeats: int) -> jax.Array | None:
    """The layers' keys [L] in the order in which stages run them."""
    if keys is None or repeats == 1:
        return keys
    numbers = np.arange(keys.shape[0]).reshape(repeats, stages, -1)
    return keys[numbers.swapaxes(0, 1).reshape(-1)]
