"""A plan: what is tried for an experiment on a slice, what is left out and why, and in which order it is compiled.

The one idea: three sieves, each dearer than the one before. Tables against shapes says what cannot be; arithmetic says
what is very unlikely to fit and what is likely to be quick; the compiler has the last word on those that are left, best
first.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from core import slices
from core.errors import UserError
from core.slices import Slice
from launch import configuration
from launch.config import LoadedConfig
from launch.experiment import Experiment
from launch.plans import choices, facts, records
from launch.plans.records import Record
from parallel import strategy
from parallel.planning import arithmetic, candidates
from parallel.planning.arithmetic import Estimate
from parallel.planning.candidates import Candidate
from parallel.planning.placed import Facts, Placed, Refused, Step

QUICK, USUAL = 10, 16  # candidates that compile
_RUNGS = (1.0, 1.05, 1.1)  # of what a chip has; arithmetic says 0 to 13 % more than the compiler, of most layouts
_SAME_MESH = 3  # of the first N, a share of one mesh is 1 in so many, while others are left


@dataclasses.dataclass(frozen=True)
class Tried:
    """One candidate and what is known of it.

    Attributes:
      candidate: what it is.
      name: for people.
      bindings: that make it of the experiment.
      estimate: by arithmetic; None where it was refused before.
      kind, reason: why it was refused; else empty.
      text: what makes its program, which names its record; empty where its tables were refused.
      is_as_written: whether it is the experiment itself.
    """

    candidate: Candidate
    name: str
    bindings: tuple[str, ...]
    estimate: Estimate | None = None
    kind: str = ""
    reason: str = ""
    text: str = ""
    is_as_written: bool = False


@dataclasses.dataclass(frozen=True)
class Question:
    """What a plan is asked.

    Attributes:
      path: of the experiment file.
      config, experiment: as it stands.
      bindings: of the command line.
      slice: to plan for.
      batch_sizes: to try.
    """

    path: str
    config: LoadedConfig
    experiment: Experiment
    bindings: tuple[str, ...]
    slice: Slice
    batch_sizes: tuple[int, ...]

    @property
    def tokens_per_row(self) -> int:
        """Positions of a row."""
        return self.experiment.task.length

    @property
    def total_tokens(self) -> int:
        """What the experiment trains on, whatever the batch."""
        return self.experiment.total_steps * self.experiment.batch_size * self.tokens_per_row

    def steps(self, batch_size: int) -> int:
        """How many of so many rows train on all of it: what a run with the candidate's bindings makes."""
        return choices.total_steps(self.experiment, batch_size)

    def flops(self, batch_size: int) -> float:
        """Of a step, recomputation not counted; 0 where the model does not say."""
        return (self.experiment.flops_per_step or 0.0) * batch_size / self.experiment.batch_size


def ask(path: str, *, slice_name: str, bindings: Sequence[str] = (), batch_sizes: Sequence[int] = ()) -> Question:
    """Loads the experiment that a plan is for.

    Raises:
      ValueError: an unknown slice, a mistake in the configuration, a batch size below 1 or too large.
    """
    slice_ = slices.get(slice_name)
    config = configuration.load(path, bindings=bindings, slice_name=slice_name)
    experiment = config.build()
    for size in batch_sizes:
        if size < 1:
            raise UserError(f"--batch {size}: expected at least 1 row")
    sizes = tuple(dict.fromkeys(batch_sizes)) or (experiment.batch_size,)
    asked = Question(path, config, experiment, tuple(bindings), slice_, sizes)
    _check_lengths(asked)
    return asked


def _check_lengths(question: Question) -> None:
    """Raises ValueError for a batch with which so few steps are left that the experiment refuses them."""
    own = question.experiment
    writer = choices.Writer(question.config, own)
    for size in set(question.batch_sizes) - {own.batch_size}:
        said = writer.bindings(Candidate(None, None, own.accum_steps, size))
        try:
            bindings = [*question.bindings, *said]
            configuration.load(question.path, bindings=bindings, slice_name=question.slice.name).build()
        except ValueError as error:
            raise UserError(f"--batch {size}, {question.steps(size)} steps for as many tokens: {error}") from error


def consider(question: Question, *, only: Sequence[str] = ()) -> list[Tried]:
    """Every candidate, with its estimate or the reason why it is none; those that can be first, likely best first.

    Args:
      question: what to plan.
      only: strategies to try; none: all, and the experiment's own.

    Raises:
      ValueError: an unknown strategy.
    """
    experiment = question.experiment
    known = facts.facts(experiment)
    layouts = candidates.layouts(question.slice, only=only)
    own = () if any(layout.strategy() == experiment.strategy for layout in layouts) or only else (None,)
    tried = candidates.candidates(
        [*own, *layouts],
        own=experiment.strategy,
        slice=question.slice,
        model=experiment.model,
        batch_sizes=question.batch_sizes,
    )
    judge = _Judge(question, known)
    return sorted(map(judge.judged, tried), key=rank)


