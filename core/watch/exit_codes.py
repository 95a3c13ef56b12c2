"""How a process of a run ends, as a number: what a supervisor, a script or a person can act on.

The one idea: a code says whether starting again can help. A lost machine is worth another start; a mistake in the
configuration, or a loss that is not a number, is the same mistake again.
"""

from __future__ import annotations

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
INTERRUPTED = 130  # 128 + SIGINT, as shells say it; likewise the next
JAX_ABORTED = 134
PREEMPTED = 143


class Ending(NamedTuple):
    """What an exit code says.

    Attributes:
      meaning: a sentence for whoever reads it.
      restart: whether starting the same command again can help.
    """

    meaning: str
    restart: bool


ENDINGS: dict[int, Ending] = {
    DONE: Ending("done", False),
    FAILED: Ending("set-up failed, or a check did not pass; the message says which", False),
    USER_ERROR: Ending(
        "something for the user to fix: the message says what, where and how (RENGA_TRACEBACK=1 shows where in the "
        "code)",
        False,
    ),
    RAISED: Ending("this host raised; its traceback is in its log", True),
    HUNG: Ending("this host made no step for longer than its limit; the stacks of its threads are in its log", True),
    PEER_LOST: Ending("another host was lost or ended; the message names it, its last step and what it did", True),
    DIVERGED: Ending("hosts that must hold the same numbers do not; the message names them", False),
    NON_FINITE: Ending("the loss or the gradient is not a number", False),
    RUN_DIRECTORY_LOST: Ending(
        "the run directory was deleted, or taken over by another launch, while the run went on; host 0 says which",
        False,
    ),
    INTERRUPTED: Ending("stopped by Ctrl-C", False),
    JAX_ABORTED: Ending("JAX ended this process because another was gone: read that host's log first", True),
    PREEMPTED: Ending(
        "told to stop (SIGTERM): saved what it had trained (before it joins the others a process just ends), and goes "
        "on when started again",
        True,
    ),
}
_BY_SIGNAL = Ending("ended by signal {} (9: killed, often for memory)", True)


def ending(code: int) -> Ending:
    """What a code means; `128 + N` is signal N."""
    if code in ENDINGS:
        return ENDINGS[code]
    if 128 < code < 128 + 65:
        return _BY_SIGNAL._replace(meaning=_BY_SIGNAL.meaning.format(code - 128))
    return Ending(f"an exit code that no part of this project uses ({code})", False)


def of_process(returncode: int) -> int:
    """The code of a process that Python says ended with `returncode`, as shells say it: 128 + N by signal N."""
    return returncode if returncode >= 0 else 128 - returncode


def markdown_table() -> str:
    """The table of launch/README.md."""
    rows = ["| code | meaning | worth another start |", "|---|---|---|"]
    rows += [f"| {code} | {said.meaning} | {'yes' if said.restart else 'no'} |" for code, said in ENDINGS.items()]
    rows.append(f"| 128 + N | {_BY_SIGNAL.meaning.format('N')} | yes |")
    return "\n".join(rows) + "\n"
