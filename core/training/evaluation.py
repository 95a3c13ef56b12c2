"""One pass of evaluation over batches, which can also yield the model's answers, and its hook."""

import collections
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from core import units
from core.batches import KnowsShare
from core.hosts import activity
from core.step import TrainState
from core.training import metrics, trainer
from core.training.trainer import Hook
from core.types import Batch, WeightedSum, can

HostBatches = Iterable[Mapping[str, np.ndarray]]
_ALMOST_ALL = 0.99  # the largest share that is reported if batches remain
_BY_STEP = re.compile(r"_step_(\d+)$")  # a mean by step of a recursion


class FirstBatches:
    """The first batches of an evaluation.

    Attributes:
      share: share of the data that was read; 1.0 if no batch remains; None if it is not known (yet).
    """

    def __init__(self, batches: HostBatches, most: int | None):
        """`most` is how many batches to read; None: all."""
        self._batches, self._most = batches, most
        self.share: float | None = None

    def __iter__(self) -> Iterator[Mapping[str, np.ndarray]]:
        batches = iter(self._batches)
        yield from itertools.islice(batches, self._most)
        share = self._batches.share() if can(self._batches, KnowsShare) else None
        self.share = 1.0 if next(batches, None) is None else share and min(share, _ALMOST_ALL)


class Scored(NamedTuple):
    """How much an evaluation scored: the weight of its loss, and the share of the data."""

    weight: float
    share: float | None  # of the validation data; 1.0 is all; None if it is not known

    def describe(self, item: str) -> str:
        """Returns, for example, `301 tokens, all of the validation data`."""
        if self.share is None:
            part = "a part"
        elif self.share == 1:
            part = "all"
        else:
            part = f"about {100 * self.share:.0f} %" if self.share >= 0.01 else "less than 1 %"
        return f"{units.counted(round(self.weight), item)}, {part} of the validation data"


class Program(Protocol):
    """Interface of a model bound to devices, for evaluation."""

    def put(self, batch: Mapping[str, np.ndarray]) -> Batch:
        """Places this host's rows on its devices."""

    def eval_step(self, state: TrainState, batch: Batch) -> Mapping[str, WeightedSum]:
        """Returns the loss and metric sums of one batch."""

    def answer_step(self, state: TrainState, batch: Batch) -> tuple[Mapping[str, WeightedSum], Mapping[str, Any]]:
        """Returns the sums of `eval_step`, and the answers to every row, `{name: [B, ...]}`."""


class EvaluationPass:
    """Evaluates a state once; `sums` are those of loss and metrics so far."""

    def __init__(self, program: Program, state: TrainState, batches: HostBatches, *, answering: bool = False):
        """Unless `answering`, `answers` yields empty mappings."""
        self._program, self._state, self._batches, self._answering = program, state, batches, answering
        self.sums: dict[str, WeightedSum] = {}

    def answers(self) -> Iterator[Mapping[str, np.ndarray]]:
        """Runs the pass; yields the answers to each batch."""
        dispatched, of = None, f" of {len(self._batches)}" if isinstance(self._batches, Sized) else ""
        for number, batch in enumerate(self._batches, 1):
            activity.at(activity.EVALUATING, part=f"batch {number}{of}")
            previous, dispatched = dispatched, self._dispatch(batch)
            if previous is not None:
                yield self._read(previous)
        if dispatched is not None:
            yield self._read(dispatched)

    def _dispatch(self, batch: Mapping[str, np.ndarray]) -> tuple[Any, Any]:
        placed = self._program.put(batch)
        if self._answering:
            return self._program.answer_step(self._state, placed)
        return self._program.eval_step(self._state, placed), {}

    def _read(self, dispatched: tuple[Any, Any]) -> Mapping[str, np.ndarray]:
        sums, answers = jax.device_get(dispatched)
        self.sums = trainer.add_sums(self.sums, sums)
        return answers


def evaluate(program: Program, state: TrainState, batches: HostBatches) -> dict[str, float]:
    """Returns the means of the model's metrics over all batches, without those of weight 0.

    All hosts must call it with the same number of batches.
    """
    return trainer.means(_sums(program, state, batches))


