"""Tells somebody that a run failed: RENGA_ALERT is a command, or a web address, that gets a few lines of JSON.

The one idea: the dead cannot call. Who starts a run (`launch/pod.sh`, simulated or on a host) outlives its processes
and sends; a process only leaves a note of the exception that ends it, in a folder that it was given. So a host that is
killed is told of like one that raised, and no process waits for anybody when others wait for it.

    {"run": …, "host": 0, "kind": "out of memory", "message": …, "step": 1200, "exit_code": 13, "time": …}

The address may hold a secret: it is never printed nor put on a command line.
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
from core.watch import exit_codes
from launch import environment

SEND_SECONDS = 10.0
_SILENT = (exit_codes.DONE, exit_codes.USER_ERROR, exit_codes.INTERRUPTED, exit_codes.PREEMPTED)
_KINDS = {
    exit_codes.HUNG: "stall",
    exit_codes.PEER_LOST: "host lost",
    exit_codes.DIVERGED: "hosts differ",
    exit_codes.NON_FINITE: "loss not finite",
}
_OUT_OF_MEMORY = re.compile(r"RESOURCE_EXHAUSTED|[Oo]ut of memory|MemoryError")
# In a process of its own, so that a name server that does not answer holds nobody up.
_POST = """
import os, sys, urllib.request
headers = {"Content-Type": "application/json"}
urllib.request.urlopen(urllib.request.Request(os.environ["RENGA_ALERT"], sys.stdin.read().encode(), headers)).read()
"""
_LOCAL = ("http://127.0.0.1:", "http://localhost:")


class Watch:
    """The notes of a run's processes here, and what is sent of them."""

    def __init__(self, run_dir: str, folder: Path):
        """Takes the run's directory and a folder for notes."""
        self._run_dir, self._folder = run_dir, folder

    def after(self, code: int) -> None:
        """Sends one alert where a run ended with `code` and somebody should look; then forgets the notes."""
        notes = sorted((json.loads(file.read_text()) for file in self._folder.glob("*.json")), key=lambda n: n["time"])
        for file in self._folder.iterdir():
            file.unlink()
        hosts = {note["host"] for note in notes}
        raised = [note for note in notes if note.get("message")]
        if code in _SILENT or (hosts and 0 not in hosts):  # another host's parent tells of the run
            return
        first = raised[0] if raised else {"host": None, "message": ""}
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
def watching(run_dir: str) -> Iterator[Watch | None]:
    """For who starts a run: a watch, or None where nobody is to be told.

    Raises:
      ValueError: RENGA_ALERT cannot be used.
    """
    if not (target := environment.read("RENGA_ALERT")):
        yield None
        return
    if re.match(r"[a-z]+://", target) and not target.startswith(("https://", *_LOCAL)):
        raise ValueError("RENGA_ALERT: expected a command, or a web address that starts with https:// (not shown here)")
    with tempfile.TemporaryDirectory(prefix="renga-notes-") as folder:
        os.environ["RENGA_NOTES"] = folder  # for the processes that are started inside
        try:
            yield Watch(run_dir, Path(folder))
        finally:
            del os.environ["RENGA_NOTES"]


@contextlib.contextmanager
def noting(host: int) -> Iterator[None]:
    """For a process of a run: leaves a note that it is here, and of an exception that ends it."""
    folder = environment.read("RENGA_NOTES")
    if folder is None:
        yield
        return
    _note(folder, host, "")
    try:
        yield
    except Exception as error:
        if getattr(error, "exit_code", exit_codes.RAISED) not in _SILENT:
            _note(folder, host, f"{type(error).__name__}: {error}"[:2000])
        raise


def kind(code: int, message: str) -> str:
    """What happened, in two words."""
    if _OUT_OF_MEMORY.search(message):
        return "out of memory"
    return _KINDS.get(code, "killed" if code > 128 and code != exit_codes.JAX_ABORTED else "crash")


def send(alert: Mapping[str, Any]) -> bool:
    """Sends to RENGA_ALERT; waits at most SEND_SECONDS, and never raises. Says whether it went, not to whom."""
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


def _note(folder: str, host: int, message: str) -> None:
    with contextlib.suppress(OSError):  # who would read it is gone
        file = Path(folder) / f"host_{host}.json"
        file.write_text(json.dumps({"host": host, "message": message, "time": time.time()}))


def _step(message: str, run_dir: str) -> int | None:
    """The step that a message names, or the last that was logged."""
    if named := re.search(r"\bstep (\d+)", message):
        return int(named[1])
    if paths.is_remote(run_dir):
        return None
    with contextlib.suppress(OSError, ValueError, IndexError, KeyError):
        return int(json.loads((Path(run_dir) / "metrics.jsonl").read_text().splitlines()[-1])["step"])
    return None
