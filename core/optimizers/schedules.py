"""Learning rate schedules: functions of the number of steps done, which is 0 for the first update."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from core import ranges
from core.errors import UserError

Schedule = Callable[[jax.Array], jax.Array]  # step counted from 0 -> learning rate


def constant(value: float) -> Schedule:
    """Returns a constant learning rate."""
    ranges.check("constant", value=value)
    return lambda step: jnp.full((), value, jnp.float32) + 0 * step


def warmup_linear(*, peak: float, warmup_steps: int, total_steps: int, final_fraction: float = 0.0) -> Schedule:
    """Linear warm-up to `peak`, then linear decay to `peak * final_fraction` at the last step."""
    return _warmup_then(lambda progress: 1 - progress, peak, warmup_steps, total_steps, final_fraction)


def warmup_cosine(*, peak: float, warmup_steps: int, total_steps: int, final_fraction: float = 0.1) -> Schedule:
    """Linear warm-up to `peak`, then cosine decay to `peak * final_fraction` (Loshchilov & Hutter 2017, eq. 5)."""
    return _warmup_then(_half_cosine, peak, warmup_steps, total_steps, final_fraction)


def warmup_floor(*, peak: float, warmup_steps: int, total_steps: int, floor: float = 1.0) -> Schedule:
    """Linear warm-up to `peak`, then constant or, with a floor below 1, cosine decay to `peak * floor`.

    As in the Tiny Recursive Model's reference, the cosine starts at the last step of the warm-up, one step earlier than
    in `warmup_cosine`, and the run may end during the warm-up.

    Args:
      peak: the highest rate.
      warmup_steps: steps of the warm-up; the first has the rate `peak / warmup_steps`.
      total_steps: the step at which the cosine ends.
      floor: the final rate as a fraction of the peak.
    """
    ranges.check("warmup_floor", peak=peak)
    if warmup_steps < 0:
        raise UserError(f"warmup_steps = {warmup_steps}: expected at least 0")
    if not 0 <= floor <= 1:
        raise UserError(f"floor = {floor}: expected from 0 to 1")

    def schedule(step: jax.Array) -> jax.Array:
        done = step + 1  # this step included
        progress = jnp.clip((done - warmup_steps) / max(total_steps - warmup_steps, 1), 0, 1)
        return peak * jnp.minimum(done / max(warmup_steps, 1), floor + (1 - floor) * _half_cosine(progress))

    return schedule


def _half_cosine(progress: jax.Array) -> jax.Array:
    return 0.5 * (1 + jnp.cos(jnp.pi * progress))


def _warmup_then(decay: Callable, peak: float, warmup_steps: int, total_steps: int, final_fraction: float) -> Schedule:
    ranges.check("learning rate", peak=peak)
    if not 0 <= warmup_steps < total_steps:
        raise UserError(f"warmup_steps = {warmup_steps}: expected from 0 to total_steps - 1 = {total_steps - 1}")
    if not 0 <= final_fraction <= 1:
        raise UserError(f"final_fraction = {final_fraction}: expected from 0 to 1")

    def schedule(step: jax.Array) -> jax.Array:
        warm = (step + 1) / max(warmup_steps, 1)
        progress = jnp.clip((step - warmup_steps) / max(total_steps - 1 - warmup_steps, 1), 0, 1)
        return peak * jnp.minimum(warm, final_fraction + (1 - final_fraction) * decay(progress))

    return schedule
