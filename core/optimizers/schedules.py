"""Learning rate schedules, and the ranges of hyperparameters.

A schedule is a function of the number of steps done, which is 0 for the first update.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import optax

from core.errors import UserError

_RANGES: Mapping[str, tuple[Callable[[Any], bool], str]] = MappingProxyType(
    {
        **dict.fromkeys(("peak", "value", "weight_decay"), (lambda v: 0 <= v < math.inf, "at least 0, and finite")),
        **dict.fromkeys(("b1", "b2", "momentum", "decay"), (lambda v: 0 <= v < 1, "from 0 to below 1")),
        **dict.fromkeys(("eps", "rms", "decay_rate", "clip_update"), (lambda v: 0 < v < math.inf, "above 0")),
        "clip_norm": (lambda v: v is None or v > 0, "above 0, or None for no clipping"),
        "min_factored": (lambda v: v >= 1, "at least 1"),
        "learning_rate": (callable, "a schedule, such as optimizers.constant(1e-3)"),
    }
)
RANGED = frozenset(_RANGES)
Schedule = Callable[[jax.Array], jax.Array]  # step counted from 0 -> learning rate


def check_ranges(where: str, **values: Any) -> None:
    """Raises UserError, naming `where`, if a value is out of the range of its name."""
    for name, value in values.items():
        allowed, expected = _RANGES[name]
        try:
            fits = allowed(value)
        except TypeError:  # such as text
            fits = False
        if not fits:
            raise UserError(f"{where}: {name} = {value!r}: expected {expected}")


def constant(value: float) -> Schedule:
    """Returns a schedule with the same learning rate at all steps.

    Args:
      value: the rate, at least 0 and finite.
    """
    check_ranges("constant", value=value)
    return lambda step: jnp.full((), value, jnp.float32) + 0 * step


def warmup_linear(*, peak: float, warmup_steps: int, total_steps: int, final_fraction: float = 0.0) -> Schedule:
    """Linear warm-up to `peak`, then linear decay to `peak * final_fraction`.

    Args:
      peak: the highest rate, at least 0.
      warmup_steps: from 0 to total_steps - 1.
      total_steps: number of steps, warm-up included.
      final_fraction: the final rate as a fraction of the peak, from 0 to 1.
    """
    return _warmup_then(lambda progress: 1 - progress, peak, warmup_steps, total_steps, final_fraction)


def warmup_cosine(*, peak: float, warmup_steps: int, total_steps: int, final_fraction: float = 0.1) -> Schedule:
    """Linear warm-up to `peak`, then cosine decay (Loshchilov & Hutter 2017, eq. 5).

    Args:
      peak: the highest rate, at least 0.
      warmup_steps: from 0 to total_steps - 1.
      total_steps: number of steps, warm-up included.
      final_fraction: the final rate as a fraction of the peak, from 0 to 1.
    """
    return _warmup_then(_half_cosine, peak, warmup_steps, total_steps, final_fraction)


def warmup_floor(*, peak: float, warmup_steps: int, total_steps: int, floor: float = 1.0) -> Schedule:
    """Linear warm-up to `peak`, then constant or, with a floor below 1, cosine decay to `peak * floor`.

    As in the Tiny Recursive Model's reference, the cosine starts one step earlier than in `warmup_cosine`.

    Args:
      peak: the highest rate, at least 0.
      warmup_steps: at least 0; may exceed `total_steps`.
      total_steps: the step at which the cosine ends.
      floor: the final rate as a fraction of the peak, from 0 to 1.

    Raises:
      UserError: `peak`, `warmup_steps` or `floor` is out of range.
    """
    check_ranges("warmup_floor", peak=peak)
    if warmup_steps < 0:
        raise UserError(f"warmup_steps = {warmup_steps}: expected at least 0")
    if not 0 <= floor <= 1:
        raise UserError(f"floor = {floor}: expected from 0 to 1")

    def schedule(step: jax.Array) -> jax.Array:
        done = step + 1  # this step included
        progress = jnp.clip((done - warmup_steps) / max(total_steps - warmup_steps, 1), 0, 1)
        return peak * jnp.minimum(done / max(warmup_steps, 1), floor + (1 - floor) * _half_cosine(progress))

    return schedule


def joined(*, schedules: Sequence[Schedule], boundaries: Sequence[int]) -> Schedule:
    """Applies one schedule after the other (`optax.join_schedules`).

    Args:
      schedules: each is a function of the steps since its boundary; the first, of all steps.
      boundaries: for each schedule but the first, the step at which it begins; ascending, above 0.

    Raises:
      UserError: `boundaries` has the wrong length or order, or a step below 1; or a schedule is not a function.
    """
    for schedule in schedules:
        check_ranges("joined", learning_rate=schedule)
    if len(boundaries) != len(schedules) - 1 or list(boundaries) != sorted({step for step in boundaries if step > 0}):
        raise UserError(
            f"joined: {len(schedules)} schedules and boundaries = {list(boundaries)}: expected "
            f"{len(schedules) - 1} steps in ascending order"
        )
    return optax.join_schedules(schedules, boundaries)


def _half_cosine(progress: jax.Array) -> jax.Array:
    return 0.5 * (1 + jnp.cos(jnp.pi * progress))


def _warmup_then(decay: Callable, peak: float, warmup_steps: int, total_steps: int, final_fraction: float) -> Schedule:
    check_ranges("learning rate", peak=peak)
    if not 0 <= warmup_steps < total_steps:
        raise UserError(f"warmup_steps = {warmup_steps}: expected from 0 to total_steps - 1 = {total_steps - 1}")
    if not 0 <= final_fraction <= 1:
        raise UserError(f"final_fraction = {final_fraction}: expected from 0 to 1")

    def schedule(step: jax.Array) -> jax.Array:
        warm = (step + 1) / max(warmup_steps, 1)
        progress = jnp.clip((step - warmup_steps) / max(total_steps - 1 - warmup_steps, 1), 0, 1)
        return peak * jnp.minimum(warm, final_fraction + (1 - final_fraction) * decay(progress))

    return schedule
