"""Checks that every run makes once its hosts have joined: tested versions, and clocks that agree."""

from __future__ import annotations

import importlib.metadata
import platform
import re
import time
from collections.abc import Callable

from packaging.requirements import Requirement
from packaging.version import Version

from core import distributed
from launch import environment
from launch.findings import Finding
from launch.host import Host

SKEW_SECONDS = 5.0  # logs are merged by time, and credentials with a wrong time are refused
_RUNTIME = ("jax", "jaxlib", "libtpu")


def warn_at_start(host: Host) -> None:
    """Prints a warning if versions do not go together or are newer than tested, or if the clocks differ."""
    installed = versions()
    if installed.ok and installed.is_note:
        print(f"{host.name}: note: {installed.name}: {installed.detail}", flush=True)
    for finding, is_mine in ((installed, True), (clocks(host), host.is_zero)):
        if not finding.ok and is_mine:
            print(f"{host.name}: warning: {finding.name}: {finding.detail}. {finding.fix}", flush=True)


def versions(*, installed: Callable[[str], str] = importlib.metadata.version, pins: str | None = None) -> Finding:
    """Compares jax, jaxlib and libtpu with one another, as jax requires, and with the tested versions.

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
        return Finding("versions", False, "; ".join(problems), "launch/setup.sh installs requirements.txt")
    listed = ", ".join(f"{name} {version}" for name, version in have.items())
    listed += f", Python {platform.python_version()}"
    if newer:
        listed += "; newer than tested: " + ", ".join(f"{name} (tested with {pinned[name]})" for name in newer)
    return Finding("versions", True, listed, is_note=bool(newer))


def clocks(host: Host, *, now: Callable[[], float] = time.time) -> Finding:
    """Measures how far the clocks of the hosts are apart, to within the time that the exchange took."""
    distributed.barrier("start/clocks")
    started, asked = now(), time.perf_counter()
    every = [float(text) for text in distributed.all_gather_text("start/clocks", repr(started))]
    within = max(float(t) for t in distributed.all_gather_text("start/asked", repr(time.perf_counter() - asked)))
    apart = max(every) - min(every)
    first, last = every.index(min(every)), every.index(max(every))
    said = f"{apart:.3f} s apart (within {within:.3f} s)"
    if apart - within <= SKEW_SECONDS:
        return Finding("clocks", True, said)
    fix = f"set the clock of the one that is wrong: sudo systemctl restart chrony (at most {SKEW_SECONDS:g} s)"
    return Finding("clocks", False, f"{said}: host {last} is ahead of host {first}", fix)


def _of_jax() -> list[Requirement]:
    """The versions of jaxlib and libtpu that jax requires, also on a TPU."""
    every = [Requirement(text) for text in importlib.metadata.requires("jax") or ()]
    return [r for r in every if r.name in _RUNTIME and (r.marker is None or (r.marker.evaluate({"extra": "tpu"})))]
