"""What a run left in its directory: the metrics by step, and whether it came to its end.

The one idea: the run directory is the only record. A suite that is started again, on another machine too, knows from it
alone what is done, and `--analyze` needs nothing else.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Callable, Iterable, Mapping

from core import metrics, paths

SCORE = "validation/exact_accuracy"
CONFIG = "config.gin"


@dataclasses.dataclass(frozen=True)
class Measured:
    """The metrics of a run.

    Attributes:
      step: the last one recorded; 0 where there is none.
      by_step: metrics by step, those of training and of validation together.
      texts: what it recorded in words, by tag.
    """

    step: int = 0
    by_step: Mapping[int, Mapping[str, float]] = dataclasses.field(default_factory=dict)
    texts: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def last(self, name: str) -> float | None:
        """The latest value of a metric that is a number."""
        found = self.curve(name)
        return found[-1][1] if found else None

    def best(self, name: str) -> tuple[int, float] | None:
        """Step and value of the highest; the first of several."""
        return max(self.curve(name), key=lambda point: (point[1], -point[0]), default=None)

    def curve(self, name: str) -> list[tuple[int, float]]:
        """A metric by step."""
        return [(step, values[name]) for step, values in sorted(self.by_step.items()) if name in values]

    def first_at(self, name: str, *, least: float) -> int | None:
        """The first step where a metric is at least so much."""
        return next((step for step, value in self.curve(name) if value >= least), None)

    def median(self, name: str) -> float | None:
        """The median over all steps recorded."""
        values = [value for _, value in self.curve(name)]
        return statistics.median(values) if values else None


def read(run_dir: str) -> Measured:
    """The metrics of a run; nothing where there are none.

    Of two lines of one step the later holds, and a last line that was cut off is left out.
    """
    file = paths.resolve(run_dir) / metrics.JSONL_NAME
    if not file.exists():
        return Measured()
    by_step: dict[int, dict[str, float]] = {}
    texts: dict[str, str] = {}
    for line in file.read_text().splitlines():
        row = _parsed(line)
        step = row.get("step")
        if "tag" in row:
            texts[str(row["tag"])] = str(row.get("text", ""))
        if not isinstance(step, int) or "tag" in row:
            continue
        numbers = {k: v for k, v in row.items() if isinstance(v, (int, float)) and k not in ("step", "time_seconds")}
        by_step.setdefault(step, {}).update(numbers)
    return Measured(max(by_step, default=0), by_step, texts)


def config(run_dir: str) -> str | None:
    """The canonical text of the run that is in this directory."""
    file = paths.resolve(run_dir) / CONFIG
    return file.read_text() if file.exists() else None


def is_complete(run_dir: str, *, text: str, last_step: int) -> bool:
    """Whether the run of this text came to its last step here."""
    return config(run_dir) == text and read(run_dir).step >= last_step


def elsewhere(root: str, texts: Iterable[str], *, key: Callable[[str], str] = str) -> dict[str, list[str]]:
    """Run directories below `root`, of any group, by the text of their run, of those that equal one of `texts`.

    Args:
      root: where runs are.
      texts: canonical.
      key: two texts are equal where their keys are; the result is by key.
    """
    wanted, found = {key(text) for text in texts}, {}
    folder = paths.resolve(root)
    for file in sorted(folder.glob(f"*/*/{CONFIG}")) if folder.exists() else ():
        if (same := key(file.read_text())) in wanted:
            found.setdefault(same, []).append(str(file.parent))
    return found


def _parsed(line: str) -> Mapping[str, object]:
    try:
        row = json.loads(line)
    except ValueError:  # the line that a run was writing when it ended
        return {}
    return row if isinstance(row, dict) else {}
