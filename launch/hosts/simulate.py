"""Simulates the hosts of a slice as processes on this machine, with CPU devices as chips.

A simulated host runs the same command as a real one; environment variables tell it that its chips are CPU devices and
where the other hosts are. If one process fails, the others have a moment to report what they observed and are then
stopped; the exit code is that of the host that failed first. No process outlives the launcher, however that ends.

    this process ── host_0   own session, HOME, TMPDIR, XDG_CACHE_HOME; output to RUN/logs/host_0.log and the terminal
                 ├─ host_1   … RUN/logs/host_1.log
                 └─ guard    reads a pipe that only we hold; at its end, kills the sessions and removes the folders
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil

from core import slices
from core.health import exit_codes
from launch.hosts import host_output, log_prefix, supervise

LAST_LINES = 20
WORDS_SECONDS = 3.0  # for the other hosts to report the failure themselves
_POLL_SECONDS = 0.2
_CONSEQUENCES = (exit_codes.PEER_LOST, exit_codes.JAX_ABORTED)  # of what happened to another host
# Reads session numbers until `over`; if its input ends before that, kills them and removes the folder it was given.
_GUARD = """
while read -r line; do [ "$line" = over ] && exit; sessions+=("$line"); done
for session in "${sessions[@]}"; do kill -KILL -- "-$session"; done
rm -rf "$1"
"""


class _Host(NamedTuple):
    name: str
    process: subprocess.Popen
    output: host_output.HostOutput


def run(
    slice_: slices.Slice,
    *,
    command: Sequence[str],
    log_directory: Path,
    grace_seconds: float = 15.0,
    words_seconds: float = WORDS_SECONDS,
    requested: list[int] | None = None,
) -> int:
    """Runs `command` once for every host of `slice_`, until all have ended or one fails.

    Args:
      slice_: the slice to simulate.
      command: argv of one host's process; the same for all.
      log_directory: gets host_0.log, host_1.log, …, each appended to.
      grace_seconds: between asking a process to stop and killing it.
      words_seconds: between the first failure and asking the others to stop.
      requested: the list of `supervise.stop_requests`, if the caller already listens for signals.

    Returns:
      0 if all succeeded; else the exit code of the host that failed first (128 + N if signal N ended it), ignoring
      hosts that ended because of another; 130 after Ctrl-C, 143 after SIGTERM.
    """
    log_directory.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        if requested is None:
            requested = stack.enter_context(supervise.stop_requests())
        scratch = Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="renga-hosts-", ignore_cleanup_errors=True))
        )
        guard = stack.enter_context(_guard(scratch))
        hosts: list[_Host] = []
        stack.callback(_stop, hosts, grace_seconds=grace_seconds, requested=requested)

        def started(host: _Host) -> None:
            hosts.append(host)
            guard(host.process.pid)

        _start(slice_, command=command, log_directory=log_directory, scratch=scratch, started=started)
        culprit = _wait(hosts, requested, words_seconds=words_seconds)
    if requested:
        return requested[0]
    return 0 if culprit is None else _report(culprit)


def _environment(slice_: slices.Slice, *, index: int, port: int, home: Path) -> dict[str, str]:
    """Returns the environment of host `index`; `home` becomes its HOME and has its cache and temporary files."""
    return {
        **os.environ,
        "RENGA_SIMULATE": slice_.name,
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(slice_.chips_per_host),
        "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
        "JAX_PROCESS_INDEX": str(index),
        "JAX_PROCESS_COUNT": str(slice_.hosts),
        "TPU_SKIP_MDS_QUERY": "1",
        "PYTHONUNBUFFERED": "1",
        "RENGA_STEP_FILE": str(home / "step"),
        "HOME": str(home),
        "TMPDIR": str(home / "tmp"),
        "XDG_CACHE_HOME": str(home / "cache"),
    }


def _start(slice_, *, command, log_directory, scratch, started) -> None:
    """Starts every host and passes it to `started` at once, so that an interrupted start is cleaned up too."""
    port = _free_port()
    for index in range(slice_.hosts):
        home = scratch / f"host_{index}"
        for folder in (home, home / "tmp", home / "cache"):
            folder.mkdir()
        prefix = log_prefix.LogPrefix(f"host {index}", step_file=home / "step")
        output = host_output.HostOutput(log_directory / f"host_{index}.log", to_terminal=index == 0, prefix=prefix)
        process = output.start(
            command,
            title=f"host {index} of {slice_.name}",
            env=_environment(slice_, index=index, port=port, home=home),
            start_new_session=True,
        )
        started(_Host(f"host_{index}", process, output))


def _wait(hosts: Sequence[_Host], requested: Sequence[int], *, words_seconds: float) -> _Host | None:
    """Waits until all succeed or a stop is requested (None); after a failure, returns the host that caused it."""
    ended: queue.Queue[_Host] = queue.Queue()

    def watch(host: _Host) -> None:
        host.process.wait()
        ended.put(host)

    for host in hosts:
        threading.Thread(target=watch, args=(host,), daemon=True).start()
    running, failed, until = len(hosts), [], float("inf")
    while running and not requested and time.monotonic() < until:
        with contextlib.suppress(queue.Empty):  # wakes up now and then to look at `requested`
            host = ended.get(timeout=_POLL_SECONDS)
            running -= 1
            if host.process.returncode != 0:
                failed.append(host)
                until = min(until, time.monotonic() + words_seconds)
    causes = [host for host in failed if exit_codes.of_process(host.process.returncode) not in _CONSEQUENCES]
    own = [host for host in causes if host.process.returncode != exit_codes.PREEMPTED]
    return next(iter(own or causes or failed), None)


def _stop(hosts: Sequence[_Host], *, grace_seconds: float, requested: Sequence[int]) -> None:
    """Ends every session with all its processes: SIGTERM, a grace period, SIGKILL. A second Ctrl-C skips the wait."""
    for host in hosts:
        if host.process.poll() is None:
            _signal_session(host.process, signal.SIGKILL if _is_frozen(host.process) else signal.SIGTERM)
    deadline = time.monotonic() + grace_seconds
    while any(host.process.poll() is None for host in hosts) and time.monotonic() < deadline and len(requested) < 2:
        time.sleep(_POLL_SECONDS / 4)
    for host in hosts:
        _signal_session(host.process, signal.SIGKILL)
        host.process.wait()
        host.output.finish()


def _is_frozen(process: subprocess.Popen) -> bool:
    """Returns whether the process is stopped (SIGSTOP) and so cannot handle SIGTERM."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(process.pid).status() == psutil.STATUS_STOPPED
    return False


