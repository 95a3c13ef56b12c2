"""Compares predictions with published measurements, for the label on every predicted figure.

`published.json` lists training runs whose speed on TPUs is public, with the prediction for the same sizes on the same
slices (`gin/published/`, filled in by `tests/run.sh lab golden --write`). Tokens per second are compared, not MFU:
published MFUs count FLOPs in different ways (full or causal attention).
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from core import versions

FILE = Path(__file__).parent / "published.json"
BOUNDS = ("hidden", "scheduled", "exposed")

PublishedRun = Mapping[str, Any]


def label(*, libtpu: str | None = None) -> str:
    """Returns the label of a prediction: `compiled by libtpu 0.0.42.1, uncalibrated, spread 0.9 to 1.5 of published`.

    Args:
      libtpu: version that compiled the step; None for the installed one.
    """
    found = spread(rows())
    said = f"spread {found[0]:.2f} to {found[1]:.2f} of published" if found else "spread not known"
    return f"compiled by libtpu {libtpu or versions.version('libtpu')}, uncalibrated, {said}"


def rows() -> list[dict[str, Any]]:
    """Returns the published runs, with `predicted` if they have been compiled."""
    return json.loads(FILE.read_text())


def spread(published: Sequence[PublishedRun]) -> tuple[float, float] | None:
    """Returns the smallest and largest ratio of predicted to published speed; None without predictions."""
    found = [ratio for row in published if "predicted" in row for ratio in ratios(row)]
    return (min(found), max(found)) if found else None


def ratios(row: PublishedRun) -> list[float]:
    """Returns the ratios of predicted to published tokens per second, by bound."""
    return [row["predicted"][bound] / row["tokens_per_second_per_chip"] for bound in BOUNDS]
