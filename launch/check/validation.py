"""Validates a new slice in about ten minutes: runs the doctor and short runs, and writes one report.

Every part is a command that a user could type, run in a process of its own, so a part that fails, hangs or is killed
does not affect the others or the report. Each part names the capabilities that it demonstrates; only a report of a TPU
counts for them (`tests/run.sh lab status`).
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from core import run_metrics
from core.health import exit_codes
from launch import environment

NAME = "validate.json"
STEPS = 30
PART_SECONDS = 900.0
STRATEGIES = environment.WORKSPACE / "gin" / "strategies"
REHEARSED = ("fsdp", "fsdp_tensor")  # of the strategies, where hosts are processes here
_LAST_LINES = 15


class Part(NamedTuple):
    """One command and the capabilities that it demonstrates.

    Attributes:
      name: of the part.
      argv: of `launch/run`.
      covers: rows of tests/capabilities.toml.
      check: of `launch/run`, where it may not fit this slice, which is no fault: finds whether it does.
    """

    name: str
    argv: tuple[str, ...]
    covers: tuple[str, ...]
    check: tuple[str, ...] = ()


def parts(slice_name: str, experiment: str, *, run_dir: str, simulated: bool, folder: Path) -> list[Part]:
    """The parts of a validation, in order."""
    played = ("--simulate",) if simulated else ()
    names = sorted(path.stem for path in STRATEGIES.glob("*.gin"))
    start = ("pod", slice_name, experiment, *played)
    common = (slice_name, experiment, *played, "--run-dir", f"{run_dir}/run")
    looks = [
        Part("doctor", ("doctor", *common, "--json", str(folder / "doctor.json")), ("R01", "X01", "X03")),
        Part("attention", ("validate", *common, "--attention", str(folder / "attention.json")), ("T08",)),
    ]
    smokes = []
    for name in [name for name in names if not simulated or name in REHEARSED]:
        what = ("--smoke", "--run-dir", f"{run_dir}/{name}", "--gin", f"include 'gin/strategies/{name}.gin'")
        check = ("check", slice_name, experiment, *played, *what)
        smokes.append(Part(f"strategy {name}", (*start, *what), _COVERS.get(name, ()) + ("C02", "C06"), check))
    steps = str(2 if simulated else STEPS)
    measured = (*start, "--run-dir", f"{run_dir}/run", "--steps", steps, "--gin", "LOG_INTERVAL = 1")
    return [*looks, *smokes, Part("predicted and measured", measured, ("O03", "X06"))]


_COVERS: Mapping[str, tuple[str, ...]] = {
    "data_parallel": ("M06",),
    "fsdp": ("M07",),
    "zero1": ("M08",),
    "tensor": ("M09",),
    "fsdp_tensor": ("M10", "M13"),
    "pipeline": ("M12",),
    "pipeline_fsdp": ("M13",),
    "pipeline_fsdp_tensor": ("M13",),
    "multislice": ("R11",),
}


def perform(part: Part) -> dict[str, Any]:
    """Runs a part for at most PART_SECONDS; `refused` if its layout does not fit the slice."""
    started = time.monotonic()
    code, said = _run(part.check) if part.check else (0, "")
    is_refused = code == exit_codes.USER_ERROR and _failed(said) == {"layout"}
    if not is_refused:
        print(f"validate: {part.name}: launch/run {' '.join(part.argv)}", flush=True)
        code, said = _run(part.argv)
    verdict = "refused" if is_refused else "ok" if code == 0 else "failed"
    seconds = round(time.monotonic() - started, 1)
    print(f"validate: {part.name}: {verdict}, {seconds:g} s", flush=True)
    found = {"name": part.name, "verdict": verdict, "exit_code": code, "seconds": seconds, "covers": list(part.covers)}
    return found if verdict == "ok" else {**found, "said": said.splitlines()[-_LAST_LINES:]}


def _run(argv: Sequence[str]) -> tuple[int | None, str]:
    """The exit code (None: not within PART_SECONDS) and the output of a command of `launch/run`."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", "launch", *argv],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=PART_SECONDS,
        )
    except subprocess.TimeoutExpired as error:
        return None, error.stdout.decode(errors="replace") if isinstance(error.stdout, bytes) else error.stdout or ""
    return done.returncode, done.stdout


def _failed(said: str) -> set[str]:
    """The names of what failed in the output of `launch/run check`."""
    return set(re.findall(r"^FAIL +(\S+)", said, re.MULTILINE))


def measured(run_dir: str) -> dict[str, float]:
    """Returns what the last measured step recorded: seconds, and on a TPU also the predicted figures."""
    recorded = run_metrics.read(f"{run_dir}/run").by_step.values()
    timed = [row for row in recorded if "step_seconds" in row]
    wanted = ("step", "step_seconds", "mfu", "hbm_gib", "tokens_per_second")
    last = timed[-1] if timed else {}
    return {name: value for name, value in last.items() if name in wanted or name.startswith("predicted/")}


def report(done: Sequence[Mapping[str, Any]], *, about: Mapping[str, Any]) -> dict[str, Any]:
    """The report: `about` the slice, every part, and whether none failed."""
    return {**about, "parts": list(done), "ok": all(part["verdict"] != "failed" for part in done)}
