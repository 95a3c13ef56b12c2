"""Runs hosts as one program: initialization, barriers, exchange of texts, preemption and shutdown.

Apart from `all_gather_array`, this uses JAX's coordination service and not the devices.
"""

import collections
import contextlib
import json
import math
import os
import secrets
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

from core import jax_internals, library_errors, units
from core.errors import UnreachableError, UserError
from core.files import paths
from core.hosts import exit_codes, heartbeat, rendezvous
from core.hosts.failure_diagnosis import Limits

# Minimum timeout of JAX's heartbeat: the heartbeat of `core.hosts`, which names the silent host, must report first.
HEARTBEAT_SECONDS = 60
_NEVER_SECONDS = 24 * 3600  # timeout of JAX's heartbeat if a silent host must not end the run
SHUTDOWN_SECONDS = 30
BEFORE_DEVICES_SECONDS = 120  # host 0 may watch another run's lock for a minute before it joins
TIMEOUT_SECONDS = 300

_MAX_TEXT_BYTES = 2**21  # the coordination service limits messages to 4 MiB
_NONCE_FILE = ".shared"
_INTERRUPTED = "interrupted"
_SHARED_FILE_SECONDS = 10.0  # network file systems may show a new file late

_UNCONNECTED_ADVICE = (
    "the simulated hosts did not connect for a collective within Gloo's 30 s: one of them has ended (its log says "
    "why), or this machine is too busy to run all of them at once. Start the same command again when it is less busy."
)
CONSEQUENCES = (jax.errors.JaxRuntimeError, TimeoutError)  # errors that the loss of another host can cause


class Cluster(NamedTuple):
    """The processes of a run.

    Attributes:
      coordinator: "HOST:PORT" of host 0; "" for a single process.
    """

    process_index: int
    process_count: int
    coordinator: str


_ALONE = Cluster(0, 1, "")
_joined: Cluster | None = None
_sigterm_received = threading.Event()
_calls: collections.Counter[str] = collections.Counter()
_posted_alone: dict[str, str] = {}  # texts posted in a single process


def initialize(
    *,
    coordinator: str | None = None,
    process_index: int | None = None,
    process_count: int | None = None,
    local_cpu_devices: int | None = None,
    timeout_seconds: float = TIMEOUT_SECONDS,
    single_process: bool = False,
    description: str = "",
    addresses: Sequence[str] = (),
    secret: str = "",
    watch: Limits | None = None,
    before_devices: Callable[[Cluster], None] = lambda cluster: None,
) -> Cluster:
    """Joins the other hosts before any device is initialized; returns the cluster.

    Args:
      coordinator: "HOST:PORT" of host 0. If this and the next two are None, JAX detects the cluster.
      process_index, process_count: index of this host, from 0, and the number of hosts.
      local_cpu_devices: number of CPU devices of this process (simulation); None: as JAX is configured.
      timeout_seconds: how long to wait for all hosts.
      single_process: whether this process runs alone.
      description: the configuration of this host, which must be equal on all hosts.
      addresses: addresses of all hosts by index, to name a missing one.
      secret: known to the hosts of this start alone.
      watch: time limits for the monitoring between hosts; None: no monitoring.
      before_devices: called with the cluster before JAX's runtime starts.

    Raises:
      RuntimeError: a device was initialized before.
      UserError: arguments are invalid, there is no cluster, or this process joined another.
    """
    global _joined
    wanted = _wanted(coordinator, process_index=process_index, process_count=process_count, alone=single_process)
    if _joined is not None:
        if wanted not in (None, _joined):
            raise UserError(f"this process has already joined as {_joined}; it cannot join again as {wanted}")
        return _joined
    if jax_internals.backends_are_initialized():
        raise RuntimeError(
            "distributed.initialize was called after a device was initialized (by jax.devices(), an array, "
            "jax.random.key at import time …); call it first in the program"
        )
    if local_cpu_devices is not None:
        jax.config.update("jax_num_cpu_devices", local_cpu_devices)
    if single_process:
        signal.signal(signal.SIGTERM, lambda *_: _sigterm_received.set())  # JAX handles it only for several processes
        if watch:
            heartbeat.start(None, limits=watch)
        cluster = _ALONE
        before_devices(cluster)
    else:
        cluster = _meet(wanted, timeout_seconds, description, addresses, secret, watch)
        before_devices(cluster)
        _join(cluster, timeout_seconds=timeout_seconds, heartbeat_seconds=_heartbeat_seconds(watch))
    _joined = cluster
    return cluster


