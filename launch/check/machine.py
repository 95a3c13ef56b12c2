"""Checks of one host without a device: its environment, and which processes hold its chips."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from typing import Any

from core.errors import UserError
from launch import environment
from launch.findings import Finding
from launch.hosts import tpu_host

_ALIKE = 0.92  # of two names, to take one for a slip of the other


def variables(environ: Mapping[str, str] = os.environ, *, simulated: bool) -> list[Finding]:
    """Returns problems of the environment: contradictory values, and names that nothing reads."""
    problems = []
    for look in (environment.process_layout, environment.mesh_bindings):
        try:
            look(environ=environ)
        except UserError as error:
            problems.append(Finding("environment", False, str(error)))
    known = {variable.name for variable in environment.VARIABLES}
    for name in sorted(set(environ) - known):
        nearest = difflib.get_close_matches(name, known, n=1, cutoff=_ALIKE)
        if name.startswith("RENGA_"):
            like = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {like[0]}?" if like else "launch/README.md lists what is read"
            problems.append(Finding("environment", False, f"{name} is read by nobody; {hint}", f"unset {name}"))
        elif nearest and not _is_jaxs(name):
            problems.append(
                Finding("environment", True, f"{name} is read by nobody here; did you mean {nearest[0]}?", "", True)
            )
    platforms = environment.read("JAX_PLATFORMS", environ=environ)
    if platforms and not simulated and "tpu" not in platforms.split(","):
        said = f"JAX_PLATFORMS={platforms} hides the TPU from JAX"
        problems.append(Finding("environment", False, said, "unset JAX_PLATFORMS"))
    return problems or [Finding("environment", True, "no contradiction, no unknown RENGA_ variable")]


def chip_holders(**where: Any) -> Finding:
    """Reports processes that hold a chip of this host, or libtpu's lock; `where` as for `tpu_host.chip_holders`."""
    holders, unseen = tpu_host.chip_holders(**where)
    if holders:
        ids = " ".join(map(str, sorted(holders)))
        return Finding("chips", False, "; ".join(holders.values()), f"end it (kill {ids}), or wait for its run to end")
    return Finding("chips", True, tpu_host.without_holders(unseen))


def _is_jaxs(name: str) -> bool:
    import jax

    return name.lower() in jax.config.values
