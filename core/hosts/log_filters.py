"""Filters known harmless messages of libraries from the terminal; they stay in the log files."""

import contextlib
import logging
import os
import re
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from typing import Any

_ABSL = rb"[IWE]\d{4} [\d:.]+ +\d+ "  # level, date, time, thread; then file:line]

# Pattern of a line, and why it can be hidden.
LINES: tuple[tuple[bytes, str], ...] = (
    (
        rb"\[Gloo\] Rank \d+ is connected to \d+ peer ranks\. Expected number of connected peer ranks is : \d+",
        "one line for each rank and communicator of CPU devices, all as expected",
    ),
    (
        rb"normalizer\.cc\(\d+\) LOG\(INFO\) precompiled_charsmap is empty\. use identity normalization\.",
        "our SentencePiece vocabularies have identity normalization on purpose",
    ),
    (
        _ABSL + rb"preemption_notifier\.cc:\d+\] SIGTERM caught at [^\r\n]*",
        "the run itself says that it is preempted, and what it saved",
    ),
    (
        rb"WARNING:absl:\[process=\d+\]\[thread=\w+\] Reached preemption sync point, step=\d+",
        "Orbax's message for the same event",
    ),
    (
        rb"WARNING: All log messages before absl::InitializeLog\(\) is called are written to STDERR",
        "introduces lines that TensorFlow writes while it is imported",
    ),
    (
        _ABSL + rb"port\.cc:\d+\] oneDNN custom operations are on\.[^\r\n]*",
        "TensorFlow reads datasets here and computes nothing",
    ),
    (
        _ABSL + rb"cudart_stub\.cc:\d+\] Could not find cuda drivers on your machine, GPU will not be used\.",
        "TensorFlow needs no GPU here",
    ),
    (
        _ABSL + rb"cuda_platform\.cc:\d+\] failed call to cuInit: [^\r\n]*",
        "TensorFlow needs no GPU here",
    ),
    (
        _ABSL
        + rb"cpu_feature_guard\.cc:\d+\] This TensorFlow binary is optimized to use available CPU instructions in "
        rb"performance-critical operations\.",
        "TensorFlow computes nothing here",
    ),
    (
        rb"To enable the following instructions: [^\r\n]*, rebuild TensorFlow with the appropriate compiler flags\.",
        "the second line of the previous message",
    ),
)
_ANY = re.compile(rb"(?:" + rb"|".join(line for line, _ in LINES) + rb")(?:\r?\n|$)")


class Held:
    """The output that `holding_stderr` captured; empty until the context ends."""

    content = b""


@contextlib.contextmanager
def holding_stderr() -> Iterator[Held]:
    """Context that moves what is written to stderr, also by C++, to `Held.content`."""
    held = Held()
    sys.stderr.flush()
    terminal = os.dup(2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            yield held
        finally:
            sys.stderr.flush()
            os.dup2(terminal, 2)
            os.close(terminal)
            file.seek(0)
            held.content = file.read()


def without(text: bytes) -> bytes:
    """Removes known harmless lines from a text, even in the middle of another line."""
    return _ANY.sub(b"", text)


@contextlib.contextmanager
def without_records(*templates: str) -> Iterator[None]:
    """Context that hides records of absl's logger with one of these templates (`LogRecord.msg`)."""

    def is_shown(record: logging.LogRecord) -> bool:
        return record.msg not in templates

    logging.getLogger("absl").addFilter(is_shown)
    try:
        yield
    finally:
        logging.getLogger("absl").removeFilter(is_shown)


# Orbax logs the error of a failed save with its traceback, once or twice, and raises it as well.
_FAILED_SAVE = "[process=%d][thread=%s][operation_id=%s] _SignalingThread.run() raised an exception: %s"
_lock = threading.Lock()
_open = 0


@contextlib.contextmanager
def while_saving() -> Iterator[None]:
    """Context that hides duplicate messages of libraries about a failed save; the caller raises the error."""
    global _open, _unraisable
    with _lock:
        _open += 1
        if _open == 1:
            logging.getLogger("absl").addFilter(_is_other_record)
            _unraisable = _Unraisable(sys.unraisablehook)
            sys.unraisablehook = _unraisable
    try:
        yield
    finally:
        with _lock:
            _open -= 1
            if _open == 0:
                logging.getLogger("absl").removeFilter(_is_other_record)
                if sys.unraisablehook is _unraisable:  # otherwise another hook calls this one
                    sys.unraisablehook = _unraisable.before


def _is_other_record(record: logging.LogRecord) -> bool:
    return not (record.exc_info and record.levelno == logging.ERROR and record.msg == _FAILED_SAVE)


class _Unraisable:
    """A `sys.unraisablehook` that ignores TensorStore's calls into a closed event loop during a save."""

    def __init__(self, before: Callable[[Any], object]):
        self.before = before

    def __call__(self, unraisable: Any) -> None:
        if not (_open and _is_late_write(unraisable)):
            self.before(unraisable)


_unraisable: _Unraisable | None = None


def _is_late_write(unraisable: Any) -> bool:
    """Returns whether C++ code called `call_soon_threadsafe` of a closed event loop."""
    trace = unraisable.exc_traceback
    if not isinstance(unraisable.exc_value, RuntimeError) or trace is None or trace.tb_next is None:
        return False
    called, raised = trace.tb_frame.f_code, trace.tb_next.tb_frame.f_code
    names = called.co_name, raised.co_name
    return names == ("call_soon_threadsafe", "_check_closed") and "asyncio" in called.co_filename
