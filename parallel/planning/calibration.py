"""Compares predictions with published steps; the errors give every predicted time its interval.

`published.json` lists training steps whose speed on TPUs is public. An interval is a predicted time multiplied by the
5th and by the 95th percentile of published / predicted seconds.
"""

import functools
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from core import slices, versions
from parallel.planning.cost import AxisTime, StepTime

FILE = Path(__file__).parent / "published.json"
SHARE = 0.9  # of the published steps: the interval is between percentiles this far apart

PublishedRun = Mapping[str, Any]


class Error(NamedTuple):
    """The error of predicted seconds, over published steps.

    Attributes:
      median, largest: of |predicted / published - 1|.
      nine_in_ten: the error that at least nine in ten steps do not exceed.
      shortest, longest: 5th and 95th percentile of published / predicted seconds.
    """

    runs: int
    median: float
    nine_in_ten: float
    largest: float
    shortest: float
    longest: float


def label(*, libtpu: str | None = None) -> str:
    """Returns the label of a prediction, such as `compiled by libtpu 0.0.42.1; intervals from 25 published steps`."""
    found = known_error()
    compiled = f"compiled by libtpu {libtpu or versions.version('libtpu')}"
    if found is None:
        return f"{compiled}, not compared with published steps"
    return f"{compiled}; intervals from {found.runs} published steps"


def interval(seconds: float) -> tuple[float, float]:
    """Returns the least and the most seconds expected of a step of predicted `seconds`."""
    found = known_error()
    return (seconds, seconds) if found is None else (found.shortest * seconds, found.longest * seconds)


@functools.cache
def known_error() -> Error | None:
    """Returns the error over the steps of `published.json`; None if none has been compiled."""
    return error(rows())


def rows() -> list[dict[str, Any]]:
    """Returns the steps of `published.json`; compiled ones have the key `predicted`."""
    return json.loads(FILE.read_text())


def error(published: Sequence[PublishedRun]) -> Error | None:
    """Returns the error over published steps; None if none has been compiled."""
    ratios = sorted(ratio(row) for row in published if "predicted" in row)
    if not ratios:
        return None
    wrong = sorted(abs(1 / each - 1) for each in ratios)
    most = wrong[math.ceil(SHARE * len(wrong)) - 1]
    outside = (1 - SHARE) / 2
    return Error(
        len(ratios),
        _quantile(wrong, 0.5),
        most,
        wrong[-1],
        _quantile(ratios, outside),
        _quantile(ratios, 1 - outside),
    )


def ratio(row: PublishedRun) -> float:
    """Returns the published seconds of a compiled step, divided by the predicted ones."""
    return published_seconds(row) / predicted_seconds(row)


def published_seconds(row: PublishedRun) -> float:
    """Returns the published seconds of a compiled step."""
    return row["predicted"]["tokens_per_step"] / slices.get(row["slice"]).chips / row["tokens_per_second_per_chip"]


def predicted_seconds(row: PublishedRun) -> float:
    """Returns the predicted seconds of a compiled step."""
    return step_time(row).scheduled


def step_time(row: PublishedRun) -> StepTime:
    """Returns the predicted time of a compiled step, without mesh axes and bytes of its traffic."""
    found = row["predicted"]
    kernels = found["kernels"] * row.get("kernel_work", 1)
    traffic = (AxisTime((), network, part["all"], part["beside"], 0) for network, part in found["traffic"].items())
    return StepTime(found["compute"], kernels, tuple(traffic), ())


def _quantile(ordered: Sequence[float], share: float) -> float:
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])
