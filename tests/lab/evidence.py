"""Reads what runs leave in their run directories, and compares the final states of two runs.

Only files count, not messages. Two final states are equal if the losses of all steps and the contents of all arrays of
the last checkpoint are equal; the files of that checkpoint are verified.
"""

import json
import re
from pathlib import Path
from typing import NamedTuple

from core.checkpoints import inspection, steps
from core.files import paths
from core.training import goodput
from core.training.goodput import Session


class Left(NamedTuple):
    """State of a run directory between two starts.

    Attributes:
      made: the last step with a logged loss; 0 for none.
      newest: the newest complete checkpoint; 0 for none.
      starts: how many starts got far enough to record the step at which they began.
    """

    made: int
    newest: int
    starts: int


def left(run_dir: Path) -> Left:
    """Reads the state of a run whose processes have ended."""
    return Left(max(losses(run_dir), default=0), newest(run_dir), len(goodput.read(str(run_dir))))


def event(run_dir: Path) -> float | None:
    """Returns the time of the injected fault; None if it did not happen."""
    note = run_dir / "event"
    return float(note.read_text()) if note.exists() else None


def losses(run_dir: Path) -> dict[int, float]:
    """Returns the loss by step, the last one written if a step was repeated."""
    return {row["step"]: row["loss"] for row in _rows(run_dir)}


def newest(run_dir: Path) -> int:
    """Returns the step of the newest complete checkpoint; 0 for none."""
    return max(steps.complete(paths.resolve(run_dir / "checkpoints")), default=0)


def last_session(run_dir: Path) -> Session:
    """Returns the record of the last start; its first step is the step it resumed from."""
    return goodput.read(str(run_dir))[-1]


def seconds_to_a_step(run_dir: Path, *, behind: int, started: float) -> float | None:
    """Returns the seconds from a start to the end of its first step after step `behind`; None if there is none."""
    after = [row["time_seconds"] for row in _rows(run_dir) if row["step"] > behind and row["time_seconds"] > started]
    return min(after) - started if after else None


def said(run_dir: Path, pattern: str) -> str:
    """Returns the first line of any host's log that matches, without its prefix of time, host and step."""
    for log in sorted((run_dir / "logs").glob("host_*.log")):
        for line in log.read_text(errors="replace").splitlines():
            text = line.partition(" | ")[2]
            if not text.startswith("---") and re.search(pattern, text):
                return text.strip()
    return ""


def difference(run_dir: Path, undisturbed: Path) -> str:
    """Returns how the final states of two runs differ; empty if they are equal."""
    mine, wanted = newest(run_dir), newest(undisturbed)
    if mine != wanted:
        return f"its last checkpoint is step {mine}, expected {wanted}"
    if losses(run_dir) != losses(undisturbed):
        return "its losses differ"
    folders = [paths.resolve(folder / "checkpoints") / str(wanted) for folder in (run_dir, undisturbed)]
    if damaged := inspection.verify(folders[0]).damaged:
        return f"its last checkpoint is damaged: {damaged[0]}"
    first, second = (steps.read(folder) for folder in folders)
    return "" if first.content == second.content else "arrays of its last checkpoint differ"


def _rows(run_dir: Path) -> list[dict]:
    file = run_dir / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return [row for line in lines if line.endswith("}") and "loss" in (row := json.loads(line))]
