"""The level `hosts` of a check: checks of each host alone, and of all hosts together."""

import argparse
import difflib
import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import jax
from jax.sharding import Mesh

from core import slices, units
from core.errors import Problem, UserError
from core.hosts import activity, distributed
from core.hosts.failure_diagnosis import Limits
from core.slices import GIB
from launch import environment, flags, predictions
from launch.check import preflight
from launch.config import LoadedConfig, loader
from launch.experiment import Experiment
from launch.findings import Finding, from_json, merge, to_json
from launch.hosts import cluster, simulate, tpu_host
from launch.hosts.cluster import Host
from parallel import collectives

LIMITS = Limits(120.0, 120.0)  # for each check of all hosts: a collective over a broken link never returns
_BYTES_PER_CHIP = {"tpu": 64 * 2**20, "cpu": 2**18}
_ALIKE = 0.92  # similarity from which one name counts as a misspelling of another


def own_host(slice_: slices.Slice, *, is_tpu: bool) -> list[Finding]:
    """Checks versions, environment variables and, on a TPU, which processes hold the chips."""
    return [cluster.check_versions(slice_), *variables(is_tpu=is_tpu), *([tpu_host.chip_holders()] if is_tpu else [])]


def variables(environ: Mapping[str, str] = os.environ, *, is_tpu: bool) -> list[Finding]:
    """Checks environment variables for contradictions and for names that look wrong.

    `is_tpu`: whether JAX_PLATFORMS must not hide a TPU.
    """
    problems = []
    for look in (environment.process_layout, environment.mesh_bindings):
        try:
            look(environ=environ)
        except UserError as error:
            problems.append(Finding.failed("environment", error))
    for name in sorted(set(environ) - environment.NAMES):
        is_ours = name.startswith("RENGA_")
        nearest = difflib.get_close_matches(name, environment.NAMES, n=1, cutoff=0.6 if is_ours else _ALIKE)
        if is_ours:
            hint = f"did you mean {nearest[0]}?" if nearest else "docs/reference/environment.md lists what is read"
            said = Problem(f"{name} is not read by anything; {hint}", fix=f"unset {name}")
            problems.append(Finding("environment", False, said))
        elif nearest and name.lower() not in jax.config.values:
            guess = f"{name} is not read by anything here; did you mean {nearest[0]}?"
            problems.append(Finding("environment", True, guess, is_note=True))
    platforms = environment.read("JAX_PLATFORMS", environ=environ)
    if platforms and is_tpu and "tpu" not in platforms.split(","):
        said = Problem(f"JAX_PLATFORMS={platforms} hides the TPU from JAX", fix="unset JAX_PLATFORMS")
        problems.append(Finding("environment", False, said))
    return problems or [Finding("environment", True, "no contradiction, no unknown RENGA_ variable")]


def join(slice_: slices.Slice) -> tuple[Host | None, Finding]:
    """Joins the other hosts; returns this host, or None if that failed, and the finding."""
    try:
        host = cluster.join(slice_, limits=LIMITS)
    except (UserError, TimeoutError, RuntimeError) as error:
        fix = "start the same command on every host, at about the same time"
        return None, Finding("hosts", False, Problem(str(error), fix=fix))
    devices = jax.devices()
    kind = "simulated chips" if host.simulated else devices[0].device_kind
    said = f"{units.counted(host.count, 'host')}, {len(devices)} {kind}, {jax.local_device_count()} on each"
    return host, Finding("hosts", True, said)


def all_hosts(config: LoadedConfig, host: Host, own: Sequence[Finding], *, run_dir: str) -> list[Finding]:
    """Makes the checks that need all hosts, each of which must call it.

    Args:
      config: the experiment's configuration.
      host: this host.
      own: the findings of this host alone.
      run_dir: the run directory.

    Returns:
      The findings of all hosts, merged; the same on every host.
    """
    spans = config.build().spans()

    def shared() -> list[Finding]:
        distributed.require_shared(run_dir, is_host_zero=host.is_zero)
        return [Finding("run directory", True, f"{run_dir}: every host sees what host 0 writes")]

    found = [*own, *_attempt("clocks", lambda: [cluster.check_clocks()]), *_attempt("run directory", shared)]
    for span in spans:
        of_phase = _of_phase(config, span.experiment, host)
        phase = span.number if span.count > 1 else None
        found += [one for name, check in of_phase.items() for one in _attempt(name, check, phase=phase)]
    activity.at("findings of all hosts")
    every = distributed.all_gather_text("check/findings", to_json(found))
    return merge([from_json(text) for text in every])


def _of_phase(config: LoadedConfig, part: Experiment, host: Host) -> dict[str, Callable[[], list[Finding]]]:
    limit = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
    checks: dict[str, Callable[[], list[Finding]]] = {
        "data on hosts": lambda: preflight.data(part, smoked=False, hosts="here", name="data on hosts"),
        "collectives": lambda: links(part.bind(jax.devices()).partitioner.mesh, host),
    }
    if slices.get(part.slice).is_tpu:  # predictions are for TPUs alone
        checks["HBM"] = lambda: [hbm(config, part, limit_bytes=limit)]
    return checks


