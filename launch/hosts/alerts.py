"""Sends an alert when a run fails: RENGA_ALERT is a shell command or a web address that receives JSON.

    {"run": …, "host": 0, "kind": "out of memory", "message": …, "step": 1200, "exit_code": 13, "time": …}

The process that started the run sends it, because a killed process cannot.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from core.errors import UserError
from core.files import paths
from core.hosts import exit_codes, failure_notes
from core.training import metrics
from launch import environment

SEND_SECONDS = 10.0
_SILENT = (exit_codes.DONE, exit_codes.USER_ERROR, exit_codes.INTERRUPTED, exit_codes.PREEMPTED)
_KINDS = {
    exit_codes.HUNG: "stall",
    exit_codes.PEER_LOST: "host lost",
    exit_codes.DIVERGED: "hosts differ",
    exit_codes.NON_FINITE: "loss not finite",
    exit_codes.RUN_DIRECTORY_LOST: "run directory lost",
    exit_codes.JAX_ABORTED: "crash",
}
# Runs in a separate process, because resolving the address may block for long.
_POST = """
import os, sys, urllib.request
headers = {"Content-Type": "application/json"}
urllib.request.urlopen(urllib.request.Request(os.environ["RENGA_ALERT"], sys.stdin.read().encode(), headers)).read()
"""
_ADDRESSES = ("https://", "http://127.0.0.1:", "http://localhost:")


@contextlib.contextmanager
def watching(run_dir: str, *, host: int | None = None) -> Iterator[Callable[[int], None]]:
    """Yields a function that sends an alert for an exit code, unless it is in `_SILENT`.

    It does nothing unless RENGA_ALERT is set. `host`: only host 0 sends alerts; None: this process sends them.

    Raises:
      UserError: RENGA_ALERT cannot be used.
    """
    if not (target := environment.read("RENGA_ALERT")):
        yield lambda code: None
        return
    if re.match(r"[a-z]+://", target) and not target.startswith(_ADDRESSES):
        raise UserError("RENGA_ALERT: expected a command, or a web address that starts with https:// (not shown here)")

    def report(code: int) -> None:
        first = failure_notes.cause(failure_notes.collect(Path(folder)))  # also deletes the notes
        if code not in _SILENT and not host:
            _send(target, _alert(code, first, run_dir))

    with tempfile.TemporaryDirectory(prefix="renga-notes-") as folder:
        os.environ["RENGA_NOTES"] = folder  # for the processes that are started in this context
        try:
            yield report
        finally:
            del os.environ["RENGA_NOTES"]


def noting(host: int | None) -> contextlib.AbstractContextManager[None]:
    """Context that notes, for the alert, which failure ends this process.

    Does nothing unless RENGA_NOTES names a folder.
    """
    folder = environment.read("RENGA_NOTES")
    return failure_notes.noting(Path(folder), host, silent=_SILENT) if folder else contextlib.nullcontext()


def _alert(code: int, first: Mapping[str, Any], run_dir: str) -> dict[str, Any]:
    step = first["step"]
    if not step and not paths.is_remote(run_dir):
        with contextlib.suppress(OSError):  # an alert without a step is better than no alert
            step = metrics.read(run_dir).step
    kind = _KINDS.get(code, "killed" if code > 128 else "crash")
    return {
        "run": run_dir,
        "host": first["host"],
        "kind": "out of memory" if first["out_of_memory"] else kind,
        "message": first["message"] or exit_codes.ending(code).meaning,
        "step": step or None,
        "exit_code": code,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def _send(target: str, alert: dict[str, Any]) -> None:
    command = [sys.executable, "-c", _POST] if target.startswith(_ADDRESSES) else ["bash", "-c", target]
    no = subprocess.DEVNULL
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=no, stderr=no, text=True, start_new_session=True)
    try:
        process.communicate(json.dumps(alert), timeout=SEND_SECONDS)
        why = f"exit code {process.returncode}" if process.returncode else ""
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        why = f"not within {SEND_SECONDS:g} s"
    how = f"could not be sent ({why})" if why else "was sent"
    print(f"alert ({alert['kind']}) {how}", file=sys.stderr, flush=True)
