"""Schedules of the Tiny Recursive Model: exploration probability, and the number of cycles.

The carry counts training steps: a schedule is a pure function of this number, which checkpoints save and which is the
same on all chips. One program with loops of fixed length serves the whole run: nothing is recompiled when a curriculum
advances.

Skipped outer cycles without a gradient are branches of `lax.cond` and cost nothing. Skipped inner cycles of the last
outer cycle are masked, and cost as much as others: inside a branch, weight gradients would be summed over all chips at
every call, and steps would take 20% longer than without a curriculum, by the compiler's estimate for a v4-64.
"""

import dataclasses
import itertools

import jax
import jax.numpy as jnp

from core.errors import UserError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Linear:
    """A value that changes linearly from `start` to `end` and then stays constant.

    Attributes:
      start: the value at step 0.
      end: the value from step `share * total_steps` on.
      total_steps: number of steps of the run.
      share: fraction of the run, above 0 and at most 1, during which the value changes.

    Raises:
      UserError: `total_steps` is below 1, or the share is outside (0, 1].
    """

    start: float
    end: float
    total_steps: int
    share: float = 1.0

    def __post_init__(self):
        _check(self, where="Linear")

    def at(self, step: jax.Array) -> jax.Array:
        """Returns the value at a training step, counted from 0; float32."""
        return self.start + (self.end - self.start) * _progress(self, step)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Curriculum:
    """Numbers of recursion cycles that grow linearly, rounded, to those of the model.

    Evaluation always uses all cycles.

    Attributes:
      h_cycles, l_cycles: outer and inner cycles at step 0; from 1 to those of the model.
      total_steps: number of steps of the run.
      share: fraction of the run, above 0 and at most 1, after which all cycles are used.

    Raises:
      UserError: a number of cycles or `total_steps` is below 1, or the share is outside (0, 1].
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
        """Returns the outer and inner cycles at a training step, int32, given the final `h_cycles` and `l_cycles`."""
        progress = _progress(self, step)

        def grown(first: int, last: int) -> jax.Array:
            return jnp.floor(first + (last - first) * progress + 0.5).astype(jnp.int32)

        return grown(self.h_cycles, h_cycles), grown(self.l_cycles, l_cycles)

    def stages(self, steps: int, *, h_cycles: int, l_cycles: int) -> list[tuple[int, int, int]]:
        """Returns (number of steps, outer cycles, inner cycles) of each stage within the first `steps` steps, in order.

        A stage is a range of steps with the same cycles; `h_cycles` and `l_cycles` are the final numbers.
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
