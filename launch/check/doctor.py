"""The doctor's checks: without a device (preflight and more), of each host on its own, and of all hosts together."""

import argparse
import difflib
import functools
import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import jax
from jax.sharding import Mesh

from core import slices, units
from core.errors import UserError
from core.files import paths
from core.hosts import activity, distributed, exit_codes
from core.hosts.failure_diagnosis import Limits
from core.slices import GIB
from launch import environment, findings, flags, predictions
from launch.check import preflight
from launch.config import LoadedConfig, loader
from launch.experiment import Experiment
from launch.findings import Finding, from_json, merge, to_json
from launch.hosts import cluster, simulate, tpu_host
from launch.hosts.cluster import Host
from parallel import collectives

COMMAND = ("runs", "doctor")
HELP = "check whether a run can start on this slice, and print problems with their fixes: READY or NOT READY"
EXAMPLE = "launch/run doctor v4-16 gin/quickstart.gin --simulate"

LIMITS = Limits(120.0, 120.0)  # of each check of all hosts: a broken link never answers
_BYTES_PER_CHIP = {"tpu": 64 * 2**20, "cpu": 2**18}
_ALIKE = 0.92  # of two names, to take one for a slip of the other


def own_host(*, simulated: bool) -> list[Finding]:
    """Makes the checks of one host: versions, environment, and which processes hold its chips."""
    return [cluster.check_versions(), *variables(simulated=simulated), tpu_host.chip_holders()]


def variables(environ: Mapping[str, str] = os.environ, *, simulated: bool) -> list[Finding]:
    """Returns problems with environment variables: contradictory values, and RENGA_ names that nothing reads."""
    problems = []
    for look in (environment.process_layout, environment.mesh_bindings):
        try:
            look(environ=environ)
        except UserError as error:
            problems.append(Finding("environment", False, str(error)))
    for name in sorted(set(environ) - environment.NAMES):
        is_ours = name.startswith("RENGA_")
        nearest = difflib.get_close_matches(name, environment.NAMES, n=1, cutoff=0.6 if is_ours else _ALIKE)
        if is_ours:
            hint = f"did you mean {nearest[0]}?" if nearest else "launch/README.md lists what is read"
            problems.append(Finding("environment", False, f"{name} is not read by anything; {hint}", f"unset {name}"))
        elif nearest and name.lower() not in jax.config.values:
            said = f"{name} is not read by anything here; did you mean {nearest[0]}?"
            problems.append(Finding("environment", True, said, is_note=True))
    platforms = environment.read("JAX_PLATFORMS", environ=environ)
    if platforms and not simulated and "tpu" not in platforms.split(","):
        said = f"JAX_PLATFORMS={platforms} hides the TPU from JAX"
        problems.append(Finding("environment", False, said, "unset JAX_PLATFORMS"))
    return problems or [Finding("environment", True, "no contradiction, no unknown RENGA_ variable")]


def join(slice_: slices.Slice) -> tuple[Host | None, Finding]:
    """Joins the other hosts; returns None and adds a failed finding if that fails."""
    try:
        host = cluster.join(slice_, limits=LIMITS)
    except (UserError, TimeoutError, RuntimeError) as error:
        return None, Finding("hosts", False, str(error), "start the same command on every host, at about the same time")
    devices = jax.devices()
    kind = "simulated chips" if host.simulated else devices[0].device_kind
    said = f"{units.counted(host.count, 'host')}, {len(devices)} {kind}, {jax.local_device_count()} on each"
    return host, Finding("hosts", True, said)


