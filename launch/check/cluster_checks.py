"""What only all hosts together can find: that they are all here, with their chips, clocks, files, and links."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence

import jax
from jax.sharding import Mesh

from core import distributed, host_checks, slices, units
from core.health import phase
from core.health.failure_diagnosis import Limits
from launch.check import collectives, machine, offline_checks, preflight_inputs
from launch.check.findings import Row, merge, to_json
from launch.check.findings import from_text as rows_from_text
from launch.experiment import Experiment
from launch.host import Host
from launch.hosts import cluster

SKEW_SECONDS = 5.0  # logs are merged by time, and credentials are refused by it
LIMITS = Limits(120.0, 120.0)  # for each look: a link that is broken is waited for without an end
_BYTES_PER_CHIP = {"tpu": 64 * 2**20, "cpu": 2**18}


def join(slice_: slices.Slice) -> tuple[Host | None, Row]:
    """Joins the others; a row where that fails."""
    try:
        host = cluster.join(slice_, limits=LIMITS)
    except (ValueError, TimeoutError, RuntimeError) as error:
        return None, Row("hosts", False, str(error), "the same command on every host, at about the same time")
    devices = jax.devices()
    kind = "simulated chips" if host.simulated else devices[0].device_kind
    return host, Row(
        "hosts", True, f"{units.counted(host.count, 'host')}, {len(devices)} {kind}, {jax.local_device_count()} on each"
    )


def examine(experiment: Experiment, host: Host, mine: Sequence[Row], *, config_text: str, run_dir: str) -> list[Row]:
    """The rows of all hosts, `mine` among them; every host gets the same. None of the looks may end another."""
    rows = list(mine)
    rows += _attempt("clocks", lambda: [clocks(host)])
    rows += _attempt("run directory", lambda: _shared(run_dir, host))
    rows += _attempt("data on hosts", lambda: _data(experiment))
    limit = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
    rows += _attempt("HBM", lambda: [offline_checks.hbm(config_text, experiment, limit_bytes=limit)])
    program = None
    phase.at("layout")
    try:
        program = experiment.bind(jax.devices())
    except ValueError as error:
        rows.append(Row("layout", False, str(error)))
    if program is not None:
        rows += _attempt("collectives", lambda: links(program.partitioner.mesh, host))
    phase.at("rows of all hosts")
    every = distributed.all_gather_text("doctor/rows", json.dumps(to_json(rows)))
    return merge([rows_from_text(text) for text in every])


def clocks(host: Host, *, now: Callable[[], float] = time.time) -> Row:
    """How far the clocks of the hosts are apart, to within the time that asking took."""
    distributed.barrier("doctor/clocks")
    started, asked = now(), time.perf_counter()
    every = [float(text) for text in distributed.all_gather_text("doctor/clocks", repr(started))]
    within = max(float(t) for t in distributed.all_gather_text("doctor/asked", repr(time.perf_counter() - asked)))
    apart = max(every) - min(every)
    first, last = every.index(min(every)), every.index(max(every))
    said = f"{apart:.3f} s apart (within {within:.3f} s)"
    if apart - within <= SKEW_SECONDS:
        return Row("clocks", True, said)
    fix = f"set the clock of the one that is wrong: sudo systemctl restart chrony (at most {SKEW_SECONDS:g} s)"
    return Row("clocks", False, f"{said}: host {last} is ahead of host {first}", fix)


def links(mesh: Mesh, host: Host) -> list[Row]:
    """Every collective on every axis of the mesh."""
    platform = mesh.devices.flat[0].platform
    trips = collectives.trips(mesh, bytes_per_chip=_BYTES_PER_CHIP.get(platform, 2**20))
    if not trips:
        return [Row("collectives", True, "one chip: none")]
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
            Row(f"axis {axis}", not wrong, detail, "another slice: a chip or a link of this one gives wrong numbers")
        )
    return rows


def _slowest(trips: Sequence[collectives.Trip]) -> dict[str, float]:
    """By collective, as the slowest host saw it; the same on all hosts."""
    own = json.dumps({trip.collective: trip.bytes_per_second for trip in trips})
    every = [json.loads(text) for text in distributed.all_gather_text(f"doctor/axis {trips[0].axis}", own)]
    return {name: min(found[name] for found in every) for name in every[0]}


def _shared(run_dir: str, host: Host) -> list[Row]:
    host_checks.require_shared(run_dir, is_host_zero=host.is_zero)
    return [Row("run directory", True, f"{run_dir}: every host sees what host 0 writes")]


def _data(experiment: Experiment) -> list[Row]:
    found = preflight_inputs.data(experiment, smoked=False, hosts="here")
    return [Row("data on hosts", f.ok, f.detail, "", f.is_note) for f in found]


def warn_at_start(host: Host) -> None:
    """Prints what every run checks of its hosts: versions that clash or are newer than tested, clocks that differ."""
    versions = machine.versions()
    if versions.ok and versions.is_note:
        print(f"{host.name}: note: {versions.name}: {versions.detail}", flush=True)
    for row, is_mine in ((versions, True), (clocks(host), host.is_zero)):
        if not row.ok and is_mine:
            print(f"{host.name}: warning: {row.name}: {row.detail}. {row.fix}", flush=True)


def _attempt(name: str, look: Callable[[], list[Row]]) -> list[Row]:
    phase.at(name)
    try:
        return look()
    except (ValueError, TimeoutError, RuntimeError) as error:
        return [Row(name, False, str(error))]
    except Exception as error:  # files, buckets and libraries fail with types of their own
        return [Row(name, False, f"{type(error).__name__}: {error}")]
