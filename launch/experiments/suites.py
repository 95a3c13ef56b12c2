"""Loads the experiments of a suite, detects duplicates, and runs them one after another, each in its own process.

Two experiments with the same canonical configuration text are duplicates, and run once. All experiments are checked
before the first one starts. Results are read from the run directories.
"""

import dataclasses
import difflib
import enum
import glob
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from core.checkpoints import steps
from core.errors import UserError
from core.files import paths
from core.hosts import exit_codes
from core.training import metrics, supervise
from launch import config, environment
from launch.config import differences, loader
from launch.config.trust import Trust
from launch.experiment import Experiment
from launch.experiments import saved_run
from launch.runs import continuation

HOME = environment.WORKSPACE / "gin" / "trm"
NUMBERED = ("exp", "contrib")  # `all` stands for the groups with these prefixes
LOCATION = ("DATA", "SLICE")  # settings that say where an experiment was run, not what it is
_SLICE = ("SLICE",)  # that of a finished run may differ; other data may be named by another DATA
_LAST_LINES = 5
_STOPPED = (exit_codes.PREEMPTED, exit_codes.INTERRUPTED)


class State(enum.Enum):
    """The state of an experiment in a suite."""

    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    REFUSED = "refused"  # its directory contains something else
    UNFINISHED = "unfinished"  # a run before its last step
    MISSING = "not run"


class Status(NamedTuple):
    """The state of an experiment, and the text for it in tables."""

    state: State
    text: str


@dataclasses.dataclass(frozen=True)
class Entry:
    """One experiment with one seed."""

    group: str  # the name of the folder of its file
    name: str  # name of its file, with the seed if it is not the one in the file
    path: str  # its file
    bindings: tuple[str, ...]  # bindings from the command line, and the seed
    run_dir: str  # directory of its run
    text: str  # its canonical configuration
    experiment: Experiment  # built from the configuration
    same_as: str | None = None  # id of an earlier entry with the same configuration, which is run instead

    @property
    def id(self) -> str:
        """The name of the entry in its suite, such as `exp01/exp01a`."""
        return f"{self.group}/{self.name}"


def groups() -> list[str]:
    """Returns the names of the groups in `gin/trm`."""
    folders = HOME.iterdir() if HOME.is_dir() else ()  # an optional part
    names = [folder.name for folder in folders if any(folder.glob("*.gin"))]
    return sorted(names, key=lambda name: (not name.startswith("exp"), name))


