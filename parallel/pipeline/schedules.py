"""Pipeline schedules as plain data: which microbatch a stage works on at each tick, and what fits the schedule.

In a tick all stages do the same kind of work in lockstep, each on a different microbatch. A stage without a microbatch
at a tick computes on meaningless values: a bubble.

    gpipe, circular   M R + S - 1 forward ticks, then as many backward ticks
    1F1B              S - 1 ticks forward, M ticks forward and backward, S - 1 ticks backward

    bubble = (S - 1) / (M R + S - 1), with R = 1 for all schedules but circular

S stages, M microbatches, R repeats: how often a microbatch passes through all stages.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax

from core import logical, units
from core.errors import UserError
from core.logical import Axes

SAVES = ("layers", "stage")


class Work(NamedTuple):
    """Work of a stage in one tick: one part of the layers on one microbatch.

    Attributes:
      kind: "F" forward or "B" backward.
      microbatch, repeat: their indices.
    """

    kind: str
    microbatch: int
    repeat: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule:
    """Base class of schedules.

    Attributes:
      num_microbatches: M. Microbatch m has rows m, m + M, … of every chip, so that rows stay on their chips.
      save: what the forward pass saves for the backward pass: "layers", the input of every layer; or "stage", only the
        input of a stage, which costs one more forward pass of the stage. Everything else is recomputed.
      bubble_input: fills uninitialized memory and the inputs of bubbles. Results do not depend on it; tests show that
        with NaN. None: memory keeps its previous content.

    Raises:
      UserError: numbers out of range.
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
        """M R: the number of forward ticks of a stage without bubbles."""
        return self.num_microbatches * self.repeats

    def ticks(self, stages: int) -> int:
        """Returns the number of ticks of the forward pass, and of the backward pass; in 1F1B, M of them overlap."""
        return self.turns + stages - 1

    def bubble(self, stages: int) -> float:
        """Returns the fraction of a stage's time in which it has no microbatch."""
        return (stages - 1) / self.ticks(stages)

    def kept(self, stages: int) -> int:
        """Returns the largest number of saved microbatch inputs on a stage; each repeat counts separately."""
        del stages
        return self.turns

    def layer_unit(self, stages: int) -> int:
        """Returns S R, the number of parts; other numbers of layers than its multiples are padded (see `fits`)."""
        return stages * self.repeats

    def fits(self, layers: int, stages: int) -> bool:
        """Returns whether this number of layers can be divided over the stages.

        They need not divide evenly: each of the R S parts has ceil(L / (R S)) layers, and the last ones are padding.
        Every stage must have a layer of the model, and so must the last repeat.
        """
        full, parts = stages * (self.repeats - 1) or stages - 1, self.layer_unit(stages)
        return layers > full * padded(layers, parts) // parts

    def problems(self, stages: int) -> list[str]:
        """Returns the reasons, with fixes, why the schedule cannot run on this number of stages."""
        del stages
        return []

    def work(self, stage: int, tick: int, stages: int) -> tuple[Work, ...]:
        """Returns the work of a stage at a tick, counted from the first forward tick; empty in a bubble."""
        ticks = self.ticks(stages)
        if tick < ticks:
            return self._work("F", tick - stage)
        return self._work("B", tick - ticks - (stages - 1 - stage))

    def timeline(self, stages: int) -> Iterator[list[tuple[Work, ...]]]:
        """Yields for every tick the work of each stage."""
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
        """Returns a one-line description."""
        rounds = f" x {self.repeats} repeats" if self.repeats > 1 else ""
        formula = f"(S - 1) / ({'M R' if self.repeats > 1 else 'M'} + S - 1)"
        kept = units.counted(self.kept(stages) // self.repeats, "microbatch", "microbatches")
        return (
            f"{self.name}: {units.counted(self.num_microbatches, 'microbatch', 'microbatches')}{rounds} through "
            f"{units.counted(stages, 'stage')} in {units.counted(self.ticks(stages), 'tick')} each way; "
            f"bubble {formula} = {self.bubble(stages):.1%}; saves the "
            f"{'layer' if self.save == 'layers' else 'stage'} inputs of {kept}{rounds}"
        )


class GPipe(Schedule):
    """All microbatches forward, then all backward (Huang et al. 2019)."""

    name = "gpipe"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Circular(Schedule):
    """gpipe with layers assigned to stages in R rounds: stage s has parts s, S + s, 2 S + s, …

    The parts are smaller, so filling and emptying the pipeline takes less time, but more arrays are sent.

    Attributes:
      repeats: R.
    """

    repeats: int

    name = "circular"

    def __post_init__(self):
        super().__post_init__()
        _check_count(self.name, "repeats", self.repeats)

    def problems(self, stages: int) -> list[str]:
        """Returns a problem if a microbatch would return to the first stage before its place is free."""
        if self.num_microbatches >= stages:
            return []
        return [
            f"circular: num_microbatches = {self.num_microbatches} is below stage = {stages}: a microbatch would "
            f"return to the first stage before that has processed the others; use at least {stages}, or gpipe"
        ]


class OneFOneB(Schedule):
    """Starts the backward pass of a microbatch as soon as its forward pass ends, so that few are in flight.

    Narayanan et al. 2019 (PipeDream-flush, "1F1B"), in lockstep. The head and the loss run between the two passes of a
    microbatch, so they must be the stack's tail.
    """

    name = "1F1B"

    def kept(self, stages: int) -> int:
        """Returns the number of microbatches in flight, at most 2 S - 1."""
        return min(2 * stages - 1, self.num_microbatches)

    def work(self, stage: int, tick: int, stages: int) -> tuple[Work, ...]:
        """Returns a forward and a backward pass of different microbatches; in the last stage, of the same one."""
        return self._work("F", tick - stage) + self._work("B", tick - 2 * (stages - 1) + stage)


def gpipe(*, num_microbatches: int, save: str = "layers") -> Schedule:
    """Runs all microbatches forward, then all backward; memory grows with their number.

    Args:
      num_microbatches, save: see `Schedule`.
    """
    return GPipe(num_microbatches=num_microbatches, save=save)


def circular(*, num_microbatches: int, repeats: int, save: str = "layers") -> Schedule:
    """Runs gpipe with the layers assigned in `repeats` rounds: a smaller bubble, but more communication.

    Args:
      num_microbatches, save: see `Schedule`.
      repeats: R.
    """
    return Circular(num_microbatches=num_microbatches, repeats=repeats, save=save)


def one_f_one_b(*, num_microbatches: int, save: str = "layers") -> Schedule:
    """Runs backward passes as early as possible; memory does not grow with the number of microbatches.

    Args:
      num_microbatches, save: see `Schedule`.
    """
    return OneFOneB(num_microbatches=num_microbatches, save=save)


def padded(layers: int, parts: int) -> int:
    """Returns the number of layers that the stages run: all parts have equally many, and the last ones are padding."""
    return -(-layers // parts) * parts


def _check_count(schedule: str, name: str, count: int) -> None:
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise UserError(f"{schedule}: {name} = {count!r}; expected a positive integer")


def problems(schedule: Schedule, shapes: Any, axes: Any, *, stages: int, chips: int) -> list[str]:
    """Returns the reasons why a model cannot run as this pipeline, each with a fix.

    Args:
      schedule: the strategy's schedule.
      shapes, axes: shapes and axes of the model's parameters, trees of one structure.
      stages: degree of `stage`.
      chips: number of chips of the slice, which bounds other degrees.
    """
    found = depths(shapes, axes)
    if not found:
        return [
            f"{schedule.name}: the model has no layer stack to split into stages (a network that is applied repeatedly "
            "cannot be split: every stage would need all of its weights); build its layers with "
            "core.stack.layer_stack, or use a strategy without a pipeline"
        ]
    unfit = [n for n in found if not schedule.fits(n, stages)]
    return schedule.problems(stages) + [_depth(schedule, n, stages, chips) for n in unfit]


def depths(shapes: Any, axes: Any) -> list[int]:
    """Returns the distinct numbers of layers of a model's stacks, ascending; arguments as in `problems`."""
    named = zip(jax.tree.leaves(shapes), jax.tree.leaves(axes, is_leaf=lambda a: isinstance(a, Axes)), strict=True)
    return sorted({leaf.shape[0] for leaf, of in named if of.names[:1] == ("layers",)})


def _depth(schedule: Schedule, layers: int, stages: int, chips: int) -> str:
    repeats = schedule.repeats
    fits = [str(s) for s in range(1, layers // repeats + 1) if schedule.fits(layers, s) and chips % s == 0]
    times = f" x {repeats} repeats" if repeats > 1 else ""
    other = f"stage = {' or '.join(fits)}" if fits else f"repeats that divide {layers}"
    return (
        f"{schedule.name}: {layers} layers do not divide over stage = {stages}{times}; use {other}, "
        f"or a multiple of {schedule.layer_unit(stages)} layers"
    )


def check_rows(rows: int, *, groups: int, accum_steps: int, schedule: Schedule | None, stages: int, where: str) -> None:
    """Checks that a batch divides over the chips, and on each of them into microbatches.

    Args:
      rows: rows of a global batch.
      groups: number of groups of chips with different rows.
      accum_steps, schedule: both divide the rows of each group; `schedule` is None without a pipeline.
      stages: degree of `stage`.
      where: strategy and slice, for the message.

    Raises:
      UserError: it does not divide; names the nearest sizes that do.
    """
    unit = groups * accum_steps * (schedule.num_microbatches if schedule else 1)
    if rows % unit == 0:
        return
    cut = f" in accum_steps = {accum_steps} microbatches" if accum_steps > 1 else ""
    cut += f" in num_microbatches = {schedule.num_microbatches} of the pipeline" if schedule else ""
    raise UserError(
        f"batch_size = {rows} does not divide{cut} over {units.counted(groups, 'group')} of chips ({where}). "
        f"Nearest that do: {', '.join(map(str, logical.nearest_multiples(rows, unit)))}"
        + _other_microbatches(schedule, rows, groups * accum_steps, stages=stages)
    )


def _other_microbatches(schedule: Schedule | None, rows: int, groups: int, *, stages: int) -> str:
    """Returns a message with the numbers of microbatches that fit these rows."""
    if schedule is None or rows % groups:
        return ""
    local = rows // groups
    divide = (dataclasses.replace(schedule, num_microbatches=m) for m in range(1, local + 1) if local % m == 0)
    fits = [str(other.num_microbatches) for other in divide if not other.problems(stages)]
    return f"; or num_microbatches one of {', '.join(fits)}" if fits else ""
