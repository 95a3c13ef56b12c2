"""Sends an alert when a run fails: RENGA_ALERT is a shell command or a web address that receives JSON.

A killed process cannot report its own failure, so the process that started the run (`launch/pod.sh`, simulated or on a
host) sends the alert. Processes of the run only write notes, into a folder that they are given: the exception that ends
them, or the hosts' common verdict on why the run ended, which takes precedence.

    {"run": …, "host": 0, "kind": "out of memory", "message": …, "step": 1200, "exit_code": 13, "time": …}

The address may contain a secret, so it is never printed and never put on a command line.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from core import paths
from core.errors import UserError
from core.health import exit_codes, failure_notes
from launch import environment

SEND_SECONDS = 10.0
_SILENT = (exit_codes.DONE, exit_codes.USER_ERROR, exit_codes.INTERRUPTED, exit_codes.PREEMPTED)
_KINDS = {
    exit_codes.HUNG: "stall",
    exit_codes.PEER_LOST: "host lost",
    exit_codes.DIVERGED: "hosts differ",
    exit_codes.NON_FINITE: "loss not finite",
    exit_codes.RUN_DIRECTORY_LOST: "run directory lost",
}
_OUT_OF_MEMORY = re.compile(r"RESOURCE_EXHAUSTED|[Oo]ut of memory|MemoryError")
# In a separate process, because resolving the name of the address may block for long.
_POST = """
import os, sys, urllib.request
headers = {"Content-Type": "application/json"}
urllib.request.urlopen(urllib.request.Request(os.environ["RENGA_ALERT"], sys.stdin.read().encode(), headers)).read()
"""
_LOCAL = ("http://127.0.0.1:", "http://localhost:")


class Watch:
    """Collects the notes of a run's processes on this machine and sends alerts."""

    def __init__(self, run_dir: str, folder: Path, host: int | None):
        """Takes the run directory, the folder of notes, and the host of these processes; None: all, or unknown."""
        self._run_dir, self._folder, self._host = run_dir, folder, host

    def after(self, code: int) -> None:
        """Sends one alert if exit code `code` is a failure, and deletes the notes."""
        first = failure_notes.cause(failure_notes.collect(self._folder))
        if code in _SILENT or self._host:  # the process that started host 0 reports for the run
            return
        message = first["message"] or exit_codes.ending(code).meaning
        send(
            {
                "run": self._run_dir,
                "host": first["host"],
                "kind": kind(code, message),
                "message": message,
                "step": _step(message, self._run_dir),
                "exit_code": code,
                "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            }
        )


@contextlib.contextmanager
def watching(run_dir: str, *, host: int | None = None) -> Iterator[Watch | None]:
    """For the process that starts a run: a watch, or None if RENGA_ALERT is not set.

    Args:
      run_dir: of the run.
      host: the host whose process is started; only host 0 reports. None: all hosts, or unknown.

    Raises:
      UserError: RENGA_ALERT cannot be used.
    """
    if not (target := environment.read("RENGA_ALERT")):
        yield None
        return
    if re.match(r"[a-z]+://", target) and not target.startswith(("https://", *_LOCAL)):
        raise UserError("RENGA_ALERT: expected a command, or a web address that starts with https:// (not shown here)")
    with tempfile.TemporaryDirectory(prefix="renga-notes-") as folder:
        os.environ["RENGA_NOTES"] = folder  # for the processes that are started inside
        try:
            yield Watch(run_dir, Path(folder), host)
        finally:
            del os.environ["RENGA_NOTES"]


def noting(host: int | None) -> contextlib.AbstractContextManager[None]:
    """For a process of a run: notes the exception that ends it, or the hosts' verdict, for the process that sends."""
    folder = environment.read("RENGA_NOTES")
    return failure_notes.noting(Path(folder), host, silent=_SILENT) if folder else contextlib.nullcontext()


def kind(code: int, message: str) -> str:
    """Classifies a failure, such as `out of memory`."""
    if _OUT_OF_MEMORY.search(message):
        return "out of memory"
    return _KINDS.get(code, "killed" if code > 128 and code != exit_codes.JAX_ABORTED else "crash")


def send(alert: Mapping[str, Any]) -> bool:
    """Sends to RENGA_ALERT within SEND_SECONDS; returns whether that succeeded. Never raises or prints the address."""
    target = environment.read("RENGA_ALERT") or ""
    text = json.dumps(alert)
    is_address = target.startswith(("https://", *_LOCAL))
    command = [sys.executable, "-c", _POST] if is_address else ["bash", "-c", target]
    silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(command, stdin=subprocess.PIPE, text=True, start_new_session=True, **silent)
    try:
        process.communicate(text, timeout=SEND_SECONDS)
        why = f"exit code {process.returncode}" if process.returncode else ""
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        why = f"not within {SEND_SECONDS:g} s"
    how = f"could not be sent ({why})" if why else "was sent"
    print(f"alert ({alert['kind']}) {how}", file=sys.stderr, flush=True)
    return not why


def _step(message: str, run_dir: str) -> int | None:
    """Returns the step that a message names, or the last that was logged."""
    if named := re.search(r"\bstep (\d+)", message):
        return int(named[1])
    if paths.is_remote(run_dir):
        return None
    with contextlib.suppress(OSError, ValueError, IndexError, KeyError):
        return int(json.loads((Path(run_dir) / "metrics.jsonl").read_text().splitlines()[-1])["step"])
    return None
