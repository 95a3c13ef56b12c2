"""Writes profiles of chosen steps, from every host, to the folder that TensorBoard reads.

JAX's profiler names its file after the hostname, in a folder named after the local time. Hosts would then write to
different folders, and hosts with the same name would overwrite one another. Therefore every host traces into a
temporary folder with the same session name, and copies its file to a path of its own:

    RUN/tensorboard/plugins/profile/step_100/<hostname>-p<process>.xplane.pb
"""

from __future__ import annotations

import contextlib
import pathlib
import socket
import tempfile
from collections.abc import Iterator

import jax

from core import distributed, paths

_SUFFIX = ".xplane.pb"


class Profile:
    """Windows of profiled steps. Every host starts and stops at the same steps."""

    def __init__(self, run_dir: str, *, process_index: int | None = None):
        """Writes profiles below `run_dir`; `process_index` defaults to that of this host."""
        self._directory = paths.resolve(run_dir) / "tensorboard" / "plugins" / "profile"
        self._process = distributed.process_index() if process_index is None else process_index
        self._session: str | None = None
        self._traced: tempfile.TemporaryDirectory | None = None

    @property
    def is_open(self) -> bool:
        """Returns whether a window is open."""
        return self._session is not None

    def start(self, step: int) -> Profile:
        """Opens a window whose first step is `step`, and returns itself. Raises RuntimeError if one is open."""
        if self._session is not None:
            raise RuntimeError(f"cannot profile from step {step}: the window {self._session} is still open")
        options = jax.profiler.ProfileOptions()
        options.session_id = f"step_{step}"
        options.python_tracer_level = 0  # Python frames would hide the device's rows and slow the step
        traced = tempfile.TemporaryDirectory(prefix="renga-profile-")
        jax.profiler.start_trace(traced.name, profiler_options=options)
        self._session, self._traced = options.session_id, traced
        return self

    def stop(self) -> list[paths.Path]:
        """Closes the window and returns the written files; call it when the steps have finished on the devices.

        Raises:
          RuntimeError: no window is open.
        """
        if self._session is None or self._traced is None:
            raise RuntimeError("no profile window is open")
        session, traced = self._session, self._traced
        self._session = self._traced = None
        with traced:
            jax.profiler.stop_trace()
            found = sorted(pathlib.Path(traced.name).rglob(f"*{_SUFFIX}"))
            return [self._publish(file, session=session, number=number) for number, file in enumerate(found)]

    def _publish(self, file: pathlib.Path, *, session: str, number: int) -> paths.Path:
        again = f"-{number}" if number else ""
        name = f"{socket.gethostname()}-p{self._process}{again}{_SUFFIX}"
        return paths.copy_file(file, to=self._directory / session / name)


class MemoryProfiles:
    """Writes profiles of the memory of this host's chips for `pprof`: RUN/memory/step_100-host_2.pprof."""

    def __init__(self, run_dir: str, *, process_index: int | None = None):
        """Writes profiles below `run_dir`; `process_index` defaults to that of this host."""
        self._directory = paths.resolve(run_dir) / "memory"
        self._process = distributed.process_index() if process_index is None else process_index

    def write(self, step: int) -> paths.Path:
        """Writes a profile of the current memory, and prints its path."""
        return self._write(f"step_{step}-host_{self._process}.pprof", why=f"step {step}")

    @contextlib.contextmanager
    def when_exhausted(self) -> Iterator[None]:
        """Context in which an out-of-memory error writes a memory profile before it propagates."""
        try:
            yield
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" in str(error):
                self._write(f"exhausted-host_{self._process}.pprof", why="memory is exhausted")
            raise

    def _write(self, name: str, *, why: str) -> paths.Path:
        with tempfile.TemporaryDirectory(prefix="renga-memory-") as folder:
            local = pathlib.Path(folder) / name
            jax.profiler.save_device_memory_profile(str(local))
            written = paths.copy_file(local, to=self._directory / name)
        print(f"host {self._process}: {why}: what is in device memory is in {written}", flush=True)
        return written