def files(group: str) -> list[Path]:
    """Returns the experiment files of a group, of groups with a prefix, or of a folder.

    `all` stands for the groups with the prefixes NUMBERED. Raises UserError if there is no such group.
    """
    known = groups()
    if group not in (*known, "all") and ("/" in group or Path(group).is_dir()):
        return _of_folder(Path(group))
    prefix = NUMBERED if group == "all" else group
    chosen = [group] if group in known else [name for name in known if name.startswith(prefix)]
    if not chosen:
        close = difflib.get_close_matches(group, known, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise UserError(f"there is no group {group!r}: {hint}Groups: {', '.join([*known, 'all'])}, or a folder's path")
    return [file for name in chosen for file in _of_folder(HOME / name)]


def _of_folder(folder: Path) -> list[Path]:
    def natural(path: Path) -> list[int | str]:  # sorts numbers by value: 250 before 1000
        return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", path.stem)]

    if found := sorted(folder.glob("*.gin"), key=natural):
        return found
    raise UserError(f"no experiment files (*.gin) in {folder}; expected a folder such as gin/ponder/controls")


def load(
    paths: Sequence[Path],
    *,
    bindings: Sequence[str] = (),
    slice_name: str | None = None,
    seeds: Sequence[int] = (0,),
    root: str | None = None,
    level: str | None = None,
    check_data: bool = True,
) -> list[Entry]:
    """Loads the experiments with the seeds, and marks duplicates.

    Args:
      paths: experiment files.
      bindings: gin bindings for all of them.
      slice_name: the slice; None: the one in each file.
      seeds: 0 stands for the seed of the file.
      root: the folder of the run directories; None: `environment.run_root()`.
      level: the level of a check to make instead of a run; None: a run.
      check_data: whether problems with the data are mistakes; not used with `level`.

    Raises:
      UserError: an experiment or its data has mistakes.
    """
    problems: dict[str, list[str]] = {}  # the names of the experiments with each mistake
    first: dict[str, str] = {}
    entries = []
    for path in (path.resolve() for path in paths):
        for seed in seeds:
            name = f"{path.stem}_seed{seed}" if seed else path.stem
            given = (*bindings, f"SEED = {seed}") if seed else tuple(bindings)
            try:
                config = loader.load(str(path), bindings=given, slice_name=slice_name)
                experiment = config.build()
            except UserError as error:
                problems[str(error)] = []
                break
            if check_data and not level:
                for problem in experiment.data_problems(prepared=False):
                    problems.setdefault(problem, []).append(name)
            folder = f"{root or environment.run_root()}/{path.parent.name}"
            run_dir = f"{folder}/{name}{environment.OF_CHECKS.get(level, '')}"
            entry = Entry(path.parent.name, name, str(path), given, run_dir, config.text, experiment)
            same = first.setdefault(entry.text, entry.id)
            entries.append(entry if same == entry.id else dataclasses.replace(entry, same_as=same))
    if problems:
        raise UserError("\n".join(_of_experiments(names) + problem for problem, names in problems.items()))
    return entries


def seeds_run(files: Sequence[Path], root: str) -> list[int]:
    """Returns the seeds with which experiments of the files were run in `root`, and 0."""
    of_files = {(path.resolve().parent.name, path.stem) for path in files}
    found = {0}
    for group in {group for group, _ in of_files}:
        for name in paths.listed(f"{paths.literal(root)}/{glob.escape(group)}/*_seed*/config.gin"):
            stem, _, seed = Path(name).parent.name.rpartition("_seed")
            if (group, stem) in of_files and seed.isdecimal():
                found.add(int(seed))
    return sorted(found)


def _of_experiments(names: Sequence[str]) -> str:
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"{names[0]}{more}: " if names else ""


def _is_of_another(text: str | None, entry: Entry, entries: Sequence[Entry]) -> bool:
    """Returns whether a run's canonical text is exactly that of another entry, such as one on other data."""
    if text is None or differences.is_same(text, entry.text, ignoring=_SLICE):
        return False
    return any(differences.is_same(text, other.text, ignoring=_SLICE) for other in entries)


def as_run(entry: Entry, *, text: str) -> Entry:
    """Returns a copy of an entry with the experiment that a run's canonical text describes."""
    if text == entry.text:
        return entry
    trust = Trust(list(config.parse(entry.text).imports.values()))
    return dataclasses.replace(entry, text=text, experiment=loader.load(entry.path, text=text, trust=trust).build())


@dataclasses.dataclass(frozen=True)
class Mode:
    """The options with which experiments are run."""

    simulate: bool = False  # simulate the hosts as processes on this machine
    check: str | None = None  # the level of a check to make instead of training
    steps: int | None = None  # stop after this step; None: at the experiment's last step

    def last_step(self, entry: Entry) -> int:
        """Returns the step at which the run of an entry ends."""
        return min(self.steps or entry.experiment.total_steps, entry.experiment.total_steps)

    def command(self, entry: Entry) -> list[str]:
        """Returns the command that runs an entry."""
        command = [*environment.COMMAND, "pod", entry.experiment.slice, entry.path]
        command += ["--run-dir", entry.run_dir]
        command += [option for binding in entry.bindings for option in ("--gin", binding)]
        command += ["--steps", str(self.steps)] * (self.steps is not None)
        return command + ["--simulate"] * self.simulate + (["--check", self.check] if self.check else [])


class Suite:
    """The experiments of a suite and their status.

    Args:
      entries: the experiments.
      mode: the options with which they are run.
      root: the folder in which earlier runs of them are looked for.
      logs: the folder for the output of their processes.

    Attributes:
      entries: entries of the suite.
      status: the status, by entry id.
      run_dirs: the run directories with the results, by entry id.
      logs: file with the output of the process, by entry id.
    """

    def __init__(self, entries: Sequence[Entry], *, mode: Mode, root: str, logs: Path):
        self.entries, self.mode, self._root = list(entries), mode, root
        self.run_dirs = {entry.id: entry.run_dir for entry in entries}
        self.logs = {entry.id: logs / entry.group / f"{entry.name}.log" for entry in entries}
        self.status = {
            e.id: Status(State.WAITING, f"same as {e.same_as}" if e.same_as else State.WAITING.value) for e in entries
        }

    def find_done(self) -> None:
        """Marks experiments that are done, and those whose directory has a run of another one.

        With `mode.check`, it marks none.
        """
        texts = [entry.text for entry in self.entries]
        found = {} if self.mode.check else saved_run.find_runs(self._root, texts, ignoring=_SLICE)
        for entry in self.entries:
            if entry.same_as:
                self.run_dirs[entry.id] = self.run_dirs[entry.same_as]
            elif not self.mode.check:
                self._find_done(entry, found[entry.text])

    def _find_done(self, entry: Entry, elsewhere: Sequence[str]) -> None:
        for run_dir in (entry.run_dir, *elsewhere):
            saved, _ = saved_run.configuration(run_dir)
            if (
                saved is not None
                and differences.is_same(saved, entry.text, ignoring=_SLICE)
                and has_ended(run_dir, entry.experiment, last_step=self.mode.last_step(entry))
            ):
                same = os.fspath(paths.resolve(run_dir)) == os.fspath(paths.resolve(entry.run_dir))
                text = "already done" if same else f"already done in {run_dir}"
                self.status[entry.id] = Status(State.DONE, text)
                self.run_dirs[entry.id] = run_dir
                return
        existing, why_not = saved_run.configuration(entry.run_dir)
        if existing is not None and not differences.is_same(existing, entry.text, ignoring=_SLICE):
            why_not = f"it contains another experiment ({difference(existing, entry.text)})"
        if why_not:
            self.status[entry.id] = _refused(entry.run_dir, why_not)

    def gather(self) -> None:
        """Finds existing runs of the experiments, with any SLICE and DATA.

        An entry with a run gets the configuration recorded in the run directory.
        """
        asked = tuple(self.entries)
        found = saved_run.find_runs(self._root, [e.text for e in asked], ignoring=LOCATION)
        for number, entry in enumerate(asked):
            places = (entry.run_dir, self.run_dirs[entry.same_as or entry.id], *found[entry.text])
            texts = {place: saved_run.configuration(place) for place in dict.fromkeys(places)}
            texts = {place: one for place, one in texts.items() if not _is_of_another(one[0], entry, asked)}
            run_dir, saved = next(((place, text) for place, (text, _) in texts.items() if text is not None), ("", ""))
            if not run_dir and (why_not := texts.get(entry.run_dir, (None, ""))[1]):
                self.status[entry.id] = _refused(entry.run_dir, why_not)
                continue
            if not run_dir:
                self.status[entry.id] = Status(State.MISSING, State.MISSING.value)
                continue
            if run_dir == entry.run_dir:
                entry = dataclasses.replace(entry, same_as=None)  # it has a run of its own
            self.run_dirs[entry.id] = run_dir
            self.entries[number] = ran = as_run(entry, text=saved)
            step, last = metrics.read(run_dir).step, ran.experiment.total_steps
            is_done = has_ended(run_dir, ran.experiment, last_step=last)
            text = "done" if run_dir == entry.run_dir else f"done in {run_dir}"
            lacks = ", without its last evaluation or checkpoint" if step >= last else ""
            text = text if is_done else f"step {step:,} of {last:,}{lacks}"
            text = f"same as {entry.same_as}: {text}" if entry.same_as else text
            self.status[entry.id] = Status(State.DONE if is_done else State.UNFINISHED, text)

    def run(self, requested: Sequence[int] = ()) -> int:
        """Runs the experiments that are not done; continues after failures.

        `requested` gets an exit code when this process is asked to stop.

        Returns:
          0 if all are done, 1 if one is not, or the exit code of an interruption.
        """
        for entry in self.entries:
            if entry.same_as or self.status[entry.id].state != State.WAITING:
                self._print(entry)
                continue
            code = self._run(entry, requested)
            if requested or code in _STOPPED:
                return requested[0] if requested else code
        return int(any(self.failed(entry) for entry in self.entries))

    def _print(self, entry: Entry) -> None:
        position = f"{self.entries.index(entry) + 1:>3}/{len(self.entries)}"
        print(f"{position}  {entry.id:<36} {self.status[entry.id].text}", flush=True)

    def _run(self, entry: Entry, requested: Sequence[int]) -> int:
        self.status[entry.id] = Status(State.RUNNING, State.RUNNING.value)
        self._print(entry)
        began = time.monotonic()
        log = self.logs[entry.id]
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w") as out:
            code = supervise.run_child(self.mode.command(entry), requested, output=out)
        minutes = (time.monotonic() - began) / 60
        is_stopped = bool(requested) or code in _STOPPED
        state = State.DONE if code == 0 else State.UNFINISHED if is_stopped else State.FAILED
        ended = "done" if code == 0 else "stopped" if is_stopped else f"failed with exit code {code}"
        self.status[entry.id] = Status(state, f"{ended} after {minutes:.1f} min")
        self._print(entry)
        return code

    def failed(self, entry: Entry) -> bool:
        """Returns whether the experiment, or the one run instead of it, is not done."""
        return self.status.get(entry.same_as or entry.id, self.status[entry.id]).state != State.DONE

    def last_lines(self, entry: Entry) -> list[str]:
        """Returns the last lines of the output of the entry's process; [] if there is no log."""
        log = self.logs[entry.id]
        return log.read_text(errors="replace").splitlines()[-_LAST_LINES:] if log.exists() else []


def has_ended(run_dir: str, experiment: Experiment, *, last_step: int) -> bool:
    """Returns whether a run has recorded, evaluated and saved its last step; its checkpoints may have been removed."""
    found, folder = metrics.read(run_dir), paths.resolve(run_dir) / steps.FOLDER
    if found.step < last_step:
        return False
    if found.step == last_step and not continuation.is_evaluated(run_dir, experiment, last_step):
        return False
    return not (folder.exists() and any(folder.iterdir())) or max(steps.complete(folder), default=0) >= last_step


def _refused(run_dir: str, why: str) -> Status:
    return Status(State.REFUSED, f"refused: {run_dir}: {why}. Give another --run-root")


def difference(existing: str, wanted: str) -> str:
    """Describes the first setting in which two canonical texts differ."""
    return next((str(found) for found in differences.between(existing, wanted)), "their imports differ")
