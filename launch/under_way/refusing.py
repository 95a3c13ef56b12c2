"""Which errors of a run under way are for the user to fix, and which are faults.

The one idea: a refusal is what this project says with a `raise` of its own. Another ValueError, out of a parser, an
array library or an unpacking, may wear the same type and is no message to anybody: it ends a run with its traceback,
so that it is seen, told and tried again.
"""

from __future__ import annotations

import contextlib
import dis
from collections.abc import Iterator
from pathlib import Path

from launch import environment


@contextlib.contextmanager
def own_refusals_alone() -> Iterator[None]:
    """Inside, a ValueError that is no refusal of ours becomes a RuntimeError that says its type."""
    try:
        yield
    except ValueError as error:
        if is_refusal(error):
            raise
        raise RuntimeError(f"{type(error).__name__}: {error}") from error


def is_refusal(error: BaseException) -> bool:
    """Whether a `raise` in this project's files made it."""
    trace = error.__traceback__
    if trace is None:
        return False
    while trace.tb_next is not None:
        trace = trace.tb_next
    code = trace.tb_frame.f_code
    return _is_ours(Path(code.co_filename)) and dis.opname[code.co_code[trace.tb_lasti]] == "RAISE_VARARGS"


def _is_ours(file: Path) -> bool:
    return file.is_relative_to(environment.WORKSPACE) and "site-packages" not in file.parts
