"""Loads the experiments of a suite, and finds those that are the same.

Two experiments are the same if their canonical configuration texts (`launch.config`) are equal, however their files are
written; they are run once. All experiments are loaded, built and checked before the first one starts, so that a mistake
in the last of fifty is found at once.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Sequence
from pathlib import Path

from core.errors import UserError
from launch import configuration, environment
from launch.config import loader
from launch.experiment import Experiment

HOME = environment.WORKSPACE / "gin" / "trm"
NUMBERED = ("exp", "contrib")  # prefixes of the groups that `all` stands for


@dataclasses.dataclass(frozen=True)
class Entry:
    """One experiment with one seed.

    Attributes:
      group: name of the folder that contains its file.
      name: name of its file, with the seed if it is not the one in the file.
      path: its file.
      bindings: from the command line, and the seed.
      run_dir: of its run.
      text: its canonical configuration.
      experiment: built from the configuration.
      same_as: id of an earlier entry with the same configuration, which is run instead.
    """

    group: str
    name: str
    path: str
    bindings: tuple[str, ...]
    run_dir: str
    text: str
    experiment: Experiment
    same_as: str | None = None

    @property
    def id(self) -> str:
        """`exp01/exp01a`."""
        return f"{self.group}/{self.name}"


def groups() -> list[str]:
    """Returns the names of all groups of `gin/trm`."""
    names = [folder.name for folder in HOME.iterdir() if any(folder.glob("*.gin"))]
    return sorted(names, key=lambda name: (not name.startswith("exp"), name))


def files(group: str) -> list[Path]:
    """Returns the experiment files of one or several groups, or of a folder.

    Args:
      group: the name of a group, the common prefix of several (`exp02`), `all` for the numbered groups, or the path of
        any folder with experiment files.

    Raises:
      UserError: there is no such group, or the folder contains no experiment.
    """
    if "/" in group or Path(group).is_dir():
        return _of_folder(Path(group))
    known = groups()
    prefix = NUMBERED if group == "all" else group
    chosen = [group] if group in known else [name for name in known if name.startswith(prefix)]
    if not chosen:
        close = difflib.get_close_matches(group, known, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise UserError(f"there is no group {group!r}: {hint}Groups: {', '.join(known)}, all, or a folder's path")
    return [file for name in chosen for file in _of_folder(HOME / name)]


def _of_folder(folder: Path) -> list[Path]:
    def natural(path: Path) -> list[int | str]:  # numbers by value: 250 before 1000
        return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", path.stem)]

    if found := sorted(folder.glob("*.gin"), key=natural):
        return found
    raise UserError(f"no experiment files (*.gin) in {folder}")


def load(
    paths: Sequence[Path],
    *,
    bindings: Sequence[str] = (),
    slice_name: str | None = None,
    seeds: int = 1,
    root: str | None = None,
    smoke: bool = False,
    check_data: bool = True,
) -> list[Entry]:
    """Loads every experiment with every seed, and marks duplicates.

    Args:
      paths: experiment files.
      bindings: from the command line, applied to every experiment.
      slice_name: overrides SLICE of the files.
      seeds: how many runs of each experiment: with the seed of its file, and with 1, 2, …
      root: where runs are; None: RENGA_RUN_ROOT.
      smoke: plan smoke runs, which need no data and have directories of their own.
      check_data: also check that the data exists.

    Raises:
      UserError: lists every mistake in every file.
    """
    environ = {"RENGA_RUN_ROOT": root} if root else None
    problems: dict[str, list[str]] = {}  # each with the names of the experiments that have it; none in a mistake
    first: dict[str, str] = {}
    entries = []
    for path in (path.resolve() for path in paths):
        for seed in range(seeds):
            name = f"{path.stem}_seed{seed}" if seed else path.stem
            given = (*bindings, f"SEED = {seed}") if seed else tuple(bindings)
            try:
                config = configuration.load(str(path), bindings=given, slice_name=slice_name)
                experiment = config.build()
            except UserError as error:
                problems[str(error)] = []
                break
            if check_data and not smoke:
                for problem in experiment.data_problems(prepared=False):
                    problems.setdefault(problem, []).append(name)
            run_dir = environment.run_directory(path.with_name(name + ".gin"), smoke=smoke, environ=environ)
            entry = Entry(path.parent.name, name, str(path), given, run_dir, config.text, experiment)
            same = first.setdefault(entry.text, entry.id)
            entries.append(entry if same == entry.id else dataclasses.replace(entry, same_as=same))
    if problems:
        raise UserError("\n".join(_of_experiments(names) + problem for problem, names in problems.items()))
    return entries


def _of_experiments(names: Sequence[str]) -> str:
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"{names[0]}{more}: " if names else ""


def as_run(entry: Entry, *, text: str) -> Entry:
    """Returns the entry with the experiment of another canonical text, that of a run."""
    if text == entry.text:
        return entry
    return dataclasses.replace(entry, text=text, experiment=loader.load(entry.path, text=text).build())
