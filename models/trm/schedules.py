"""What of the Tiny Recursive Model changes while it trains: how much it explores, and how often it recurs.

The one idea: the carry counts training steps, so a schedule is a pure function of a number that every step has, that a
checkpoint keeps, and that is the same on all chips. One program serves the whole run, with loops of fixed length, and
nothing is compiled anew when a curriculum moves on. Outer cycles without a gradient that it leaves out stand behind a
condition and cost nothing. Inner ones of the last cycle are masked and cost what they always do: behind a condition the
gradients of the weights would be summed over all chips at every call, and compiled for a v4-64 that made a step a fifth
longer than without any curriculum, for all of the run.
"""

from __future__ import annotations

import dataclasses
import itertools

import jax
import jax.numpy as jnp

from core.errors import UserError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Linear:
    """A number that goes in a straight line from `start` to `end`, and stays there.

    Attributes:
      start: at step 0.
      end: from step `share * total_steps` on.
      total_steps: of the run.
      share: of the run that the way takes.

    Raises:
      ValueError: no steps, or a share that is none.
    """

    start: float
    end: float
    total_steps: int
    share: float = 1.0

    def __post_init__(self):
        _check(self, where="Linear")

    def at(self, step: jax.Array) -> jax.Array:
        """The number at a training step, counted from 0; float32."""
        return self.start + (self.end - self.start) * _progress(self, step)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Curriculum:
    """Cycles of recursion that grow in a straight line, rounded, to those of the model.

    Evaluation does not follow it: its scores are of all cycles, at every step.

    Attributes:
      h_cycles, l_cycles: at step 0; at most those of the model.
      total_steps: of the run.
      share: of the run after which all cycles are done.

    Raises:
      ValueError: no cycles, no steps, or a share that is none.
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
        """Outer and inner repetitions at a training step, int32, on the way to `h_cycles` and `l_cycles`."""
        progress = _progress(self, step)

        def grown(first: int, last: int) -> jax.Array:
            return jnp.floor(first + (last - first) * progress + 0.5).astype(jnp.int32)

        return grown(self.h_cycles, h_cycles), grown(self.l_cycles, l_cycles)

    def stages(self, steps: int, *, h_cycles: int, l_cycles: int) -> list[tuple[int, int, int]]:
        """How the first `steps` steps divide: (steps, outer, inner repetitions), in order."""
        h, l = (a.tolist() for a in self.at(jnp.arange(steps), h_cycles=h_cycles, l_cycles=l_cycles))  # noqa: E741
        return [(len(list(same)), *pair) for pair, same in itertools.groupby(zip(h, l, strict=True))]


def _progress(schedule: Linear | Curriculum, step: jax.Array) -> jax.Array:
    return jnp.clip(step / (schedule.share * schedule.total_steps), 0.0, 1.0)


def _check(schedule: Linear | Curriculum, *, where: str) -> None:
    if schedule.total_steps < 1:
        raise UserError(f"{where}: total_steps = {schedule.total_steps}: expected at least 1")
    if not 0 < schedule.share <= 1:
        raise UserError(f"{where}: share = {schedule.share}: expected above 0, to 1")
