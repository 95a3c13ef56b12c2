"""Hooks that write profiles of chosen steps and of memory, also on request while a run is training.

    command ── RUN/profile_request.json ──> host 0 ── first and last step, posted ──> every host
       ^                                       │ <── "written" ─────────────────────────── │
       └────── RUN/profile_answer.json <───────┘

A thread of each host polls the posted texts, so no host waits inside a step.
"""

import collections
import contextlib
import itertools
import json
import math
import pathlib
import re
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import jax

from core import library_errors, units
from core.files import foreign_json, paths
from core.hosts import distributed
from core.training.trainer import Hook, StepReport

Made = TypeVar("Made")
PROFILES = ("tensorboard", "plugins", "profile")  # folder in the run directory, where TensorBoard looks
SUFFIX = ".xplane.pb"
_OF_HOST = re.compile(r"-p(?P<process>\d+)of(?P<count>\d+)")  # in the name of a file
REQUEST_NAME = "profile_request.json"
ANSWER_NAME = "profile_answer.json"

_FOLDER = "profile"
_LOOK_SECONDS = 0.5  # interval for reading posted texts
_LOCAL_SECONDS = 1.0  # interval for reading the request; a bucket is read less often
_BUCKET_SECONDS = 5.0
_AHEAD_SECONDS = 2.0
_AHEAD_STEPS = 3
_CLOSING_SECONDS = 10.0


class Window(NamedTuple):
    """The steps to trace, from `first_step` to `last_step`, both included."""

    first_step: int
    last_step: int


def window_of(steps: int | None, seconds: float | None, *, step: int, step_seconds: float, end: int) -> Window | None:
    """Returns the steps to trace for a request; None if the run ends before them.

    Args:
      steps: number of steps; None: as many as take `seconds`, at least 1.
      seconds: duration if `steps` is None.
      step: the current step.
      end: the run's last step.
    """
    first = step + max(_AHEAD_STEPS, math.ceil(_AHEAD_SECONDS / step_seconds))
    assert steps or seconds, "a request says one of them"
    count = steps or max(1, round((seconds or 0.0) / step_seconds))
    return Window(first, min(first + count - 1, end)) if first <= end else None