def all_hosts(config: LoadedConfig, host: Host, own: Sequence[Finding], *, run_dir: str) -> list[Finding]:
    """Makes the checks that need all hosts; a check that fails does not stop the others.

    Returns:
      The findings of all hosts, the same on every host; `own` are those that this host made on its own.
    """
    spans = config.build().spans()

    def shared() -> list[Finding]:
        distributed.require_shared(run_dir, is_host_zero=host.is_zero)
        return [Finding("run directory", True, f"{run_dir}: every host sees what host 0 writes")]

    limit = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
    checks: dict[str, Callable[[], list[Finding]]] = {
        "clocks": lambda: [cluster.check_clocks()],
        "run directory": shared,
    }
    for span in spans:
        own_part, of = span.experiment, f" of phase {span.number}" if span.count > 1 else ""
        checks |= {
            f"data on hosts{of}": functools.partial(
                preflight.data, own_part, smoked=False, hosts="here", name=f"data on hosts{of}"
            ),
            f"HBM{of}": lambda e=own_part, of=of: [hbm(config, e, limit_bytes=limit)._replace(name=f"HBM{of}")],
            f"collectives{of}": lambda e=own_part: links(e.bind(jax.devices()).partitioner.mesh, host),
        }
    found = [*own, *(finding for name, check in checks.items() for finding in _attempt(name, check))]
    activity.at("findings of all hosts")
    every = distributed.all_gather_text("doctor/findings", to_json(found))
    return merge([from_json(text) for text in every])


def hbm(config: LoadedConfig, experiment: Experiment, *, limit_bytes: int | None) -> Finding:
    """Compares the recorded HBM use of this experiment with the HBM of a chip (`limit_bytes`, if known)."""
    chip = slices.get(experiment.slice).chip
    have, whose = (limit_bytes, "says the runtime") if limit_bytes else (chip.usable_hbm_bytes, "by the slice table")
    there = f"{have / GIB:.4g} GiB a chip ({whose})"
    record = predictions.find(experiment, config)
    if record is None:
        fix = f"launch/run report {experiment.slice} EXPERIMENT.gin --compile says what it needs"
        return Finding("HBM", True, f"this experiment is not compiled yet; available: {there}", fix, is_note=True)
    need = record["memory"]["peak_bytes"]
    fix = "more chips, fsdp or tensor, remat = 'full', or accum_steps: launch/run plan finds what fits"
    return Finding("HBM", need <= have, f"{need / GIB:.3g} GiB needed (compiled) of {there}", fix)


def links(mesh: Mesh, host: Host) -> list[Finding]:
    """Runs every collective on every axis of the mesh; speeds are those of the slowest host."""
    bytes_per_chip = _BYTES_PER_CHIP.get(mesh.devices.flat[0].platform, 2**20)
    trips = collectives.trips(mesh, bytes_per_chip=bytes_per_chip)
    found = []
    for axis in dict.fromkeys(trip.axis for trip in trips):
        along = [trip for trip in trips if trip.axis == axis]
        speeds = json.dumps({trip.collective: trip.bytes_per_second for trip in along})
        every = [json.loads(text) for text in distributed.all_gather_text(f"doctor/axis {axis}", speeds)]
        slowest = {name: min(speeds[name] for speeds in every) for name in every[0]}
        listed = ", ".join(f"{name} {speed / 1e9:.3g}" for name, speed in slowest.items())
        said = f"{units.counted(mesh.shape[axis], 'chip')}: {listed} GB/s sent by a chip"
        said += " (simulated)" if host.simulated else ""
        if wrong := [trip.collective for trip in along if not trip.is_right]:
            said = f"wrong numbers from {', '.join(wrong)}; {said}"
        fix = "another slice: a chip or a link of this one gives wrong numbers"
        found.append(Finding(f"axis {axis}", not wrong, said, fix))
    return found or [Finding("collectives", True, "one chip: none")]


def _attempt(name: str, look: Callable[[], list[Finding]]) -> list[Finding]:
    activity.at(name)
    try:
        return look()
    except (UserError, TimeoutError, RuntimeError) as error:
        return [Finding(name, False, str(error))]
    except Exception as error:  # files, buckets and libraries fail with types of their own
        return [Finding(name, False, f"{type(error).__name__}: {error}")]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    flags.add(parser, "SLICE", "EXPERIMENT.gin", "--gin", "--run-dir", "--simulate", "--json", "--overwrite")
    parser.add_argument("--part", choices=("offline", "host"), help=argparse.SUPPRESS)  # as one of its processes


