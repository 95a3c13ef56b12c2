"""From what a user types to a folder of checkpoints: RUN, or RUN@STEP."""

from __future__ import annotations

from core import paths
from core.checkpoints import steps

FOLDER = "checkpoints"


def directory(run: str) -> paths.Path:
    """The folder of a run's checkpoints. Raises ValueError where there is no run, or it has none."""
    folder = paths.resolve(run)
    if folder.name != FOLDER:
        folder = folder / FOLDER
    if not folder.exists():
        what = "has no checkpoints" if folder.parent.exists() else "is not there"
        raise ValueError(
            f"the run {run!r} {what} (looked for {folder}); give the --run-dir that it was trained with, local or gs://"
        )
    return folder


def require_step(folder: paths.Path, step: int) -> paths.Path:
    """The folder of a complete step. Raises ValueError with those that there are."""
    there = steps.complete(folder)
    if step not in there:
        listed = ", ".join(map(str, there)) or "none"
        raise ValueError(f"no complete checkpoint of step {step} in {folder}; there are {listed}")
    return folder / str(step)


def run_at_step(text: str) -> paths.Path:
    """The folder of the step that RUN@STEP names; RUN alone is its latest. Raises ValueError where there is none."""
    run, mark, step = text.rpartition("@")
    if mark and not (run and step.isdecimal()):
        raise ValueError(f"{text!r}: behind @ stands a step, such as runs/first@1000; without @ it is the latest")
    folder = directory(run if mark else text)
    if mark:
        return require_step(folder, int(step))
    there = steps.complete(folder)
    if not there:
        raise ValueError(f"{text!r} has no complete checkpoint in {folder}")
    return folder / str(there[-1])
