"""Measures the goodput of a run over all its starts, and finds the slowest host.

Goodput is the fraction of the time since a run first started that was spent in useful steps. `RUN/sessions.jsonl` has
one line per start (session). The time between a start that reached the run's last step and the next start is not
counted.

Hosts that train together have about the same step time, because each waits for the slowest. They differ in their own
work and their wait for data.
"""

import dataclasses
import itertools
import json
import os
import pathlib
import time
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax

from core import units
from core.files import bookkeeping, foreign_json, paths
from core.hosts import distributed
from core.slices import GIB
from core.training.trainer import Hook, StepReport

FILE = "sessions.jsonl"
NAME = "goodput"
_SECONDS_BETWEEN_WRITES = 10.0
_SECONDS_BETWEEN_COPIES = 30.0  # to a bucket
SENT = ("step_seconds", "input_wait_seconds", "device_seconds", "host_seconds")
WORTH_NAMING = 0.1  # fraction of a step that the slowest host must cost the others to be reported
_FOLDER = "figures"
_LINES = 3  # lines that a host keeps posted: hosts are at most two steps apart


@dataclasses.dataclass
class Session:
    """One start of a run.

    Attributes:
      started, seen: start, and last update of this line, in seconds since 1970.
      first_step: the step after which it began, or an earlier one to which it rolled back.
      last_step: its last step that was not repeated later.
      useful_seconds: time in its steps, without the first (which compiles), repeated ones, and waiting for data.
      lost_steps: number of its steps that were repeated later.
      finished: whether it reached the last step of the run.
    """

    started: float
    seen: float
    first_step: int
    last_step: int
    useful_seconds: float = 0.0
    lost_steps: int = 0
    finished: bool = False

    def lose(self, *, after: int) -> None:
        """Counts its steps after step `after` as lost, and subtracts their mean time."""
        lost = self.last_step - max(self.first_step, after)
        if lost > 0:
            self.useful_seconds *= 1 - lost / (self.last_step - self.first_step)
            self.last_step -= lost
            self.lost_steps += lost


_KINDS = typing.get_type_hints(Session)
_REQUIRED = {f.name: _KINDS[f.name] for f in dataclasses.fields(Session) if f.default is dataclasses.MISSING}


def share(sessions: Sequence[Session]) -> float:
    """Returns the goodput, 0 to 1, of at least one session."""
    seconds = sessions[0].seen - sessions[0].started + sum(itertools.starmap(_added, itertools.pairwise(sessions)))
    return sum(s.useful_seconds for s in sessions) / seconds if seconds > 0 else 0.0


def _added(earlier: Session, later: Session) -> float:
    set_back = later.seen < earlier.seen  # the machine's clock was set to an earlier time between them
    idle = earlier.finished and later.started > earlier.seen
    return later.seen - (later.started if set_back or idle else earlier.seen)


def read(run_dir: str) -> list[Session]:
    """Reads the sessions of a run, in order; malformed lines are skipped."""
    file = paths.resolve(run_dir) / FILE
    sessions = []
    for line in file.read_bytes().splitlines() if file.exists() else ():
        try:
            found = foreign_json.load_object(line, _REQUIRED)
        except foreign_json.MalformedError:
            continue
        own = {name: found[name] for name in _KINDS if name in found}
        if all(foreign_json.is_a(value, _KINDS[name]) for name, value in own.items()):
            sessions.append(Session(**own))
    return sessions


def sentence(sessions: Sequence[Session]) -> str:
    """Describes the goodput of at least one session."""
    lost, starts = sum(s.lost_steps for s in sessions), len(sessions)
    again = f"; {units.counted(lost, 'step was', 'steps were')} repeated" if lost else ""
    return f"goodput {100 * share(sessions):.1f} % over {units.counted(starts, 'start')}{again}"


