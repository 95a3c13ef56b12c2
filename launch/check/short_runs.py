"""The level `slice` of a check: the level `hosts`, the attention kernel, all strategies, and the speed of a slice.

Each of these checks is a command in a process of its own, so one that hangs does not affect the others.
"""

import argparse
import json
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from core import slices, versions
from core.files import paths
from core.training import metrics
from launch import environment, flags
from launch.findings import Finding, from_json, is_ready, merge, to_json
from launch.hosts import tpu_host

NAME = "check.json"
ALL_HOSTS, ATTENTION, SPEED = "all hosts", "attention", "speed"  # names of findings
STEPS, SIMULATED_STEPS = 30, 2
PART_SECONDS = 900.0
STRATEGIES = environment.WORKSPACE / "gin" / "strategies"
REHEARSED = ("fsdp", "fsdp_tensor")  # the strategies that are tried if hosts are simulated
SPEED_BINDINGS = (  # the run of a check is not copied or logged to where the experiment's own run is
    "LOG_INTERVAL = 1",
    "from launch import settings",
    "settings.Checkpointing.checkpoint_mirror = ''",
    "settings.Logging.wandb_project = ''",
)
_LAST_LINES = 15


def check(args: argparse.Namespace, slice_: slices.Slice) -> tuple[list[Finding], bool]:
    """Runs the checks in turn; writes the findings to RUN/check.json if they are printed here.

    Returns:
      The findings, and whether to print them here.
    """
    started, run_dir = time.time(), _new_folder(args.run_dir)
    of_hosts, all_hosts = _check(args, ALL_HOSTS, "--level", "hosts", run_dir=run_dir)
    compared, attention = _check(args, ATTENTION, "--part", "attention", run_dir=run_dir)
    strategies = REHEARSED if args.simulate else sorted(path.stem for path in STRATEGIES.glob("*.gin"))
    found = [*of_hosts, all_hosts, *(compared or [attention]), *(_strategy(args, name) for name in strategies)]
    steps = str(SIMULATED_STEPS if args.simulate else STEPS)
    speed = _judged(SPEED, _pod(args, run_dir, "--steps", steps, *_flags_of(SPEED_BINDINGS)))
    figures = measured(run_dir)
    listed = ", ".join(f"{name} {value:.4g}" for name, value in figures.items())
    found.append(speed._replace(detail=listed) if speed.ok and listed else speed)
    index = 0 if args.simulate or slice_.hosts == 1 else tpu_host.own_index(slice_)
    if index or (index is None and not of_hosts):  # only host 0 has findings of the hosts
        return found, False
    report = {
        "slice": slice_.name,
        "experiment": args.experiment,
        "platform": "simulated" if args.simulate else slice_.chip.platform,
        "date": time.strftime("%Y-%m-%d", time.gmtime(started)),
        "seconds": round(time.time() - started, 1),
        "git_revision": versions.git_revision(),
        "measured": figures,
        "findings": json.loads(to_json(found)),
        "ok": is_ready(found),
    }
    file = paths.resolve(args.run_dir) / NAME
    paths.write_text_atomically(file, json.dumps(report, indent=1) + "\n")
    print(f"check: wrote {file}", flush=True)
    return found, True


def _new_folder(run_dir: str) -> str:
    """Returns the folder of a new run in `run_dir`.

    In a folder that all hosts see, it is the same on all of them: none begins the run before all have met in the checks
    of hosts.
    """
    before = paths.listed(f"{paths.literal(run_dir)}/run*/config.gin")
    numbers = [name.split("/")[-2].removeprefix("run") for name in before]
    return f"{run_dir}/run{1 + max((int(number) for number in numbers if number.isdecimal()), default=0)}"


def _flags_of(bindings: Sequence[str]) -> list[str]:
    return [word for binding in bindings for word in ("--gin", binding)]


