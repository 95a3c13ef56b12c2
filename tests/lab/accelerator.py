"""`tests/run.sh lab accelerator`: measures the accelerator of this machine in minutes, in order of value.

Every step runs in a process of its own, so that a crash, a hang or memory that JAX keeps costs that step alone. Figures
are written to DIR/report.json as they come. The same command goes on with what is left: first with steps that never
began, then with those that failed or were ended.
"""

import argparse
import dataclasses
import datetime
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from core import slices, versions
from core.checkpoints import published_files
from core.errors import UserError
from core.hosts import exit_codes
from launch import environment, flags, terminal
from tests.lab.on_accelerator.recorder import Request
from tests.lab.on_accelerator.report import DONE, FAILED, HEADINGS, RUNNING, TIMED_OUT, Report
from tests.lab.on_accelerator.steps import STEPS, order

HELP = "measure the accelerator of this machine, in minutes; --rehearse does all of it on the CPU at small sizes"
EXAMPLE = """tests/run.sh lab accelerator --out accelerator
  python -m tests.lab accelerator --minutes 8 --out accelerator       (packages on PYTHONPATH)
  tests/run.sh lab accelerator --rehearse --out rehearsal"""
LOG = "log.txt"
_LOOK_SECONDS = 0.3
_ENDING_LOOKS = 30
_LAST_CHARACTERS = 2000  # of a failed step's output, in the report
_MODULE = "tests.lab.on_accelerator"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the limits, and what the steps take."""
    parser.add_argument("--minutes", metavar="N", type=flags.positive, default=9.0, help="for all steps (default: 9)")
    parser.add_argument("--out", metavar="DIR", type=Path, default=Path("accelerator"), help="default: accelerator")
    parser.add_argument("--rehearse", action="store_true", help="run every step on the CPU, at small sizes")
    parser.add_argument("--only", metavar="STEP", nargs="+", choices=STEPS, help=f"of {', '.join(STEPS)}")
    parser.add_argument("--model", metavar="FOLDER", default="", help="of a published model, such as SmolLM2, to tune")
    parser.add_argument(
        "--python", metavar="PYTHON", default="", help="with torch and transformers (default: this one)"
    )


def run(args: argparse.Namespace) -> int:
    """Measures, and prints the table, also after an interruption. Returns 1 if a step failed or is left."""
    ends = time.monotonic() + 60 * args.minutes
    _check(args)
    if args.rehearse:
        os.environ["JAX_PLATFORMS"] = "cpu"
    report = Report.opened(args.out, _device(args.rehearse), is_rehearsal=args.rehearse)
    report.save()
    names = args.only or list(STEPS)
    code = exit_codes.DONE
    try:
        with _terminating(), tempfile.TemporaryDirectory(prefix="renga-accelerator-") as work:
            model = args.model and str(Path(args.model).absolute())
            out = str(args.out.absolute())
            request = Request(report.device["slice"], args.rehearse, work, out, model, args.python)
            measure(report, request, args.only or order(report, names), ends=ends)
    except KeyboardInterrupt:
        code = exit_codes.INTERRUPTED
    show(report, names)
    print(f"written: {args.out / 'report.json'}; the same command goes on with what is left")
    return code or (exit_codes.DONE if all(report.status(name) == DONE for name in names) else exit_codes.FAILED)


def _check(args: argparse.Namespace) -> None:
    if args.model and not published_files.is_published(args.model):
        raise UserError(f"--model {args.model}: expected the folder of a published model, with config.json")
    if args.python and not shutil.which(args.python):
        raise UserError(f"--python {args.python}: there is no such program")


def _device(is_rehearsal: bool) -> dict[str, Any]:
    """Returns what this machine has. Raises UserError if that is a CPU, and this is no rehearsal."""
    from launch.hosts import machine

    slice_ = slices.get("cpu:1") if is_rehearsal else machine.local()
    if slice_.generation == "cpu" and not is_rehearsal:
        raise UserError("JAX finds no accelerator on this machine; --rehearse runs all steps on its CPU")
    return {
        "slice": slice_.name,
        "platform": slice_.chip.platform,
        "date": str(datetime.date.today()),
        "revision": versions.git_revision(),
        "versions": versions.of_training(),
    }


@contextmanager
def _terminating() -> Iterator[None]:
    """Treats SIGTERM as Ctrl-C, so that the table is printed."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def measure(report: Report, request: Request, names: Sequence[str], *, ends: float) -> None:
    """Runs the steps in this order, each while there is time for it; `ends` is on the monotonic clock."""
    with Path(request.out, LOG).open("a") as log:
        for name in names:
            left = ends - time.monotonic()
            if left < STEPS[name].least:
                print(f"{name}: {left:.0f} s are left, and it needs {STEPS[name].least}", flush=True)
                continue
            limit = left if request.is_rehearsal else min(left, STEPS[name].seconds)
            print(f"{name}: {STEPS[name].what}; at most {limit:.0f} s", flush=True)
            run_step(report, request, name, seconds=limit, log=log)
            print(f"{name}: {report.status(name)} after {report.steps[name]['seconds']:.0f} s", flush=True)


