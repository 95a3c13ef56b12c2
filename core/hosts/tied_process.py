"""Ties a child process to this one: the kernel ends the child when this process ends.

This file runs as a program in the child, because a `preexec_fn` can deadlock in a process with threads.
"""

import ctypes
import errno
import os
import shutil
import signal
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def tied(command: Sequence[str], number: signal.Signals = signal.SIGKILL) -> list[str]:
    """Returns a command that becomes `command`, and gets the signal `number` when this process has ended.

    The signal is sent when the thread that starts the child ends, so that thread must outlive the child. Without
    `prctl`, the command is returned as it is. Raises FileNotFoundError if there is no such program.
    """
    if shutil.which(command[0]) is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), command[0])
    if not hasattr(_libc, "prctl"):
        return list(command)
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), str(int(number)), *command]


def _become(parent: int, number: int, command: list[str]) -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # it ended before the call
        os.kill(os.getpid(), number)
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ):  # by Python, and by what it becomes, if they stayed ignored
        signal.signal(ignored, signal.SIG_DFL)
    os.execvp(command[0], command)


if __name__ == "__main__":
    _become(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
