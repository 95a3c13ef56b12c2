"""Runs untrusted programs, each in a confined process of its own (`confined.py`)."""

import json
import secrets
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from core.errors import UserError
from tasks.code import confined

_SCRIPT = str(Path(confined.__file__))
_ENVIRONMENT = {"PATH": "/usr/bin:/bin", "OPENBLAS_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}  # no secrets
_START_SECONDS = 60.0  # for the interpreter to start on a busy machine


class Limits(NamedTuple):
    """Limits of a program.

    Attributes:
      seconds: time after the interpreter has started, also of the processor.
      memory_bytes: of address space, with the interpreter.
    """

    seconds: float = 3.0
    memory_bytes: int = 2 * 2**30


class Outcome(NamedTuple):
    """How a program ended.

    Attributes:
      passed: whether it ran to its end.
      why: the name of its error, `timed out` or `ended early`; "" if it passed.
    """

    passed: bool
    why: str = ""


def run(code: str, limits: Limits = Limits()) -> Outcome:  # noqa: B008 (immutable)
    """Runs one program to its end or its limits; no process of it remains."""
    # A program that ends its process early, or writes to the pipe, has not passed. (One that searches the memory of its
    # interpreter could find the token: the limits protect the machine, not the score.)
    token = secrets.token_hex(16)
    command = [sys.executable, "-I", "-B", _SCRIPT]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "bufsize": 0}
    with subprocess.Popen(command, **pipes, env=_ENVIRONMENT, cwd="/", start_new_session=True) as process:
        try:
            process.stdin.write(json.dumps({"code": code, "token": token, **limits._asdict()}).encode())
            process.stdin.close()
            said = _answer(process, limits.seconds) if _starts(process) else ""
        finally:
            process.kill()
    if said == token:
        return Outcome(True)
    ended = "ended early" if process.returncode >= 0 else f"killed by signal {-process.returncode}"
    return Outcome(False, "timed out" if said is None else said or ended)


def _starts(process: subprocess.Popen) -> bool:
    """Waits until the process is confined; returns whether it is."""
    ready, _, _ = select.select([process.stdout], [], [], _START_SECONDS)
    return bool(ready) and process.stdout.read(len(confined.READY)) == confined.READY


def _answer(process: subprocess.Popen, seconds: float) -> str | None:
    """Returns what a program answers, at most 200 bytes; None if it does not answer in time."""
    end, said = time.monotonic() + seconds, b""
    while len(said) <= 200:
        ready, _, _ = select.select([process.stdout], [], [], max(0.0, end - time.monotonic()))
        if not ready:
            return None
        part = process.stdout.read(256)
        if not part:  # it has ended, or has closed the pipe
            try:
                process.wait(max(0.1, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                return None
            break
        said += part
    return said.decode(errors="replace")


def run_all(programs: Sequence[str], limits: Limits = Limits(), *, workers: int = 1) -> list[Outcome]:  # noqa: B008
    """Runs programs, `workers` at a time.

    Raises:
      UserError: programs cannot be confined on this machine; none was run.
    """
    require_confinement()
    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(lambda code: run(code, limits), programs))


def require_confinement() -> None:
    """Checks that the confinement works here.

    Raises:
      UserError: it does not.
    """
    forbidden = "import os\ntry:\n    os.fork()\nexcept PermissionError:\n    pass\nelse:\n    raise RuntimeError"
    if not (found := run(forbidden)).passed:
        raise UserError(
            f"untrusted programs cannot be confined on this machine ({found.why}): expected "
            f"{' on '.join(confined.SYSTEM)}, with seccomp"
        )
