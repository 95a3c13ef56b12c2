"""When a stage does what: schedules as plain data, with their arithmetic.

A tick is the time in which every stage does the same kind of work on a microbatch of its own, all in lockstep. A stage
that has no microbatch at a tick works all the same, on nothing: a bubble.

    gpipe, circular   forward ticks: M R + S - 1, then as many backward ones
    1F1B              S - 1 ticks forward, M ticks forward and backward, S - 1 ticks backward

    bubble = (S - 1) / (M R + S - 1), of every schedule here with R = 1 but for circular

S stages, M microbatches, R repeats: times that a microbatch goes around all stages.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

from core import units
from core.errors import UserError

SAVES = ("layers", "stage")


class Work(NamedTuple):
    """What a stage does within one tick: one part of the layers on one microbatch.

    Attributes:
      kind: "F" forward or "B" backward.
      microbatch, repeat: of what.
    """

    kind: str
    microbatch: int
    repeat: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule:
    """What is common to all schedules.

    Attributes:
      num_microbatches: M. Microbatch m holds rows m, m + M, … of every chip, so that chips keep their rows.
      save: what is kept of the forward pass for the backward one: "layers", the input of every layer; "stage", the
        input of a stage alone, at the price of running it forward once more. Everything else is computed again.
      bubble_input: what a stage without a microbatch computes on, and what is where nothing was put yet. Nothing
        depends on it, which tests show with NaN. None: whatever is there.

    Raises:
      ValueError: numbers out of range.
    """

    num_microbatches: int
    save: str = "layers"
    bubble_input: float | None = None

    name = "schedule"
    repeats = 1

    def __post_init__(self):
        _check_count(self.name, "num_microbatches", self.num_microbatches)
        if self.save not in SAVES:
            raise UserError(f"{self.name}: save = {self.save!r}; expected one of {', '.join(SAVES)}")

    @property
    def turns(self) -> int:
        """M R: how often a stage works forward, bubbles apart."""
        return self.num_microbatches * self.repeats

    def ticks(self, stages: int) -> int:
        """Ticks of the forward pass; the backward pass has as many, and 1F1B shares M of them."""
        return self.turns + stages - 1

    def bubble(self, stages: int) -> float:
        """The share of a stage's time in which it has no microbatch."""
        return (stages - 1) / self.ticks(stages)

    def kept(self, stages: int) -> int:
        """Microbatches whose saved inputs a stage holds at most, counted once per repeat."""
        del stages
        return self.turns

    def layer_unit(self, stages: int) -> int:
        """What the number of layers must be a multiple of."""
        return stages * self.repeats

    def problems(self, stages: int) -> list[str]:
        """What makes the schedule impossible on so many stages, with its fix."""
        del stages
        return []

    def work(self, stage: int, tick: int, stages: int) -> tuple[Work, ...]:
        """What a stage does at a tick, counted from the first forward one; empty in a bubble."""
        ticks = self.ticks(stages)
        if tick < ticks:
            return self._work("F", tick - stage)
        return self._work("B", tick - ticks - (stages - 1 - stage))

    def timeline(self, stages: int) -> Iterator[list[tuple[Work, ...]]]:
        """Every tick: what each stage does."""
        tick, done = 0, 0
        while done < 2 * self.turns * stages:
            row = [self.work(stage, tick, stages) for stage in range(stages)]
            done += sum(len(work) for work in row)
            tick += 1
            yield row

    def _work(self, kind: str, turn: int) -> tuple[Work, ...]:
        if not 0 <= turn < self.turns:
            return ()
        repeat, microbatch = divmod(turn, self.num_microbatches)
        return (Work(kind, microbatch, repeat if kind == "F" else self.repeats - 1 - repeat),)

    def describe(self, stages: int) -> str:
        """One line for people."""
        rounds = f" x {self.repeats} repeats" if self.repeats > 1 else ""
        formula = f"(S - 1) / ({'M R' if self.repeats > 1 else 'M'} + S - 1)"
        kept = units.counted(self.kept(stages) // self.repeats, "microbatch", "microbatches")
        return (
            f"{self.name}: {units.counted(self.num_microbatches, 'microbatch', 'microbatches')}{rounds} through "
            f"{units.counted(stages, 'stage')} in {units.counted(self.ticks(stages), 'tick')} each way; "
            f"bubble {formula} = {self.bubble(stages):.1%}; keeps the "
            f"{'layer' if self.save == 'layers' else 'stage'} inputs of {kept}{rounds}"
        )


class GPipe(Schedule):
    """All microbatches forward, then all backward. Huang et al. 2019."""

    name = "gpipe"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Circular(Schedule):
    """As gpipe, with the layers dealt out in R rounds: stage s has parts s, S + s, 2 S + s, …

    The parts are smaller, so that filling and emptying the pipeline takes less, and more arrays travel.

    Attributes:
      repeats: R.
    """

    repeats: int

    name = "circular"

    def __post_init__(self):
        super().__post_init__()
        _check_count(self.name, "repeats", self.repeats)

    def problems(self, stages: int) -> list[str]:
        """A microbatch that comes around must find its place free."""
        if self.num_microbatches >= stages:
            return []
        return [
            f"circular: num_microbatches = {self.num_microbatches} is below stage = {stages}: a microbatch would come "
            f"around before the first stage is done with the others; take at least {stages}, or gpipe"
        ]


class OneFOneB(Schedule):
    """A microbatch's backward pass starts as soon as its forward pass ends, so that few are in flight.

    Narayanan et al. 2019 (PipeDream-flush, "1F1B"), in lockstep. The head and the loss run between the two passes of a
    microbatch, so they must be the stack's tail.
    """

    name = "1F1B"

    def kept(self, stages: int) -> int:
        """At most 2 S - 1, whatever the number of microbatches."""
        return min(2 * stages - 1, self.num_microbatches)

    def work(self, stage: int, tick: int, stages: int) -> tuple[Work, ...]:
        """Forward and backward of different microbatches, but for the last stage, which turns around at once."""
        return self._work("F", tick - stage) + self._work("B", tick - 2 * (stages - 1) + stage)


def gpipe(*, num_microbatches: int, save: str = "layers") -> Schedule:
    """All microbatches forward, then all backward; memory grows with their number."""
    return GPipe(num_microbatches=num_microbatches, save=save)


def circular(*, num_microbatches: int, repeats: int, save: str = "layers") -> Schedule:
    """gpipe with the layers dealt out in `repeats` rounds: a smaller bubble, and more arrays that travel."""
    return Circular(num_microbatches=num_microbatches, repeats=repeats, save=save)


def one_f_one_b(*, num_microbatches: int, save: str = "layers") -> Schedule:
    """Backward as soon as possible; memory does not grow with the number of microbatches."""
    return OneFOneB(num_microbatches=num_microbatches, save=save)


def _check_count(schedule: str, name: str, count: int) -> None:
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise UserError(f"{schedule}: {name} = {count!r}; expected a whole number, at least 1")
