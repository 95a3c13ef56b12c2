"""Ties a child process to this one: the kernel ends the child when this process ends, however it ends."""

import ctypes
import os
import signal
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def to_this_process(number: signal.Signals = signal.SIGKILL) -> Callable[[], None] | None:
    """Returns a `preexec_fn` for `subprocess`, with which the child gets a signal when this process has ended.

    The signal is sent when the thread that starts the child ends, so that thread must outlive the child. None where the
    kernel has no such call.
    """
    if not hasattr(_libc, "prctl"):
        return None
    parent, prctl = os.getpid(), _libc.prctl

    def tie() -> None:
        prctl(_PR_SET_PDEATHSIG, int(number))
        if os.getppid() != parent:  # it ended before the call
            os.kill(os.getpid(), number)

    return tie
