"""Simulates the hosts of a slice as processes on this machine, with CPU devices as chips.

this process ── host_0   own session, TMPDIR, XDG_CACHE_HOME; output to host_0.log and the terminal
             ├─ host_1   … host_1.log
             └─ guard    kills the sessions and removes the folders if this process is killed

Hosts share the user's HOME, so that `~` in a path and stored credentials mean what they mean to the user.
"""

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil

from core import slices, units
from core.hosts import exit_codes
from core.training import supervise
from launch import environment
from launch.hosts.host_output import HostProcess

WORDS_SECONDS = 3.0  # time for the other hosts to report a failure
_POLL_SECONDS = 0.05
_ONE_THREAD = "--xla_cpu_multi_thread_eigen=false"  # for each device: together they would use more threads than cores
_STOPPED = {exit_codes.PREEMPTED: ("preempted", "SIGTERM"), exit_codes.INTERRUPTED: ("interrupted", "SIGINT")}
_CONSEQUENCES = (exit_codes.PEER_LOST, exit_codes.JAX_ABORTED)  # codes after the failure of another host
# Reads session numbers up to the line `over`; if its input ends before, kills these sessions and removes folder $1.
_GUARD = """
while read -r line; do [ "$line" = over ] && exit; sessions+=("$line"); done
for session in "${sessions[@]}"; do kill -KILL -- "-$session"; done
rm -rf "$1"
"""


def announce(slice_: slices.Slice, log_directory: Path) -> None:
    """Prints which slice is simulated, and where the logs are."""
    hosts = units.counted(slice_.hosts, "host")
    print(f"Simulating {slice_.name}: {hosts} x {slice_.counted_per_host}; logs in {log_directory}", flush=True)


def run(
    slice_: slices.Slice,
    *,
    command: Sequence[str],
    log_directory: Path,
    grace_seconds: float = 60.0,
    words_seconds: float = WORDS_SECONDS,
    requested: list[int] | None = None,
    xla_flags: str = "",
) -> int:
    """Runs `command` once for every host of `slice_`; stops all if one fails.

    Args:
      log_directory: gets host_0.log, host_1.log, …, each appended to.
      grace_seconds: time from asking a process to stop to killing it.
      words_seconds: time for the other hosts to report the first failure.
      requested: the list of `supervise.stop_requests`; None: this function listens for signals.
      xla_flags: flags in the hosts' XLA_FLAGS, unless the environment sets it.

    Returns:
      0, the exit code of the host that caused a failure, or that of the requested stop.
    """
    log_directory.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        if requested is None:
            requested = stack.enter_context(supervise.stop_requests())
        scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="renga-hosts-", ignore_cleanup_errors=True))
        guard = stack.enter_context(_guard(scratch))
        hosts: list[HostProcess] = []
        stack.callback(_stop, hosts, grace_seconds=grace_seconds, requested=requested)
        port, secret = _free_port(), secrets.token_hex()
        for index in range(slice_.hosts):
            own = Path(scratch) / f"host_{index}"
            for folder in (own, own / "tmp", own / "cache"):
                folder.mkdir()
            host = HostProcess(
                command,
                log_path=log_directory / f"host_{index}.log",
                name=f"host {index}",
                step_file=own / "step",
                env=_environment(slice_, index=index, port=port, secret=secret, own=own, xla_flags=xla_flags),
                to_terminal=index == 0,
                start_new_session=True,
            )
            hosts.append(host)
            guard(host.pid)
        culprit = _wait(hosts, requested, words_seconds=words_seconds)
    if requested:
        return requested[0]
    return 0 if culprit is None else _report(culprit)


_OURS = ("XLA_FLAGS", "HF_HOME", *environment.ON_CPUS)  # have values of ours where they are unset or empty


