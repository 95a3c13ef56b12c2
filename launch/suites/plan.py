"""Which experiments a suite has, and which of them are one and the same.

The one idea: an experiment is its canonical text (`launch.config`), so two files that say the same, however they
are written, are run once. Everything is loaded, built and checked before the first run starts: what is wrong with the
last of fifty experiments is not found out a day later.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from core.errors import UserError
from launch import configuration, environment
from launch.config import loader
from launch.experiment import Experiment

HOME = environment.WORKSPACE / "gin" / "trm"
NUMBERED = ("exp", "contrib")  # groups of the suite proper; beside them stand controls


@dataclasses.dataclass(frozen=True)
class Entry:
    """One experiment with one seed.

    Attributes:
      group: the folder it is in.
      name: its file, and the seed where it is not the file's own.
      path: the file.
      bindings: of the command line, and of the seed.
      run_dir: where it goes.
      text: all that counts, in canonical form.
      experiment: built.
      same_as: the entry that is run in its place.
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
    """The folders of experiments there are."""
    names = [folder.name for folder in home.iterdir() if any(folder.glob("*.gin"))]
    return sorted(names, key=lambda name: (not name.startswith("exp"), name))


def files(group: str, *, home: Path = HOME) -> list[Path]:
    """The experiment files of a group, of several, or of a folder.

    Args:
      group: a folder's name in gin/trm; the beginning of several (`exp02`); `all` that are numbered; or the path of any
        folder with experiment files.
      home: where groups are.

    Raises:
      ValueError: there is no such group, or no file in the folder.
    """
    if "/" in group or Path(group).is_dir():
        return _of_folder(Path(group))
    known = groups(home)
    chosen = [name for name in known if name == group]
    chosen = chosen or [name for name in known if name.startswith(group)]
    if group == "all":
        chosen = [name for name in known if name.startswith(NUMBERED)]
    if not chosen:
        close = difflib.get_close_matches(group, known, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise UserError(f"there is no group {group!r}: {hint}There are {', '.join(known)}, all, or a folder's path")
    return [file for name in chosen for file in _of_folder(home / name)]


def plan(
    paths: Sequence[Path],
    *,
    bindings: Sequence[str] = (),
    slice_name: str | None = None,
    seeds: int = 1,
    root: str | None = None,
    smoke: bool = False,
    check_data: bool = True,
) -> list[Entry]:
    """Loads every experiment, with every seed, and finds the duplicates.

    Args:
      paths: experiment files.
      bindings: of the command line, for all of them.
      slice_name: wins over the files' SLICE.
      seeds: how many of each: the file's own seed, then 1, 2, …
      root: where runs go; None: RENGA_RUN_ROOT.
      smoke: for rehearsals, which need no data and have directories of their own.
      check_data: also look whether the data is there.

    Raises:
      ValueError: every mistake in every file.
    """
    problems, entries = [], []
    for path in paths:
        for seed in range(seeds):
            try:
                entries.append(_entry(path, seed, bindings=bindings, slice_name=slice_name, root=root, smoke=smoke))
            except ValueError as error:
                problems.append(str(error))
                break
    if check_data and not smoke:
        problems += data_problems(entries)
    if problems:
        raise UserError("\n".join(dict.fromkeys(problems)))
    return without_repetition(entries)


def data_problems(entries: Iterable[Entry]) -> list[str]:
    """What is wrong with the data of experiments, each problem once with the experiments that have it."""
    found: dict[str, list[str]] = {}
    for entry in entries:
        for problem in entry.experiment.data_problems(prepared=False):
            found.setdefault(problem, []).append(entry.name)
    return [
        f"{names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}: {problem}"
        for problem, names in found.items()
    ]


def without_repetition(entries: Sequence[Entry]) -> list[Entry]:
    """The entries, each but the first of the same text marked with the first."""
    first: dict[str, Entry] = {}
    marked = []
    for entry in entries:
        before = first.setdefault(entry.text, entry)
        marked.append(entry if before is entry else dataclasses.replace(entry, same_as=before.id))
    return marked


def as_run(entry: Entry, *, text: str) -> Entry:
    """The entry as a run of that canonical text has it."""
    if text == entry.text:
        return entry
    with tempfile.NamedTemporaryFile("w", suffix=".gin") as file:
        file.write(text)
        file.flush()
        config = loader.load(file.name)
    return dataclasses.replace(entry, text=text, experiment=config.build())


def _natural(path: Path) -> list[tuple[bool, int | str]]:
    """By numbers where there are numbers: 250 is before 1000."""
    return [(part.isdigit(), int(part) if part.isdigit() else part) for part in re.split(r"(\d+)", path.stem)]


def _of_folder(folder: Path) -> list[Path]:
    found = sorted(folder.glob("*.gin"), key=_natural)
    if not found:
        raise UserError(f"no experiment files (*.gin) in {folder}")
    return found


def _entry(
    path: Path, seed: int, *, bindings: Sequence[str], slice_name: str | None, root: str | None, smoke: bool
) -> Entry:
    path = path.resolve()
    given = (*bindings, *([f"SEED = {seed}"] if seed else []))
    config = configuration.load(str(path), bindings=given, slice_name=slice_name)
    suffix = f"_seed{seed}" if seed else ""
    environ = {"RENGA_RUN_ROOT": root} if root else None
    return Entry(
        group=path.parent.name,
        name=path.stem + suffix,
        path=str(path),
        bindings=given,
        run_dir=environment.run_directory(path.with_name(path.stem + suffix + ".gin"), smoke=smoke, environ=environ),
        text=config.text,
        experiment=config.build(),
    )
