"""Hooks that write profiles of chosen steps and of memory, and handle requests for profiles of a run that is training.

    command ── RUN/profile_request.json ──> host 0 ── first and last step, posted ──> every host
       ^                                       │ <── "written" ─────────────────────────── │
       └────── RUN/profile_answer.json <───────┘

All hosts trace the same steps, and no host waits for a request inside a step. A thread of each host polls the posted
texts, and host 0 chooses a first step far enough ahead that all hosts have polled by then. Hosts that train together
are within two steps of one another, so a step that is far enough ahead of host 0 is ahead of all. A host that receives
the window late begins late, and reports that in the answer.
"""

import collections
import contextlib
import json
import math
import pathlib
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import jax

from core import library_errors, units
from core.files import foreign_json, paths
from core.hosts import distributed
from core.training.trainer import Hook, StepReport

PROFILES = ("tensorboard", "plugins", "profile")  # folder in the run directory, where TensorBoard looks
SUFFIX = ".xplane.pb"
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
    """The steps from `first_step` to `last_step`, both included, which are to be traced."""

    first_step: int
    last_step: int


def window_of(steps: int | None, seconds: float | None, *, step: int, step_seconds: float, end: int) -> Window | None:
    """Returns the steps to trace for a request, after `step`, up to the run's last step; None if it ends before them.

    Args:
      steps: number of steps; None: as many as take `seconds`, at least 1.
      seconds: duration if `steps` is None.
      step: the current step of host 0.
      step_seconds: duration of a step.
      end: the run's last step.
    """
    first = step + max(_AHEAD_STEPS, math.ceil(_AHEAD_SECONDS / step_seconds))
    assert steps or seconds, "a request says one of them"
    count = steps or max(1, round((seconds or 0.0) / step_seconds))
    return Window(first, min(first + count - 1, end)) if first <= end else None


class Requests:
    """The profile requests of the run in `run_dir`, as seen by one of its hosts.

    The hook calls `asked` before every step to learn of a window that begins, and `done` when its file is written.
    """

    def __init__(self, run_dir: str, *, last_step: int):
        """Starts a thread that polls: host 0 for requests, every host for the profiling windows that host 0 posts.

        Args:
          run_dir: local or gs://.
          last_step: the last step of the run.
        """
        folder = paths.resolve(run_dir)
        self._request, self._answer = folder / REQUEST_NAME, folder / ANSWER_NAME
        self._request_seconds = _BUCKET_SECONDS if paths.is_remote(folder) else _LOCAL_SECONDS
        self._last_step = last_step
        self._steps: collections.deque[tuple[int, float]] = collections.deque(maxlen=11)
        self._seen = ""
        self._late_by = 0
        self._waiting: Window | None = None
        self._open: dict[str, Any] = {}  # host 0: the current request, until all hosts have written their profiles
        self._looked_at = -math.inf
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._work, name="profile requests", daemon=True)
        self._thread.start()

    def asked(self, step: int) -> Window | None:
        """Returns the window that `step` belongs to, once; otherwise None. Called before every step; does not wait."""
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

    def done(self) -> None:
        """Reports that this host has written the requested profile."""
        self._say_done(f"began {units.counted(self._late_by, 'step')} late" if self._late_by else "")

    def close(self) -> None:
        """Ends the thread; host 0 waits up to 10 s for profiles that other hosts are still writing."""
        self._closing.set()
        self._thread.join(_CLOSING_SECONDS + 1.0)

    def _say_done(self, remark: str) -> None:
        done = {"id": self._seen, "remark": remark}
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
        plan = json.loads(posted.get("window", "{}"))
        if plan and plan["id"] != self._seen:
            self._seen, self._waiting = plan["id"], Window(plan["first_step"], plan["last_step"])
        if self._open:
            self._answer_when_written(posted)

    def _look_for_request(self) -> None:
        """Reads a request if there is one, and posts the steps that all hosts will trace."""
        if self._open or len(self._steps) < 2 or time.monotonic() - self._looked_at < self._request_seconds:
            return
        self._looked_at = time.monotonic()
        if not self._request.exists():
            return
        text = self._request.read_bytes()
        self._request.unlink()
        request = foreign_json.load_object(text, {"id": str})
        (old, then), (step, now) = self._steps[0], self._steps[-1]
        step_seconds = max((now - then) / (step - old), 1e-3)
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
            remarks = {str(host): said["remark"] for host, said in done.items() if said["remark"]}
            self._say({**self._open, "state": "written", "remarks": remarks})
            self._open = {}

    def _say(self, answer: dict[str, Any]) -> None:
        paths.write_text_atomically(self._answer, json.dumps(answer) + "\n")


class Asks(Protocol):
    """Interface of the profile requests of a run; `Requests` implements it."""

    def asked(self, step: int) -> Window | None:
        """Returns the window that `step` belongs to, once; otherwise None. Called before every step; does not wait."""

    def done(self) -> None:
        """Reports that this host has written the requested profile."""


