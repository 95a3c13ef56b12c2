"""Reads the metrics that a run recorded in its directory (`core.metrics` writes them)."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Mapping

from core import metrics, paths


@dataclasses.dataclass(frozen=True)
class RunMetrics:
    """The metrics of a run.

    Attributes:
      step: the last recorded step; 0 if there is none.
      by_step: metrics of training and validation, by step.
      texts: recorded texts, by tag.
    """

    step: int = 0
    by_step: Mapping[int, Mapping[str, float]] = dataclasses.field(default_factory=dict)
    texts: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def curve(self, name: str) -> list[tuple[int, float]]:
        """Returns (step, value) pairs of a metric."""
        return [(step, values[name]) for step, values in sorted(self.by_step.items()) if name in values]

    def last(self, name: str) -> float | None:
        """Returns the latest value of a metric."""
        found = self.curve(name)
        return found[-1][1] if found else None

    def best(self, name: str) -> tuple[int, float] | None:
        """Returns the step and value of the maximum; of equal values, the earliest."""
        return max(self.curve(name), key=lambda point: (point[1], -point[0]), default=None)

    def first_at(self, name: str, *, least: float) -> int | None:
        """Returns the first step at which a metric is at least `least`."""
        return next((step for step, value in self.curve(name) if value >= least), None)

    def median(self, name: str) -> float | None:
        """Returns the median over all recorded steps."""
        values = [value for _, value in self.curve(name)]
        return statistics.median(values) if values else None


def read(run_dir: str) -> RunMetrics:
    """Reads the metrics of a run; empty if it recorded none.

    If a step was recorded twice, the later line wins; an incomplete last line is skipped.
    """
    file = paths.resolve(run_dir) / metrics.JSONL_NAME
    if not file.exists():
        return RunMetrics()
    by_step: dict[int, dict[str, float]] = {}
    texts: dict[str, str] = {}
    for line in file.read_text().splitlines():
        row = _parsed(line)
        step = row.get("step")
        if "tag" in row:
            texts[str(row["tag"])] = str(row.get("text", ""))
        elif isinstance(step, int):
            numbers = {k: v for k, v in row.items() if isinstance(v, (int, float))}
            by_step.setdefault(step, {}).update(numbers)
    return RunMetrics(max(by_step, default=0), by_step, texts)


def _parsed(line: str) -> Mapping[str, object]:
    try:
        row = json.loads(line)
    except ValueError:  # the run was interrupted while it wrote this line
        return {}
    return row if isinstance(row, dict) else {}
