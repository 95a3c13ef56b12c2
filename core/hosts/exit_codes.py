"""Exit codes of the processes of a run, with their meanings and whether a restart can help."""

from typing import NamedTuple

DONE = 0
FAILED = 1
USER_ERROR = 2
RAISED = 13
HUNG = 14
PEER_LOST = 15
DIVERGED = 16
NON_FINITE = 17
RUN_DIRECTORY_LOST = 18
UNREACHABLE = 19
INTERRUPTED = 130  # 128 + SIGINT, as in shells; likewise below
JAX_ABORTED = 134
PREEMPTED = 143


class Ending(NamedTuple):
    """The meaning of an exit code, a sentence, and whether a restart can help."""

    meaning: str
    restart: bool


ENDINGS: dict[int, Ending] = {
    DONE: Ending("done", False),
    FAILED: Ending(
        "set-up failed, a layout does not fit, compared values differ, a checkpoint is damaged, or part of a suite "
        "failed; the message says which",
        False,
    ),
    USER_ERROR: Ending(
        "user error, or NOT READY from a check: the message says what, where and how to fix it (RENGA_TRACEBACK=1 adds "
        "the traceback)",
        False,
    ),
    RAISED: Ending(
        "unexpected error, of Renga or of your own code: the traceback is printed, on a pod into the host's log", True
    ),
    HUNG: Ending("this host made no progress within its limit; the stacks of its threads are in its log", True),
    PEER_LOST: Ending("another host was lost or ended; the message names it, its last step and activity", True),
    DIVERGED: Ending("hosts disagree about values that must be equal; the message names them", False),
    NON_FINITE: Ending("the loss or the gradient is not finite", False),
    RUN_DIRECTORY_LOST: Ending(
        "the run directory was deleted, or taken over by another launch, during the run; host 0 says which", False
    ),
    UNREACHABLE: Ending(
        "a bucket (gs://), or Weights & Biases, cannot be reached from this machine; the message gives the reason", True
    ),
    INTERRUPTED: Ending(
        "stopped by Ctrl-C: a run saved a checkpoint, unless Ctrl-C came twice or it had trained no step; the same "
        "command resumes",
        False,
    ),
    JAX_ABORTED: Ending("JAX aborted this process because another one was lost; read that host's log first", True),
    PREEMPTED: Ending(
        "preempted (SIGTERM): saved a checkpoint, unless it had not joined the others yet; the same command resumes",
        True,
    ),
}
_BY_SIGNAL = Ending(
    "ended by signal {} (9: killed, often for lack of memory; 7: a file was shortened while it was read)", True
)


def ending(code: int) -> Ending:
    """Returns the meaning of an exit code."""
    if code in ENDINGS:
        return ENDINGS[code]
    if 128 < code < 128 + 65:
        return _BY_SIGNAL._replace(meaning=_BY_SIGNAL.meaning.format(code - 128))
    return Ending(f"unknown exit code {code}", False)


def of_process(returncode: int) -> int:
    """Converts a subprocess's `returncode` into an exit code of a shell, 128 + N for signal N."""
    return returncode if returncode >= 0 else 128 - returncode