class Goodput(Hook):
    """A hook for host 0 that measures the goodput, and updates RUN/sessions.jsonl."""

    def __init__(
        self,
        run_dir: str,
        *,
        first_step: int,
        last_step: int | None,
        every: int,
        write: Callable[[int, dict[str, float]], None],
        say: Callable[[str], None],
        started: float | None = None,
        continues: bool = False,
    ):
        """Reads the sessions of earlier starts.

        Args:
          first_step: step of the restored checkpoint; 0 for none.
          last_step: last step of the run; None: another phase follows.
          every: `write` is called at the steps that are multiples of this.
          write: receives the step and `{"goodput": share}`.
          say: receives a sentence about the goodput.
          started: when this start began, by `time.monotonic`; None: when the process began.
          continues: whether this start has trained the phase before, so that the last session goes on.
        """
        self._run_dir = run_dir
        self._last_step, self._every = last_step, every
        self._write, self._say = write, say
        self._bookkeeping = bookkeeping.Bookkeeping(f"{run_dir}/{FILE}")
        self._pause_seconds = _SECONDS_BETWEEN_COPIES if paths.is_remote(run_dir) else _SECONDS_BETWEEN_WRITES
        self._sessions = read(run_dir)
        for earlier in self._sessions:  # steps after the checkpoint are repeated
            earlier.lose(after=first_step)
        age = process_seconds() if started is None else time.monotonic() - started
        now = time.time()
        continues = continues and bool(self._sessions)
        if not continues:
            self._sessions.append(Session(now - age, now, first_step, first_step))
        self._own = self._sessions[-1]
        # Fixed, because the time of day may be set while the run trains.
        self._since_1970 = self._own.started + age - time.monotonic()
        self._is_first, self._wrote_at = True, 0.0
        if len(self._sessions) > 1 and not continues:
            self._say(f"{sentence(self._sessions)}; continues from step {first_step}")
        self._keep()

    def after_step(self, report: StepReport) -> None:
        self._own.lose(after=report.step - 1)  # after a rollback
        self._own.first_step = min(self._own.first_step, report.step - 1)
        self._own.last_step = report.step
        if not self._is_first:
            self._own.useful_seconds += max(0.0, report.seconds - report.input_wait_seconds)
        self._is_first = False
        self._own.seen = self._since_1970 + time.monotonic()
        if report.step % self._every == 0:
            self._write(report.step, {NAME: share(self._sessions)})
        if time.monotonic() - self._wrote_at >= self._pause_seconds:
            self._keep()

    def close(self) -> None:
        self._own.finished = self._last_step is not None and self._own.last_step >= self._last_step
        self._own.seen = self._since_1970 + time.monotonic()
        self._keep()
        self._say(sentence(self._sessions))

    def _keep(self) -> None:
        self._wrote_at = time.monotonic()
        lines = [json.dumps(dataclasses.asdict(session)) + "\n" for session in self._sessions]
        file = paths.resolve(self._run_dir) / FILE
        self._bookkeeping.attempt(lambda: paths.write_text_atomically(file, "".join(lines)))


def process_started() -> float:
    """Returns when this process started, in seconds since 1970."""
    return time.time() - process_seconds()


def process_seconds() -> float:
    """Returns the seconds since this process started."""
    up_seconds = float(pathlib.Path("/proc/uptime").read_text().split()[0])
    return up_seconds - own_ticks() / os.sysconf("SC_CLK_TCK")


def own_ticks() -> int:
    """Returns when this process started, in clock ticks since boot."""
    ticks = start_ticks(os.getpid())
    assert ticks is not None, "this process runs"
    return ticks


def start_ticks(pid: int) -> int | None:
    """Returns when a process started, in clock ticks since boot; None if it does not run."""
    try:
        state, *fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if state in "ZX" else int(fields[18])


class Slowest(NamedTuple):
    """The host with the most own time per step: its work, and waiting for data.

    Attributes:
      seconds: its own time, minus that of the fastest host.
    """

    host: int
    seconds: float


