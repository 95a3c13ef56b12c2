"""A run as its directory has it: the configuration that it was started with, and the checkpoints it left.

The one idea: the run directory is enough. Whoever evaluates need not remember the experiment, its bindings or its
slice; what they give beside it (a slice, a strategy, other data) wins over what the directory says.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from typing import NamedTuple

from core import checkpoint, paths
from launch import configuration, environment
from launch.gin_config import LoadedConfig

CONFIG, CHECKPOINTS = "config.gin", "checkpoints"


class Saved(NamedTuple):
    """A run that is there.

    Attributes:
      run_dir: resolved.
      config: what it was, with what was given beside it.
      steps: of its complete checkpoints, ascending; at least one.
    """

    run_dir: str
    config: LoadedConfig
    steps: tuple[int, ...]


def read(run_dir: str, *, bindings: Sequence[str] = (), slice_name: str | None = None) -> Saved:
    """Finds a run.

    Args:
      run_dir: local or gs://.
      bindings: win over its configuration.
      slice_name: as `bindings`, of the slice.

    Raises:
      ValueError: there is no run, or no complete checkpoint; mistakes in the bindings.
    """
    folder = paths.resolve(run_dir)
    if not (folder / CONFIG).exists():
        raise ValueError(_no_run(run_dir, folder))
    steps = checkpoint.complete_steps(folder / CHECKPOINTS)
    if not steps:
        raise ValueError(
            f"the run in {str(folder)!r} has no complete checkpoint: it saves one every CHECKPOINT_INTERVAL steps, "
            "when it is told to stop (SIGTERM), and at its end"
        )
    return Saved(str(folder), _config(folder / CONFIG, bindings, slice_name), tuple(steps))


def chosen(saved: Saved, *, step: int | None, every: bool) -> list[int]:
    """The steps to evaluate: the last, `step`, or every one.

    Raises:
      ValueError: there is no complete checkpoint of `step`.
    """
    if step is not None and step not in saved.steps:
        there = ", ".join(map(str, saved.steps))
        raise ValueError(f"--step {step}: {saved.run_dir!r} has no complete checkpoint of it; there are {there}")
    if every:
        return list(saved.steps)
    return [saved.steps[-1] if step is None else step]


def _config(file: paths.Path, bindings: Sequence[str], slice_name: str | None) -> LoadedConfig:
    if not paths.is_remote(file):
        return configuration.load(str(file), bindings=bindings, slice_name=slice_name)
    with tempfile.NamedTemporaryFile("w", suffix=".gin") as copy:  # configurations are read from disks
        copy.write(file.read_text())
        copy.flush()
        return configuration.load(copy.name, bindings=bindings, slice_name=slice_name)


def _no_run(run_dir: str, folder: paths.Path) -> str:
    if run_dir.endswith(".gin"):
        return (
            f"{run_dir!r} is an experiment; give the directory of its run, such as {environment.run_directory(run_dir)}"
        )
    what = f"it has no {CONFIG}" if folder.exists() else "there is no such folder"
    return f"no run in {str(folder)!r}: {what}. Give the --run-dir that it was trained with"
