"""Chooses which candidate layouts are worth compiling, and ranks them."""

import collections
import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from core.slices import Slice
from parallel import strategy
from parallel.partitioner import Program
from parallel.planning import arithmetic
from parallel.planning.arithmetic import Estimate
from parallel.planning.candidates import Candidate, Layout
from parallel.planning.model_trace import ModelTrace
from parallel.planning.sharded_state import Refused, ShardedState, Step, step_of
from parallel.strategy import Strategy

_MESHES_IN_FIRST = 3  # of the first N candidates, one mesh has at most N / 3 while others are left


@dataclasses.dataclass(frozen=True)
class JudgedCandidate:
    """A candidate with its estimate, or the reason why it was refused.

    Attributes:
      estimate: None if the strategy does not fit the slice, the model or the batch.
      kind, reason: why it was refused; empty if it may fit.
      is_as_written: whether it is the experiment as written.
    """

    candidate: Candidate
    name: str
    estimate: Estimate | None = None
    kind: str = ""
    reason: str = ""
    is_as_written: bool = False


AnyCandidate = TypeVar("AnyCandidate", bound=JudgedCandidate)


class Judge:
    """Estimates the memory and time of candidates by arithmetic."""

    def __init__(self, trace: ModelTrace, own: Strategy, *, num_streams: int, gather_once: bool = False):
        """Judges candidates of one experiment.

        Args:
          trace: of its model.
          own: its strategy, that of candidates without a layout.
          num_streams: must divide the rows of a candidate.
          gather_once: its setting, which all candidates have.
        """
        self._trace, self._own, self._num_streams, self._gather_once = trace, own, num_streams, gather_once
        self._sharded: dict[Any, ShardedState | Refused] = {}

    def judge(self, candidate: Candidate) -> JudgedCandidate:
        """Returns the candidate with its estimate, or with the reason why it is refused."""
        sharded = self._place(candidate.layout)
        if isinstance(sharded, Refused):
            degrees = dict(candidate.layout.degrees) if candidate.layout else {}
            mesh = strategy.mesh_text({axis: n for axis, n in degrees.items() if n > 0}, single="")
            return _refused(JudgedCandidate(candidate, candidate.name(mesh)), sharded)
        mesh = strategy.mesh_text(sharded.shape, dcn_shape=sharded.tables.dcn_shape)
        judged = JudgedCandidate(candidate, candidate.name(mesh))
        step = Step(candidate.remat, candidate.batch_size, candidate.accum_steps, self._gather_once)
        try:
            sharded.check(step, num_streams=self._num_streams)
            estimate = arithmetic.estimate(sharded, step)
            judged = dataclasses.replace(judged, estimate=estimate)
            arithmetic.check_fits(estimate, self._trace.slice)
        except Refused as refused:
            return _refused(judged, refused)
        return judged

    def _place(self, layout: Layout | None) -> ShardedState | Refused:
        tables = layout.strategy() if layout else self._own
        mesh = layout and dataclasses.replace(layout, choice=None)
        if mesh not in self._sharded:
            try:
                self._sharded[mesh] = ShardedState(tables, self._trace)
            except Refused as refused:
                self._sharded[mesh] = refused
        sharded = self._sharded[mesh]
        return sharded.rescheduled(tables) if isinstance(sharded, ShardedState) and tables.pipeline else sharded


def _refused(judged: JudgedCandidate, refused: Refused) -> JudgedCandidate:
    return dataclasses.replace(judged, kind=refused.kind, reason=" ".join(str(refused).split()))


def rank(judged: JudgedCandidate) -> tuple[bool, float]:
    """Returns a sort key: refused candidates last, others by seconds per row."""
    if judged.reason or judged.estimate is None:
        return True, 0.0
    time = judged.estimate.time
    return False, (time.hidden + time.exposed) / 2 / judged.candidate.batch_size


def order(judged: Sequence[AnyCandidate], *, wanted: int, usable_bytes: float) -> Iterator[AnyCandidate]:
    """Yields the candidates that may fit in the order to compile them, first the experiment as written.

    Others follow as in `judged`, but two kinds are moved to the end. These are candidates after the first `wanted` / 3
    with the same strategy, mesh and batch size, and pipelines after the first `wanted` / 2. Candidates whose estimate
    exceeds `usable_bytes` are counted apart.
    """
    possible = sorted((one for one in judged if not one.reason), key=lambda one: not one.is_as_written)
    share, of_pipelines = max(1, wanted // _MESHES_IN_FIRST), max(1, wanted // 2)
    taken: collections.Counter = collections.Counter()
    pipelines: list[AnyCandidate] = []
    later: list[AnyCandidate] = []
    for one in possible:
        is_doubtful = one.estimate is not None and one.estimate.peak_bytes > usable_bytes
        is_pipeline = one.candidate.layout is not None and one.candidate.layout.choice is not None
        place = one.name.partition(",")[0], one.candidate.batch_size, is_doubtful
        taken[place] += not one.is_as_written
        if not one.is_as_written and taken[place] > share:
            later.append(one)
        elif not one.is_as_written and is_pipeline and taken["pipelines", is_doubtful] >= of_pipelines:
            pipelines.append(one)
        else:
            taken["pipelines", is_doubtful] += is_pipeline
            yield one
    yield from pipelines
    yield from later


def by_reason(judged: Sequence[AnyCandidate]) -> list[tuple[str, list[AnyCandidate]]]:
    """Groups the refused candidates by the kind of reason, the most frequent kind first."""
    refused = sorted((one for one in judged if one.reason), key=lambda one: one.kind)
    groups = [(kind, list(group)) for kind, group in itertools.groupby(refused, key=lambda one: one.kind)]
    return sorted(groups, key=lambda group: -len(group[1]))


def nearest(judged: Sequence[AnyCandidate], bound: Program) -> list[AnyCandidate]:
    """Returns the candidates that may fit, most similar to a program's layout first."""
    own = _resolved(bound.partitioner.strategy, bound.partitioner.slice)
    step = step_of(bound)
    ranked = []
    for one in judged:
        candidate = one.candidate
        if one.reason:
            continue
        tables = _resolved(candidate.layout.strategy(), bound.partitioner.slice) if candidate.layout else own
        changed = (
            tables.mesh_shape != own.mesh_shape,
            tables.pipeline != own.pipeline,
            candidate.remat not in (None, step.remat),
            candidate.accum_steps != step.accum_steps,
        )
        if tables != own or any(changed):
            ranked.append((2 * (tables.name != own.name) + sum(changed), rank(one), one))
    return [one for *_, one in sorted(ranked, key=lambda item: item[:2])]


def _resolved(tables: Strategy, slice: Slice) -> Strategy:
    return dataclasses.replace(tables, mesh_shape=strategy.resolve(tables, slice))
