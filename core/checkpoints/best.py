"""The best checkpoint of a run by a validation metric, which is kept beside the latest ones.

The metadata of a step has the means of the evaluation after it and the metric that was asked for, so the best step is
found again by any process that reads the steps.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from core.errors import UserError

_VALIDATION, _KEEP_BEST = "validation", "keep_best"  # in the metadata of a step
_PREFIX, _HIGHEST = "validation/", "max:"


class Metric(NamedTuple):
    """A validation metric by which checkpoints are compared.

    Attributes:
      name: such as `validation/loss`.
      is_highest: whether the highest value is the best, not the lowest.
    """

    name: str
    is_highest: bool

    def best(self, values: Mapping[int, float]) -> int | None:
        """Returns the step with the best value, the earliest of equal ones; None without values."""
        sign = -1 if self.is_highest else 1
        return min(values, key=lambda step: (sign * values[step], step), default=None)

    def value(self, meta: Mapping[str, Any]) -> float | None:
        """Returns the value that the metadata of a step has; None if it has none, or one that is not finite."""
        value = meta.get(_VALIDATION, {}).get(self.name)
        return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def parse(text: str) -> Metric:
    """Parses `validation/loss` (the lowest is the best) or `max:validation/accuracy`. Raises UserError."""
    name = text.removeprefix(_HIGHEST)
    if not name.removeprefix(_PREFIX) or not name.startswith(_PREFIX):
        raise UserError(
            f"keep_best = {text!r}: expected a metric of evaluations, 'validation/loss' for the lowest or "
            "'max:validation/accuracy' for the highest; '' keeps the latest checkpoints only"
        )
    return Metric(name, text.startswith(_HIGHEST))


def described(text: str, validation: Mapping[str, float]) -> dict[str, Any]:
    """Returns entries for the metadata of a step: the metric that was asked for, and the means of its evaluation.

    Means that are not finite are left out, because metadata is strict JSON.
    """
    finite = {name: float(value) for name, value in validation.items() if math.isfinite(value)}
    return {_KEEP_BEST: text, _VALIDATION: finite}


def values(described: Mapping[int, Mapping[str, Any]], metric: Metric) -> dict[int, float]:
    """Returns the values that the metadata of steps have, by step."""
    read = {step: metric.value(meta) for step, meta in described.items()}
    return {step: value for step, value in read.items() if value is not None}


def asked(described: Mapping[int, Mapping[str, Any]]) -> Metric | None:
    """Returns the metric of the newest step, of the metadata by step, that has one."""
    found = [meta[_KEEP_BEST] for _, meta in sorted(described.items()) if _KEEP_BEST in meta]
    return parse(found[-1]) if found else None


class Kept:
    """The steps that stay: the latest and, with a metric, the best one."""

    def __init__(self, latest: int, metric: Metric | None = None, known: Mapping[int, float] | None = None):
        """Takes how many of the latest steps stay, and the values of steps that were saved before."""
        self._latest, self._metric, self._known = latest, metric, dict(known or {})

    def saving(self, step: int, meta: Mapping[str, Any]) -> None:
        """Notes the value of a step before it is saved."""
        self._known.pop(step, None)
        if self._metric and (value := self._metric.value(meta)) is not None:
            self._known[step] = value

    def others(self, there: Sequence[int]) -> list[int]:
        """Returns those of the complete steps, ascending, that do not stay."""
        best = self._metric and self._metric.best({step: self._known[step] for step in there if step in self._known})
        return [step for step in there[: -self._latest] if step != best]
