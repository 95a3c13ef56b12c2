"""Goodput: the fraction of the time since a run first started that was spent in useful steps.

It is measured over all starts (sessions) of a run. `RUN/sessions.jsonl` has one line per start, which host 0 updates
every few seconds while it trains. The other time is: down time, start-up, compiling, waiting for data, evaluating,
saving, and steps that a later start repeated.

The time between a start that reached its last step and the next start is not counted at all.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import pathlib
import time
from collections.abc import Callable, Sequence

from core import bookkeeping, paths, units
from core.training.trainer import Hook, StepReport

FILE = "sessions.jsonl"
NAME = "goodput"
_SECONDS_BETWEEN_WRITES = 10.0
_SECONDS_BETWEEN_COPIES = 30.0  # to a bucket


@dataclasses.dataclass
class Session:
    """One start of a run.

    Attributes:
      started: seconds since 1970.
      seen: when this line was last updated, in seconds since 1970.
      first_step: the step after which it began.
      last_step: its last step that was not repeated later.
      useful_seconds: time in steps, without the first (which compiles) and without waiting for data.
      lost_steps: number of its steps that were repeated later.
      finished: whether it reached its last step.
    """

    started: float
    seen: float
    first_step: int
    last_step: int
    useful_seconds: float = 0.0
    lost_steps: int = 0
    finished: bool = False

    def lose(self, *, after: int) -> None:
        """Marks the steps after `after` as lost, at the mean time per step."""
        lost = self.last_step - max(self.first_step, after)
        if lost > 0:
            self.useful_seconds *= 1 - lost / (self.last_step - self.first_step)
            self.last_step -= lost
            self.lost_steps += lost


def share(sessions: Sequence[Session]) -> float:
    """Returns the goodput: useful seconds divided by all seconds, 0 to 1."""
    idle = [later.started - s.seen for s, later in itertools.pairwise(sessions) if s.finished]
    seconds = sessions[-1].seen - sessions[0].started - sum(max(0.0, gap) for gap in idle)
    return sum(s.useful_seconds for s in sessions) / seconds if seconds > 0 else 0.0


def read(run_dir: str) -> list[Session]:
    """Reads the sessions of a run; malformed lines are skipped."""
    file = paths.resolve(run_dir) / FILE
    sessions = []
    for line in file.read_text().splitlines() if file.exists() else ():
        try:
            sessions.append(Session(**json.loads(line)))
        except (ValueError, TypeError):
            continue
    return sessions


def sentence(sessions: Sequence[Session]) -> str:
    """Describes the goodput of the sessions so far."""
    lost, starts = sum(s.lost_steps for s in sessions), len(sessions)
    again = f"; {units.counted(lost, 'step was', 'steps were')} repeated" if lost else ""
    return f"goodput {100 * share(sessions):.1f} % over {units.counted(starts, 'start')}{again}"


class Goodput(Hook):
    """A hook that updates the line of this start, on host 0 only."""

    def __init__(
        self,
        run_dir: str,
        *,
        first_step: int,
        last_step: int,
        every: int,
        write: Callable[[int, dict[str, float]], None],
        say: Callable[[str], None],
    ):
        """Reads the sessions of earlier starts and reports their goodput.

        Args:
          run_dir: local or gs://.
          first_step: step of the restored checkpoint; 0 for none.
          last_step: the step at which the run ends.
          every: steps between two reports.
          write: receives the step and `goodput`.
          say: receives a sentence, at the end and at every start after the first.
        """
        self._run_dir = run_dir
        self._last_step, self._every = last_step, every
        self._write, self._say = write, say
        self._bookkeeping = bookkeeping.Bookkeeping(f"{run_dir}/{FILE}")
        self._pause_seconds = _SECONDS_BETWEEN_COPIES if paths.is_remote(run_dir) else _SECONDS_BETWEEN_WRITES
        self._sessions = read(run_dir)
        for earlier in self._sessions:  # steps after the checkpoint are repeated
            earlier.lose(after=first_step)
        self._own = Session(process_started(), time.time(), first_step, first_step)
        self._sessions.append(self._own)
        self._is_first, self._wrote_at = True, 0.0
        if len(self._sessions) > 1:
            self._say(f"{sentence(self._sessions)}; continues from step {first_step}")
        self._keep()

    def after_step(self, report: StepReport) -> None:
        """Counts the step."""
        self._own.lose(after=report.step - 1)  # after a rollback
        self._own.first_step = min(self._own.first_step, report.step - 1)
        self._own.last_step = report.step
        if not self._is_first:
            self._own.useful_seconds += max(0.0, report.seconds - report.input_wait_seconds)
        self._is_first = False
        self._own.seen = time.time()
        if report.step % self._every == 0:
            self._write(report.step, {NAME: share(self._sessions)})
        if time.monotonic() - self._wrote_at >= self._pause_seconds:
            self._keep()

    def close(self) -> None:
        """Updates the line a last time."""
        self._own.finished = self._own.last_step >= self._last_step
        self._own.seen = time.time()
        self._keep()
        self._say(sentence(self._sessions))

    def _keep(self) -> None:
        self._wrote_at = time.monotonic()
        lines = [json.dumps(dataclasses.asdict(session)) + "\n" for session in self._sessions]
        file = paths.resolve(self._run_dir) / FILE
        self._bookkeeping.attempt(lambda: paths.write_text_atomically(file, "".join(lines)))


def process_started() -> float:
    """Returns the time at which this process started, in seconds since 1970."""
    up_seconds = float(pathlib.Path("/proc/uptime").read_text().split()[0])
    return time.time() - (up_seconds - own_ticks() / os.sysconf("SC_CLK_TCK"))


def own_ticks() -> int:
    """Returns the time at which this process started, in clock ticks since boot."""
    ticks = start_ticks(os.getpid())
    assert ticks is not None, "this process runs"
    return ticks


def start_ticks(pid: int) -> int | None:
    """Returns the time at which a process started, in clock ticks since boot; None if it does not run."""
    try:
        state, *fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if state in "ZX" else int(fields[18])
