"""The best checkpoint of a run by a validation metric."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from core.errors import UserError

_VALIDATION, _KEEP_BEST = "validation", "keep_best"  # in the metadata of a step
_PREFIX, _HIGHEST = "validation/", "max:"


class Metric(NamedTuple):
    """A validation metric by which checkpoints are compared."""

    name: str
    is_highest: bool

    def best(self, values: Mapping[int, float]) -> int | None:
        """Returns the first step with the best value; None if there are no values."""
        sign = -1 if self.is_highest else 1
        return min(values, key=lambda step: (sign * values[step], step), default=None)

    def value(self, meta: Mapping[str, Any]) -> float | None:
        """Returns the value in a step's metadata; None if missing or not finite."""
        value = meta.get(_VALIDATION, {}).get(self.name)
        return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def parse(text: str) -> Metric:
    """Parses `validation/loss` (lowest is best) or `max:validation/accuracy` (highest is best).

    Raises UserError for names not below `validation/`.
    """
    name = text.removeprefix(_HIGHEST)
    if not name.removeprefix(_PREFIX) or not name.startswith(_PREFIX):
        raise UserError(
            f"keep_best = {text!r}: expected a metric of evaluations, 'validation/loss' for the lowest or "
            "'max:validation/accuracy' for the highest; '' keeps the latest checkpoints only"
        )
    return Metric(name, text.startswith(_HIGHEST))


def described(text: str, validation: Mapping[str, float]) -> dict[str, Any]:
    """Returns entries for a step's metadata: the requested metric, and the finite means."""
    finite = {name: float(value) for name, value in validation.items() if math.isfinite(value)}
    return {_KEEP_BEST: text, _VALIDATION: finite}


def values(described: Mapping[int, Mapping[str, Any]], metric: Metric) -> dict[int, float]:
    """Returns the values of a metric by step, without steps that have none."""
    read = {step: metric.value(meta) for step, meta in described.items()}
    return {step: value for step, value in read.items() if value is not None}


def asked(described: Mapping[int, Mapping[str, Any]]) -> Metric | None:
    """Returns the requested metric of the newest step that has one, or None."""
    found = [meta[_KEEP_BEST] for _, meta in sorted(described.items()) if _KEEP_BEST in meta]
    return parse(found[-1]) if found else None


class Kept:
    """Decides which steps are kept: the latest and, with a metric, the best one."""

    def __init__(self, latest: int, metric: Metric | None = None, known: Mapping[int, float] | None = None):
        self._latest, self._metric, self._known = latest, metric, dict(known or {})

    def saving(self, step: int, meta: Mapping[str, Any]) -> None:
        """Records the metric's value of a step."""
        self._known.pop(step, None)
        if self._metric and (value := self._metric.value(meta)) is not None:
            self._known[step] = value

    def unscored(self, there: Sequence[int]) -> list[int]:
        """Returns which of the steps `there` have no known value of the metric; [] without a metric."""
        return [step for step in there if step not in self._known] if self._metric else []

    def others(self, there: Sequence[int]) -> list[int]:
        """Returns which of the steps `there` (ascending) are not kept."""
        best = self._metric and self._metric.best({step: self._known[step] for step in there if step in self._known})
        return [step for step in there[: -self._latest] if step != best]