def hbm_gib() -> dict[str, float]:
    """Returns the peak memory of each chip of this host in GiB, if it is known."""
    used = {f"chip_{d.id}": (d.memory_stats() or {}).get("peak_bytes_in_use") for d in jax.local_devices()}
    return {name: count / GIB for name, count in used.items() if count is not None}


class HostMetrics:
    """The measurements of this host and, on host 0, of all hosts.

    Attributes:
      slowest: on host 0, the slowest host if it costs the others more than WORTH_NAMING of a step; otherwise None.
    """

    def __init__(self, *, hbm: Callable[[], Mapping[str, float]] = hbm_gib):
        self._hbm = hbm
        self._written: dict[str, float] = {}  # memory that was reported already, because it rarely changes
        self._latest: dict[int, Mapping[str, float]] = {}  # this host's last lines, by step
        self._compared = -1
        self._times_back = 0
        self.slowest: Slowest | None = None

    def own(self, values: Mapping[str, float]) -> dict[str, float]:
        """Selects this host's measurements from a log line, and adds its chips' memory."""
        memory = {f"hbm_gib/{chip}": gib for chip, gib in self._hbm().items()}
        return {name: values[name] for name in SENT if name in values} | memory

    def exchange(self, step: int, own: Mapping[str, float]) -> tuple[int, dict[str, float]]:
        """Posts this host's measurements of a log line; on host 0, returns those of all hosts.

        Returns:
          On host 0, the latest step that all hosts have posted, and its values, such as `hosts/step_seconds/host_2`;
            without a new one, `step` and no values.
        """
        if self._latest and step <= max(self._latest):
            self._latest, self._compared, self._times_back = {}, -1, self._times_back + 1
        self._latest[step] = own
        self._latest = dict(sorted(self._latest.items())[-_LINES:])
        distributed.post(f"{_FOLDER}/{distributed.process_index()}", json.dumps([self._times_back, self._latest]))
        if not distributed.is_host_zero():
            return step, {}
        put_up = {int(host): json.loads(text) for host, text in distributed.posted(_FOLDER).items()}
        of_hosts = {host: lines if back == self._times_back else {} for host, (back, lines) in put_up.items()}
        common = set.intersection(*({int(line) for line in lines} for lines in of_hosts.values()))
        compared = max(common, default=-1)
        if len(of_hosts) < distributed.process_count() or compared <= self._compared:
            return step, {}
        self._compared = compared
        return compared, self._beside({host: lines[str(compared)] for host, lines in of_hosts.items()})

    def _beside(self, figures: Mapping[int, Mapping[str, float]]) -> dict[str, float]:
        alone = {host: own["input_wait_seconds"] + own["host_seconds"] for host, own in sorted(figures.items())}
        steps = {host: own["step_seconds"] for host, own in sorted(figures.items())}
        found: dict[str, float] = {}
        for name, by_host in (("step_seconds", steps), ("own_seconds", alone)):
            found |= {f"hosts/{name}/host_{host}": seconds for host, seconds in by_host.items()}
            found[f"hosts/{name}_spread"] = max(by_host.values()) - min(by_host.values())
        slowest = max(alone, key=alone.__getitem__)
        behind = Slowest(slowest, found["hosts/own_seconds_spread"])
        self.slowest = behind if behind.seconds > WORTH_NAMING * max(steps.values()) else None
        return found | {"hosts/slowest": float(slowest)} | self._memory(figures)

    def _memory(self, figures: Mapping[int, Mapping[str, float]]) -> dict[str, float]:
        now = {
            name.replace("hbm_gib/", f"hbm_gib/host_{host}/"): value
            for host, own in figures.items()
            for name, value in own.items()
            if name.startswith("hbm_gib/")
        }
        changed = {name: value for name, value in now.items() if self._written.get(name) != value}
        self._written |= changed
        return changed