def _wanted(
    coordinator: str | None, *, process_index: int | None, process_count: int | None, alone: bool
) -> Cluster | None:
    """Returns None if the cluster has to be detected."""
    given = {"coordinator": coordinator, "process_index": process_index, "process_count": process_count}
    missing = [name for name, value in given.items() if value is None]
    if alone:
        if len(missing) < 3:
            raise UserError(f"single_process=True and a cluster were both given: {given}; give one of them")
        return _ALONE
    if len(missing) == 3:
        return None
    if coordinator is None or process_index is None or process_count is None:
        raise UserError(f"distributed.initialize needs {', '.join(missing)} too (got {given}); give all three or none")
    rendezvous.split(coordinator)
    if not 0 <= process_index < process_count:
        raise UserError(f"process_index is {process_index}; expected 0 to {process_count - 1} (process_count - 1)")
    return Cluster(process_index, process_count, coordinator)


def _detected(timeout_seconds: float) -> Cluster:
    coordinator, process_count, process_index = jax_internals.detected_cluster(timeout_seconds)
    if coordinator is None or process_count is None or process_index is None:
        raise UserError(
            "no cluster was found on this machine (it is not a host of a TPU slice, or its metadata cannot be read); "
            "set JAX_COORDINATOR_ADDRESS, JAX_PROCESS_INDEX and JAX_PROCESS_COUNT on every host, or in Python "
            "single_process=True to run alone"
        )
    return Cluster(process_index, process_count, coordinator)


def _meet(
    wanted: Cluster | None,
    timeout_seconds: float,
    description: str,
    addresses: Sequence[str],
    secret: str,
    watch: Limits | None,
) -> Cluster:
    if wanted is None:
        wanted = _detected(timeout_seconds)
        found = jax_internals.addresses_of_slice()  # empty for several slices
        addresses = addresses or (found if len(found) == wanted.process_count else ())
        secret = secret or ",".join(addresses)
    index, count, coordinator = wanted
    roll = rendezvous.answer(
        coordinator,
        index=index,
        count=count,
        timeout_seconds=timeout_seconds,
        description=description,
        addresses=addresses,
        secret=secret,
    )
    if watch:
        heartbeat.start(roll, limits=watch)
    else:
        roll.close()
    return wanted


def _heartbeat_seconds(watch: Limits | None) -> int:
    if watch is None:
        return HEARTBEAT_SECONDS
    return _NEVER_SECONDS if watch.reports_only else max(HEARTBEAT_SECONDS, math.ceil(1.5 * watch.silent_seconds))


def _join(cluster: Cluster, *, timeout_seconds: float, heartbeat_seconds: int) -> None:
    index, count, coordinator = cluster
    host, port = rendezvous.split(coordinator)
    own_host = rendezvous.bindable(host) if index == 0 else host
    if ":" in own_host:
        own_host = f"[{own_host}]"
    with _without_proxies():
        jax.distributed.initialize(
            coordinator,
            num_processes=count,
            process_id=index,
            initialization_timeout=int(max(timeout_seconds, 30)) + BEFORE_DEVICES_SECONDS,
            heartbeat_timeout_seconds=heartbeat_seconds,
            shutdown_timeout_seconds=SHUTDOWN_SECONDS,
            coordinator_bind_address=f"{own_host or '[::]'}:{port}",
            cluster_detection_method="deactivate",  # that of SLURM or Open MPI would leave this process one GPU
        )


@contextlib.contextmanager
def _without_proxies() -> Iterator[None]:
    """Context without the environment's proxies: gRPC would look for the other hosts behind them."""
    proxies = {name: value for name, value in os.environ.items() if "_proxy" in name.lower()}
    for name in proxies:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(proxies)


def process_index() -> int:
    """Returns the index of this host, without initializing devices; 0 before `initialize`."""
    return jax_internals.process_index()


def process_count() -> int:
    """Returns the number of hosts, without initializing devices; 1 before `initialize`."""
    return jax_internals.process_count()


def is_host_zero() -> bool:
    """Returns whether this is host 0."""
    return process_index() == 0


