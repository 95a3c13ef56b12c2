"""What differs between texts that must be equal on all hosts, by host.

The one idea: the text that most hosts have is taken for the one that was meant, so that one host with another
configuration is the one that is named, also where it is host 0.
"""

from __future__ import annotations

import collections
import difflib
from collections.abc import Sequence

from core import listing

_MOST_LINES = 20


def between_hosts(texts: Sequence[str]) -> str:
    """One paragraph for each group of hosts that differs from the rest; empty where all are equal.

    `host 2: -BATCH_SIZE = 16 +BATCH_SIZE = 32`: what the others have after the minus, what host 2 has after the plus.

    Args:
      texts: one for each host, in their order.
    """
    counts = collections.Counter(texts)
    meant = max(texts, key=counts.__getitem__)  # the first of equally frequent ones: host 0's
    others: dict[str, list[int]] = {}
    for host, text in enumerate(texts):
        if text != meant:
            others.setdefault(text, []).append(host)
    return "\n".join(f"host {', '.join(map(str, who))}: {_changes(meant, text)}" for text, who in others.items())


def _changes(meant: str, text: str) -> str:
    """`-a +b` on one line where that is all; else a line for each."""
    lines = [
        line
        for line in difflib.unified_diff(meant.splitlines(), text.splitlines(), lineterm="", n=0)
        if not line.startswith(("---", "+++", "@@"))
    ]
    if len(lines) == 2 and [line[0] for line in lines] == ["-", "+"]:
        return " ".join(lines)
    return (
        "".join(f"\n  {line}" for line in listing.shortened(lines, most=_MOST_LINES))
        or "the same lines, with other ends"
    )