class Requests:
    """The profile requests of a run, as seen by one of its hosts."""

    def __init__(self, run_dir: str, *, last_step: int):
        """Starts a thread that polls for requests (on host 0) and for posted windows."""
        folder = paths.resolve(run_dir)
        self._request, self._answer = folder / REQUEST_NAME, folder / ANSWER_NAME
        self._request_seconds = _BUCKET_SECONDS if paths.is_remote(folder) else _LOCAL_SECONDS
        self._last_step = last_step
        self._steps: collections.deque[tuple[int, float]] = collections.deque(maxlen=11)
        # Left by an earlier run of this process. With several hosts, it may be the first of this run.
        self._seen = _planned(distributed.posted(_FOLDER)).get("id", "") if distributed.process_count() == 1 else ""
        self._late_by = 0
        self._waiting: Window | None = None
        self._open: dict[str, Any] = {}  # host 0: the current request, until all hosts have written their profiles
        self._looked_at = -math.inf
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._work, name="profile requests", daemon=True)
        self._thread.start()

    def asked(self, step: int) -> Window | None:
        """Returns the window that `step` belongs to, once; otherwise None. Called before every step."""
        if self._steps and step <= self._steps[-1][0]:  # the run was rolled back
            self._steps.clear()
        self._steps.append((step, time.monotonic()))
        found = self._waiting
        if found is None or step < found.first_step:
            return None
        self._waiting = None
        if step > found.last_step:
            self._say_done("learned of it after its last step")
            return None
        self._late_by = step - found.first_step
        return found

    def done(self, failure: str = "") -> None:
        """Reports that this host has written the requested profile, or why it could not."""
        late = f"began {units.counted(self._late_by, 'step')} late" if self._late_by else ""
        self._say_done("" if failure else late, failure)

    def close(self) -> None:
        """Ends the thread; host 0 waits up to 10 s for other hosts' profiles."""
        self._closing.set()
        self._thread.join(_CLOSING_SECONDS + 1.0)

    def _say_done(self, remark: str, failure: str = "") -> None:
        done = {"id": self._seen, "remark": remark, "failure": failure}
        distributed.post(f"{_FOLDER}/done/{distributed.process_index()}", json.dumps(done))

    def _work(self) -> None:
        while not self._closing.wait(_LOOK_SECONDS):
            try:
                self._look()
            except Exception as error:  # a file system or a coordinator in trouble must not end a run over this
                print(f"profile requests: {type(error).__name__}: {error}; looks again", flush=True)
                self._closing.wait(_BUCKET_SECONDS)
        deadline = time.monotonic() + _CLOSING_SECONDS
        while self._open and time.monotonic() < deadline:
            self._answer_when_written(distributed.posted(_FOLDER))
            time.sleep(_LOOK_SECONDS / 5)

    def _look(self) -> None:
        if distributed.is_host_zero():
            self._look_for_request()
        posted = distributed.posted(_FOLDER)
        plan = _planned(posted)
        if plan and plan["id"] != self._seen:
            self._seen, self._waiting = plan["id"], Window(plan["first_step"], plan["last_step"])
        if self._open:
            self._answer_when_written(posted)

    def _look_for_request(self) -> None:
        seen = list(self._steps)  # to which the thread of the steps appends
        if self._open or len(seen) < 2 or time.monotonic() - self._looked_at < self._request_seconds:
            return
        step, _ = seen[-1]
        self._looked_at = time.monotonic()
        if not self._request.exists():
            return
        text = self._request.read_bytes()
        self._request.unlink()
        request = foreign_json.load_object(text, {"id": str})
        between = [(now - then) / (new - old) for (old, then), (new, now) in itertools.pairwise(seen)]
        step_seconds = max(statistics.median(between), 1e-3)  # one may hold a compilation or an evaluation
        found = window_of(
            request.get("steps"), request.get("seconds"), step=step, step_seconds=step_seconds, end=self._last_step
        )
        if found is None:
            self._say({"id": request["id"], "state": "over", "step": step, "last_step": self._last_step})
            return
        plan = {"id": request["id"], **found._asdict()}
        distributed.post(f"{_FOLDER}/window", json.dumps(plan))
        self._open = {
            **plan,
            "session": f"step_{found.first_step}",
            "hosts": distributed.process_count(),
            "starts_in_seconds": round((found.first_step - step) * step_seconds, 1),
            "step_seconds": round(step_seconds, 4),
        }
        self._say({**self._open, "state": "planned"})

    def _answer_when_written(self, posted: dict[str, str]) -> None:
        done = {host: json.loads(posted.get(f"done/{host}", "{}")) for host in range(self._open["hosts"])}
        if all(said.get("id") == self._open["id"] for said in done.values()):
            remarks, failures = (
                {str(host): said[kind] for host, said in done.items() if said[kind]} for kind in ("remark", "failure")
            )
            self._say({**self._open, "state": "written", "remarks": remarks, "failures": failures})
            self._open = {}

    def _say(self, answer: dict[str, Any]) -> None:
        paths.write_text_atomically(self._answer, json.dumps(answer) + "\n")


def _planned(posted: Mapping[str, str]) -> dict[str, Any]:
    """Returns the last window that host 0 has posted; {} without one."""
    return json.loads(posted.get("window", "{}"))


class Asks(Protocol):
    """Interface of the profile requests of a run."""

    def asked(self, step: int) -> Window | None:
        """Returns the window that `step` belongs to, once; otherwise None. Called before every step."""

    def done(self, failure: str = "") -> None:
        """Reports that this host has written the requested profile, or why it could not."""


class Stops(Protocol):
    """Interface of a trace in progress."""

    def stop(self) -> object:
        """Ends the trace; its steps must have finished on the devices."""


class Profile(Hook):
    """Profiles windows of steps: planned ones, and those requested while the run trains."""

    def __init__(self, start: Callable[[int], Stops], requests: Asks, *, at: Sequence[int] = (), num_steps: int = 3):
        """`at`: steps at which a planned window of `num_steps` steps begins."""
        self._start, self._requests = start, requests
        self._at, self._num_steps, self._host = frozenset(at), num_steps, distributed.process_index()
        self._open: tuple[Stops, Window, bool] | None = None

    def before_step(self, step: int) -> None:
        if self._open is not None:
            return
        asked = self._requests.asked(step)
        planned = Window(step, step + self._num_steps - 1) if step in self._at else None
        if window := asked or planned:
            trace, failure = _tried(lambda: self._start(window.first_step), _named(window), host=self._host)
            if trace is not None:
                self._open = trace, window, asked is not None
            elif asked:
                self._requests.done(failure)

    def needs_state(self, step: int) -> bool:
        """Returns True at the last step of a window, which finishes before the next is dispatched."""
        return self._open is not None and step >= self._open[1].last_step

    def after_step(self, report: StepReport) -> None:
        if self._open is not None and report.step >= self._open[1].last_step:
            self.close()

    def close(self) -> None:
        if self._open is not None:
            trace, window, was_asked = self._open
            self._open = None
            _, failure = _tried(trace.stop, _named(window), host=self._host)
            if was_asked:
                self._requests.done(failure)


