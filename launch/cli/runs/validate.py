"""`launch/pod.sh SLICE validate`: checks a new slice with the doctor and short runs, and writes one report."""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path

from core import paths, slices, versions
from core.health import exit_codes
from launch import environment
from launch.cli import flags
from launch.hosts import tpu_host

HELP = "try a slice: doctor, attention, every strategy, save and restore, predicted against measured; one report"
EXAMPLE = "launch/run validate v4-16 gin/quickstart.gin --simulate"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flags.add(parser, "SLICE")
    parser.add_argument("experiment", metavar="EXPERIMENT.gin", nargs="?", default="gin/quickstart.gin")
    flags.add(parser, "--run-dir", help="default: $RENGA_RUN_ROOT/validate/SLICE")
    flags.add(parser, "--simulate")
    parser.add_argument("--attention", metavar="FILE", help=argparse.SUPPRESS)  # of this command's own process


def run(args: argparse.Namespace) -> int:
    """Runs all parts in turn. Returns 0 if none failed. In any case host 0 writes RUN/validate.json."""
    from launch.check import validation

    slice_ = slices.get(args.slice)
    if args.attention:
        return _attention(args, slice_)
    if not args.simulate:
        tpu_host.require_here(slice_)
    run_dir = os.fspath(paths.resolve(args.run_dir or default_directory(slice_)))
    started = time.time()
    with tempfile.TemporaryDirectory(prefix="renga-validate-") as name:
        folder = Path(name)
        parts = validation.parts(slice_.name, args.experiment, run_dir=run_dir, simulated=args.simulate, folder=folder)
        done = [validation.perform(part) for part in parts]
        files = {what: folder / f"{what}.json" for what in ("doctor", "attention")}
        found = {what: json.loads(file.read_text()) if file.exists() else None for what, file in files.items()}
    ok = all(part["verdict"] != "failed" for part in done)
    code = exit_codes.DONE if ok else exit_codes.FAILED
    index = 0 if args.simulate else tpu_host.own_index(slice_)
    if index or (index is None and found["attention"] is None):
        return code
    report = {
        "slice": slice_.name,
        "experiment": args.experiment,
        "platform": "simulated" if args.simulate else (found["attention"] or {}).get("platform", "unknown"),
        "date": time.strftime("%Y-%m-%d", time.gmtime(started)),
        "seconds": round(time.time() - started, 1),
        "git_revision": versions.git_revision(),
        **found,
        "measured": validation.measured(run_dir),
        "parts": done,
        "ok": ok,
    }
    file = paths.resolve(run_dir) / validation.NAME
    paths.write_text_atomically(file, json.dumps(report, indent=1) + "\n")
    print(f"{'PASS' if ok else 'FAIL'}  {file}", flush=True)
    return code


def default_directory(slice_: slices.Slice) -> str:
    """Returns the default run directory of a validation: $RENGA_RUN_ROOT/validate/SLICE."""
    return environment.run_directory(environment.WORKSPACE / "validate" / slice_.name)


def _attention(args: argparse.Namespace, slice_: slices.Slice) -> int:
    """Compares attention on this host's chip or, with --simulate, on this machine's CPU. Host 0 writes."""
    from core import distributed
    from core.health import phase
    from launch.check import attention
    from launch.hosts import cluster

    if args.simulate:
        os.environ["JAX_PLATFORMS"] = "cpu"
    index = 0 if args.simulate else cluster.join(slice_).index
    phase.at("attention")
    found = attention.look()
    print(json.dumps(found))
    if index == 0:
        Path(args.attention).write_text(json.dumps(found))
    distributed.shutdown()
    return exit_codes.DONE if found["ok"] else exit_codes.FAILED
