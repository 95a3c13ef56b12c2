"""Versions of installed packages, and of this workspace."""

from __future__ import annotations

import functools
import importlib.metadata
import subprocess
from collections.abc import Iterable
from pathlib import Path

_WORKSPACE = Path(__file__).resolve().parent.parent
REVISION_FILE = ".revision"  # written when a workspace is shipped without its .git
COMPILER = ("jax", "jaxlib", "libtpu")  # the packages that determine the compiled program
TRAINING = (*COMPILER, "dm-haiku", "optax", "orbax-checkpoint", "tensorstore", "seqio", "gin-config")


@functools.cache
def version(package: str) -> str:
    """Returns the installed version of a package.

    Raises:
      importlib.metadata.PackageNotFoundError: it is not installed.
    """
    return importlib.metadata.version(package)


def installed(packages: Iterable[str]) -> dict[str, str]:
    """Returns the installed version of each package, by name; raises as `version` does."""
    return {name: version(name) for name in packages}


def git_revision(workspace: Path = _WORKSPACE) -> str:
    """Returns the git revision of a workspace, with `-dirty` if it was edited; `unknown` outside git."""
    shipped = workspace / REVISION_FILE
    if shipped.exists():
        return shipped.read_text().strip()
    command = ["git", "-C", str(workspace), "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"]
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
