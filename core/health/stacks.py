"""What the threads of this process are doing, as text: what somebody who finds it stuck wants to see first."""

from __future__ import annotations

import faulthandler
import re
import tempfile
from collections.abc import Mapping

_MOST_CHARACTERS = 16_000
_MOST_DIFFERENT = 8


def of_all_threads() -> str:
    """The Python stack of every thread, innermost call first, also of those that sit in C++."""
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read(_MOST_CHARACTERS)


def by_text(of_hosts: Mapping[int, str]) -> list[tuple[list[int], str]]:
    """The hosts with each text that differs by more than addresses, and the text; the first few of many."""
    hosts: dict[str, list[int]] = {}
    for host in sorted(of_hosts):
        hosts.setdefault(re.sub(r"0x[0-9a-f]+", "", of_hosts[host]), []).append(host)
    return [(alike, of_hosts[alike[0]]) for alike in hosts.values()][:_MOST_DIFFERENT]


def print_unless_called_again(seconds: float) -> None:
    """Prints the stacks where nobody calls this again in time: a thread in C keeps all of Python from running.

    The waiting is done outside of Python, so it works then too. Costs 0.15 ms.
    """
    faulthandler.dump_traceback_later(seconds, exit=False)


def print_no_more() -> None:
    """Ends the waiting."""
    faulthandler.cancel_dump_traceback_later()
