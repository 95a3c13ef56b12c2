"""The level `slice` of a check: all strategies, the attention kernel and the speed of a slice, in about ten minutes.

Every part is a command that a user could type, run in a process of its own, so a part that fails, hangs or is killed
does not affect the others or the report.
"""

import argparse
import json
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from core import slices, versions
from core.errors import Problem
from core.files import paths
from core.training import metrics
from launch import environment, flags
from launch.findings import LAYOUT, Finding, from_json, is_ready, to_json
from launch.hosts import tpu_host

NAME = "check.json"
ALL_HOSTS, ATTENTION, SPEED = "all hosts", "attention", "speed"  # names of findings
STEPS, SIMULATED_STEPS = 30, 2
PART_SECONDS = 900.0
STRATEGIES = environment.WORKSPACE / "gin" / "strategies"
REHEARSED = ("fsdp", "fsdp_tensor")  # of the strategies, where hosts are processes here
_LAST_LINES = 15


def check(args: argparse.Namespace, slice_: slices.Slice) -> tuple[list[Finding], bool]:
    """Runs all parts in turn; host 0 writes their report to RUN/check.json.

    Returns:
      The findings, and whether this is host 0, or a host that could not join the others.
    """
    started = time.time()
    with tempfile.TemporaryDirectory(prefix="renga-check-") as name:
        folder = Path(name)
        found = _all_hosts(args, folder / "hosts.json")
        found.append(_attention(args, folder / "attention.json"))
        for strategy in REHEARSED if args.simulate else sorted(path.stem for path in STRATEGIES.glob("*.gin")):
            found.append(_strategy(args, strategy, folder / f"{strategy}.json"))
        attention = _read(folder / "attention.json")
    steps = str(SIMULATED_STEPS if args.simulate else STEPS)
    where = ["--run-dir", f"{args.run_dir}/run", *flags.passed_on(args, "--gin", "--simulate")]
    speed = _judged(SPEED, ["pod", slice_.name, args.experiment, *where, "--steps", steps, "--gin", "LOG_INTERVAL = 1"])
    figures = measured(f"{args.run_dir}/run")
    listed = ", ".join(f"{name} {value:.4g}" for name, value in figures.items())
    found.append(speed._replace(detail=listed) if speed.ok and listed else speed)
    index = 0 if args.simulate else tpu_host.own_index(slice_)
    if index or (index is None and attention is None):
        return found, False
    report = {
        "slice": slice_.name,
        "experiment": args.experiment,
        "platform": "simulated" if args.simulate else (attention or {}).get("platform", "unknown"),
        "date": time.strftime("%Y-%m-%d", time.gmtime(started)),
        "seconds": round(time.time() - started, 1),
        "git_revision": versions.git_revision(),
        "attention": attention,
        "measured": figures,
        "findings": json.loads(to_json(found)),
        "ok": is_ready(found),
    }
    file = paths.resolve(args.run_dir) / NAME
    paths.write_text_atomically(file, json.dumps(report, indent=1) + "\n")
    print(f"check: wrote {file}", flush=True)
    return found, True


def _all_hosts(args: argparse.Namespace, file: Path) -> list[Finding]:
    """Returns the findings of the level `hosts`, and one of them all."""
    summary = _judged(ALL_HOSTS, [*_check(args, file, f"{args.run_dir}/run"), "--level", "hosts"])
    return [*(from_json(file.read_text()) if file.exists() else ()), summary]


def _attention(args: argparse.Namespace, file: Path) -> Finding:
    """Compares the attention kernel with the plain implementation, in a process of its own."""
    found = _judged(ATTENTION, [*_check(args, file, f"{args.run_dir}/run"), "--part", "attention"])
    compared = _read(file)
    if not compared:
        return found
    apart = ", ".join(f"{one['dtype']} {max(one['apart'].values()):.2g}" for one in compared["compared"])
    said = f"kernel {compared['kernel']}; largest difference from the plain form, of the largest element: {apart}"
    return Finding(ATTENTION, compared["ok"], said)


def _strategy(args: argparse.Namespace, name: str, file: Path) -> Finding:
    """Makes a smoke run with a strategy; a note if its layout does not fit the slice."""
    bindings = ["--gin", f"include 'gin/strategies/{name}.gin'"]
    run_dir = f"{args.run_dir}/{name}"
    code, said = _run([*_check(args, file, run_dir), *bindings, "--part", "small"])
    failed = [finding for finding in from_json(file.read_text()) if not finding.ok] if file.exists() else []
    if {finding.name for finding in failed} == {LAYOUT}:
        detail = f"not tried, its layout does not fit: {failed[0].detail}"
        return Finding(f"strategy {name}", True, detail, is_note=True)
    if code:
        return Finding(f"strategy {name}", False, _last_lines(code, said))
    words = [*flags.passed_on(args, "--gin", "--simulate"), *bindings, "--run-dir", run_dir, "--check", "smoke"]
    return _judged(f"strategy {name}", ["pod", args.slice, args.experiment, *words])


def _check(args: argparse.Namespace, file: Path, run_dir: str) -> list[str]:
    words = [*flags.passed_on(args, "--gin", "--simulate"), "--run-dir", run_dir, "--json", str(file)]
    return ["check", args.slice, args.experiment, *words]


def _judged(name: str, argv: Sequence[str]) -> Finding:
    """Runs a command of `launch/run` and returns whether it succeeded, with its duration or its last lines."""
    started = time.monotonic()
    print(f"check: {name}: launch/run {' '.join(argv)}", flush=True)
    code, said = _run(argv)
    seconds = time.monotonic() - started
    print(f"check: {name}: {'failed' if code else 'ok'}, {seconds:.1f} s", flush=True)
    return Finding(name, code == 0, f"{seconds:.1f} s" if code == 0 else _last_lines(code, said))


def _last_lines(code: int | None, said: str) -> Problem:
    what = f"not within {PART_SECONDS:g} s" if code is None else f"exit code {code}"
    return Problem("\n".join([what, *said.splitlines()[-_LAST_LINES:]]))


def _run(argv: Sequence[str]) -> tuple[int | None, str]:
    """Returns the exit code (None: not within PART_SECONDS) and the output of a command of `launch/run`."""
    command = [*environment.COMMAND, *argv]
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    try:
        done = subprocess.run(command, **output, check=False, timeout=PART_SECONDS)
    except subprocess.TimeoutExpired as error:
        return None, (error.stdout or b"").decode(errors="replace")
    return done.returncode, done.stdout.decode(errors="replace")


def _read(file: Path) -> dict[str, Any] | None:
    return json.loads(file.read_text()) if file.exists() else None


def measured(run_dir: str) -> dict[str, float]:
    """Returns the metrics of the last measured step: seconds, and on a TPU also the predicted figures."""
    timed = [row for row in metrics.read(run_dir).by_step.values() if "step_seconds" in row]
    wanted = ("step", "step_seconds", "mfu", "hbm_gib", "tokens_per_second")
    last = timed[-1] if timed else {}
    return {name: value for name, value in last.items() if name in wanted or name.startswith("predicted/")}


def compare_attention(args: argparse.Namespace, slice_: slices.Slice) -> bool:
    """Compares attention on this host's chip or, with --simulate, on this machine's CPU; host 0 writes --json."""
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
        args.json.write_text(json.dumps(found))
    distributed.shutdown()
    return found["ok"]
