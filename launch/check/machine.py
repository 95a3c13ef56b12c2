"""What one host can see of itself without a device: versions, environment, and who holds its chips."""

from __future__ import annotations

import difflib
import importlib.metadata
import os
import platform
import re
from collections.abc import Callable, Mapping
from typing import Any

from packaging.requirements import Requirement
from packaging.version import Version

from launch import environment
from launch.check.findings import Row
from launch.hosts import tpu_host

_RUNTIME = ("jax", "jaxlib", "libtpu")
_ALIKE = 0.92  # of two names, to take one for a slip of the other


def versions(*, installed: Callable[[str], str] = importlib.metadata.version, pins: str | None = None) -> Row:
    """Whether jax, jaxlib and libtpu go together, as jax itself says, and are the tested ones of requirements.txt.

    Older versions are a problem; newer ones may work as well and are noted.
    """
    text = (environment.WORKSPACE / "requirements.txt").read_text() if pins is None else pins
    pinned = dict(re.findall(r"(?m)^([A-Za-z0-9_.-]+)==([^\s;]+)", text))
    have, problems = {}, []
    for name in _RUNTIME:
        try:
            have[name] = installed(name)
        except importlib.metadata.PackageNotFoundError:
            problems.append(f"{name} is not installed")
    for requirement in _of_jax():
        version = have.get(requirement.name)
        if version and not requirement.specifier.contains(version, prereleases=True):
            problems.append(
                f"{requirement.name} {version} does not go with jax {have['jax']}, which needs {requirement}"
            )
    others = [name for name in have if name in pinned and have[name] != pinned[name]]
    newer = [name for name in others if Version(have[name]) > Version(pinned[name])]
    problems += [
        f"{name} {have[name]} is not the {pinned[name]} of requirements.txt" for name in others if name not in newer
    ]
    if problems:
        return Row("versions", False, "; ".join(problems), "launch/setup.sh installs requirements.txt")
    listed = ", ".join(f"{name} {version}" for name, version in have.items())
    listed += f", Python {platform.python_version()}"
    if newer:
        listed += "; newer than tested: " + ", ".join(f"{name} (tested with {pinned[name]})" for name in newer)
    return Row("versions", True, listed, is_note=bool(newer))


def variables(environ: Mapping[str, str] = os.environ, *, simulated: bool) -> list[Row]:
    """What is wrong with the environment: values that contradict one another, and names that nobody reads."""
    problems = []
    for look in (environment.process_layout, environment.mesh_bindings):
        try:
            look(environ=environ)
        except ValueError as error:
            problems.append(Row("environment", False, str(error)))
    known = {variable.name for variable in environment.VARIABLES}
    for name in sorted(set(environ) - known):
        nearest = difflib.get_close_matches(name, known, n=1, cutoff=_ALIKE)
        if name.startswith("RENGA_"):
            like = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {like[0]}?" if like else "launch/README.md lists what is read"
            problems.append(Row("environment", False, f"{name} is read by nobody; {hint}", f"unset {name}"))
        elif nearest and not _is_jaxs(name):
            problems.append(
                Row("environment", True, f"{name} is read by nobody here; did you mean {nearest[0]}?", "", True)
            )
    platforms = environment.read("JAX_PLATFORMS", environ=environ)
    if platforms and not simulated and "tpu" not in platforms.split(","):
        said = f"JAX_PLATFORMS={platforms} hides the TPU from JAX"
        problems.append(Row("environment", False, said, "unset JAX_PLATFORMS"))
    return problems or [Row("environment", True, "no contradiction, no unknown RENGA_ variable")]


def chip_holders(**where: Any) -> Row:
    """Reports processes that hold a chip of this host, or libtpu's lock; `where` as for `tpu_host.chip_holders`."""
    holders, unseen = tpu_host.chip_holders(**where)
    if holders:
        ids = " ".join(map(str, sorted(holders)))
        return Row("chips", False, "; ".join(holders.values()), f"end it (kill {ids}), or wait for its run to end")
    return Row("chips", True, tpu_host.without_holders(unseen))


def _of_jax() -> list[Requirement]:
    """What jax asks of jaxlib and libtpu, on a TPU too."""
    every = [Requirement(text) for text in importlib.metadata.requires("jax") or ()]
    return [r for r in every if r.name in _RUNTIME and (r.marker is None or (r.marker.evaluate({"extra": "tpu"})))]


def _is_jaxs(name: str) -> bool:
    import jax

    return name.lower() in jax.config.values
