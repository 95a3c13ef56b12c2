"""Schedules of the Tiny Recursive Model: exploration probability, and the number of cycles."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp

from core.errors import UserError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Linear:
    """A value that changes linearly from `start` to `end` and then stays constant.

    Attributes:
      total_steps: number of steps of the run.
      share: fraction of the run during which the value changes.
    """

    start: float
    end: float
    total_steps: int
    share: float = 1.0

    def __post_init__(self):
        _check(self, where="Linear")

    def at(self, step: jax.Array) -> jax.Array:
        """Returns the value at a training step, counted from 0."""
        return self.start + (self.end - self.start) * _progress(self, step)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Curriculum:
    """Numbers of recursion cycles that grow linearly, rounded, to those of the model; evaluation uses all cycles.

    Attributes:
      h_cycles, l_cycles: outer and inner cycles at step 0.
      total_steps: number of steps of the run.
      share: fraction of the run during which they grow.
    """

    h_cycles: int = 1
    l_cycles: int = 2
    total_steps: int
    share: float = 0.2

    def __post_init__(self):
        if min(self.h_cycles, self.l_cycles) < 1:
            raise UserError(f"Curriculum: h_cycles = {self.h_cycles}, l_cycles = {self.l_cycles}: expected at least 1")
        _check(self, where="Curriculum")

    def at(self, step: jax.Array, *, h_cycles: int, l_cycles: int) -> tuple[jax.Array, jax.Array]:
        """Returns the outer and inner cycles at a training step, given the final `h_cycles` and `l_cycles`."""
        progress = _progress(self, step)

        def grown(first: int, last: int) -> jax.Array:
            return jnp.floor(first + (last - first) * progress + 0.5).astype(jnp.int32)

        return grown(self.h_cycles, h_cycles), grown(self.l_cycles, l_cycles)

    def stages(self, steps: int, *, h_cycles: int, l_cycles: int) -> list[tuple[int, int, int]]:
        """Returns (number of steps, outer cycles, inner cycles) for ranges of the first `steps` steps.

        `h_cycles` and `l_cycles` are the final numbers.
        """
        h, l = (a.tolist() for a in self.at(jnp.arange(steps), h_cycles=h_cycles, l_cycles=l_cycles))  # noqa: E741
        return [(len(list(same)), *pair) for pair, same in itertools.groupby(zip(h, l, strict=True))]


def _progress(schedule: Linear | Curriculum, step: jax.Array) -> jax.Array:
    return jnp.clip(step / (schedule.share * schedule.total_steps), 0.0, 1.0)


def _check(schedule: Linear | Curriculum, *, where: str) -> None:
    if schedule.total_steps < 1:
        raise UserError(f"{where}: total_steps = {schedule.total_steps}: expected at least 1")
    if not 0 < schedule.share <= 1:
        raise UserError(f"{where}: share = {schedule.share}: expected a number in (0, 1]")