def _sums(program: Program, state: TrainState, batches: HostBatches) -> dict[str, WeightedSum]:
    evaluation = EvaluationPass(program, state, batches)
    collections.deque(evaluation.answers(), maxlen=0)  # runs the pass
    return evaluation.sums


def position_ranges(length: int) -> list[range]:
    """Divides the positions 0 … `length` - 1: the first 64th, then as many as before, at most seven times."""
    ends = [0, *sorted({length // 2**n for n in range(6, -1, -1)} - {0})]
    return [range(first, end) for first, end in itertools.pairwise(ends)]


def by_position(
    program: Program, state: TrainState, batches: HostBatches, ranges: Sequence[range]
) -> list[dict[str, WeightedSum]]:
    """Returns the sums of `eval_step` over the tokens whose position in their document lies in each range.

    It runs a step for each range and batch, in which other tokens have the weight 0. All hosts must call it with the
    same number of batches.

    Args:
      program, state: what to evaluate.
      batches: this host's rows, with `positions` and `weights`.
      ranges: the ranges of positions.
    """
    sums: list[dict[str, WeightedSum]] = [{} for _ in ranges]
    for batch in batches:
        for number, own in enumerate(ranges):
            inside = (batch["positions"] >= own.start) & (batch["positions"] < own.stop)
            placed = program.put({**batch, "weights": batch["weights"] * inside})
            sums[number] = trainer.add_sums(sums[number], jax.device_get(program.eval_step(state, placed)))
    return sums


class Evaluate(Hook):
    """Evaluates every `every` steps and after the last step, on the same batches each time.

    Attributes:
      latest: means of the last evaluation, by `validation/<name>`.
      scored, step: how much it scored, and its step; None before the first.
      unless: returns whether to skip the evaluation at a step; the next start makes it up.
    """

    def __init__(
        self,
        program: Program,
        open_batches: Callable[[], FirstBatches],
        write: Callable[[int, Mapping[str, float]], None],
        *,
        every: int,
        last_step: int,
        also: Callable[[TrainState], Mapping[str, float]] = lambda state: {},
    ):
        """Opens no batches yet.

        Args:
          open_batches: opens the batches; called once.
          write: `write(step, values)` receives `latest`.
          also: returns further values by name.
        """
        self._program, self._open_batches, self._write = program, open_batches, write
        self._every, self._last_step, self._also = every, last_step, also
        self._batches: list[Mapping[str, np.ndarray]] | None = None
        self._share: float | None = None
        self.latest: dict[str, float] = {}
        self.scored: Scored | None = None
        self.step: int | None = None
        self.unless: Callable[[int], bool] = lambda step: False

    def read(self) -> None:
        """Reads the batches, if it has not read them. Data that cannot be read should not end a run after hours."""
        if self._batches is None:
            opened = self._open_batches()
            self._batches, self._share = list(opened), opened.share

    def after_rollback(self, step: int) -> None:
        del step
        self.latest, self.scored, self.step = {}, None, None  # the last evaluation may be of a lost step

    def needs_state(self, step: int) -> bool:
        return (step % self._every == 0 or step == self._last_step) and not self.unless(step)

    def at_boundary(self, step: int, state: TrainState) -> None:
        with activity.enter(activity.EVALUATING):
            self.read()
            assert self._batches is not None
            sums = _sums(self._program, state, self._batches)
            means = {**trainer.means(sums), **self._also(state)}
        self.latest = {f"{metrics.VALIDATION}{name}": value for name, value in means.items()}
        self.step = step
        self.scored = Scored(float(sums["loss"].weight) if sums else 0.0, self._share)
        self._write(step, self.latest)


def curves_apart(means: Mapping[str, float]) -> tuple[dict[str, float], dict[str, list[float]]]:
    """Separates means by step of a recursion from the others.

    For example, `exact_accuracy_step_01`, … become a list `exact_accuracy`.
    """
    plain: dict[str, float] = {}
    by_step: dict[str, dict[int, float]] = {}
    for name, value in means.items():
        if found := _BY_STEP.search(name):
            by_step.setdefault(name[: found.start()], {})[int(found[1])] = value
        else:
            plain[name] = value
    return plain, {name: [values[step] for step in sorted(values)] for name, values in sorted(by_step.items())}
