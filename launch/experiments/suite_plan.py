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


def groups(home: Path = HOME) -> list[str]:
    """Returns the names of all groups."""
    names = [folder.name for folder in home.iterdir() if any(folder.glob("*.gin"))]
    return sorted(names, key=lambda name: (not name.startswith("exp"), name))


def files(group: str, *, home: Path = HOME) -> list[Path]:
    """Returns the experiment files of one or several groups, or of a folder.

    Args:
      group: the name of a folder in `home`, the common prefix of several (`exp02`), `all` for the numbered groups, or
        the path of any folder with experiment files.
      home: the folder that contains the groups.

    Raises:
      UserError: there is no such group, or the folder contains no experiment.
    """
    if "/" in group or Path(group).is_dir():
        return _of_folder(Path(group))
    known = groups(home)
    chosen = [name for name in known if name == group] or [name for name in known if name.startswith(group)]
    if group == "all":
        chosen = [name for name in known if name.startswith(NUMBERED)]
    if not chosen:
        close = difflib.get_close_matches(group, known, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise UserError(f"there is no group {group!r}: {hint}Groups: {', '.join(known)}, all, or a folder's path")
    return [file for name in chosen for file in _of_folder(home / name)]


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
    problems, entries = [], []
    for path in paths:
        for seed in range(seeds):
            try:
                entries.append(_entry(path, seed, bindings=bindings, slice_name=slice_name, root=root, smoke=smoke))
            except UserError as error:
                problems.append(str(error))
                break
    if check_data and not smoke:
        problems += _data_problems(entries)
    if problems:
        raise UserError("\n".join(dict.fromkeys(problems)))
    first: dict[str, Entry] = {}
    return [
        entry if (same := first.setdefault(entry.text, entry)) is entry else dataclasses.replace(entry, same_as=same.id)
        for entry in entries
    ]


def as_run(entry: Entry, *, text: str) -> Entry:
    """Returns the entry with the experiment of another canonical text, that of a run."""
    if text == entry.text:
        return entry
    config = loader.load(entry.path, text=text)
    return dataclasses.replace(entry, text=text, experiment=config.build())


def _data_problems(entries: Sequence[Entry]) -> list[str]:
    """Each problem with the data once, with the experiments that have it."""
    found: dict[str, list[str]] = {}
    for entry in entries:
        for problem in entry.experiment.data_problems(prepared=False):
            found.setdefault(problem, []).append(entry.name)
    return [
        f"{names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}: {problem}"
        for problem, names in found.items()
    ]


def _of_folder(folder: Path) -> list[Path]:
    def natural(path: Path) -> list[tuple[bool, int | str]]:  # numbers by value: 250 before 1000
        return [(part.isdigit(), int(part) if part.isdigit() else part) for part in re.split(r"(\d+)", path.stem)]

    found = sorted(folder.glob("*.gin"), key=natural)
    if not found:
        raise UserError(f"no experiment files (*.gin) in {folder}")
    return found


def _entry(
    path: Path, seed: int, *, bindings: Sequence[str], slice_name: str | None, root: str | None, smoke: bool
) -> Entry:
    path = path.resolve()
    given = (*bindings, *([f"SEED = {seed}"] if seed else []))
    config = configuration.load(str(path), bindings=given, slice_name=slice_name)
    name = path.stem + (f"_seed{seed}" if seed else "")
    environ = {"RENGA_RUN_ROOT": root} if root else None
    return Entry(
        group=path.parent.name,
        name=name,
        path=str(path),
        bindings=given,
        run_dir=environment.run_directory(path.with_name(name + ".gin"), smoke=smoke, environ=environ),
        text=config.text,
        experiment=config.build(),
    )
