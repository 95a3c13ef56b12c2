"""Pipeline schedules as plain data: which microbatch a stage works on at each tick.

In a tick all stages do the same kinds of work in lockstep, usually on different microbatches. A stage without a
microbatch at a tick computes on meaningless values: a bubble.

    gpipe, circular     M R + S - 1 ticks forward, then as many backward
    1F1B, interleaved   S R - 1 ticks forward, M R + S - S R ticks forward and backward, S R - 1 ticks backward
    zero-bubble         as 1F1B and interleaved; gradients of matrices only in the last M R ticks

S stages, M microbatches, R repeats: how often a microbatch passes through all stages. A pass of a microbatch through
all layers of a stage takes the time F forward and B backward, of which W is for the gradients of matrices:

                  time                                        bubble
    all others    (M R + S - 1) (F + B) / R                   (S - 1) / (M R + S - 1)
    zero-bubble   (M R + S - 1) (F + B - W) / R + M W         2 (S - 1) / (3 M R + 2 (S - 1)), with F = W = B / 2
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax

from core import logical, units
from core.errors import UserError
from core.logical import Axes

SAVES = ("layers", "stage")
# Places that a stage allocates where its layers run again. One would do, but then libtpu 0.0.42.1 compiles 7B on v4-32
# to 6 % more cycles and 1 GiB more at the peak.
PLACES_AGAIN = 2
# Forward; backward, without the gradients of matrices where these are work of their own; gradients of matrices.
KINDS = ("F", "B", "W")
# The names of their operations in profiles. T: the tail, which runs on what leaves the last layer.
SCOPES = {
    "F": "pipeline_forward",
    "T": "pipeline_tail",
    "B": "pipeline_backward",
    "W": "pipeline_matrices",
}


class Work(NamedTuple):
    """Work of a stage in one tick: one part of the layers on one microbatch."""

    kind: str
    microbatch: int
    repeat: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule:
    """Base class of schedules.

    Attributes:
      num_microbatches: M, at least 1.
      save: what the forward pass saves: "layers", for every layer its input and what the model's `remat` saves; or
        "stage", only the input of a stage, whose layers then run forward once more.
      bubble_input: fills new arrays and the inputs of bubbles, for tests. None: bubbles have whatever values are there.

    Raises:
      UserError: a field has an invalid value.
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
        """M R, the number of microbatches that a stage runs, counting repeats."""
        return self.num_microbatches * self.repeats

    def group(self, stages: int) -> int:
        """Returns how many microbatches a stage runs before its next repeat."""
        del stages
        return self.num_microbatches

    def starts(self, stages: int) -> dict[str, int]:
        """Returns the first tick in which any stage does each kind of work."""
        return {"F": 0, "B": self.ticks(stages)}

    def ticks(self, stages: int) -> int:
        """Returns the number of ticks with forward passes; as many have backward passes."""
        return self.turns + stages - 1

    def bubble(self, stages: int) -> float:
        """Returns the fraction of a stage's time in which it has no microbatch."""
        return (stages - 1) / self.ticks(stages)

    def kept(self, stages: int) -> int:
        """Returns the largest number of forward passes whose values a stage holds."""
        return max(self.places(stages)) + 1

    def allocated(self, stages: int) -> int:
        """Returns the number of places that a stage allocates for saved values; bubbles write the last one."""
        return self.kept(stages) + 1

    @functools.lru_cache(maxsize=4096)  # noqa: B019  # a plan asks for those of a few schedules thousands of times
    def places(self, stages: int) -> tuple[int, ...]:
        """Returns the place in memory of the saved values of each forward pass."""
        last = self.starts(stages)["B"] + stages - 1
        ends = {self._work("B", turn, stages)[0]: last + turn for turn in range(self.turns)}
        found: list[int] = []
        free: list[int] = []
        held: list[tuple[int, int]] = []  # the last tick and the place of saved values
        for tick in range(self.turns):
            free = sorted(free + [place for end, place in held if end < tick])
            held = [(end, place) for end, place in held if end >= tick]
            found.append(free.pop(0) if free else len(held))
            (forward,) = self._work("F", tick, stages)
            held.append((ends[forward._replace(kind="B")], found[-1]))
        return tuple(found)

    def layer_unit(self, stages: int) -> int:
        """Returns S R; layers are padded to a multiple of it."""
        return stages * self.repeats

    def fits(self, layers: int, stages: int) -> bool:
        """Returns whether this number of layers can be divided over the stages.

        Each of the S R parts has ceil(L / (R S)) layers. Every stage, and the last repeat, must have a layer that is
        not padding.
        """
        full, parts = stages * (self.repeats - 1) or stages - 1, self.layer_unit(stages)
        return layers > full * padded(layers, parts) // parts

    def problems(self, stages: int) -> list[str]:
        """Returns the reasons, with fixes, why the schedule cannot run on these stages."""
        del stages
        return []

    def work(self, stage: int, tick: int, stages: int) -> tuple[Work, ...]:
        """Returns the work of a stage at a tick; () in a bubble."""
        lag = {"F": stage, "B": stages - 1 - stage, "W": 0}
        starts = self.starts(stages)
        return tuple(w for kind in starts for w in self._work(kind, tick - starts[kind] - lag[kind], stages))

    def timeline(self, stages: int) -> Iterator[list[tuple[Work, ...]]]:
        """Yields for every tick the work of each stage."""
        tick, done = 0, 0
        while done < len(self.starts(stages)) * self.turns * stages:
            row = [self.work(stage, tick, stages) for stage in range(stages)]
            done += sum(len(work) for work in row)
            tick += 1
            yield row

    def _work(self, kind: str, turn: int, stages: int) -> tuple[Work, ...]:
        if not 0 <= turn < self.turns:
            return ()
        group = self.group(stages)
        before, rest = divmod(turn, group * self.repeats)
        repeat, index = divmod(rest, group)
        return (Work(kind, before * group + index, repeat if kind == "F" else self.repeats - 1 - repeat),)

    def describe(self, stages: int) -> str:
        """Describes the schedule on this number of stages in one line."""
        rounds = f" x {self.repeats} repeats" if self.repeats > 1 else ""
        saved = "values that each layer saves" if self.save == "layers" else "stage inputs"
        return (
            f"{self.name}: {units.counted(self.num_microbatches, 'microbatch', 'microbatches')}{rounds} through "
            f"{units.counted(stages, 'stage')} in {units.counted(self.ticks(stages), 'tick')} each way; "
            f"bubble {self.formula} = {self.bubble(stages):.1%}; keeps the {saved} of "
            f"{units.counted(self.kept(stages), 'pass', 'passes')} of a microbatch"
        )

    @property
    def formula(self) -> str:
        """The formula of the bubble's share of a step, as text."""
        return f"(S - 1) / ({'M R' if self.repeats > 1 else 'M'} + S - 1)"


