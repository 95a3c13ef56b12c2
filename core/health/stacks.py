"""Stack traces of all threads of this process, to diagnose a hang."""

from __future__ import annotations

import faulthandler
import re
import tempfile
from collections.abc import Mapping

_MOST_CHARACTERS = 16_000
_MOST_DIFFERENT = 8


def of_all_threads() -> str:
    """Returns the Python stack of every thread, innermost call first, including threads that run C++ code."""
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read(_MOST_CHARACTERS)


def by_text(of_hosts: Mapping[int, str]) -> list[tuple[list[int], str]]:
    """Groups hosts by stack, ignoring addresses; returns (hosts, text) of the first few groups."""
    hosts: dict[str, list[int]] = {}
    for host in sorted(of_hosts):
        hosts.setdefault(re.sub(r"0x[0-9a-f]+", "", of_hosts[host]), []).append(host)
    return [(alike, of_hosts[alike[0]]) for alike in hosts.values()][:_MOST_DIFFERENT]


def print_unless_called_again(seconds: float) -> None:
    """Prints the stacks unless this is called again within `seconds`.

    It waits outside of Python, so it also works while C code holds the interpreter lock. Takes 0.15 ms.
    """
    faulthandler.dump_traceback_later(seconds, exit=False)


def print_no_more() -> None:
    """Cancels `print_unless_called_again`."""
    faulthandler.cancel_dump_traceback_later()