def _named(window: Window) -> str:
    return f"the profile of steps {window.first_step} to {window.last_step}"


def _tried(make: Callable[[], Made], what: str, *, host: int) -> tuple[Made | None, str]:
    """Returns what `make` returns, and ""; if it fails, None and the reason, which is printed.

    A failure to write a profile, such as on a full disk, does not end the run.
    """
    try:
        return make(), ""
    except Exception as error:
        failure = f"could not write {what}: {type(error).__name__}: {error}"
        print(f"host {host} {failure}", flush=True)
        return None, failure


class Trace:
    """A trace of the steps from `step` on. Every host writes it to a file of its own:

        RUN/tensorboard/plugins/profile/step_100/<hostname>-p<process>of<hosts>.xplane.pb

    JAX's profiler names the file after the hostname alone, so hosts with the same name could overwrite one another.
    """

    def __init__(self, run_dir: str, step: int):
        """Begins to trace."""
        process = distributed.process_index()
        options = jax.profiler.ProfileOptions()
        options.session_id = f"step_{step}"
        options.python_tracer_level = 0  # Python frames would hide the device's rows and slow the step
        self._folder = paths.resolve(run_dir).joinpath(*PROFILES, options.session_id)
        self._name = f"{socket.gethostname()}-p{process}of{distributed.process_count()}"
        self._traced = tempfile.TemporaryDirectory(prefix="renga-profile-")
        jax.profiler.start_trace(self._traced.name, profiler_options=options)

    def stop(self) -> list[paths.Path]:
        """Ends the trace, whose steps must have finished; returns the written files."""
        with self._traced:
            jax.profiler.stop_trace()
            found = sorted(pathlib.Path(self._traced.name).rglob(f"*{SUFFIX}"))
            names = [f"{self._name}{f'-{number}' if number else ''}{SUFFIX}" for number in range(len(found))]
            self._remove_earlier()
            return [paths.copy_file(file, to=self._folder / name) for file, name in zip(found, names, strict=True)]

    def _remove_earlier(self) -> None:
        """Removes what this process traced of the same step on another machine and, as host 0, with other hosts."""
        process, count = distributed.process_index(), distributed.process_count()
        for file in self._folder.glob(f"*{SUFFIX}") if self._folder.exists() else ():
            if (of := _OF_HOST.search(file.name)) is None:
                continue
            is_own = int(of["process"]) == process and not file.name.startswith(f"{socket.gethostname()}-p")
            if is_own or (process == 0 and int(of["count"]) != count):
                file.unlink()


class MemoryProfile(Hook):
    """Writes memory profiles of this host's chips for `pprof`: RUN/memory/step_100-host_2.pprof."""

    def __init__(self, run_dir: str, *, at: Sequence[int] = (), process_index: int | None = None):
        """Writes after the steps in `at`; `process_index` defaults to that of this host."""
        self._directory, self._at = paths.resolve(run_dir) / "memory", frozenset(at)
        self._process = distributed.process_index() if process_index is None else process_index

    def after_step(self, report: StepReport) -> None:
        if report.step in self._at:
            self._write(f"step_{report.step}-host_{self._process}.pprof", why=f"step {report.step}")

    @contextlib.contextmanager
    def when_exhausted(self) -> Iterator[None]:
        """Context in which an out-of-memory error of JAX writes a memory profile."""
        try:
            yield
        except jax.errors.JaxRuntimeError as error:
            if library_errors.is_out_of_memory(error):
                self._write(f"exhausted-host_{self._process}.pprof", why="memory is exhausted")
            raise

    def _write(self, name: str, *, why: str) -> None:
        def write() -> paths.Path:
            with tempfile.TemporaryDirectory(prefix="renga-memory-") as folder:
                local = pathlib.Path(folder) / name
                jax.profiler.save_device_memory_profile(str(local))
                return paths.copy_file(local, to=self._directory / name)

        written, _ = _tried(write, f"a profile of device memory ({why})", host=self._process)
        if written is not None:
            print(f"host {self._process}: {why}: what is in device memory is in {written}", flush=True)
