"""Writes to a terminal or a pipe: width, wrapped errors, progress, closed pipes.

Only `console` and `markdown` import packages: `launch.hosts.host_output` runs before any is installed.
"""

from __future__ import annotations

import os
import select
import sys
import textwrap
import time
import traceback
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from typing import IO, TYPE_CHECKING, Any

from launch import environment

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

ERROR_WIDTH = 120
_PIPED_SECONDS = 10.0  # seconds between lines of progress
_NARROWEST = 40  # wrap at this many columns at least, even if the terminal is narrower
_UNPRINTABLE = ("Cc", "Cs")  # control characters; lone surrogates, which cannot be encoded


def console(piped_width: int, *, file: IO[str] | None = None, stderr: bool = False, **options: Any) -> Console:
    """Returns a rich console as wide as its terminal.

    Args:
      piped_width: the width without a terminal.
      file: where it writes; None: standard output, or standard error if `stderr`.
      stderr: whether to write to standard error; not used with `file`.
      **options: options of `rich.console.Console`.
    """
    from rich.console import Console

    stream = file or (sys.stderr if stderr else sys.stdout)
    found = Console(
        file=file,
        stderr=stderr,
        width=width(piped_width, stream),
        force_terminal=stream.isatty() and not environment.read("NO_COLOR"),
        highlight=False,
        **options,
    )
    found.on_broken_pipe = _reraise  # type: ignore[method-assign]  # rich's own would end the process
    return found


def markdown(
    headings: Sequence[str], rows: Iterable[Sequence[str]], *, text: Sequence[str] = (), title: str | None = None
) -> Table:
    """Formats a table as Markdown.

    Args:
      headings: headings of the columns.
      rows: cells of each row.
      text: headings of columns with text, which are left-aligned and wrapped.
      title: a line above the table; None: no line.
    """
    from rich import box
    from rich.table import Table

    table = Table(box=box.MARKDOWN, title=title, title_justify="left")
    for heading in headings:
        table.add_column(heading, justify="left" if heading in text else "right", no_wrap=heading not in text)
    for row in rows:
        table.add_row(*row)
    return table


def width(piped_width: int, stream: IO[str] | None = None) -> int:
    """Returns the number of columns of a stream's terminal; `piped_width` without a terminal.

    If `stream` is None, it is standard output.
    """
    stream = stream or sys.stdout
    if not stream.isatty():
        return piped_width
    told = environment.read("COLUMNS") or ""
    try:
        columns = int(told) if told.isdigit() else os.get_terminal_size(stream.fileno()).columns
    except OSError:
        columns = 0
    return max(columns, _NARROWEST) if columns else piped_width or ERROR_WIDTH


def wrapped(text: str, *, margin: int = 0) -> str:
    """Breaks an error's long lines between words.

    `margin`: the columns by which the caller indents the result.
    """
    told = environment.read("COLUMNS") or ""
    columns = int(told) if told.isdigit() and int(told) else min(ERROR_WIDTH, width(ERROR_WIDTH, sys.stderr))
    return _broken(text, max(columns - margin, _NARROWEST))


def print_traceback(error: BaseException) -> None:
    """Prints an error's traceback and causes if RENGA_TRACEBACK is set."""
    if environment.read("RENGA_TRACEBACK"):
        traceback.print_exception(error)


def say(text: str) -> None:
    """Prints text; on a terminal, wrapped to its width."""
    print(_broken(text, width(0)) if sys.stdout.isatty() else text)


def printable(text: str) -> str:
    r"""Replaces control characters, except line breaks and tabs, and lone surrogates by escapes."""
    return "".join(
        c if c in "\n\t" or unicodedata.category(c) not in _UNPRINTABLE else c.encode("unicode_escape").decode()
        for c in text
    )


def progress(what: str) -> Callable[[str, int, int], None]:
    """Returns a function that shows on standard error how far `what` has been read.

    Its arguments are the name of a part, its number from 1, and the number of parts.
    """
    began = last = time.monotonic()

    def show(name: str, number: int, count: int) -> None:
        nonlocal last
        text = f"reads {what}: {number} of {count} ({name})"
        if sys.stderr.isatty():
            print(f"\r{text}\033[K", end="\n" if number == count else "", file=sys.stderr, flush=True)
        elif time.monotonic() - last > _PIPED_SECONDS or (number == count and last > began):
            last = time.monotonic()
            print(text, file=sys.stderr, flush=True)

    return show


def flush() -> None:
    """Flushes standard output; if its reader has closed the pipe, discards the output."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def is_reader_gone() -> bool:
    """Returns whether standard output is a pipe whose reader has closed it."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _broken(text: str, columns: int) -> str:
    return "\n".join(_broken_line(line, columns) for line in text.split("\n"))


def _broken_line(line: str, columns: int) -> str:
    indent = line[: len(line) - len(line.lstrip(" "))]
    return textwrap.fill(
        line,
        columns,
        subsequent_indent=indent + "  ",
        break_long_words=False,
        break_on_hyphens=False,
        replace_whitespace=False,
        expand_tabs=False,
    )


def _reraise() -> None:
    raise
