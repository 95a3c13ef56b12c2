"""Runs untrusted programs, each in a confined process of its own (`confined.py`)."""

import builtins
import contextlib
import json
import os
import secrets
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from core.errors import UserError
from tasks.code import confined

_SCRIPT = str(Path(confined.__file__))
_ENVIRONMENT = {"PATH": "/usr/bin:/bin", "OPENBLAS_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}  # contains no secrets
_START_SECONDS = 60.0  # time for the interpreter to start on a busy machine
_EXPECTED = f"expected {' on '.join(confined.SYSTEM)}, with seccomp and Landlock (Linux 5.13)"
_ERRORS = {name for name, kind in vars(builtins).items() if isinstance(kind, type) and issubclass(kind, BaseException)}


class Limits(NamedTuple):
    """The limits of a program.

    Attributes:
      seconds: wall time from when the interpreter is ready; CPU time is limited to about as much.
      memory_bytes: limit of the address space, including the interpreter's.
    """

    seconds: float = 3.0
    memory_bytes: int = 2 * 2**30


class Outcome(NamedTuple):
    """How a program ended.

    Attributes:
      passed: whether it ran to its end. A program that means to deceive can forge that (docs/explanation/trust.md).
      why: "" if it passed; otherwise the name of a builtin error, `timed out`, `ended early` or `killed by signal N`.
        Never text from the program, which could contain what it has read.
    """

    passed: bool
    why: str = ""


def run(code: str, limits: Limits = Limits()) -> Outcome:  # noqa: B008 (immutable)
    """Runs one program until it ends or reaches a limit.

    Raises:
      UserError: its process did not start or could not be confined; the program was not run.
    """
    token = secrets.token_hex(16)  # a program that ends early has not written it
    command = [sys.executable, "-I", "-B", _SCRIPT]
    pipe = subprocess.PIPE
    pipes: dict[str, Any] = {"stdin": pipe, "stdout": pipe, "stderr": subprocess.DEVNULL, "bufsize": 0}
    try:
        started = subprocess.Popen(command, **pipes, env=_ENVIRONMENT, cwd="/", start_new_session=True)
    except OSError as error:
        raise _unconfined(str(error)) from error
    with started as process:
        assert process.stdin is not None
        try:
            with contextlib.suppress(BrokenPipeError):  # the process has ended; `_require_start` says how
                process.stdin.write(f"{json.dumps({'code': code, **limits._asdict()})}\n{token}".encode())
            process.stdin.close()
            _require_start(process)
            answer = _answer(process, limits.seconds)
        finally:
            process.kill()
    if answer == token:
        return Outcome(True)
    if answer is None:
        return Outcome(False, "timed out")
    return Outcome(False, answer if answer in _ERRORS else _ended(process.returncode))


def _ended(code: int) -> str:
    return "ended early" if code >= 0 else f"killed by signal {-code}"


def _unconfined(reason: str) -> UserError:
    return UserError(f"an untrusted program could not be started in a confined process ({reason}): {_EXPECTED}")


def _require_start(process: subprocess.Popen) -> None:
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], _START_SECONDS)
    if not ready:
        raise _unconfined(f"not ready after {_START_SECONDS:.0f} s")
    said = process.stdout.read(len(confined.READY))
    if said != confined.READY:
        reason = (said + process.stdout.read(200)).decode(errors="replace")
        raise _unconfined(reason or _ended(process.wait(_START_SECONDS)))


def _answer(process: subprocess.Popen, seconds: float) -> str | None:
    """Returns the beginning of what the process writes; None if it does not end in time."""
    assert process.stdout is not None
    end, said = time.monotonic() + seconds, b""
    while len(said) <= 200:
        ready, _, _ = select.select([process.stdout], [], [], max(0.0, end - time.monotonic()))
        if not ready:
            return None
        part = process.stdout.read(256)
        if not part:
            try:
                process.wait(max(0.1, end - time.monotonic()))
            except subprocess.TimeoutExpired:  # it closed the pipe but keeps running
                return None
            break
        said += part
    return said.decode(errors="replace")


def run_all(programs: Sequence[str], limits: Limits = Limits()) -> list[Outcome]:  # noqa: B008 (immutable)
    """Runs programs, as many at a time as there are CPUs for this process."""
    require_confinement()
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        return list(pool.map(lambda code: run(code, limits), programs))


def require_confinement() -> None:
    """Raises UserError unless programs are confined on this machine."""
    attempts = "".join(
        f"try:\n    {attempt}\nexcept PermissionError:\n    pass\nelse:\n    raise RuntimeError\n"
        for attempt in ("os.fork()", f"open({str(Path(__file__))!r})")
    )
    if not (found := run(f"import os\n{attempts}")).passed:
        raise UserError(f"untrusted programs are not confined on this machine ({found.why}): {_EXPECTED}")