def _environment(
    slice_: slices.Slice, *, index: int, port: int, secret: str, own: Path, xla_flags: str
) -> dict[str, str]:
    has_core_each = slice_.devices <= len(os.sched_getaffinity(0))
    xla_flags = " ".join(filter(None, ("" if has_core_each else _ONE_THREAD, xla_flags)))
    return {
        **environment.ON_CPUS,
        **({"XLA_FLAGS": xla_flags} if xla_flags else {}),
        "HF_HOME": f"{os.environ.get('XDG_CACHE_HOME') or os.path.expanduser('~/.cache')}/huggingface",  # noqa: PTH111
        **{name: value for name, value in os.environ.items() if value or name not in _OURS},
        "RENGA_SIMULATE": slice_.name,
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(slice_.devices_per_host),
        "RENGA_JOIN_SECRET": secret,
        "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
        "JAX_PROCESS_INDEX": str(index),
        "JAX_PROCESS_COUNT": str(slice_.hosts),
        "TPU_SKIP_MDS_QUERY": "1",
        "PYTHONUNBUFFERED": "1",
        "TMPDIR": str(own / "tmp"),
        "XDG_CACHE_HOME": str(own / "cache"),
    }


def _wait(hosts: Sequence[HostProcess], requested: Sequence[int], *, words_seconds: float) -> HostProcess | None:
    """Returns the host that caused a failure, if any failed."""
    running, failed, until = list(hosts), [], float("inf")
    while running and not requested and time.monotonic() < until:
        time.sleep(_POLL_SECONDS)
        ended = [host for host in running if host.poll() is not None]
        failed += [host for host in ended if host.returncode]
        running = [host for host in running if host not in ended]
        if failed:
            until = min(until, time.monotonic() + words_seconds)
    causes = [host for host in failed if exit_codes.of_process(host.returncode) not in _CONSEQUENCES]
    own = [host for host in causes if host.returncode not in _STOPPED]
    return next(iter(own or causes or failed), None)


def _stop(hosts: Sequence[HostProcess], *, grace_seconds: float, requested: Sequence[int]) -> None:
    request = signal.SIGINT if requested and requested[0] == exit_codes.INTERRUPTED else signal.SIGTERM
    for host in hosts:
        if host.poll() is None:
            is_frozen = psutil.Process(host.pid).status() == psutil.STATUS_STOPPED
            _signal_session(host, signal.SIGKILL if is_frozen else request)
    deadline = time.monotonic() + grace_seconds
    while any(host.poll() is None for host in hosts) and time.monotonic() < deadline and len(requested) < 2:
        time.sleep(_POLL_SECONDS)
    late = [host.log_path.stem for host in hosts if host.poll() is None]
    if late:
        within = f"within {grace_seconds:g} s of {request.name}" if len(requested) < 2 else "before the second Ctrl-C"
        print(
            f"{', '.join(late)} did not end {within} and will be killed; steps since the last checkpoint are lost",
            file=sys.stderr,
        )
    for host in hosts:
        _signal_session(host, signal.SIGKILL)
        host.wait()
        host.finish()


def _signal_session(host: HostProcess, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(host.pid, number)


def _report(host: HostProcess) -> int:
    name, code = host.log_path.stem, exit_codes.of_process(host.returncode)
    if host.returncode in _STOPPED:  # that host has itself printed that it saved a checkpoint
        how, name_of_signal = _STOPPED[code]
        print(f"\nthe run was {how} ({name_of_signal} to {name} or another host): exit code {code}", file=sys.stderr)
        return code
    how = f"exit code {code}" if host.returncode > 0 else f"signal {signal.Signals(-host.returncode).name}"
    print(f"\n{name} failed first ({how}); the others were stopped. Its last lines:", file=sys.stderr)
    for line in host.last_lines:
        print(f"  {name} | {line}", file=sys.stderr)
    print(f"Full log: {host.log_path}", file=sys.stderr, flush=True)
    return code


@contextlib.contextmanager
def _guard(scratch: str) -> Iterator[Callable[[object], None]]:
    """Yields a function that tells a helper process which sessions to kill if this process is killed."""
    command = ["bash", "-c", _GUARD, "guard", scratch]
    no = subprocess.DEVNULL
    guard = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=no, stderr=no, start_new_session=True, text=True)
    assert guard.stdin is not None
    stdin = guard.stdin

    def tell(line: object) -> None:
        stdin.write(f"{line}\n")
        stdin.flush()

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
