"""What runs leave behind, and whether two of them ended alike.

The one idea: files are believed, not messages. Equal ends are equal losses at every step and equal contents of every
array of the last checkpoint, whose files were read to find that they hold them.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import NamedTuple

from core import paths
from core.checkpoints import description, steps, verifying
from core.training import goodput
from core.training.goodput import Session


class Left(NamedTuple):
    """What is there between two starts.

    Attributes:
      made: the last step of which there is a loss; 0 for none.
      newest: the newest step that was saved whole; 0 for none.
      starts: how many starts got as far as to say where they begin.
    """

    made: int
    newest: int
    starts: int


def left(run_dir: Path) -> Left:
    """Of a run whose processes have ended."""
    return Left(max(losses(run_dir), default=0), newest(run_dir), len(goodput.read(str(run_dir))))


def event(run_dir: Path) -> float | None:
    """When what was planted happened; None where it did not."""
    note = run_dir / "event"
    return float(note.read_text()) if note.exists() else None


def losses(run_dir: Path) -> dict[int, float]:
    """By step, the last that was written."""
    return {row["step"]: row["loss"] for row in _rows(run_dir)}


def newest(run_dir: Path) -> int:
    """The newest step that was saved whole; 0 for none."""
    return max(steps.complete(paths.resolve(run_dir / "checkpoints")), default=0)


def last_session(run_dir: Path) -> Session:
    """Of the last start; its first step is where it went on from."""
    return goodput.read(str(run_dir))[-1]


def seconds_to_a_step(run_dir: Path, *, behind: int, started: float) -> float | None:
    """From a start to the end of its first step behind that one."""
    after = [row["time_seconds"] for row in _rows(run_dir) if row["step"] > behind and row["time_seconds"] > started]
    return min(after) - started if after else None


def said(run_dir: Path, pattern: str) -> str:
    """The first line of a host's log that matches, without the time, host and step before it."""
    for log in sorted((run_dir / "logs").glob("host_*.log")):
        for line in log.read_text(errors="replace").splitlines():
            text = line.partition(" | ")[2]
            if not text.startswith("---") and re.search(pattern, text):
                return text.strip()
    return ""


def difference(run_dir: Path, undisturbed: Path) -> str:
    """What of the ends of two runs differs; "" for nothing."""
    mine, wanted = newest(run_dir), newest(undisturbed)
    if mine != wanted:
        return f"its last checkpoint is step {mine}, expected {wanted}"
    if losses(run_dir) != losses(undisturbed):
        return "its losses are others"
    folders = [paths.resolve(folder / "checkpoints") / str(wanted) for folder in (run_dir, undisturbed)]
    if damaged := verifying.verify(folders[0]).damaged:
        return f"its last checkpoint is damaged: {damaged[0]}"
    first, second = (description.read(folder) for folder in folders)
    return "" if first.content == second.content else "arrays of its last checkpoint are others"


def _rows(run_dir: Path) -> list[dict]:
    file = run_dir / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return [row for line in lines if line.endswith("}") and "loss" in (row := json.loads(line))]
