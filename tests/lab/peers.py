"""`tests/run.sh lab peers`: times training steps of a small Llama on CPUs: ours, hand-written JAX, other trainers.

Every program is a process (`tests/lab/peer_steps.py`). All are started first, and then take turns of a few steps, so
that other work on the machine slows all of them; ratios are medians over turns.
"""

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from core.errors import UserError
from launch import environment, flags, terminal
from tests.lab import peer_steps

HELP = "time training steps of a small Llama on CPUs: ours, written by hand in JAX, and those of other trainers"
EXAMPLE = """tests/run.sh lab peers --cores 0,1
  tests/run.sh lab peers --dtype bfloat16 --devices 1 --transformers torch-environment/bin/python
  tests/run.sh lab peers --maxtext maxtext-environment/bin/python --levanter levanter-environment/bin/python"""
_HERE = ("ours", "scanned", "unrolled")
_PEERS = tuple(name for name in peer_steps.PROGRAMS if name not in _HERE)
_ON_ONE_DEVICE = ("transformers",)
_REFERENCE = "unrolled"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds sizes of the measurement and the environments of other trainers."""
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of products")
    parser.add_argument(
        "--devices", metavar="N", type=flags.at_least(1), nargs="+", default=[1, 8], help="CPU devices (default: 1 8)"
    )
    parser.add_argument(
        "--turns", metavar="N", type=flags.at_least(2), default=10, help="of each program (default: 10)"
    )
    parser.add_argument("--steps", metavar="N", type=flags.at_least(1), default=5, help="of a turn (default: 5)")
    parser.add_argument("--cores", metavar="A,B", help="the cores of every program (default: those of this process)")
    parser.add_argument("--default-pages", action="store_true", help="without the large pages of the launcher")
    for name in _PEERS:
        note = "; on one device" if name in _ON_ONE_DEVICE else ""
        parser.add_argument(f"--{name}", metavar="PYTHON", help=f"of an environment with {name}{note}")


def run(args: argparse.Namespace) -> int:
    """Measures and prints; no timing fails. Raises UserError if a program ends early."""
    if 1 not in args.devices and (given := [name for name in _ON_ONE_DEVICE if getattr(args, name)]):
        raise UserError(f"--{given[0]} runs on one device: add 1 to --devices, or leave it out")
    if args.cores:
        os.sched_setaffinity(0, _cores(args.cores))
    env = dict(os.environ) if args.default_pages else environment.ON_CPUS | os.environ
    env["PYTHONPATH"] = str(environment.WORKSPACE)
    pythons = dict.fromkeys(_HERE, sys.executable) | {name: getattr(args, name) for name in _PEERS}
    where = [
        (name, python, devices)
        for devices in args.devices
        for name, python in pythons.items()
        if python and (devices == 1 or name not in _ON_ONE_DEVICE)
    ]
    programs: list[Program] = []
    try:
        for name, python, devices in where:
            programs.append(Program(name, python, devices, args.dtype, env))
            print(f"{programs[-1].label}: {programs[-1].versions}; first loss {programs[-1].loss:.3f}", flush=True)
        for turn in range(args.turns):
            for program in programs if turn % 2 == 0 else reversed(programs):
                program.take_turn(args.steps)
    finally:
        for program in programs:
            program.end()
    pages = "default pages" if args.default_pages else "large pages"
    cores = len(os.sched_getaffinity(0))
    print(
        f"\n{datetime.date.today()}, {args.dtype}, {cores} cores, {pages}, load {os.getloadavg()[0]:.1f} at the end\n"
    )
    terminal.console(120).print(table(programs))
    return 0


def _cores(text: str) -> set[int]:
    parts = text.split(",")
    cores = {int(part) for part in parts if part.isdecimal()}
    if len(cores) != len(parts) or not cores <= os.sched_getaffinity(0):
        raise UserError(f"--cores {text}: expected some of {sorted(os.sched_getaffinity(0))}, such as 0,1")
    return cores


class Program:
    """The process of one program.

    Attributes:
      name, devices: which.
      versions: of its libraries.
      loss: of its first step.
      first: seconds from the start of the process to the end of its first step.
      turns: the answers of `peer_steps`: seconds, processor seconds and page faults of a step, peak bytes.
    """

    def __init__(self, name: str, python: str, devices: int, dtype: str, env: dict[str, str]):
        self.name, self.devices, self.turns = name, devices, list[dict[str, float]]()
        command = [python, str(Path(peer_steps.__file__)), name, str(devices), dtype]
        started, pipe = time.perf_counter(), subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, env=env, text=True)
        about = self._answer()
        self.first = time.perf_counter() - started
        self.versions, self.loss = about["versions"], about["loss"]

    @property
    def label(self) -> str:
        """Its name and devices."""
        return f"{self.name}, {self.devices} device{'s' * (self.devices > 1)}"

    def take_turn(self, steps: int) -> None:
        """Runs some steps."""
        assert self._process.stdin
        self._process.stdin.write(f"{steps}\n")
        self._process.stdin.flush()
        self.turns.append(self._answer())

    def end(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.wait()

    def _answer(self) -> Any:
        assert self._process.stdout
        if not (line := self._process.stdout.readline()):
            code = self._process.wait()
            raise UserError(f"{self.name} ended with exit code {code}; see the messages above")
        return json.loads(line)


def table(programs: Sequence[Program]) -> Table:
    """Returns a row for each program; ratios are to `_REFERENCE` on as many devices, in the same turn."""
    references = {program.devices: program for program in programs if program.name == _REFERENCE}
    headings = (
        "program",
        "devices",
        "tokens/s",
        "of unrolled",
        "processor s",
        "page faults",
        "first step, s",
        "peak, MiB",
    )
    found = Table(*headings, box=None)
    for program in programs:
        seconds, processor = ([turn[key] for turn in program.turns] for key in ("seconds", "processor"))
        ratios = [other["seconds"] / own for other, own in zip(references[program.devices].turns, seconds, strict=True)]
        tokens = peer_steps.ROWS * peer_steps.LENGTH / statistics.median(seconds)
        figures = [f"{tokens:,.0f}", f"{statistics.median(ratios):.2f}", f"{statistics.median(processor):.3f}"]
        figures.append(f"{statistics.median(turn['faults'] for turn in program.turns):,.0f}")
        figures += [f"{program.first:.1f}", f"{max(turn['peak'] for turn in program.turns) / 2**20:,.0f}"]
        found.add_row(program.name, str(program.devices), *figures)
    return found
