"""Versions of installed packages."""

from __future__ import annotations

import functools
import importlib.metadata
from collections.abc import Iterable

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