def barrier(name: str, *, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
    """Waits until every host has called `barrier` with this name, for at most `timeout_seconds`.

    Raises TimeoutError if one does not, or the wait fails.
    """
    client = jax_internals.coordination_client()
    if client is None:
        return
    try:
        client.wait_at_barrier(f"renga/{name}", int(timeout_seconds * 1000))
    except jax.errors.JaxRuntimeError as error:
        hosts = ", ".join(map(str, library_errors.absent_tasks(error)))
        late = f"host {hosts} did not come within {timeout_seconds:g} s; read the end of its log"
        raise TimeoutError(f"barrier {name!r}: {late if hosts else error}") from error


def from_host_zero(text: str, *, timeout_seconds: float = TIMEOUT_SECONDS) -> str:
    """Returns host 0's `text` on every host. All hosts must call it, in the same order."""
    size, is_zero = _MAX_TEXT_BYTES // 8, is_host_zero()  # characters of a message
    parts = [text[begin : begin + size] for begin in range(0, len(text), size)] if is_zero else []
    begin = f"{max(len(parts), 1)} {parts[0] if parts else ''}"
    wait: dict[str, Any] = {"sources": [0], "timeout_seconds": timeout_seconds}
    count, _, found = _shared("from_host_zero", begin if is_zero else None, **wait)[0].partition(" ")
    for part in range(1, int(count)):
        found += _shared("from_host_zero", parts[part] if is_zero else None, **wait)[0]
    return found


def decided_by_host_zero(decide: Callable[[], Any], *, timeout_seconds: float = TIMEOUT_SECONDS) -> Any:
    """Calls `decide` on host 0 alone; returns its result, of JSON types, on every host.

    All hosts must call it, in the same order. A UserError in `decide` is raised on every host.
    """
    decided: dict[str, Any] = {}
    if is_host_zero():
        try:
            decided = {"result": decide()}
        except UserError as error:
            decided = {"error": str(error), "is_unreachable": isinstance(error, UnreachableError)}
    decided = json.loads(from_host_zero(json.dumps(decided), timeout_seconds=timeout_seconds))
    if "error" in decided:
        raise (UnreachableError if decided["is_unreachable"] else UserError)(decided["error"])
    return decided["result"]


def all_gather_text(name: str, text: str, *, timeout_seconds: float = TIMEOUT_SECONDS) -> list[str]:
    """Returns the `text` of every host, at most 2 MiB. All hosts must call it with the same `name`."""
    sources = list(range(process_count()))
    return _shared(f"gather/{name}", text, sources=sources, timeout_seconds=timeout_seconds)


def all_gather_array(array: jax.Array) -> np.ndarray:
    """Returns all values of an array with shards on several hosts. All hosts must call it, in the same order."""
    return np.asarray(multihost_utils.process_allgather(array, tiled=True))


def _shared(name: str, text: str | None, *, sources: list[int], timeout_seconds: float = TIMEOUT_SECONDS) -> list[str]:
    """Returns the texts of the hosts `sources`; the n-th call of a name meets the n-th of other hosts."""
    client = jax_internals.coordination_client()
    if text is not None and len(text.encode()) > _MAX_TEXT_BYTES:
        raise RuntimeError(f"{name}: a text of {len(text.encode())} bytes; hosts exchange at most {_MAX_TEXT_BYTES}")
    if client is None:  # this process is the only source
        return [text or ""]
    folder = f"renga/{name}/{_calls[name]}"
    _calls[name] += 1
    if text is not None:
        client.key_value_set(f"{folder}/{process_index()}", text)
    deadline = time.monotonic() + timeout_seconds
    found = []
    for source in sources:
        try:
            left_seconds = max(deadline - time.monotonic(), 1.0)
            found.append(client.blocking_key_value_get(f"{folder}/{source}", int(left_seconds * 1000)))
        except jax.errors.JaxRuntimeError as error:
            said = f"{name}: host {source} gave nothing within {timeout_seconds:g} s; read its log"
            raise TimeoutError(said) from error
    return found


def post(name: str, text: str) -> None:
    """Stores `text` under `name` for all hosts to read with `posted`, replacing an earlier text."""
    client = jax_internals.coordination_client()
    if client is None:
        _posted_alone[name] = text
    else:
        client.key_value_set(f"renga/posted/{name}", text, allow_overwrite=True)


def posted(folder: str) -> dict[str, str]:
    """Returns the texts that hosts have stored with `post("FOLDER/NAME", text)`, by NAME."""
    client = jax_internals.coordination_client()
    if client is None:
        found = [(name, text) for name, text in _posted_alone.items() if name.startswith(f"{folder}/")]
        return {name.removeprefix(f"{folder}/"): text for name, text in found}
    prefix = f"renga/posted/{folder}/"
    return {key.removeprefix(prefix): text for key, text in client.key_value_dir_get(prefix)}


def require_same(what: str, text: str) -> None:
    """Raises UserError on all hosts if `text` differs between them. All hosts must call it."""
    if differing := rendezvous.host_differences(all_gather_text(what, text)):
        raise UserError(f"{what} differs between hosts (- marks the other hosts' lines):\n{differing}")


def require_shared(run_dir: str, *, is_host_zero: bool) -> None:
    """Raises UserError on all hosts unless every host sees a file that host 0 writes to the run directory.

    All hosts must call it.
    """
    directory = paths.resolve(run_dir)
    nonce = from_host_zero(secrets.token_hex(8))
    if refused := from_host_zero(_written(directory, nonce) if is_host_zero else ""):
        raise UserError(refused)
    answers = all_gather_text("run_dir/seen", "yes" if _sees(directory / _NONCE_FILE, nonce) else "no")
    blind = [str(i) for i, answer in enumerate(answers) if answer == "no"]
    if blind:
        raise UserError(
            f"the run directory {directory} is not shared: {units.counted(len(blind), 'host')} "
            f"({', '.join(blind)}) cannot see host 0's file there. "
            "Checkpoints need one place that all hosts see: set --run-dir (or RENGA_RUN_ROOT) to gs://BUCKET/…"
        )


def _written(directory, nonce: str) -> str:
    try:
        paths.require_writable(directory)
        paths.write_text_atomically(directory / _NONCE_FILE, nonce)
    except Exception as error:  # a bucket fails with its client's own types
        return str(error) if isinstance(error, UserError) else f"cannot write to {directory}: {error!r}"
    return ""


def _sees(file, nonce: str) -> bool:
    deadline = time.monotonic() + _SHARED_FILE_SECONDS
    while time.monotonic() < deadline:
        with contextlib.suppress(Exception):  # whatever the error, this host cannot read the file
            if file.read_text() == nonce:
                return True
        time.sleep(0.2)
    return False


def interrupt() -> None:
    """Makes `preempted` return True on all hosts soon, because of Ctrl-C on this one; from any thread."""
    post(f"{_INTERRUPTED}/{process_index()}", "Ctrl-C")
    if _joined in (None, _ALONE):
        _sigterm_received.set()
    else:
        os.kill(os.getpid(), signal.SIGTERM)  # JAX tells the others


def is_interrupted() -> bool:
    """Returns whether a host has reported Ctrl-C."""
    return bool(posted(_INTERRUPTED))


def preempted(step: int) -> bool:
    """Returns True on all hosts if they should stop after `step`.

    Every host must call it at every step: they agree on a step that none has passed.
    """
    if _joined in (None, _ALONE):  # a process that joined a cluster of one has JAX's handler, too
        return _sigterm_received.is_set()
    return multihost_utils.reached_preemption_sync_point(step)


def shutdown() -> None:
    """Disconnects; waits until all hosts have called it, for at most `SHUTDOWN_SECONDS`."""
    global _joined
    heartbeat.leave()
    if jax.distributed.is_initialized():
        jax.distributed.shutdown()
    heartbeat.stop()
    _joined = None


def exit_at_once(code: int, why: str = "") -> None:
    """Ends this process without JAX's barrier at exit; `why` is one line for the other hosts."""
    sys.stdout.flush()
    sys.stderr.flush()
    heartbeat.leave(code, why)
    os._exit(code)


def exit_at_once_on_exception() -> None:
    """Makes an uncaught exception end this process at once, without JAX's barrier at exit.

    The exit code is the error's attribute `exit_code` if it has one; a verdict of host 0 can change it.
    """

    def end(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if library_errors.is_unconnected(error):
            print(f"error: {_UNCONNECTED_ADVICE} ({str(error).splitlines()[0]})", file=sys.stderr)
        elif getattr(error, "says_all", False):
            print("\n".join([f"error: {error}", *getattr(error, "__notes__", ())]), file=sys.stderr)
        else:
            traceback.print_exception(kind, error, trace)
        sys.stderr.flush()
        if issubclass(kind, KeyboardInterrupt):
            exit_at_once(exit_codes.INTERRUPTED, "stopped by Ctrl-C")
        code = getattr(error, "exit_code", exit_codes.RAISED)
        first_line = next(iter(str(error).splitlines()), "")
        heartbeat.raised(f"{kind.__name__}: {first_line}", code=code, is_consequence=isinstance(error, CONSEQUENCES))
        os._exit(code)

    sys.excepthook = end
