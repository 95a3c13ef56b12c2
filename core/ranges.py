"""Validates the hyperparameters of optimizers.

A hyperparameter's name has the same meaning in all optimizers, so its range is defined once. Values out of range are
refused when the configuration is loaded, before they could cause a NaN loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from core.errors import UserError

_RANGES: Mapping[str, tuple[Callable[[Any], bool], str]] = MappingProxyType(
    {
        **dict.fromkeys(("peak", "value", "weight_decay"), (lambda v: 0 <= v < math.inf, "at least 0, and finite")),
        **dict.fromkeys(("b1", "b2", "momentum", "decay"), (lambda v: 0 <= v < 1, "from 0 to below 1")),
        **dict.fromkeys(("eps", "rms", "decay_rate", "clip_update"), (lambda v: 0 < v < math.inf, "above 0")),
        "clip_norm": (lambda v: v is None or v > 0, "above 0, or None for no clipping"),
        "min_factored": (lambda v: v >= 1, "at least 1"),
    }
)
NAMES = frozenset(_RANGES)


def check(where: str, **values: float | None) -> None:
    """Validates each number against the range of its name.

    Args:
      where: the constructor that takes the numbers, for the error.
      **values: by the names of `_RANGES`; NaN is never allowed.

    Raises:
      UserError: a number is out of its range.
    """
    for name, value in values.items():
        allowed, expected = _RANGES[name]
        if not allowed(value):
            raise UserError(f"{where}: {name} = {value}: expected {expected}")
