"""Tells somebody that a run failed: RENGA_ALERT is a command, or a web address, that gets a few lines of JSON.

The one idea: the dead cannot call. Who starts a run (`launch/pod.sh`, simulated or on a host) outlives its processes
and sends; a process only leaves a note of the exception that ends it, in a folder that it was given. So a host that is
killed is told of like one that raised, and no process waits for anybody when others wait for it. Where the hosts of
a run found out together what ends it, that is what is told.

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
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from core import paths
from core.errors import UserError
from core.watch import exit_codes, peers
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
# In a process of its own, so that a name server that does not answer holds nobody up.
_POST = """
import os, sys, urllib.request
headers = {"Content-Type": "application/json"}
urllib.request.urlopen(urllib.request.Request(os.environ["RENGA_ALERT"], sys.stdin.read().encode(), headers)).read()
"""
_LOCAL = ("http://127.0.0.1:", "http://localhost:")


class Watch:
    """The notes of a run's processes here, and what is sent of them."""

    def __init__(self, run_dir: str, folder: Path, host: int | None):
        """Takes the run's directory, a folder for notes, and whose processes these are; None: of all, or unknown."""
        self._run_dir, self._folder, self._host = run_dir, folder, host

    def after(self, code: int) -> None:
        """Sends one alert where a run ended with `code` and somebody should look; then forgets the notes."""
        notes = self._taken()
        if code in _SILENT or self._host:  # the parent of host 0 tells of the run
            return
        first = _cause(notes)
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

    def _taken(self) -> list[dict[str, Any]]:
        """The notes in the order they were written; a file that is none is left out."""
        notes = []
        for file in self._folder.glob("*.json"):
            with contextlib.suppress(ValueError):
                notes.append(json.loads(file.read_text()))
            file.unlink()
        return sorted(notes, key=lambda note: note["time"])


@contextlib.contextmanager
def watching(run_dir: str, *, host: int | None = None) -> Iterator[Watch | None]:
    """For who starts a run: a watch, or None where nobody is to be told.

    Args:
      run_dir: of the run.
      host: whose processes are started; that of host 0 tells. None: those of all, or nobody knows.

    Raises:
      ValueError: RENGA_ALERT cannot be used.
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


@contextlib.contextmanager
def noting(host: int | None) -> Iterator[None]:
    """For a process of a run: leaves a note of an exception that ends it, or of the verdict of its hosts."""
    folder = environment.read("RENGA_NOTES")
    if folder is None:
        yield
        return
    peers.on_verdict(lambda verdict: _note(folder, "verdict", host, min(verdict.hosts), verdict.says))
    try:
        yield
    except Exception as error:
        if getattr(error, "exit_code", exit_codes.RAISED) not in _SILENT:
            _note(folder, "raised", host, host, f"{type(error).__name__}: {error}"[:2000])
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


def _cause(notes: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """What is told: what was raised on the host that the verdict names, or the verdict, or what was raised first."""
    verdicts = [note for note in notes if note["kind"] == "verdict"]
    raised = [note for note in notes if note["kind"] == "raised"]
    named = [note for note in raised if verdicts and note["host"] == verdicts[0]["host"]]
    return next(iter([*named, *verdicts, *raised]), {"host": None, "message": ""})


def _note(folder: str, kind: str, of: int | None, host: int | None, message: str) -> None:
    """Leaves a note of a process (`of`) about a host."""
    with contextlib.suppress(OSError):  # who would read it is gone
        about = {"kind": kind, "host": host, "message": message, "time": time.time()}
        part = Path(folder) / f".{kind}_{of}"
        part.write_text(json.dumps(about))
        part.replace(Path(folder) / f"{kind}_{of}.json")


def _step(message: str, run_dir: str) -> int | None:
    """The step that a message names, or the last that was logged."""
    if named := re.search(r"\bstep (\d+)", message):
        return int(named[1])
    if paths.is_remote(run_dir):
        return None
    with contextlib.suppress(OSError, ValueError, IndexError, KeyError):
        return int(json.loads((Path(run_dir) / "metrics.jsonl").read_text().splitlines()[-1])["step"])
    return None
