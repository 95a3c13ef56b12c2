"""Learning rates by step, counted from 0: the step that is about to be made."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from core import ranges
from core.errors import UserError

Schedule = Callable[[jax.Array], jax.Array]  # step counted from 0 -> learning rate


def constant(value: float) -> Schedule:
    """The same rate at every step."""
    ranges.check("constant", value=value)
    return lambda step: jnp.full((), value, jnp.float32) + 0 * step


def warmup_linear(*, peak: float, warmup_steps: int, total_steps: int, final_fraction: float = 0.0) -> Schedule:
    """Up to `peak` over the warm-up, then in a straight line to `peak * final_fraction` at the last step."""
    return _warmup_then(lambda progress: 1 - progress, peak, warmup_steps, total_steps, final_fraction)


def warmup_cosine(*, peak: float, warmup_steps: int, total_steps: int, final_fraction: float = 0.1) -> Schedule:
    """Up to `peak` over the warm-up, then half a cosine to `peak * final_fraction`. Loshchilov & Hutter 2017, eq. 5."""
    return _warmup_then(_half_cosine, peak, warmup_steps, total_steps, final_fraction)


def warmup_floor(*, peak: float, warmup_steps: int, total_steps: int, floor: float = 1.0) -> Schedule:
    """Up to `peak` over the warm-up, and there it stays; or, with a floor below 1, half a cosine to `peak * floor`.

    The cosine starts at the last step of the warm-up, one step before that of `warmup_cosine`, and a run may end before
    its warm-up does: both as in the Tiny Recursive Model's reference.

    Args:
      peak: the highest rate.
      warmup_steps: of these, the first has the rate `peak / warmup_steps`.
      total_steps: where the cosine ends.
      floor: what is left of the peak there.
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