class Stops(Protocol):
    """Interface of a trace in progress; `Trace` implements it."""

    def stop(self) -> object:
        """Ends the trace, when its steps have finished on the devices."""


class Profile(Hook):
    """Profiles windows of steps: those of the configuration and those requested while the run trains.

    No window begins while another is open.
    """

    def __init__(self, start: Callable[[int], Stops], requests: Asks, *, at: Sequence[int] = (), num_steps: int = 3):
        """Profiles windows of `num_steps` at the given steps, and the requested ones.

        Args:
          start: begins the trace of the window that begins at this step.
          requests: the windows that are requested while the run trains.
          at: steps at which a window begins.
          num_steps: number of steps in each of these profiles.
        """
        self._start, self._requests = start, requests
        self._at, self._num_steps = frozenset(at), num_steps
        self._open: tuple[Stops, Window, bool] | None = None

    def before_step(self, step: int) -> None:
        """Opens a window if one begins at this step."""
        if self._open is not None:
            return
        asked = self._requests.asked(step)
        planned = Window(step, step + self._num_steps - 1) if step in self._at else None
        if window := asked or planned:
            self._open = self._start(window.first_step), window, asked is not None

    def needs_state(self, step: int) -> bool:
        """Returns True at the last step of a window, so that it finishes before the next step is dispatched.

        A host that learned of a window late may answer differently from the others; it then only reads that step's
        metrics earlier.
        """
        return self._open is not None and step >= self._open[1].last_step

    def after_step(self, report: StepReport) -> None:
        """Closes the window after its last step."""
        if self._open is not None and report.step >= self._open[1].last_step:
            self.close()

    def close(self) -> None:
        """Closes an open window."""
        if self._open is not None:
            trace, _, was_asked = self._open
            self._open = None
            trace.stop()
            if was_asked:
                self._requests.done()


class Trace:
    """A trace of the steps from `step` on. Every host writes it to a file of its own:

        RUN/tensorboard/plugins/profile/step_100/<hostname>-p<process>.xplane.pb

    JAX's profiler names its file after the hostname, in a folder named after the local time. Hosts would then write to
    different folders, and hosts with the same name would overwrite one another. Therefore every host traces into a
    temporary folder with the same session name, and copies its file to a path of its own.
    """

    def __init__(self, run_dir: str, step: int, *, process_index: int | None = None):
        """Begins to trace; `process_index` defaults to that of this host."""
        process = distributed.process_index() if process_index is None else process_index
        options = jax.profiler.ProfileOptions()
        options.session_id = f"step_{step}"
        options.python_tracer_level = 0  # Python frames would hide the device's rows and slow the step
        self._folder = paths.resolve(run_dir).joinpath(*PROFILES, options.session_id)
        self._name = f"{socket.gethostname()}-p{process}"
        self._traced = tempfile.TemporaryDirectory(prefix="renga-profile-")
        jax.profiler.start_trace(self._traced.name, profiler_options=options)

    def stop(self) -> list[paths.Path]:
        """Ends the trace and returns the written files; call it when the steps have finished on the devices."""
        with self._traced:
            jax.profiler.stop_trace()
            found = sorted(pathlib.Path(self._traced.name).rglob(f"*{SUFFIX}"))
            names = [f"{self._name}{f'-{number}' if number else ''}{SUFFIX}" for number in range(len(found))]
            return [paths.copy_file(file, to=self._folder / name) for file, name in zip(found, names, strict=True)]


class MemoryProfile(Hook):
    """Writes profiles of the memory of this host's chips for `pprof`: RUN/memory/step_100-host_2.pprof."""

    def __init__(self, run_dir: str, *, at: Sequence[int] = (), process_index: int | None = None):
        """Writes after the steps in `at`; `process_index` defaults to that of this host."""
        self._directory, self._at = paths.resolve(run_dir) / "memory", frozenset(at)
        self._process = distributed.process_index() if process_index is None else process_index

    def after_step(self, report: StepReport) -> None:
        """Writes at the given steps; the next step has usually begun by then, so its arrays are included."""
        if report.step in self._at:
            self._write(f"step_{report.step}-host_{self._process}.pprof", why=f"step {report.step}")

    @contextlib.contextmanager
    def when_exhausted(self) -> Iterator[None]:
        """Context in which an out-of-memory error of JAX writes a memory profile before it propagates."""
        try:
            yield
        except jax.errors.JaxRuntimeError as error:
            if library_errors.is_out_of_memory(error):
                self._write(f"exhausted-host_{self._process}.pprof", why="memory is exhausted")
            raise

    def _write(self, name: str, *, why: str) -> None:
        with tempfile.TemporaryDirectory(prefix="renga-memory-") as folder:
            local = pathlib.Path(folder) / name
            jax.profiler.save_device_memory_profile(str(local))
            written = paths.copy_file(local, to=self._directory / name)
        print(f"host {self._process}: {why}: what is in device memory is in {written}", flush=True)