def run_step(report: Report, request: Request, name: str, *, seconds: float, log: IO[str]) -> None:
    """Runs one step in a process of its own, and takes its figures into the report while it runs."""
    asked, answer = Path(request.work, "request.json"), Path(request.work, f"{name}.answer.json")
    asked.write_text(json.dumps(dataclasses.asdict(request)))
    answer.unlink(missing_ok=True)
    began, log_began = time.monotonic(), Path(log.name).stat().st_size
    report.steps.setdefault(name, {"figures": [], "absent": []})  # those of an earlier try stay until there are others
    report.update(name, status=RUNNING, error="", revision=versions.git_revision())
    print(f"---- {name}", file=log, flush=True)
    process = subprocess.Popen(
        [sys.executable, "-m", _MODULE, name, str(asked), str(answer)],
        cwd=environment.WORKSPACE,
        env=_environment(request),
        stdout=log,
        stderr=subprocess.STDOUT,
        process_group=0,  # with the processes that it starts, which end with it
    )
    status = "interrupted"
    try:
        status = _watch(report, name, process, answer, ends=began + seconds)
    finally:
        _end(process)
        took = {"status": status, "seconds": round(time.monotonic() - began, 1)}
        report.update(name, **took, **_answered(answer), **_error(status, Path(log.name), log_began))


def _watch(report: Report, name: str, process: subprocess.Popen, answer: Path, *, ends: float) -> str:
    """Waits for a process, and writes its figures as they come; returns the status of its step."""
    seen = 0
    while True:
        try:
            return FAILED if process.wait(_LOOK_SECONDS) else DONE
        except subprocess.TimeoutExpired:
            if answer.exists() and (now := answer.stat().st_mtime_ns) != seen:
                seen = now
                report.update(name, **_answered(answer))
        if time.monotonic() > ends:
            return TIMED_OUT


def _end(process: subprocess.Popen) -> None:
    """Ends a process and what it started, and waits until all are gone: they hold memory of the device.

    They may be in a call to a driver, so that they are not asked first.
    """
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for _ in range(_ENDING_LOOKS):
            os.killpg(process.pid, 0)
            time.sleep(_LOOK_SECONDS)
    process.wait()


def _answered(answer: Path) -> dict[str, Any]:
    return json.loads(answer.read_text()) if answer.exists() else {}


def _error(status: str, log: Path, began: int) -> dict[str, str]:
    if status == DONE:
        return {}
    return {"error": log.read_bytes()[began:].decode(errors="replace")[-_LAST_CHARACTERS:]}


def _environment(request: Request) -> dict[str, str]:
    """Returns the variables of a step: with our modules first."""
    path = [str(environment.WORKSPACE), *filter(None, [os.environ.get("PYTHONPATH")])]
    given = {"PYTHONPATH": os.pathsep.join(path), "PYTHONUNBUFFERED": "1", "COLUMNS": "120"}
    return os.environ | given | ({"JAX_PLATFORMS": "cpu"} if request.is_rehearsal else {})


def show(report: Report, names: Sequence[str]) -> None:
    """Prints the table."""
    device = report.device
    title = f"{device['slice']}, {device['date']}, {device['revision'][:10]}"
    title += ": a rehearsal on a CPU, no measurement of an accelerator" if report.is_rehearsal else ""
    terminal.console(160).print(terminal.markdown(HEADINGS, report.rows(names), text=HEADINGS, title=title))
