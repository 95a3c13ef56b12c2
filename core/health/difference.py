"""Describes differences between texts that must be equal on all hosts.

The text of the majority is taken as correct, so that a single host with another configuration is named even if it is
host 0.
"""

from __future__ import annotations

import collections
import difflib
from collections.abc import Sequence

from core import units

_MOST_LINES = 20


def between_hosts(texts: Sequence[str]) -> str:
    """Returns one paragraph for each group of hosts that differs from the majority; empty if all are equal.

    For example `host 2: -BATCH_SIZE = 16 +BATCH_SIZE = 32`: minus marks the others' line, plus that of host 2.

    Args:
      texts: one per host, in order.
    """
    counts = collections.Counter(texts)
    meant = max(texts, key=counts.__getitem__)  # the first of equally frequent ones: host 0's
    others: dict[str, list[int]] = {}
    for host, text in enumerate(texts):
        if text != meant:
            others.setdefault(text, []).append(host)
    return "\n".join(f"host {', '.join(map(str, who))}: {_changes(meant, text)}" for text, who in others.items())


def _changes(meant: str, text: str) -> str:
    """Formats a difference: `-a +b` on one line if one line changed, otherwise one line per change."""
    lines = [
        line
        for line in difflib.unified_diff(meant.splitlines(), text.splitlines(), lineterm="", n=0)
        if not line.startswith(("---", "+++", "@@"))
    ]
    if len(lines) == 2 and [line[0] for line in lines] == ["-", "+"]:
        return " ".join(lines)
    return (
        "".join(f"\n  {line}" for line in units.shortened(lines, most=_MOST_LINES)) or "the same lines, with other ends"
    )
