"""`launch/run doctor`: whether a run could start on this slice, here and now; everything at once, each with its fix.

The checks that need no device run first, in a process of their own, so their findings are printed even if the hosts
cannot join. Then the hosts join and make the checks that need all of them. On a TPU, run it on every host, like a run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from core import paths, slices
from core.errors import UserError
from core.health import exit_codes
from launch import environment, findings
from launch.cli import flags
from launch.hosts import simulate, tpu_host

HELP = "say whether a run could start on this slice, with the fix of whatever is wrong: READY or NOT READY"
EXAMPLE = "launch/run doctor v4-16 gin/quickstart.gin --simulate"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments."""
    flags.add(parser, "SLICE", "EXPERIMENT.gin", "--gin", "--run-dir", "--simulate", "--json")
    parser.add_argument("--part", choices=("ahead", "host"), help=argparse.SUPPRESS)  # of this command's own processes


def run(args: argparse.Namespace) -> int:
    """Prints the findings; 0 if a run could start, otherwise 1."""
    slice_ = slices.get(args.slice)
    args.run_dir = os.fspath(paths.resolve(args.run_dir or environment.run_directory(args.experiment)))
    if args.part == "ahead":
        return _ahead(args)
    played = environment.read("RENGA_SIMULATE")
    if args.part == "host" or played:
        return _host(args, slice_)
    if args.simulate:
        return _end(args, _simulated(args, slice_))
    place = tpu_host.look()
    if not place.on_tpu_host:
        looked_at = "\n  ".join(place.looked_at)
        raise UserError(f"this is no host of a TPU slice: go to every host of one, or add --simulate:\n  {looked_at}")
    tpu_host.require_slice(slice_, accelerator_type=place.accelerator_type, where="this host's TPU")
    return _host(args, slice_)


def _ahead(args: argparse.Namespace) -> int:
    """Writes the findings that need no device to --json; a process of its own, so that its compiler takes no chip."""
    from launch.check import doctor

    where = "simulated" if args.simulate else "here"
    found = doctor.offline(args.experiment, bindings=args.gin, slice_name=args.slice, run_dir=args.run_dir, hosts=where)
    Path(args.json).write_text(json.dumps(findings.to_json(found)))
    return 0


def _rows_of(args: argparse.Namespace, part: str, file: Path, **variables: str) -> list:
    """Runs a part of this command and reads its findings; one failed finding if it did not finish."""
    command = _command(args, part, file)
    done = subprocess.run(
        command,
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode or not file.exists():
        return [findings.Finding(part, False, f"exit code {done.returncode}: {done.stdout.strip()[-2000:]}")]
    return findings.from_text(file.read_text())


def _command(args: argparse.Namespace, part: str, file: Path) -> list[str]:
    own = [*flags.passed_on(args, "--gin", "--simulate", "--run-dir"), "--part", part, "--json", str(file)]
    return [sys.executable, "-m", "launch", "doctor", args.slice, args.experiment, *own]


def _simulated(args: argparse.Namespace, slice_: slices.Slice) -> list:
    with tempfile.TemporaryDirectory(prefix="renga-doctor-") as folder:
        found = _rows_of(args, "ahead", Path(folder) / "ahead.json", JAX_PLATFORMS="cpu")
        if any(row.name == "configuration" and not row.ok for row in found):
            return found
        file = Path(folder) / "host.json"
        code = simulate.run(slice_, command=_command(args, "host", file), log_directory=Path(folder) / "logs")
        if code or not file.exists():
            last = (Path(folder) / "logs/host_0.log").read_text().splitlines()[-5:]
            return [*found, findings.Finding("hosts", False, "\n".join([f"exit code {code}", *last]))]
        return [*found, *findings.from_text(file.read_text())]


def _host(args: argparse.Namespace, slice_: slices.Slice) -> int:
    """Runs this host's part; host 0 prints the findings of all hosts."""
    from core import distributed
    from launch import configuration
    from launch.check import doctor

    simulated = bool(environment.read("RENGA_SIMULATE"))
    own = doctor.own_host(simulated=simulated)
    if args.part != "host":  # else whoever started this process looked
        with tempfile.TemporaryDirectory(prefix="renga-doctor-") as folder:
            own += _rows_of(args, "ahead", Path(folder) / "ahead.json", JAX_PLATFORMS="cpu")
    if any(row.name in ("configuration", "ahead") and not row.ok for row in own):
        return _end(args, own)
    config = configuration.load(args.experiment, bindings=args.gin, slice_name=slice_.name)
    host, joined = doctor.join(slice_)
    if host is None:
        return _end(args, [*own, joined])
    every = doctor.all_hosts(config.build(), host, [*own, joined], config_text=config.text, run_dir=args.run_dir)
    distributed.shutdown()
    if args.part == "host":
        if host.is_zero:
            Path(args.json).write_text(json.dumps(findings.to_json(every)))
        return 0
    return _end(args, every) if host.is_zero else int(not findings.is_ready(every))


def _end(args: argparse.Namespace, found: list) -> int:
    print(findings.table(found), flush=True)
    if args.json:
        paths.write_text_atomically(paths.resolve(args.json), json.dumps(findings.to_json(found), indent=1) + "\n")
    return exit_codes.DONE if findings.is_ready(found) else exit_codes.FAILED
