"""Checks for optional packages, the extras of pyproject.toml."""

import importlib.util
import sys
from pathlib import Path

from core.errors import Problem, UserError


def missing(package: str, *, extra: str, what: str) -> Problem | None:
    """Returns a problem, with the install command, if a package is missing; otherwise None.

    `what` is the setting or command that needs it.
    """
    if sys.modules.get(package) or importlib.util.find_spec(package) is not None:
        return None
    return Problem(f"needs the package {package}", setting=what, fix=install(extra))


def require(package: str, *, extra: str, what: str) -> None:
    """Raises UserError if a package is not installed; `what` is what needs it."""
    if problem := missing(package, extra=extra, what=what):
        raise UserError(problem)


def install(extra: str) -> str:
    """Returns the command that installs an extra."""
    in_wheel = __name__ != "core.extras"
    return f"pip install 'renga[{extra}]'" if in_wheel else f"launch/setup.sh --extra {extra}"


def flags() -> list[str]:
    """Returns arguments of `launch/setup.sh` that install this environment's extras, except `dev`."""
    kept = Path(sys.prefix, "renga.extras")
    chosen = kept.read_text().split() if kept.exists() else []
    return [word for extra in chosen if extra != "dev" for word in ("--extra", extra)]
