"""A process for each experiment, one after the other.

The one idea: an experiment of a suite is run exactly as somebody would type it (`launch/pod.sh SLICE FILE …`), in a
process of its own; so a crash costs one experiment, and a run that was interrupted continues from its checkpoint,
because `train` does. What the process prints goes to a log; what it does is read from the run directory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from core import paths
from core.watch import exit_codes
from launch import config
from launch.suites import measured, plan
from launch.suites.plan import Entry

DONE = ("done", "was done")
_POLL_SECONDS = 0.5
_LAST_LINES = 5
_GRACE_SECONDS = 30.0


@dataclasses.dataclass(frozen=True)
class Mode:
    """How experiments are run.

    Attributes:
      simulate: hosts as processes here.
      smoke: rehearsals in place of runs.
      steps: stop after this one; None: the experiment's own last.
    """

    simulate: bool = False
    smoke: bool = False
    steps: int | None = None

    def last_step(self, entry: Entry) -> int:
        """Where the run of an entry ends."""
        return min(self.steps or entry.experiment.total_steps, entry.experiment.total_steps)

    def command(self, entry: Entry) -> list[str]:
        """What one would type."""
        command = [sys.executable, "-m", "launch", "pod", entry.experiment.slice, entry.path]
        command += ["--run-dir", entry.run_dir]
        command += [option for binding in entry.bindings for option in ("--gin", binding)]
        command += ["--steps", str(self.steps)] * (self.steps is not None)
        return command + ["--simulate"] * self.simulate + ["--smoke"] * self.smoke


class Suite:
    """The state of a suite while it runs.

    Attributes:
      entries: of the plan.
      status: by id, in words: what the table shows.
      run_dirs: by id, where its results are.
      logs: by id, what its process printed.
      requested: exit codes of signals that asked us to stop. A handler adds to it and does nothing else: an exception
        while a process starts would leave it behind.
    """

    def __init__(self, entries: Sequence[Entry], *, mode: Mode, root: str, logs: Path):
        self.entries, self.mode, self._root = list(entries), mode, root
        self.requested: list[int] = []
        self.run_dirs = {entry.id: entry.run_dir for entry in entries}
        self.logs = {entry.id: logs / entry.group / f"{entry.name}.log" for entry in entries}
        self._elsewhere = {} if mode.smoke else measured.elsewhere(root, {entry.text for entry in entries})
        self.status = {entry.id: f"same as {entry.same_as}" if entry.same_as else "waits" for entry in entries}

    def look(self) -> None:
        """Finds what is done already, here or in another group, and directories that hold something else."""
        for entry in self.entries:
            if not entry.same_as and not self.mode.smoke:
                self._look(entry)
        self._follow()

    def gather(self) -> None:
        """Finds what runs left, whatever the data and the slice they had, and says how far each came.

        An experiment is then what its run directory says it was, not what its file says now.
        """
        found = measured.elsewhere(self._root, [e.text for e in self.entries], key=without_place)
        for number, entry in enumerate(self.entries):
            there = self._there(entry, found.get(without_place(entry.text), ()))
            if there is None:
                self.status[entry.id] = "not run"
                continue
            self.run_dirs[entry.id] = there
            self.entries[number] = ran = plan.as_run(entry, text=measured.config(there))
            step, last = measured.read(there).step, ran.experiment.total_steps
            how = f"done in {there}" if there != entry.run_dir else "done"
            if step < last:
                how = f"step {step:,} of {last:,}"
            self.status[entry.id] = f"same as {entry.same_as}: {how}" if entry.same_as else how

    def run(self, show: Callable[[], None]) -> int:
        """Runs what is left. Goes on after failures.

        Args:
          show: called whenever something may have changed.

        Returns:
          0 where all is done; 1 where something failed; 143 where a run was preempted, and the rest left; the exit
          code of a signal that asked us to stop.
        """
        for entry in self.entries:
            if self.status[entry.id] != "waits":
                continue
            code = self._run(entry, show)
            self._follow()
            show()
            if self.requested or code == exit_codes.PREEMPTED:
                return self.requested[0] if self.requested else exit_codes.PREEMPTED
        return int(any(self.failed(entry) for entry in self.entries))

    def failed(self, entry: Entry) -> bool:
        """Whether the experiment, or the one in its place, did not come to its end."""
        status = self.status.get(entry.same_as) or self.status[entry.id]
        return not status.startswith(DONE)

    def progress(self, entry: Entry) -> tuple[int, float | None]:
        """Steps done and the latest score."""
        found = measured.read(self.run_dirs[entry.id])
        return found.step, found.last(measured.SCORE)

    def last_lines(self, entry: Entry) -> list[str]:
        """The end of what its process printed."""
        log = self.logs[entry.id]
        return log.read_text(errors="replace").splitlines()[-_LAST_LINES:] if log.exists() else []

    def _look(self, entry: Entry) -> None:
        last = self.mode.last_step(entry)
        for run_dir in (entry.run_dir, *self._elsewhere.get(entry.text, ())):
            if measured.is_complete(run_dir, text=entry.text, last_step=last):
                same = os.fspath(paths.resolve(run_dir)) == os.fspath(paths.resolve(entry.run_dir))
                self.status[entry.id] = "was done" if same else f"was done in {run_dir}"
                self.run_dirs[entry.id] = run_dir
                return
        there = measured.config(entry.run_dir)
        if there is not None and there != entry.text:
            self.status[entry.id] = (
                f"refused: {entry.run_dir} holds another experiment ({difference(there, entry.text)}). "
                "Give another --run-root, or remove it"
            )

    def _there(self, entry: Entry, alike: Sequence[str]) -> str | None:
        """The directory of a run of this entry: its own, that of the entry in its place, or one that is alike."""
        places = (entry.run_dir, self.run_dirs[entry.same_as or entry.id], *alike)
        return next((place for place in places if measured.config(place) is not None), None)

    def _wait(self, process: subprocess.Popen, show: Callable[[], None]) -> int:
        """Waits for a run to end. Where we are asked to stop, so is it, and it is given the time to save."""
        while process.poll() is None and not self.requested:
            time.sleep(_POLL_SECONDS)
            show()
        if process.poll() is None:
            if self.requested[0] == exit_codes.INTERRUPTED:  # the terminal told it too; a second signal costs its save
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_GRACE_SECONDS)
            if process.poll() is None:
                process.terminate()
            process.wait()
        return exit_codes.of_process(process.returncode)

    def _follow(self) -> None:
        """A duplicate's results are those of the entry in its place."""
        for entry in self.entries:
            if entry.same_as:
                self.run_dirs[entry.id] = self.run_dirs[entry.same_as]

    def _run(self, entry: Entry, show: Callable[[], None]) -> int:
        self.status[entry.id] = "runs"
        show()
        began = time.monotonic()
        log = self.logs[entry.id]
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w") as out:
            process = subprocess.Popen(self.mode.command(entry), stdout=out, stderr=subprocess.STDOUT)
            code = self._wait(process, show)
        minutes = (time.monotonic() - began) / 60
        ended = "done" if code == 0 else "stopped" if self.requested else f"failed with exit code {code}"
        self.status[entry.id] = f"{ended} after {minutes:.1f} min"
        return code


def without_place(text: str) -> str:
    """A canonical text without where its data lies and on which slice it runs."""
    settings = config.parse(text)
    bindings = [str(b) for b in settings.bindings if b.name not in ("DATA", "SLICE")]
    return "\n".join([*map(settings.import_line, settings.imports), *bindings])


def difference(there: str, now: str) -> str:
    """The first value that differs between two canonical texts."""
    old, new = ({b.name: config.render(b.value) for b in config.parse(text).bindings} for text in (there, now))
    for name in sorted(old.keys() | new.keys()):
        if old.get(name) != new.get(name):
            return f"{name}: there {old.get(name, 'not set')}, now {new.get(name, 'not set')}"
    return "its imports differ"
