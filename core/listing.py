"""Long lists in messages: the first of them, and how many more there are."""

from __future__ import annotations

from collections.abc import Sequence


def shortened(items: Sequence[str], *, most: int) -> list[str]:
    """The first `most`, and behind them `… and 3 more` where there are more."""
    return [*items[:most], *([f"… and {len(items) - most} more"] if len(items) > most else [])]
