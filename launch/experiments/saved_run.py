"""Finds runs, their configurations and their checkpoints on disk.

The run directory is the only record: it suffices for evaluating a run, and a suite that is started again, on any
machine, reads from run directories which experiments are done.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from core import paths, published_files
from core.errors import UserError
from launch import environment
from launch.config import LoadedConfig, loader

CONFIG = "config.gin"


class SavedRun(NamedTuple):
    """A run on disk: its resolved directory, and its configuration with the overrides applied."""

    run_dir: str
    config: LoadedConfig


def read(run_dir: str, *, bindings: Sequence[str] = (), slice_name: str | None = None) -> SavedRun:
    """Reads the configuration of a run, local or gs://; `bindings` and `slice_name` override it.

    Raises:
      UserError: there is no run, or the bindings are wrong.
    """
    folder = paths.resolve(run_dir)
    if not (folder / CONFIG).exists():
        if run_dir.endswith(".gin"):
            own = environment.run_directory(run_dir)
            raise UserError(f"{run_dir!r} is an experiment file; give the directory of its run, such as {own}")
        what = f"it has no {CONFIG}" if folder.exists() else "there is no such folder"
        raise UserError(f"no run in {str(folder)!r}: {what}. Give the --run-dir that it was trained with")
    published_files.use_copies(run_dir)
    return SavedRun(str(folder), loader.load(str(folder / CONFIG), bindings=bindings, slice_name=slice_name))


def config(run_dir: str) -> str | None:
    """Returns the canonical configuration text of the run in this directory; None if there is no run."""
    file = paths.resolve(run_dir) / CONFIG
    return file.read_text() if file.exists() else None


def find_runs(root: str, texts: Iterable[str], *, key: Callable[[str], str] = str) -> dict[str, list[str]]:
    """Returns the run directories {group}/{experiment} in `root` whose configuration equals one of `texts`.

    Two texts are equal if their keys are; the result is by key.
    """
    found: dict[str, list[str]] = {key(text): [] for text in texts}
    folder = paths.resolve(root)
    for file in sorted(folder.glob(f"*/*/{CONFIG}")) if folder.exists() else ():
        if (same := key(file.read_text())) in found:
            found[same].append(str(file.parent))
    return found