def rank(tried: Tried) -> tuple[bool, float]:
    """Order of likely seconds per row: half-way between all traffic hidden and none."""
    if tried.reason or tried.estimate is None:
        return True, 0.0
    time = tried.estimate.time
    return False, (time.hidden + time.exposed) / 2 / tried.candidate.batch_size


class _Judge:
    """Holds candidates against tables and arithmetic."""

    def __init__(self, question: Question, known: Facts):
        self._question, self._facts = question, known
        self._writer = choices.Writer(question.config, question.experiment)
        self._placed: dict[Any, Placed | Refused] = {}

    def judged(self, candidate: Candidate) -> Tried:
        """The candidate with its estimate, or with why it cannot be."""
        placed = self._place(candidate.layout)
        if isinstance(placed, Refused):
            mesh = _asked(candidate)
        else:
            mesh = strategy.mesh_text(placed.shape, dcn_shape=placed.tables.dcn_shape)
        bindings = tuple(self._writer.bindings(candidate))
        tried = Tried(candidate, choices.name(candidate, mesh), bindings)
        try:
            if isinstance(placed, Refused):
                raise placed
            step = Step(candidate.remat, candidate.batch_size, candidate.accum_steps)
            placed.check(step, num_streams=self._question.experiment.task.num_streams)
            found = arithmetic.estimate(placed, step)
            made = choices.apply(self._question.experiment, candidate)
            text = records.program_text(made, self._question.config)
            is_as_written = made == self._question.experiment
            tried = dataclasses.replace(tried, estimate=found, text=text, is_as_written=is_as_written)
            arithmetic.check_fits(found, self._question.slice)
        except Refused as refused:
            tried = dataclasses.replace(tried, kind=refused.kind, reason=" ".join(str(refused).split()))
        return tried

    def _place(self, layout: candidates.Layout | None) -> Placed | Refused:
        tables = layout.strategy() if layout else self._question.experiment.strategy
        mesh = layout and (layout.constructor, layout.degrees)
        if mesh not in self._placed:
            try:
                self._placed[mesh] = Placed(tables, self._facts)
            except Refused as refused:
                self._placed[mesh] = refused
        placed = self._placed[mesh]
        return placed.rescheduled(tables) if isinstance(placed, Placed) and tables.pipeline else placed


def _asked(candidate: Candidate) -> str:
    """The degrees of a layout that makes no mesh."""
    degrees = dict(candidate.layout.degrees) if candidate.layout else {}
    return strategy.mesh_text({axis: n for axis, n in degrees.items() if n > 0}, single="")


def order(tried: Sequence[Tried], *, wanted: int, usable_bytes: float) -> Iterator[Tried]:
    """Those that may fit, the experiment itself first, then likely best first.

    Among the first places a mesh has a share for what fits into `usable_bytes` by arithmetic, and as large a one for
    what needs more and may fit all the same: where that does not, it took no place of what does.
    """
    possible = sorted((t for t in tried if not t.reason), key=lambda t: not t.is_as_written)
    share = max(1, wanted // _SAME_MESH)
    taken: collections.Counter = collections.Counter()
    later = []
    for one in possible:
        is_doubtful = one.estimate.peak_bytes > usable_bytes
        place = one.name.partition(",")[0], one.candidate.batch_size, is_doubtful
        taken[place] += not one.is_as_written
        if taken[place] <= share:
            yield one
        else:
            later.append(one)
    yield from later


def beyond(tried: Sequence[Tried], *, usable_bytes: float) -> list[Tried]:
    """Of those that need more than a chip has by arithmetic the nearest to that, and to 5 and 10 % more.

    Compiled, they show where HBM ends, and how far arithmetic can be believed there.
    """
    sized = sorted(((t.estimate.peak_bytes, t) for t in tried if t.estimate), key=lambda pair: pair[0])
    rungs = (next((t for peak, t in sized if peak > usable_bytes * rung), None) for rung in _RUNGS)
    return list({t.text: t for t in rungs if t is not None}.values())


def winner(found: Sequence[tuple[Tried, Record]]) -> tuple[Tried, Record] | None:
    """The compiled candidate with the fewest seconds per row."""
    return next(iter(ranked(found)), None)


def ranked(found: Sequence[tuple[Tried, Record]]) -> list[tuple[Tried, Record]]:
    """Those that compiled, by seconds per row as the compiler scheduled them."""
    fit = [(tried, record) for tried, record in found if record.time is not None]
    return sorted(fit, key=lambda pair: pair[1].time.scheduled / pair[0].candidate.batch_size)


def by_reason(tried: Sequence[Tried]) -> list[tuple[str, list[Tried]]]:
    """What was left out before compiling, most frequent reason first."""
    out = sorted((t for t in tried if t.reason), key=lambda t: t.kind)
    groups = [(kind, list(group)) for kind, group in itertools.groupby(out, key=lambda t: t.kind)]
    return sorted(groups, key=lambda group: -len(group[1]))
