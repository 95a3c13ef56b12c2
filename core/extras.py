"""Checks for optional packages, the extras of pyproject.toml, which only some settings and commands need."""

import importlib.util
import sys
from pathlib import Path

from core.errors import Problem, UserError


def missing(package: str, *, extra: str, what: str) -> Problem | None:
    """Returns a problem, with the command that installs the extra, if a package is not installed; None if it is.

    Args:
      package: name that Python imports.
      extra: name in pyproject.toml.
      what: the setting or command that needs it.
    """
    if sys.modules.get(package) or importlib.util.find_spec(package) is not None:
        return None
    return Problem(f"needs the package {package}", setting=what, fix=install(extra))


def require(package: str, *, extra: str, what: str) -> None:
    """Raises UserError if a package is not installed; arguments as for `missing`."""
    if problem := missing(package, extra=extra, what=what):
        raise UserError(problem)


def install(extra: str) -> str:
    """Returns the command that installs an extra, for the workspace or for the wheel, whichever runs."""
    in_wheel = __name__ != "core.extras"
    return f"pip install 'renga[{extra}]'" if in_wheel else f"launch/setup.sh --extra {extra}"


def flags() -> list[str]:
    """Returns the arguments of `launch/setup.sh` that install the extras of this environment elsewhere, except `dev`.

    Returns [] for an environment that `launch/setup.sh` did not make.
    """
    kept = Path(sys.prefix, "renga.extras")
    chosen = kept.read_text().split() if kept.exists() else []
    return [word for extra in chosen if extra != "dev" for word in ("--extra", extra)]