def _strategy(args: argparse.Namespace, strategy: str) -> Finding:
    name, run_dir = f"strategy {strategy}", f"{args.run_dir}/{strategy}"
    bindings = ("--gin", f"include 'gin/strategies/{strategy}.gin'")
    found, checked = _check(args, name, *bindings, "--part", "small", run_dir=run_dir)
    failed = [finding for finding in found if not finding.ok]
    if failed and all(finding.is_layout for finding in failed):
        return Finding(name, True, f"not tried, its layout does not fit: {failed[0].detail}", is_note=True)
    return _judged(name, _pod(args, run_dir, *bindings, "--check", "smoke")) if checked.ok else checked


def _check(args: argparse.Namespace, name: str, *words: str, run_dir: str) -> tuple[list[Finding], Finding]:
    """Runs `launch/run check`; returns its findings ([] if another host has them), and whether it succeeded."""
    options = [*flags.passed_on(args, "--gin", "--simulate"), *words, "--run-dir", run_dir]
    with tempfile.TemporaryDirectory(prefix="renga-check-") as folder:
        file = Path(folder) / "findings.json"
        found = _judged(name, ["check", args.slice, args.experiment, *options, "--json", str(file)])
        return from_json(file.read_text()) if file.exists() else [], found


def _pod(args: argparse.Namespace, run_dir: str, *words: str) -> list[str]:
    options = [*flags.passed_on(args, "--gin", "--simulate"), *words, "--run-dir", run_dir]
    return ["pod", args.slice, args.experiment, *options]


def _judged(name: str, argv: Sequence[str]) -> Finding:
    started = time.monotonic()
    print(f"check: {name}: launch/run {' '.join(argv)}", flush=True)
    code, said = _run(argv)
    seconds = time.monotonic() - started
    print(f"check: {name}: {'ok' if code == 0 else 'failed'}, {seconds:.1f} s", flush=True)
    if code == 0:
        return Finding(name, True, f"{seconds:.1f} s")
    what = f"not within {PART_SECONDS:g} s" if code is None else f"exit code {code}"
    return Finding(name, False, "\n".join([what, *said.splitlines()[-_LAST_LINES:]]))


def _run(argv: Sequence[str]) -> tuple[int | None, str]:
    """Returns the exit code (None: not within PART_SECONDS) and the output of a command."""
    command = [*environment.COMMAND, *argv]
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False, timeout=PART_SECONDS
        )
    except subprocess.TimeoutExpired as error:
        return None, (error.stdout or b"").decode(errors="replace")
    return done.returncode, done.stdout.decode(errors="replace")


def measured(run_dir: str) -> dict[str, float]:
    """Returns metrics of the newest timed step, by name; {} if no step was timed."""
    timed = [row for row in metrics.read(run_dir).by_step.values() if "step_seconds" in row]
    wanted = ("step", "step_seconds", "mfu", "hbm_gib", "tokens_per_second")
    last = timed[-1] if timed else {}
    return {name: value for name, value in last.items() if name in wanted or name.startswith("predicted/")}


def attention(args: argparse.Namespace, slice_: slices.Slice) -> tuple[list[Finding], bool]:
    """Compares the attention kernel with plain attention on this host's chip, or on the CPU.

    Returns:
      The findings of all hosts, and whether to print them here.
    """
    import jax

    from core.hosts import activity, distributed
    from launch.hosts import cluster

    if args.simulate:
        jax.config.update("jax_platforms", "cpu")
    is_zero = args.simulate or cluster.join(slice_).is_zero
    activity.at(ATTENTION)
    every = distributed.all_gather_text("check/attention", to_json([_attention()]))
    distributed.shutdown()
    return merge([from_json(text) for text in every]), is_zero


def _attention() -> Finding:
    from models.decoder.attention import attention_check

    try:
        found = attention_check.look()
    except Exception as error:  # other hosts wait for this one's finding
        return Finding(ATTENTION, False, f"{type(error).__name__}: {error}")
    apart = ", ".join(f"{one['dtype']} {max(one['apart'].values()):.2g}" for one in found["compared"])
    said = f"kernel {found['kernel']}; largest difference from the plain form, of the largest element: {apart}"
    return Finding(ATTENTION, found["ok"], said)
