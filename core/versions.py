"""Versions of installed packages, and of this workspace."""

import functools
import hashlib
import importlib.metadata
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path

_WORKSPACE = Path(__file__).resolve().parent.parent
_INSTALLED = {"site-packages", "dist-packages"}
REVISION_FILE = ".revision"  # written when a workspace is shipped without its .git
COMPILER = ("jax", "jaxlib", "libtpu")  # the packages that determine the compiled program
TRAINING = (*COMPILER, "dm-haiku", "optax", "orbax-checkpoint", "tensorstore", "seqio", "gin-config")


@functools.cache
def version(package: str) -> str:
    """Returns the installed version of a package."""
    return importlib.metadata.version(package)


def installed(packages: Iterable[str]) -> dict[str, str]:
    """Returns the installed version of each package, by name."""
    return {name: version(name) for name in packages}


def of_training() -> dict[str, str]:
    """Returns the version of each package in TRAINING, by name, or `not installed`."""
    found = {}
    for name in TRAINING:
        try:
            found[name] = version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def of_modules(names: Iterable[str]) -> dict[str, str]:
    """Returns digests of the files of imported modules, without Renga, installed packages and Python's own."""
    files = {name: getattr(sys.modules.get(name), "__file__", None) for name in names}
    own = {name: Path(file).resolve() for name, file in sorted(files.items()) if file}
    return {n: hashlib.sha256(f.read_bytes()).hexdigest()[:16] for n, f in own.items() if not _is_versioned(f)}


@functools.cache
def _is_versioned(file: Path) -> bool:
    ours = (_WORKSPACE / name for name in ("core", "launch", "models", "parallel", "renga", "tasks"))
    installed = _INSTALLED & set(file.parts) or file.is_relative_to(sysconfig.get_path("stdlib"))
    return bool(installed) or any(file.is_relative_to(folder) for folder in ours)


def git_revision(workspace: Path = _WORKSPACE) -> str:
    """Returns a workspace's git revision, with `-dirty` if tracked files were edited; `unknown` outside git.

    The file REVISION_FILE, if there is one, replaces git.
    """
    shipped = workspace / REVISION_FILE
    if shipped.exists():
        return shipped.read_text().strip()
    command = ["git", "-C", str(workspace), "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"]
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
