"""`launch/run doctor`: checks whether a run can start on this slice now, and lists all problems with their fixes.

The checks that need no device run first, in a process of their own, so their findings are printed even if the hosts
cannot join. Then the hosts join and make the checks that need all of them. On a TPU, run it on every host, like a run.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from core import paths, slices
from core.health import exit_codes
from launch import environment, findings
from launch.cli import flags
from launch.findings import Finding
from launch.hosts import simulate, tpu_host

HELP = "say whether a run could start on this slice, with the fix of whatever is wrong: READY or NOT READY"
EXAMPLE = "launch/run doctor v4-16 gin/quickstart.gin --simulate"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flags.add(parser, "SLICE", "EXPERIMENT.gin", "--gin", "--run-dir", "--simulate", "--json")
    parser.add_argument("--part", choices=("offline", "host"), help=argparse.SUPPRESS)  # as one of its processes


def run(args: argparse.Namespace) -> int:
    """Prints the findings. Returns 0 if a run can start, otherwise 1."""
    slice_ = slices.get(args.slice)
    args.run_dir = os.fspath(paths.resolve(args.run_dir or environment.run_directory(args.experiment)))
    if args.part == "offline":
        from launch.check import doctor

        where = "simulated" if args.simulate else "here"
        found = doctor.offline(
            args.experiment, bindings=args.gin, slice_name=args.slice, run_dir=args.run_dir, hosts=where
        )
        args.json.write_text(findings.to_json(found))
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
    return [sys.executable, "-m", "launch", "doctor", args.slice, args.experiment, *words]


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
    from core import distributed
    from launch import configuration
    from launch.check import doctor

    own = doctor.own_host(simulated=bool(environment.read("RENGA_SIMULATE")))
    if args.part != "host":  # otherwise the process that started this one made the offline checks
        with tempfile.TemporaryDirectory(prefix="renga-doctor-") as folder:
            own += _offline_checks(args, Path(folder))
    if any(row.name in ("configuration", "offline") and not row.ok for row in own):
        return _end(args, own)
    config = configuration.load(args.experiment, bindings=args.gin, slice_name=slice_.name)
    host, joined = doctor.join(slice_)
    if host is None:
        return _end(args, [*own, joined])
    every = doctor.all_hosts(config, host, [*own, joined], run_dir=args.run_dir)
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
