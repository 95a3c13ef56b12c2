"""A run as its directory has it: the configuration that it was started with, and the checkpoints it left.

The one idea: the run directory is enough. Whoever evaluates need not remember the experiment, its bindings or its
slice; what they give beside it (a slice, a strategy, other data) wins over what the directory says.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple

from core import distributed, paths
from core.checkpoints import steps as saved_steps
from core.errors import UserError
from launch import configuration, environment
from launch.config import LoadedConfig

CONFIG, CHECKPOINTS = "config.gin", "checkpoints"


class Saved(NamedTuple):
    """A run that is there.

    Attributes:
      run_dir: resolved.
      config: what it was, with what was given beside it.
    """

    run_dir: str
    config: LoadedConfig


def read(run_dir: str, *, bindings: Sequence[str] = (), slice_name: str | None = None) -> Saved:
    """Finds a run.

    Args:
      run_dir: local or gs://.
      bindings: win over its configuration.
      slice_name: as `bindings`, of the slice.

    Raises:
      ValueError: there is no run; mistakes in the bindings.
    """
    folder = paths.resolve(run_dir)
    if not (folder / CONFIG).exists():
        raise UserError(_no_run(run_dir, folder))
    config = configuration.load(str(folder / CONFIG), bindings=bindings, slice_name=slice_name)
    return Saved(str(folder), config)


def chosen(run_dir: str, *, step: int | None, every: bool) -> list[int]:
    """The steps to evaluate of those that are there now: the last, `step`, or every one.

    Raises:
      ValueError: there is no complete checkpoint, or none of `step`.
    """
    steps = saved_steps.complete(paths.resolve(run_dir) / CHECKPOINTS)
    if not steps:
        raise UserError(
            f"the run in {run_dir!r} has no complete checkpoint: it saves one every CHECKPOINT_INTERVAL steps, "
            "when it is told to stop (SIGTERM), and at its end"
        )
    if step is not None and step not in steps:
        there = ", ".join(map(str, steps))
        raise UserError(f"--step {step}: {run_dir!r} has no complete checkpoint of it; there are {there}")
    if every:
        return steps
    return [steps[-1] if step is None else step]


def agreed(run_dir: str, *, step: int | None, every: bool) -> list[int]:
    """As `chosen`, host 0's choice on every host: a run that is still training adds and removes checkpoints.

    Collective.
    """
    answer = json.loads(distributed.from_host_zero(_choice(run_dir, step, every) if distributed.is_host_zero() else ""))
    if isinstance(answer, str):
        raise UserError(answer)
    return answer


def _choice(run_dir: str, step: int | None, every: bool) -> str:
    """The steps as JSON, or why there are none: the other hosts are told that too."""
    try:
        return json.dumps(chosen(run_dir, step=step, every=every))
    except ValueError as error:
        return json.dumps(str(error))


def _no_run(run_dir: str, folder: paths.Path) -> str:
    if run_dir.endswith(".gin"):
        return (
            f"{run_dir!r} is an experiment; give the directory of its run, such as {environment.run_directory(run_dir)}"
        )
    what = f"it has no {CONFIG}" if folder.exists() else "there is no such folder"
    return f"no run in {str(folder)!r}: {what}. Give the --run-dir that it was trained with"
