import time

import jax
import pytest

from core.hosts import distributed, exit_codes
from core.training import run_lock

JOIN = """
from core.hosts import distributed
cluster = distributed.initialize(
    coordinator=COORDINATOR, process_index=PROCESS, process_count=HOSTS, local_cpu_devices=2, timeout_seconds=TIMEOUT
)
"""
PROXIES = ("HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "ALL_PROXY", "grpc_proxy")
EXPLICIT = (
    "TIMEOUT = 30"
    + JOIN
    + f"""
import os
assert {{os.environ[name] for name in {PROXIES}}} == {{"http://127.0.0.1:9"}}
"""
    + """
import pathlib, time
from core.errors import UnreachableError, UserError
assert distributed.initialize() is cluster
assert distributed.initialize(coordinator=COORDINATOR, process_index=PROCESS, process_count=HOSTS) is cluster
try:
    distributed.initialize(coordinator=COORDINATOR, process_index=PROCESS, process_count=HOSTS + 1)
except ValueError as error:
    assert "already joined" in str(error)
import jax
assert (jax.process_index(), jax.process_count()) == (PROCESS, HOSTS) == (distributed.process_index(), HOSTS)
assert (jax.device_count(), jax.local_device_count()) == (2 * HOSTS, 2)
assert distributed.is_host_zero() == (PROCESS == 0)
for turn in range(2):
    assert distributed.from_host_zero(f"of {PROCESS} ü {turn}") == f"of 0 ü {turn}"
    assert distributed.all_gather_text("versions", f"{PROCESS}/{turn}") == [f"{i}/{turn}" for i in range(HOSTS)]
    distributed.barrier("again", timeout_seconds=10)
assert distributed.decided_by_host_zero(lambda: [PROCESS, "ü"]) == [0, "ü"]
long = "0 ü" * 2**20  # more than one message
assert distributed.from_host_zero(long if PROCESS == 0 else "") == long
def refuse():
    raise UserError(f"refused by {PROCESS}")
try:
    distributed.decided_by_host_zero(refuse)
except UserError as error:
    assert str(error) == "refused by 0"
else:
    raise AssertionError("no host was told")
def fail():
    raise UnreachableError("no network")
try:
    distributed.decided_by_host_zero(fail)
except UnreachableError as error:
    assert str(error) == "no network"
if PROCESS == 0:
    port = f"{int(COORDINATOR.split(':')[1]):04X}"
    tables = pathlib.Path("/proc/net/tcp").read_text() + pathlib.Path("/proc/net/tcp6").read_text()
    listening = [line.split()[1] for line in tables.splitlines() if f":{port} " in line and line.split()[3] == "0A"]
    assert listening and all(address.endswith(f"0100007F:{port}") for address in listening), listening
if PROCESS in (1, 3):
    time.sleep(1.5)
else:
    try:
        distributed.barrier("late", timeout_seconds=0.5)
    except TimeoutError as error:
        print("barrier:", error)
distributed.shutdown()
print("left")
"""
)


@pytest.mark.covers("R02", "R04", "X11")
@pytest.mark.simulated(4)
def test_four_hosts_join_talk_and_leave(run_hosts, monkeypatch):
    """With the proxies of a network that lead nowhere: hosts of a slice reach one another directly."""
    for name in PROXIES:
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    results = run_hosts(EXPLICIT, hosts=4)
    assert [result.returncode for result in results] == [0] * 4, results
    assert all("left" in result.output for result in results)
    for host in (0, 2):
        assert "barrier 'late': host 1, 3 did not come within 0.5 s" in results[host].output


@pytest.mark.covers("R05")
@pytest.mark.simulated(2)
def test_a_missing_host_is_named_by_those_who_came(run_hosts):
    results = run_hosts("TIMEOUT = 6" + JOIN, hosts=3, only=(0, 2))
    for result in results:
        assert result.returncode == 1
        assert "TimeoutError: waited 6 s at 127.0.0.1:" in result.output
        assert "for 3 hosts; missing: host 1." in result.output


NO_CLUSTER = """
from core.hosts import distributed
try:
    distributed.initialize(timeout_seconds=2)
except ValueError as error:
    print("none:", error)
assert distributed.initialize(single_process=True, local_cpu_devices=3) == (0, 1, "")
import jax
assert jax.device_count() == 3 and not jax.distributed.is_initialized()
assert distributed.from_host_zero("alone") == "alone" and distributed.all_gather_text("x", "y") == ["y"]
distributed.barrier("alone", timeout_seconds=1)
distributed.shutdown()
"""


@pytest.mark.covers("R04")
def test_joining_after_a_device_was_touched_is_refused(monkeypatch):
    monkeypatch.setattr(distributed, "_joined", None)
    jax.devices()
    with pytest.raises(RuntimeError, match=r"^distributed\.initialize was called after a device"):
        distributed.initialize(single_process=True)


def test_hosts_wait_for_host_0_while_it_watches_the_lock_of_a_lost_machine(monkeypatch):
    given = {}
    monkeypatch.setattr(distributed.jax.distributed, "initialize", lambda *_, **options: given.update(options))
    distributed._join(distributed.Cluster(1, 2, "127.0.0.1:1"), timeout_seconds=45, heartbeat_seconds=60)
    assert given["initialization_timeout"] > 45 + run_lock.SILENT_SECONDS


@pytest.mark.covers("R05")
def test_no_cluster_is_an_error_unless_one_process_was_asked_for(run_hosts):
    (result,) = run_hosts(NO_CLUSTER, hosts=1)
    assert result.returncode == 0, result
    assert "none: no cluster was found on this machine" in result.output
    assert "set JAX_COORDINATOR_ADDRESS, JAX_PROCESS_INDEX and JAX_PROCESS_COUNT on every host" in result.output
    assert "single_process=True to run alone" in result.output


DETECTED = """
from core.jax_internals import clusters

class Stub(clusters.ClusterEnv):
    name = "stub"
    is_env_present = classmethod(lambda cls: True)
    get_coordinator_address = classmethod(lambda cls, timeout_secs, override_coordinator_port: COORDINATOR)
    get_process_count = classmethod(lambda cls: HOSTS)
    get_process_id = classmethod(lambda cls: PROCESS)
    get_local_process_id = classmethod(lambda cls: None)

clusters.ClusterEnv._cluster_types.insert(0, Stub)
from core.hosts import distributed
assert distributed.initialize(local_cpu_devices=1, timeout_seconds=30) == (PROCESS, HOSTS, COORDINATOR)
import jax
assert jax.device_count() == HOSTS
distributed.shutdown()
"""


@pytest.mark.slow  # test_hosts_of_a_slice_find_one_another_in_their_metadata gives no arguments either
@pytest.mark.covers("R01")
@pytest.mark.simulated(2)
def test_a_detected_cluster_needs_no_arguments(run_hosts):
    results = run_hosts(DETECTED, hosts=2)
    assert [result.returncode for result in results] == [0, 0], results


ON_TPU_HOSTS = """
import http.server, os, threading

class Metadata(http.server.BaseHTTPRequestHandler):
    answers = {
        "agent-worker-number": str(PROCESS),
        "worker-network-endpoints": ",".join(["127.0.0.1"] * HOSTS),
        "tpu-env": "ACCELERATOR_TYPE: 'v4-16'",
    }

    def do_GET(self):
        body = self.answers[self.path.rsplit("/", 1)[1]].encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Metadata)
threading.Thread(target=server.serve_forever, daemon=True).start()
os.environ["GCE_METADATA_IP"] = f"127.0.0.1:{server.server_port}"
os.environ["JAX_COORDINATOR_PORT"] = COORDINATOR.split(":")[1]

from core.jax_internals import cloud_tpu_cluster
cloud_tpu_cluster.running_in_cloud_tpu_vm = True
del os.environ["TPU_SKIP_MDS_QUERY"]  # JAX sets it where it finds no TPU.
from core.hosts import distributed, rendezvous
asked, answer = {}, rendezvous.answer
rendezvous.answer = lambda *arguments, **options: asked.update(options) or answer(*arguments, **options)
assert distributed.initialize(local_cpu_devices=1, timeout_seconds=30) == (PROCESS, HOSTS, COORDINATOR)
assert asked["secret"] == ",".join(["127.0.0.1"] * HOSTS)
import jax
assert jax.device_count() == HOSTS
distributed.shutdown()
"""


@pytest.mark.covers("R01")
@pytest.mark.simulated(2)
def test_hosts_of_a_slice_find_one_another_in_their_metadata(run_hosts):
    results = run_hosts(ON_TPU_HOSTS, hosts=2)
    assert [result.returncode for result in results] == [0, 0], results


FAILS_ALONE = (
    "TIMEOUT = 30"
    + JOIN
    + """
import jax, time
distributed.exit_at_once_on_exception()
if PROCESS == 1:
    raise OverflowError("only here")
try:
    distributed.barrier("never", timeout_seconds=1)
except TimeoutError:
    distributed.exit_at_once(5)
"""
)


@pytest.mark.simulated(2)
def test_an_exception_on_one_host_ends_it_at_once(run_hosts):
    began = time.monotonic()
    zero, one = run_hosts(FAILS_ALONE, hosts=2)
    assert one.returncode == exit_codes.RAISED
    assert "OverflowError: only here" in one.output
    assert zero.returncode == 5
    assert time.monotonic() - began < distributed.SHUTDOWN_SECONDS / 2


UNCONNECTED = """
import jax
from core.hosts import distributed
distributed.exit_at_once_on_exception()
raise jax.errors.JaxRuntimeError("INTERNAL: Gloo context initialization failed: [connectFullMesh] timed out")
"""


def test_hosts_that_do_not_connect_on_a_busy_machine_are_worth_another_start(run_hosts):
    (result,) = run_hosts(UNCONNECTED, hosts=1)
    assert result.returncode == exit_codes.RAISED
    assert exit_codes.ending(result.returncode).restart
    assert "error: the simulated hosts did not connect for a collective within Gloo's 30 s" in result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"coordinator": "h:1"}, "needs process_index, process_count too"),
        ({"process_index": 0, "process_count": 2}, "needs coordinator too"),
        ({"coordinator": "h:1", "process_index": 2, "process_count": 2}, "process_index is 2; expected 0 to 1"),
        ({"coordinator": "h", "process_index": 0, "process_count": 2}, "expected HOST:PORT"),
        ({"coordinator": "h:1", "single_process": True}, "both given"),
    ],
)
def test_arguments_that_do_not_go_together(arguments, says):
    with pytest.raises(ValueError, match=says):
        distributed.initialize(**arguments)


def test_a_text_too_long_for_the_coordinator_is_refused():
    with pytest.raises(RuntimeError, match="2097153 bytes; hosts exchange at most 2097152"):
        distributed.all_gather_text("long", "x" * (2**21 + 1))


PREEMPTED = """
import os, signal, time
from core.hosts import distributed
distributed.initialize(coordinator=COORDINATOR, process_index=PROCESS, process_count=HOSTS, local_cpu_devices=1)
os.kill(os.getpid(), signal.SIGTERM)
for step in range(400):
    if distributed.preempted(step):
        print("STOPPED")
        break
    time.sleep(0.02)
distributed.shutdown()
"""


@pytest.mark.slow  # waits for the service of JAX that agrees on a step
def test_a_cluster_of_one_process_notices_sigterm(run_hosts):
    (result,) = run_hosts(PREEMPTED, hosts=1)
    assert result.returncode == 0, result.output
    assert "STOPPED" in result.output
