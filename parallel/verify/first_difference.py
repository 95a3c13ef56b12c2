"""Finds where two runs of one experiment diverge: the first step, place and tensor that differ.

Two recordings (`recording`) are compared in causal order. Differences are in units of the float32 spacing at the
largest entry of both tensors ("ulp").
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from core.checkpoints import reading
from core.checkpoints.store import Checkpoints
from core.checkpoints.warm_start import Origin
from core.errors import UserError
from core.files import paths
from core.step import TrainState
from core.types import Task
from parallel.partitioner import Program
from parallel.verify import agreement
from parallel.verify.agreement import Batch
from parallel.verify.recording import START, Recording, key, record

SHOWN_BEFORE, SHOWN_AT, SHOWN_AFTER = 4, 6, 2  # tensors around the first difference
DATA = "data"  # the phase of the batches that a side reads; like START, compared bit by bit
# In ulp at step 1 and at later ones, by phase or place of the update. Beside them, how far the strategies of
# `agreement` were at most from one device in three AdamW steps of three layers in float32, on 16 CPU devices.
# Later steps show more: Adam makes a whole step of a gradient that is nothing but rounding. A wrong sum: millions.
TOLERANCE: Mapping[str, tuple[float, float]] = {
    "forward": (32, 512),  # 4.5, 69
    "loss": (16, 64),  # 1, 2
    "gradients": (128, 2048),  # 15, 299
    "optimizer state": (256, 2048),  # 28, 197
    "parameters": (64, 64),  # 12, 6
}


# The same with the model computing in bfloat16, one of whose spacings is 65,536 of float32's; seven of the strategies.
BFLOAT16: Mapping[str, tuple[float, float]] = {
    "forward": (2**20, 2**20),  # 229,376, 262,144: up to four spacings
    "loss": (2**12, 2**13),  # 1,095, 1,663
    "gradients": (2**20, 2**20),  # 203,153, 274,513: two or three hundredths
    "optimizer state": (2**21, 2**21),  # 415,460, 327,465
    "parameters": (2**17, 2**17),  # 19,812, 23,277
}


class Compared(NamedTuple):
    """One tensor of both recordings.

    Attributes:
      step: number of the step, from 1; 0 for "start".
      phase: "forward", "loss", "gradients" or "update"; or an input: "data" or "start".
      place: such as "layer 3".
      ulp: difference divided by the float32 spacing at the largest entry of both.
      absolute: the same difference, not divided.
      remark: why the tensors cannot be subtracted; "" if they can.
    """

    step: int
    phase: str
    place: str
    tensor: str
    ulp: float
    absolute: float
    remark: str = ""

    @property
    def group(self) -> tuple[int, str, str]:
        """Step, phase and place."""
        return self.step, self.phase, self.place

    def __str__(self) -> str:
        where = " ".join(part for part in (self.place, self.tensor) if part)
        return f"step {self.step}, {self.phase}, {where}" if where else f"step {self.step}, {self.phase}"


class Verdict(NamedTuple):
    """The result of a comparison.

    Attributes:
      first: a tensor of the first group that differs by more than the tolerance; None: there is none.
      rows: the comparisons of tensors, except inputs of the run, in causal order.
      tolerance: allowed difference in ulp, in the form of `TOLERANCE`.
    """

    first: Compared | None
    rows: Sequence[Compared]
    tolerance: Mapping[str, tuple[float, float]]

    @property
    def largest(self) -> Compared:
        """The comparison whose difference is largest relative to its tolerance."""
        return max(self.rows, key=lambda row: row.ulp / self.allowed(row) if row.ulp else 0.0)

    def allowed(self, row: Compared) -> float:
        """The tolerance of this tensor, in ulp."""
        return self.tolerance[row.place if row.phase == "update" else row.phase][row.step > 1]

    def differs(self, row: Compared) -> bool:
        """Returns whether the difference of this tensor exceeds its tolerance."""
        return row.ulp > self.allowed(row)

    def shown(self) -> list[Compared]:
        """Returns tensors with the most ulp: around `first`, or of each phase if `first` is None."""
        worst: dict[Any, Compared] = {}
        for row in self.rows:
            group = row.group if self.first else (row.step, row.phase)
            worst[group] = max(worst.get(group, row), row, key=lambda r: r.ulp)
        found = list(worst.values())
        if self.first is None:
            return found
        at, group = list(worst).index(self.first.group), self.first.group
        inside = sorted((row for row in self.rows if row.group == group), key=lambda r: -r.ulp)
        return [*found[max(at - SHOWN_BEFORE, 0) : at], *inside[:SHOWN_AT], *found[at + 1 : at + 1 + SHOWN_AFTER]]


def judge(ours: Recording, theirs: Recording, *, tolerance: Mapping[str, tuple[float, float]]) -> Verdict:
    """Finds the first group of tensors, in causal order, with one that differs.

    `tolerance`: allowed differences, in the form of `TOLERANCE`.
    """
    rows = [row for row in compare(ours, theirs) if row.phase not in (DATA, START)]
    verdict = Verdict(None, rows, tolerance)
    for _, group in itertools.groupby(rows, key=lambda row: row.group):
        if differing := [row for row in group if verdict.differs(row)]:
            return verdict._replace(first=max(differing, key=lambda row: row.ulp))
    return verdict


def given(ours: Recording, theirs: Recording) -> dict[str, list[Compared]]:
    """Returns the inputs that differ between the runs, by phase: `data` and `start`."""
    rows = [row for row in compare(ours, theirs) if row.ulp > 0]
    return {phase: [row for row in rows if row.phase == phase] for phase in (DATA, START)}


def compare(ours: Recording, theirs: Recording) -> Iterator[Compared]:
    """Compares all tensors: first those of `ours` in their order, then those that only `theirs` has."""
    for name in dict.fromkeys((*ours, *theirs)):
        step, phase, place, tensor = name.split("|")
        mean = (phase, place) == ("update", "parameters")
        yield Compared(int(step), phase, place, tensor, *apart(ours.get(name), theirs.get(name), mean=mean))


def apart(a: np.ndarray | None, b: np.ndarray | None, *, mean: bool = False) -> tuple[float, float, str]:
    """Returns the difference of two arrays in ulp and in absolute terms, and a remark.

    The difference is the largest of any entry or, with `mean`, the root mean square. It is infinite with a remark and,
    in ulp, for integers that differ.
    """
    if a is None or b is None:
        return np.inf, np.inf, f"only in {'B' if a is None else 'A'}"
    if a.shape != b.shape:
        return np.inf, np.inf, f"{list(a.shape)} in A, {list(b.shape)} in B"
    wide_a, wide_b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    same = (wide_a == wide_b) | (np.isnan(wide_a) & np.isnan(wide_b))
    if np.all(same):
        return 0.0, 0.0, ""
    if not (np.all(np.isfinite(wide_a)) and np.all(np.isfinite(wide_b))):
        return np.inf, np.inf, "not finite"
    difference = np.abs(wide_a - wide_b)
    absolute = float(np.sqrt(np.mean(difference**2)) if mean else np.max(difference))
    if not np.issubdtype(a.dtype, np.floating):
        return np.inf, absolute, ""
    largest = max(np.max(np.abs(wide_a)), np.max(np.abs(wide_b)), np.finfo(np.float32).tiny)
    return absolute / float(np.spacing(np.float32(largest))), absolute, ""


# Recording a side.


def run(
    program: Program,
    task: Task,
    *,
    steps: int,
    checkpoint: paths.Path | None,
    origin: Origin | None = None,
    data_of: Recording | None,
) -> dict[str, np.ndarray]:
    """Records a run of a program, on its own data or on the batches of another recording.

    Args:
      program: bound to devices that exist.
      checkpoint: folder of the step to take the state from; None: a new state.
      origin: reads frozen parameters that the checkpoint leaves out; None: none.
      data_of: a recording whose batches to train on; None: those of the task.

    Returns:
      The recording; its batches (`DATA`) are those of the task.
    """
    own = agreement.batches_of(task, program, steps=steps)
    batches = own if data_of is None else _batches(data_of, own)
    state = program.init() if checkpoint is None else _restored(program, checkpoint, origin)
    given = {key(step, DATA, "batch", name): a for step, batch in enumerate(own, 1) for name, a in batch.items()}
    return given | record(program, state, batches)


def _batches(recording: Recording, own: Sequence[Batch]) -> list[Batch]:
    found = {name: recording.get(key(1, DATA, "batch", name)) for name in own[0]}
    theirs = {name: None if array is None else array.shape for name, array in found.items()}
    if wrong := {name: array.shape for name, array in own[0].items() if theirs[name] != array.shape}:
        raise UserError(
            f"A and B cannot run on the same data: B's batches have {wrong}, A's "
            f"{ {name: theirs[name] for name in wrong} }; give both the same task, BATCH_SIZE and LENGTH"
        )
    return [{name: recording[key(step, DATA, "batch", name)] for name in own[0]} for step in range(1, len(own) + 1)]


def _restored(program: Program, folder: paths.Path, origin: Origin | None) -> TrainState:
    checkpoints = Checkpoints(str(folder.parent), keep=1, read_only=True, origin=origin)
    with reading.refusing_damage(folder):
        state, _, _ = checkpoints.restore(int(folder.name), program.abstract_state)
    checkpoints.close()
    return state
