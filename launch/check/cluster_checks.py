"""Checks that need all hosts of a slice: chips, clocks, shared files, layout and collectives."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

import jax
from jax.sharding import Mesh

from core import distributed, host_checks, slices, units
from core.errors import UserError
from core.health import phase
from core.health.failure_diagnosis import Limits
from launch.check import collectives, offline_checks, preflight_inputs
from launch.experiment import Experiment
from launch.findings import Finding, from_text, merge, to_json
from launch.host import Host
from launch.hosts import cluster, start_checks

LIMITS = Limits(120.0, 120.0)  # of each check: a broken link never answers
_BYTES_PER_CHIP = {"tpu": 64 * 2**20, "cpu": 2**18}


def join(slice_: slices.Slice) -> tuple[Host | None, Finding]:
    """Joins the other hosts; None with a failed finding if that is not possible."""
    try:
        host = cluster.join(slice_, limits=LIMITS)
    except (UserError, TimeoutError, RuntimeError) as error:
        return None, Finding("hosts", False, str(error), "the same command on every host, at about the same time")
    devices = jax.devices()
    kind = "simulated chips" if host.simulated else devices[0].device_kind
    return host, Finding(
        "hosts", True, f"{units.counted(host.count, 'host')}, {len(devices)} {kind}, {jax.local_device_count()} on each"
    )


def examine(
    experiment: Experiment, host: Host, mine: Sequence[Finding], *, config_text: str, run_dir: str
) -> list[Finding]:
    """Makes the checks that need all hosts; a check that fails does not stop the others.

    Args:
      experiment: that is to run.
      host: this process among its peers.
      mine: what this host found on its own.
      config_text: the canonical configuration.
      run_dir: that all hosts must see.

    Returns:
      The findings of all hosts, the same on every host.
    """
    rows = list(mine)
    rows += _attempt("clocks", lambda: [start_checks.clocks(host)])
    rows += _attempt("run directory", lambda: _shared(run_dir, host))
    rows += _attempt("data on hosts", lambda: _data(experiment))
    limit = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
    rows += _attempt("HBM", lambda: [offline_checks.hbm(config_text, experiment, limit_bytes=limit)])
    program = None
    phase.at("layout")
    try:
        program = experiment.bind(jax.devices())
    except UserError as error:
        rows.append(Finding("layout", False, str(error)))
    if program is not None:
        rows += _attempt("collectives", lambda: links(program.partitioner.mesh, host))
    phase.at("rows of all hosts")
    every = distributed.all_gather_text("doctor/rows", json.dumps(to_json(rows)))
    return merge([from_text(text) for text in every])


def links(mesh: Mesh, host: Host) -> list[Finding]:
    """Runs every collective on every axis of the mesh."""
    platform = mesh.devices.flat[0].platform
    trips = collectives.trips(mesh, bytes_per_chip=_BYTES_PER_CHIP.get(platform, 2**20))
    if not trips:
        return [Finding("collectives", True, "one chip: none")]
    rows = []
    for axis in dict.fromkeys(trip.axis for trip in trips):
        found = [trip for trip in trips if trip.axis == axis]
        wrong = [trip.collective for trip in found if not trip.is_right]
        slowest = _slowest(found)
        listed = ", ".join(f"{name} {speed / 1e9:.3g}" for name, speed in slowest.items())
        note = " (simulated)" if host.simulated else ""
        detail = f"{units.counted(found[0].chips, 'chip')}: {listed} GB/s sent by a chip{note}"
        if wrong:
            detail = f"wrong numbers from {', '.join(wrong)}; {detail}"
        rows.append(
            Finding(
                f"axis {axis}", not wrong, detail, "another slice: a chip or a link of this one gives wrong numbers"
            )
        )
    return rows


def _slowest(trips: Sequence[collectives.Trip]) -> dict[str, float]:
    """Bytes per second of each collective on the slowest host; the same on all hosts."""
    own = json.dumps({trip.collective: trip.bytes_per_second for trip in trips})
    every = [json.loads(text) for text in distributed.all_gather_text(f"doctor/axis {trips[0].axis}", own)]
    return {name: min(found[name] for found in every) for name in every[0]}


def _shared(run_dir: str, host: Host) -> list[Finding]:
    host_checks.require_shared(run_dir, is_host_zero=host.is_zero)
    return [Finding("run directory", True, f"{run_dir}: every host sees what host 0 writes")]


def _data(experiment: Experiment) -> list[Finding]:
    found = preflight_inputs.data(experiment, smoked=False, hosts="here")
    return [finding._replace(name="data on hosts") for finding in found]


def _attempt(name: str, look: Callable[[], list[Finding]]) -> list[Finding]:
    phase.at(name)
    try:
        return look()
    except (UserError, TimeoutError, RuntimeError) as error:
        return [Finding(name, False, str(error))]
    except Exception as error:  # files, buckets and libraries fail with types of their own
        return [Finding(name, False, f"{type(error).__name__}: {error}")]
