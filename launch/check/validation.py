"""Validates a new slice in about ten minutes: runs the doctor and short runs, and writes one report.

Every part is a command that a user could type, run in a process of its own, so a part that fails, hangs or is killed
does not affect the others or the report.
"""

import argparse
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from core import slices, versions
from core.files import paths
from core.hosts import exit_codes
from core.training import metrics
from launch import environment, flags
from launch.findings import LAYOUT, from_json
from launch.hosts import tpu_host

COMMAND = ("runs", "validate")
HELP = "validate a slice: doctor, attention, all strategies, save and restore, measured speed; writes a report"
EXAMPLE = "launch/run validate v4-16 gin/quickstart.gin --simulate"

NAME = "validate.json"
STEPS = 30
PART_SECONDS = 900.0
STRATEGIES = environment.WORKSPACE / "gin" / "strategies"
REHEARSED = ("fsdp", "fsdp_tensor")  # of the strategies, where hosts are processes here
_LAST_LINES = 15


class Part(NamedTuple):
    """One command, as arguments of `launch/run`."""

    name: str
    argv: tuple[str, ...]
    check: tuple[str, ...] = ()  # a command that finds whether it fits this slice; if it does not, that is no failure


def parts(slice_name: str, experiment: str, *, run_dir: str, simulated: bool, folder: Path) -> list[Part]:
    """Returns the parts of a validation, in order."""
    where = (slice_name, experiment, *(("--simulate",) if simulated else ()))
    common = (*where, "--run-dir", f"{run_dir}/run")
    found = [
        Part("doctor", ("doctor", *common, "--json", str(folder / "doctor.json"), "--overwrite")),
        Part("attention", ("validate", *common, "--attention", str(folder / "attention.json"))),
    ]
    for name in REHEARSED if simulated else sorted(path.stem for path in STRATEGIES.glob("*.gin")):
        what = (*where, "--smoke", "--run-dir", f"{run_dir}/{name}", "--gin", f"include 'gin/strategies/{name}.gin'")
        found.append(Part(f"strategy {name}", ("pod", *what), ("check", *what)))
    steps = str(2 if simulated else STEPS)
    measured = ("pod", *common, "--steps", steps, "--gin", "LOG_INTERVAL = 1")
    return [*found, Part("predicted and measured", measured)]


def perform(part: Part) -> dict[str, Any]:
    """Runs a part for at most PART_SECONDS; `refused` if its layout does not fit the slice."""
    started = time.monotonic()
    code, said, failed = 0, "", set()
    if part.check:
        with tempfile.TemporaryDirectory(prefix="renga-validate-") as folder:
            file = Path(folder) / "check.json"
            code, said = _run((*part.check, "--json", str(file)))
            found = from_json(file.read_text()) if file.exists() else ()
            failed = {finding.name for finding in found if not finding.ok}
    if failed == {LAYOUT}:
        verdict = "refused"
    else:
        print(f"validate: {part.name}: launch/run {' '.join(part.argv)}", flush=True)
        code, said = _run(part.argv)
        verdict = "ok" if code == 0 else "failed"
    seconds = round(time.monotonic() - started, 1)
    print(f"validate: {part.name}: {verdict}, {seconds:g} s", flush=True)
    result = {"name": part.name, "verdict": verdict, "exit_code": code, "seconds": seconds}
    return result if verdict == "ok" else {**result, "said": said.splitlines()[-_LAST_LINES:]}


def _run(argv: Sequence[str]) -> tuple[int | None, str]:
    """Returns the exit code (None: not within PART_SECONDS) and the output of a command of `launch/run`."""
    command = [*environment.COMMAND, *argv]
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    try:
        done = subprocess.run(command, **output, check=False, timeout=PART_SECONDS)
    except subprocess.TimeoutExpired as error:
        return None, (error.stdout or b"").decode(errors="replace")
    return done.returncode, done.stdout.decode(errors="replace")


def measured(run_dir: str) -> dict[str, float]:
    """Returns the metrics of the last measured step: seconds, and on a TPU also the predicted figures."""
    timed = [row for row in metrics.read(f"{run_dir}/run").by_step.values() if "step_seconds" in row]
    wanted = ("step", "step_seconds", "mfu", "hbm_gib", "tokens_per_second")
    last = timed[-1] if timed else {}
    return {name: value for name, value in last.items() if name in wanted or name.startswith("predicted/")}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    flags.add(parser, "SLICE")
    parser.add_argument("experiment", metavar="EXPERIMENT.gin", nargs="?", default="gin/quickstart.gin")
    flags.add(parser, "--run-dir", help="default: runs/validate/SLICE")
    flags.add(parser, "--simulate")
    parser.add_argument("--attention", metavar="FILE", help=argparse.SUPPRESS)  # of this command's own process


def run(args: argparse.Namespace) -> int:
    """Runs all parts in turn. Returns 0 if none failed. In any case host 0 writes RUN/validate.json."""
    slice_ = slices.get(args.slice)
    if args.attention:
        return _attention(args, slice_)
    if not args.simulate:
        tpu_host.require_here(slice_)
    run_dir = os.fspath(paths.resolve(args.run_dir or default_directory(slice_)))
    started = time.time()
    with tempfile.TemporaryDirectory(prefix="renga-validate-") as name:
        folder = Path(name)
        todo = parts(slice_.name, args.experiment, run_dir=run_dir, simulated=args.simulate, folder=folder)
        done = [perform(part) for part in todo]
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
        "measured": measured(run_dir),
        "parts": done,
        "ok": ok,
    }
    file = paths.resolve(run_dir) / NAME
    paths.write_text_atomically(file, json.dumps(report, indent=1) + "\n")
    print(f"{'PASS' if ok else 'FAIL'}  {file}", flush=True)
    return code


def default_directory(slice_: slices.Slice) -> str:
    """Returns the default run directory of a validation."""
    return f"{environment.run_root()}/validate/{slice_.name.replace(':', '-')}"


def _attention(args: argparse.Namespace, slice_: slices.Slice) -> int:
    """Compares attention on this host's chip or, with --simulate, on this machine's CPU. Host 0 writes."""
    import jax

    from core.hosts import activity, distributed
    from launch.hosts import cluster
    from models.decoder.attention import attention_check

    if args.simulate:
        jax.config.update("jax_platforms", "cpu")
    index = 0 if args.simulate else cluster.join(slice_).index
    activity.at("attention")
    found = attention_check.look()
    print(json.dumps(found))
    if index == 0:
        Path(args.attention).write_text(json.dumps(found))
    distributed.shutdown()
    return exit_codes.DONE if found["ok"] else exit_codes.FAILED
