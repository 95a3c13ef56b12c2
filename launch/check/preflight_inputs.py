"""Preflight checks of data and run directory.

A file is checked only if it is visible from here. Files on the hosts' own disks, and files that would need the network
in a dry run, are listed in a note: they count neither as present nor as missing.
"""

from __future__ import annotations

import contextlib
from typing import Literal

from core import paths
from core.errors import UserError
from core.slices import Slice
from core.training import run_lock
from core.types import HasVocabulary, NamesFiles, can
from launch import environment
from launch.experiment import Experiment
from launch.findings import Finding
from launch.hosts import shipping
from tasks.ids import ReadsFile

# Where the hosts will be: "here" (this machine, or unknown), processes of this machine, or reached from this
# workstation, which in a dry run uses no network.
Hosts = Literal["here", "simulated", "shipped to", "dry run"]
_AWAY = ("shipped to", "dry run")
_CUSTOMARY_SPARE_IDS = 256


def data(experiment: Experiment, *, smoked: bool, hosts: Hosts) -> list[Finding]:
    """Checks the task's files without reading documents."""
    task = experiment.task
    named = tuple(task.named_files()) if can(task, NamesFiles) else ()
    vocabulary = task.vocabulary.path if can(task.vocabulary, ReadsFile) else ""
    unseen = [name for name in named if _is_unseen(name, hosts, is_vocabulary=name == vocabulary)]
    with contextlib.chdir(environment.WORKSPACE) if hosts in _AWAY else contextlib.nullcontext():  # where hosts start
        problems = _without(unseen, task.problems())
        if problems and smoked:
            return [Finding("data", True, f"random tokens in its place ({problems[0]})")]
        if hosts in _AWAY:
            seen = [name for name in named if name not in unseen and not paths.is_remote(name)]
            problems += shipping.left_behind(seen, workspace=environment.WORKSPACE)
        notes = [Finding("data", True, f"not checked: {', '.join(unseen)}", is_note=True)] if unseen else []
        if vocabulary not in unseen and not problems:
            try:
                problems = _without(unseen, experiment.data_problems(prepared=False))
            except Exception as error:  # a bucket fails with its client's own types
                if not paths.is_remote(vocabulary) and not isinstance(error, OSError):
                    raise
                unread = f"cannot read {vocabulary or 'the data'} from here: {type(error).__name__}: {error}"
                unproven = hosts in _AWAY and paths.is_remote(vocabulary)  # what is shipped is read from here
                return [Finding("data", unproven, unread, is_note=unproven), *notes]
        if problems:
            return [*(Finding("data", False, p) for p in problems), *notes]
        if vocabulary in unseen:
            return [Finding("data", True, ", ".join(named)), *notes]
        return [Finding("data", True, task.describe()), *_unused_ids(experiment), *notes]


def _unused_ids(experiment: Experiment) -> list[Finding]:
    """A note if the model has many more rows than its data has ids; rounding up by some is customary."""
    vocabulary, model = experiment.task.vocabulary, experiment.model
    rows = model.vocab_size if can(model, HasVocabulary) else 0
    if vocabulary is None or rows <= vocabulary.size + _CUSTOMARY_SPARE_IDS:
        return []
    said = (
        f"the model has vocab_size {rows:,}, but {vocabulary.describe()} has {vocabulary.size:,} ids: "
        f"{rows - vocabulary.size:,} rows are never trained. Set VOCAB_SIZE = {vocabulary.size}, or VOCABULARY to the "
        "vocabulary that is meant"
    )
    return [Finding("vocabulary", True, said, is_note=True)]


def run_directory(run_dir: str, slice_: Slice | None, hosts: Hosts) -> list[Finding]:
    """Checks whether the hosts of the slice can share and write the run directory, without creating anything."""
    name, remote = "run directory", paths.is_remote(run_dir)
    several = slice_ is not None and slice_.hosts > 1
    try:
        resolved = paths.resolve(run_dir)
        if several and not remote and hosts in _AWAY:
            return [Finding(name, False, f"{run_dir}: {_not_shared(slice_)}")]
        if hosts == "dry run" or (hosts == "shipped to" and not remote):
            return [Finding(name, True, f"{run_dir}: not checked", is_note=True)]
        found = [Finding(name, True, str(paths.check_writable(resolved)))]
        if not remote and (owner := run_lock.holder(run_dir)):
            return [Finding(name, False, run_lock.in_use(run_dir, owner))]
    except UserError as error:
        # The hosts write as the TPU's service account, not as whoever is here; but what does not exist exists nowhere.
        unproven = hosts == "shipped to" and not isinstance(error.__cause__, FileNotFoundError | None)
        return [Finding(name, unproven, str(error), is_note=unproven)]
    if several and not remote and hosts == "here":
        said = f"unless this is a rehearsal (--simulate), {_not_shared(slice_)}"
        found.append(Finding(name, True, said, is_note=True))
    return found


def _not_shared(slice_: Slice) -> str:
    return (
        f"all {slice_.hosts} hosts of {slice_.name} must see one run directory, and this is on a disk: "
        "give --run-dir gs://BUCKET/… or set RENGA_RUN_ROOT to gs://BUCKET/…"
    )


def _is_unseen(name: str, hosts: Hosts, *, is_vocabulary: bool) -> bool:
    """Returns whether a file cannot be checked from here: data in buckets, and absolute paths of remote hosts."""
    if paths.is_remote(name):
        return hosts == "dry run" or not is_vocabulary
    return hosts in _AWAY and name.startswith(("/", "~"))


def _without(unseen: list[str], problems: list[str]) -> list[str]:
    return [p for p in problems if not any(repr(name) in p for name in unseen)]  # a problem names its file