class GPipe(Schedule):
    """All microbatches forward, then all backward (Huang et al. 2019)."""

    name = "gpipe"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Circular(Schedule):
    """gpipe with layers assigned to stages in R rounds: stage s has parts s, S + s, 2 S + s, …

    M must be at least S.

    Attributes:
      repeats: R, at least 1.
    """

    repeats: int

    name = "circular"

    def __post_init__(self):
        super().__post_init__()
        _check_count(self.name, "repeats", self.repeats)

    def problems(self, stages: int) -> list[str]:
        """Returns a problem if M is below S."""
        if self.num_microbatches >= stages:
            return []
        return [
            f"circular: num_microbatches = {self.num_microbatches} is below stage = {stages}: a microbatch would "
            f"return to the first stage before that has processed the others; use at least {stages}, or gpipe"
        ]


class Phase(NamedTuple):
    """Successive ticks in which stages do the same kinds of work.

    Attributes:
      kinds: letters of `KINDS`, with "T" after "F" if the tail runs: "FTB".
    """

    kinds: str
    ticks: int


class Rounds(NamedTuple):
    """Phases that are repeated `times` times."""

    times: int
    phases: tuple[Phase, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class OneFOneB(Schedule):
    """Starts the backward pass of a microbatch as soon as its forward pass ends.

    Narayanan et al. 2020 (arXiv 2006.09503, PipeDream-Flush), in lockstep. For gradients, the head and the loss must be
    a `core.stack.Tail`.
    """

    name = "1F1B"

    def group(self, stages: int) -> int:
        """Returns M, or with repeats S."""
        return self.num_microbatches if self.repeats == 1 else stages

    def starts(self, stages: int) -> dict[str, int]:
        """Returns the tick of the first forward pass, "F", and of the first backward pass, "B"."""
        return {"F": 0, "B": stages * self.repeats - 1}

    def problems(self, stages: int) -> list[str]:
        """Returns a problem if there are repeats and M is not a multiple of S."""
        if self.repeats == 1 or self.num_microbatches % stages == 0:
            return []
        nearest = " or ".join(map(str, logical.nearest_multiples(self.num_microbatches, stages)))
        return [
            f"{self.name}: num_microbatches = {self.num_microbatches} is not a multiple of stage = {stages}: with "
            f"repeats, microbatches pass through the stages in groups of {stages}; use {nearest}"
        ]

    def rounds(self, stages: int) -> list[Rounds]:
        """Returns the phases of the schedule; the program has a loop for each."""
        every = [Phase(kinds, len(list(ticks))) for kinds, ticks in itertools.groupby(self._kinds(stages))]
        found: list[Rounds] = []
        at = 0
        while at < len(every):
            pair, times = every[at : at + 2], 1
            while every[at + 2 * times : at + 2 * times + 2] == pair:
                times += 1
            taken = (times, pair) if times > 1 else (1, every[at : at + 1])
            found.append(Rounds(taken[0], tuple(taken[1])))
            at += taken[0] * len(taken[1])
        return found

    def _kinds(self, stages: int) -> Iterator[str]:
        last = stages - 1
        for tick, row in enumerate(self.timeline(stages)):
            kinds = "".join(kind for kind in KINDS if any(w.kind == kind for work in row for w in work))
            leaves = any(w.kind == "F" and w.repeat == self.repeats - 1 for w in self.work(last, tick, stages))
            yield kinds.replace("F", "FT") if leaves else kinds


@dataclasses.dataclass(frozen=True, kw_only=True)
class Interleaved(OneFOneB):
    """1F1B with layers assigned to stages in R rounds, as in `Circular` (Narayanan et al. 2021).

    With R above 1, M must be a multiple of S.

    Attributes:
      repeats: R, at least 1.
    """

    repeats: int

    name = "interleaved"

    def __post_init__(self):
        super().__post_init__()
        _check_count(self.name, "repeats", self.repeats)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ZeroBubble(OneFOneB):
    """1F1B or interleaved, without bubbles in the computation of matrices' gradients.

    Qi et al. 2023 ("zero bubble") compute the gradients of matrices, on which no other stage depends, in place of
    bubbles. Here all stages compute those of one microbatch at the same tick, as soon as the first stage can. With R
    above 1, M must be a multiple of S. `save` must be "layers".

    Attributes:
      repeats: R, at least 1.
    """

    repeats: int = 1

    name = "zero-bubble"

    def __post_init__(self):
        super().__post_init__()
        _check_count(self.name, "repeats", self.repeats)
        if self.save != "layers":
            raise UserError(
                f"{self.name}: save = {self.save!r}: the gradients of matrices would need every layer to run once "
                "more; use save = 'layers', or one_f_one_b or interleaved"
            )

    def starts(self, stages: int) -> dict[str, int]:
        """Returns the first ticks; "W" (gradients of matrices) starts with the first stage's backward pass."""
        starts = super().starts(stages)
        return starts | {"W": starts["B"] + stages - 1}

    def bubble(self, stages: int) -> float:
        """Returns the fraction of a stage's time without a microbatch, if F = W = B / 2."""
        return 2 * (stages - 1) / (2 * self.ticks(stages) + self.turns)

    @property
    def formula(self) -> str:
        """The formula of the bubble's share of a step, as text."""
        return f"2 (S - 1) / (3 {'M R' if self.repeats > 1 else 'M'} + 2 (S - 1))"


def gpipe(*, num_microbatches: int, save: str = "layers") -> Schedule:
    """Runs all microbatches forward, then all backward; memory grows with their number.

    Args:
      num_microbatches: M, at least 1.
      save: "layers" saves the input of each layer and what the model's `remat` saves; "stage" saves only the input of
        each stage, whose layers then run forward once more.
    """
    return GPipe(num_microbatches=num_microbatches, save=save)


def circular(*, num_microbatches: int, repeats: int, save: str = "layers") -> Schedule:
    """Runs gpipe with the layers assigned in `repeats` rounds: with more, the bubble is smaller, and more is sent.

    Args:
      num_microbatches: M, at least the number of stages.
      repeats: R, at least 1: how often a microbatch passes through all stages.
      save: as in `gpipe`.
    """
    return Circular(num_microbatches=num_microbatches, repeats=repeats, save=save)


def one_f_one_b(*, num_microbatches: int, save: str = "layers") -> Schedule:
    """Runs backward passes as early as possible: fewer microbatches are in flight.

    Args:
      num_microbatches: M, at least 1.
      save: as in `gpipe`.
    """
    return OneFOneB(num_microbatches=num_microbatches, save=save)


def interleaved(*, num_microbatches: int, repeats: int, save: str = "layers") -> Schedule:
    """Runs 1F1B with the layers assigned in `repeats` rounds: with more, the bubble is smaller, and more is sent.

    Args:
      num_microbatches: M; with `repeats` above 1, a multiple of the number of stages.
      repeats: R, at least 1: how often a microbatch passes through all stages.
      save: as in `gpipe`.
    """
    return Interleaved(num_microbatches=num_microbatches, repeats=repeats, save=save)


def zero_bubble(*, num_microbatches: int, repeats: int = 1) -> Schedule:
    """Runs 1F1B (with repeats: interleaved) without bubbles in the gradients of matrices; needs more memory.

    Args:
      num_microbatches: M, at least 1; with `repeats` above 1, a multiple of the number of stages.
      repeats: R, at least 1: how often a microbatch passes through all stages.
    """
    return ZeroBubble(num_microbatches=num_microbatches, repeats=repeats)


def padded(layers: int, parts: int) -> int:
    """Rounds a number of layers up to a multiple of `parts`."""
    return -(-layers // parts) * parts


def _check_count(schedule: str, name: str, count: int) -> None:
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise UserError(f"{schedule}: {name} = {count!r}; expected a positive integer")


def problems(schedule: Schedule, shapes: Any, axes: Any, *, stages: int, chips: int, slices: int = 1) -> list[str]:
    """Returns the reasons why a model cannot run as this pipeline, each with a fix.

    Args:
      shapes, axes: of the model's parameters.
      stages: over all slices.
      chips: number of devices of all slices.
      slices: number of slices over which stages extend.
    """
    found = depths(shapes, axes)
    if not found:
        return [
            f"{schedule.name}: the model has no layer stack to split into stages (a network that is applied repeatedly "
            "cannot be split: every stage would need all of its weights); build its layers with "
            "core.stack.layer_stack, or use a strategy without a pipeline"
        ]
    unfit = [n for n in found if not schedule.fits(n, stages)]
    return schedule.problems(stages) + [_depth(schedule, n, stages, chips, slices) for n in unfit]


def depths(shapes: Any, axes: Any) -> list[int]:
    """Returns the distinct numbers of layers of a model's stacks, without first layers."""
    named = zip(jax.tree.leaves(shapes), jax.tree.leaves(axes, is_leaf=lambda a: isinstance(a, Axes)), strict=True)
    return sorted({leaf.shape[0] for leaf, of in named if of.names[:1] == ("layers",)})


def _depth(schedule: Schedule, layers: int, stages: int, chips: int, slices: int) -> str:
    """A strategy's argument `stage` is the number of stages in each slice."""
    repeats = schedule.repeats
    totals = [s for s in range(slices, layers // repeats + 1, slices) if schedule.fits(layers, s) and chips % s == 0]
    fits = [str(total // slices) for total in totals]
    times = f" x {repeats} repeats" if repeats > 1 else ""
    across = f" x {slices} slices" if slices > 1 else ""
    fewer = f"repeats that divide {layers}" if repeats > 1 else "fewer slices"
    other = f"stage = {' or '.join(fits)}" if fits else fewer
    return (
        f"{schedule.name}: {layers} layers do not divide over stage = {stages // slices}{across}{times}; use {other}, "
        f"or a multiple of {schedule.layer_unit(stages)} layers"
    )


def check_rows(rows: int, *, groups: int, accum_steps: int, schedule: Schedule | None, stages: int, where: str) -> None:
    """Checks that a batch divides over the chips, and on each of them into microbatches.

    Args:
      groups: number of groups of chips with different rows.
      schedule: None without a pipeline.
      where: strategy and slice, for the message.

    Raises:
      UserError: it does not divide.
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
    if schedule is None or rows % groups:
        return ""
    local = rows // groups
    divide = (dataclasses.replace(schedule, num_microbatches=m) for m in range(1, local + 1) if local % m == 0)
    fits = [str(other.num_microbatches) for other in divide if not other.problems(stages)]
    return f"; or num_microbatches one of {', '.join(fits)}" if fits else ""
