"""Runs the experiments of a suite one after another, each in a process of its own.

An experiment is started with the command that a user would type (`launch/pod.sh SLICE FILE …`), so a crash affects only
that experiment, and an interrupted run resumes from its checkpoint. The output of the process goes to a log; results
are read from the run directory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from core import paths, run_metrics
from core.health import exit_codes
from launch import config
from launch.experiments import results, saved_run, suite_plan
from launch.experiments.suite_plan import Entry

DONE = ("done", "already done")
_POLL_SECONDS = 0.5
_LAST_LINES = 5
_GRACE_SECONDS = 30.0


@dataclasses.dataclass(frozen=True)
class Mode:
    """The options with which experiments are run.

    Attributes:
      simulate: simulate the hosts as processes on this machine.
      smoke: smoke runs instead of training.
      steps: stop after this step; None: at the experiment's last step.
    """

    simulate: bool = False
    smoke: bool = False
    steps: int | None = None

    def last_step(self, entry: Entry) -> int:
        """Returns the step at which the run of an entry ends."""
        return min(self.steps or entry.experiment.total_steps, entry.experiment.total_steps)

    def command(self, entry: Entry) -> list[str]:
        """Returns the command that runs an entry."""
        command = [sys.executable, "-m", "launch", "pod", entry.experiment.slice, entry.path]
        command += ["--run-dir", entry.run_dir]
        command += [option for binding in entry.bindings for option in ("--gin", binding)]
        command += ["--steps", str(self.steps)] * (self.steps is not None)
        return command + ["--simulate"] * self.simulate + ["--smoke"] * self.smoke


class Suite:
    """The experiments of a suite and their status.

    Attributes:
      entries: of the suite.
      status: text for the table, by entry id.
      run_dirs: where the results are, by entry id.
      logs: file with the output of the process, by entry id.
    """

    def __init__(self, entries: Sequence[Entry], *, mode: Mode, root: str, logs: Path):
        self.entries, self.mode, self._root = list(entries), mode, root
        self.run_dirs = {entry.id: entry.run_dir for entry in entries}
        self.logs = {entry.id: logs / entry.group / f"{entry.name}.log" for entry in entries}
        self.status = {entry.id: f"same as {entry.same_as}" if entry.same_as else "waiting" for entry in entries}

    def find_done(self) -> None:
        """Finds experiments that are already done, here or in another group, and run directories in use by others."""
        if not self.mode.smoke:
            elsewhere = saved_run.find_runs(self._root, {entry.text for entry in self.entries})
            for entry in self.entries:
                if not entry.same_as:
                    self._find_done(entry, elsewhere.get(entry.text, ()))
        for entry in self.entries:
            if entry.same_as:
                self.run_dirs[entry.id] = self.run_dirs[entry.same_as]

    def _find_done(self, entry: Entry, elsewhere: Sequence[str]) -> None:
        for run_dir in (entry.run_dir, *elsewhere):
            if saved_run.is_complete(run_dir, text=entry.text, last_step=self.mode.last_step(entry)):
                same = os.fspath(paths.resolve(run_dir)) == os.fspath(paths.resolve(entry.run_dir))
                self.status[entry.id] = "already done" if same else f"already done in {run_dir}"
                self.run_dirs[entry.id] = run_dir
                return
        existing = saved_run.config(entry.run_dir)
        if existing not in (None, entry.text):
            self.status[entry.id] = (
                f"refused: {entry.run_dir} contains another experiment ({difference(existing, entry.text)}). "
                "Give another --run-root, or remove that directory"
            )

    def gather(self) -> None:
        """Finds existing runs, on whatever slice and data location, and how far each got.

        An entry with a run is replaced by the experiment recorded in the run directory.
        """
        found = saved_run.find_runs(self._root, [e.text for e in self.entries], key=without_location)
        for number, entry in enumerate(self.entries):
            equal = found.get(without_location(entry.text), ())
            places = (entry.run_dir, self.run_dirs[entry.same_as or entry.id], *equal)
            run_dir = next((place for place in places if saved_run.config(place) is not None), None)
            if run_dir is None:
                self.status[entry.id] = "not run"
                continue
            self.run_dirs[entry.id] = run_dir
            self.entries[number] = ran = suite_plan.as_run(entry, text=saved_run.config(run_dir))
            step, last = run_metrics.read(run_dir).step, ran.experiment.total_steps
            status = f"done in {run_dir}" if run_dir != entry.run_dir else "done"
            if step < last:
                status = f"step {step:,} of {last:,}"
            self.status[entry.id] = f"same as {entry.same_as}: {status}" if entry.same_as else status

    def run(self, requested: Sequence[int] = ()) -> int:
        """Runs the experiments that are not done, printing a line for each change; continues after failures.

        Args:
          requested: exit codes of received signals. Signal handlers only append to it: an exception while a process is
            being started would leave that process running.

        Returns:
          0 if all are done, 1 if any failed, 143 if a run was preempted (the rest is not started), or the exit code of
          a signal that stopped the suite.
        """
        for entry in self.entries:
            if self.status[entry.id] != "waiting":
                self._print(entry)
                continue
            code = self._run(entry, requested)
            if requested or code == exit_codes.PREEMPTED:
                return requested[0] if requested else code
        return int(any(self.failed(entry) for entry in self.entries))

    def _print(self, entry: Entry) -> None:
        position = f"{self.entries.index(entry) + 1:>3}/{len(self.entries)}"
        print(f"{position}  {entry.id:<36} {self.status[entry.id]}", flush=True)

    def _run(self, entry: Entry, requested: Sequence[int]) -> int:
        self.status[entry.id] = "running"
        self._print(entry)
        began = time.monotonic()
        log = self.logs[entry.id]
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w") as out:
            process = subprocess.Popen(self.mode.command(entry), stdout=out, stderr=subprocess.STDOUT)
            code = _wait(process, requested)
        minutes = (time.monotonic() - began) / 60
        ended = "done" if code == 0 else "stopped" if requested else f"failed with exit code {code}"
        self.status[entry.id] = f"{ended} after {minutes:.1f} min"
        self._print(entry)
        return code

    def failed(self, entry: Entry) -> bool:
        """Returns whether the experiment, or the one run instead of it, is not done."""
        status = self.status.get(entry.same_as) or self.status[entry.id]
        return not status.startswith(DONE)

    def progress(self, entry: Entry) -> tuple[int, float | None]:
        """Returns the last recorded step and the latest score."""
        found = run_metrics.read(self.run_dirs[entry.id])
        return found.step, found.last(results.SCORE)

    def last_lines(self, entry: Entry) -> list[str]:
        """Returns the end of the process's output."""
        log = self.logs[entry.id]
        return log.read_text(errors="replace").splitlines()[-_LAST_LINES:] if log.exists() else []


def _wait(process: subprocess.Popen, requested: Sequence[int]) -> int:
    """Waits for a run to end. If the suite is asked to stop, the run is stopped too, with time to save."""
    while process.poll() is None and not requested:
        time.sleep(_POLL_SECONDS)
    if requested and requested[0] == exit_codes.INTERRUPTED:  # Ctrl-C reached the run too; a second one skips saving
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_SECONDS)
    if process.poll() is None:
        process.terminate()
    return exit_codes.of_process(process.wait())


def without_location(text: str) -> str:
    """Returns a canonical text without the location of the data and the slice."""
    settings = config.parse(text)
    bindings = [str(b) for b in settings.bindings if b.name not in ("DATA", "SLICE")]
    return "\n".join([*map(settings.import_line, settings.imports), *bindings])


def difference(existing: str, wanted: str) -> str:
    """Describes the first value that differs between two canonical texts."""
    old, new = ({b.name: config.render(b.value) for b in config.parse(text).bindings} for text in (existing, wanted))
    for name in sorted(old.keys() | new.keys()):
        if old.get(name) != new.get(name):
            return f"{name}: {old.get(name, 'not set')} there, {new.get(name, 'not set')} now"
    return "their imports differ"