def hbm(config: LoadedConfig, experiment: Experiment, *, limit_bytes: int | None) -> Finding:
    """Compares the HBM that a step needs, as recorded in `launch.predictions`, with a chip's.

    `limit_bytes`: HBM per chip that the runtime reports; None: the value of the slice table is used.
    """
    chip = slices.get(experiment.slice).chip
    have, whose = (limit_bytes, "says the runtime") if limit_bytes else (chip.usable_hbm_bytes, "by the slice table")
    there = f"{have / GIB:.4g} GiB a {chip.unit} ({whose})"
    record = predictions.find(experiment, config)
    if record is None:
        fix = f"launch/run report {experiment.slice} EXPERIMENT.gin --compile says what it needs"
        said = f"this experiment is not compiled yet; available: {there}"
        return Finding("HBM", True, Problem(said, fix=fix), is_note=True)
    need, is_bound = record["memory"]["peak_bytes"], record["memory"].get("peak_is_bound", False)
    said = f"{'at most ' if is_bound else ''}{need / GIB:.3g} GiB needed (compiled) of {there}"
    if need <= have or is_bound:
        return Finding("HBM", True, said, is_note=need > have)
    fix = "more chips, fsdp or tensor, remat = 'full', or accum_steps: launch/run plan finds what fits"
    return Finding("HBM", False, Problem(said, fix=fix))


def links(mesh: Mesh, host: Host) -> list[Finding]:
    """Runs collectives on the mesh axes with several devices. All hosts must call it.

    Returns, for each axis, whether the numbers are right, and the speed on the slowest host.
    """
    bytes_per_chip = _BYTES_PER_CHIP.get(mesh.devices.flat[0].platform, 2**20)
    trips = collectives.trips(mesh, bytes_per_chip=bytes_per_chip)
    found = []
    for axis in dict.fromkeys(trip.axis for trip in trips):
        along = [trip for trip in trips if trip.axis == axis]
        speeds = json.dumps({trip.collective: trip.bytes_per_second for trip in along})
        every = [json.loads(text) for text in distributed.all_gather_text(f"check/axis {axis}", speeds)]
        slowest = {name: min(speeds[name] for speeds in every) for name in every[0]}
        listed = ", ".join(f"{name} {speed / 1e9:.3g}" for name, speed in slowest.items())
        said = f"{units.counted(mesh.shape[axis], 'device')}: {listed} GB/s sent by a device"
        said += " (simulated)" if host.simulated else ""
        wrong = [trip.collective for trip in along if not trip.is_right]
        if wrong:
            fix = "another slice: a chip or a link of this one gives wrong numbers"
            said = Problem(f"wrong numbers from {', '.join(wrong)}; {said}", fix=fix)
        found.append(Finding(f"axis {axis}", not wrong, said))
    return found or [Finding("collectives", True, "one chip: none")]


def _attempt(name: str, look: Callable[[], list[Finding]], *, phase: int | None = None) -> list[Finding]:
    activity.at(name if phase is None else f"{name} of phase {phase}")
    try:
        found = look()
    except (UserError, TimeoutError, RuntimeError) as error:
        found = [Finding.failed(name, error)]
    except Exception as error:  # files, buckets and libraries fail with types of their own
        found = [Finding(name, False, f"{type(error).__name__}: {error}")]
    return [finding._replace(phase=phase) for finding in found]


def on_simulated_hosts(args: argparse.Namespace, slice_: slices.Slice) -> list[Finding]:
    """Makes the checks of level `hosts` on simulated hosts, unless the configuration has a mistake."""
    found = without_devices(args)
    if is_unreadable(found):
        return found
    with tempfile.TemporaryDirectory(prefix="renga-check-") as name:
        file, logs = Path(name) / "hosts.json", Path(name) / "logs"
        code = simulate.run(slice_, command=_command(args, file, "--part", "host"), log_directory=logs)
        if not file.exists():
            last = (logs / "host_0.log").read_text().splitlines()[-5:]
            return [*found, Finding("hosts", False, "\n".join([f"exit code {code}", *last]))]
        return [*found, *from_json(file.read_text())]


def on_this_host(args: argparse.Namespace, slice_: slices.Slice) -> tuple[list[Finding], bool]:
    """Makes the checks that need devices, in the process of one host of the slice.

    Returns:
      The findings, and whether to print them here.
    """
    own = own_host(slice_, is_tpu=slice_.is_tpu and not environment.read("RENGA_SIMULATE"))
    config = loader.load(args.experiment, bindings=args.gin, slice_name=slice_.name)
    host, joined = join(slice_)
    if host is None:
        return [*own, joined], True
    found = all_hosts(config, host, [*own, joined], run_dir=args.run_dir)
    distributed.shutdown()
    return found, host.is_zero


def without_devices(args: argparse.Namespace) -> list[Finding]:
    """Makes the checks of level `config` in a separate process that uses no chip."""
    with tempfile.TemporaryDirectory(prefix="renga-check-") as name:
        file, variables = Path(name) / "config.json", {**os.environ, "JAX_PLATFORMS": "cpu"}
        command = _command(args, file, *flags.passed_on(args, "--simulate"))
        done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
        if file.exists():
            return from_json(file.read_text())
    output = (done.stdout + done.stderr).strip()[-2000:]
    return [Finding(preflight.CONFIGURATION, False, f"exit code {done.returncode}: {output}")]


def is_unreadable(found: Sequence[Finding]) -> bool:
    """Returns whether the configuration has a mistake."""
    return any(finding.name == preflight.CONFIGURATION and not finding.ok for finding in found)


def _command(args: argparse.Namespace, file: Path, *more: str) -> list[str]:
    words = flags.passed_on(args, "--gin", "--run-dir")
    return [*environment.COMMAND, "check", args.slice, args.experiment, *words, *more, "--json", str(file)]