def _signal_session(process: subprocess.Popen, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def _report(host: _Host) -> int:
    returncode, code = host.process.returncode, exit_codes.of_process(host.process.returncode)
    if returncode == exit_codes.PREEMPTED:  # it has printed that it saved a checkpoint
        print(f"\nthe run was preempted (SIGTERM to {host.name} or another host): exit code {code}", file=sys.stderr)
        return code
    how = f"exit code {code}" if returncode > 0 else f"signal {signal.Signals(-returncode).name}"
    print(f"\n{host.name} failed first ({how}); the others were stopped. Its last lines:", file=sys.stderr)
    for line in host.output.last_lines(LAST_LINES):
        print(f"  {host.name} | {line}", file=sys.stderr)
    print(f"Full log: {host.output.log_path}", file=sys.stderr, flush=True)
    return code


@contextlib.contextmanager
def _guard(scratch: Path) -> Iterator[Callable[[int], None]]:
    """Inside, a helper process ends the sessions that it was told of if this process is killed."""
    guard = subprocess.Popen(
        ["bash", "-c", _GUARD, "guard", str(scratch)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        text=True,
    )

    def tell(line: object) -> None:
        guard.stdin.write(f"{line}\n")
        guard.stdin.flush()

    try:
        yield tell
    finally:
        with contextlib.suppress(BrokenPipeError):  # the helper was killed
            tell("over")
        guard.communicate()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