def run(args: argparse.Namespace) -> int:
    """Prints the findings. Returns 0 if a run can start, otherwise 1."""
    slice_ = slices.get(args.slice)
    args.run_dir = os.fspath(paths.resolve(args.run_dir or environment.run_directory(args.experiment, slice_.name)))
    if args.part == "offline":
        where = "simulated" if args.simulate else "here"
        checked = preflight.check(
            args.experiment, bindings=args.gin, slice_name=args.slice, run_dir=args.run_dir, hosts=where
        )
        args.json.write_text(findings.to_json(checked.findings))
        return 0
    if args.part == "host" or environment.read("RENGA_SIMULATE"):
        return _host(args, slice_)
    if args.simulate:
        return _end(args, _simulated(args, slice_))
    tpu_host.require_here(slice_)
    return _host(args, slice_)


def _offline_checks(args: argparse.Namespace, folder: Path) -> list[Finding]:
    """Makes the checks that need no device in a process of their own, so that its compiler takes no chip."""
    file, variables = folder / "offline.json", {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(_command(args, "offline", file), env=variables, capture_output=True, text=True, check=False)
    if done.returncode or not file.exists():
        output = (done.stdout + done.stderr).strip()[-2000:]
        return [Finding("offline", False, f"exit code {done.returncode}: {output}")]
    return findings.from_json(file.read_text())


def _command(args: argparse.Namespace, part: str, file: Path) -> list[str]:
    words = [*flags.passed_on(args, "--gin", "--simulate", "--run-dir"), "--part", part, "--json", str(file)]
    return [*environment.COMMAND, "doctor", args.slice, args.experiment, *words]


def _simulated(args: argparse.Namespace, slice_: slices.Slice) -> list[Finding]:
    with tempfile.TemporaryDirectory(prefix="renga-doctor-") as name:
        folder = Path(name)
        found = _offline_checks(args, folder)
        if any(row.name == "configuration" and not row.ok for row in found):
            return found
        file = folder / "host.json"
        code = simulate.run(slice_, command=_command(args, "host", file), log_directory=folder / "logs")
        if code or not file.exists():
            last = (folder / "logs/host_0.log").read_text().splitlines()[-5:]
            return [*found, Finding("hosts", False, "\n".join([f"exit code {code}", *last]))]
        return [*found, *findings.from_json(file.read_text())]


def _host(args: argparse.Namespace, slice_: slices.Slice) -> int:
    """Runs this host's part; host 0 prints the findings of all hosts."""
    own = own_host(simulated=bool(environment.read("RENGA_SIMULATE")))
    if args.part != "host":  # otherwise the process that started this one made the offline checks
        with tempfile.TemporaryDirectory(prefix="renga-doctor-") as folder:
            own += _offline_checks(args, Path(folder))
    if any(row.name in ("configuration", "offline") and not row.ok for row in own):
        return _end(args, own)
    config = loader.load(args.experiment, bindings=args.gin, slice_name=slice_.name)
    host, joined = join(slice_)
    if host is None:
        return _end(args, [*own, joined])
    every = all_hosts(config, host, [*own, joined], run_dir=args.run_dir)
    distributed.shutdown()
    if not host.is_zero:
        return int(args.part != "host" and not findings.is_ready(every))
    if args.part == "host":
        args.json.write_text(findings.to_json(every))
        return 0
    return _end(args, every)


def _end(args: argparse.Namespace, found: list[Finding]) -> int:
    print(findings.table(found), flush=True)
    if args.json:
        paths.write_text_atomically(args.json, findings.to_json(found) + "\n")
    return exit_codes.DONE if findings.is_ready(found) else exit_codes.FAILED
