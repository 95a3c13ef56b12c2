"""What every test stands on: 16 CPU devices, no accelerator, and host processes on loopback.

The environment is set before anything imports jax; nothing here imports it, so that tests which need no jax stay quick.
"""

import ctypes
import gc
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import textwrap
import zlib
from typing import NamedTuple

import pytest

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_NUM_CPU_DEVICES"] = "16"
os.environ["TPU_SKIP_MDS_QUERY"] = "1"
os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background ignores it, as would what tests start
os.environ["NO_GCE_CHECK"] = "true"  # google.auth reads it when it is imported

ROOT = pathlib.Path(__file__).resolve().parent.parent
MOST_BYTES = 3 * 2**29  # of a process, above which it forgets compiled programs
LONG_FILES = {  # take more than ten minutes of one core under --all
    "tests/parallel/generation/test_generating.py",
    "tests/parallel/pipeline/test_pipelines_agree.py",
}


def pytest_xdist_make_scheduler(config, log):
    """Runs the tests of a file in one process, where they share fixtures, and deals those of a long file over three."""
    from xdist.scheduler import LoadFileScheduling

    class ByFile(LoadFileScheduling):
        def _split_scope(self, nodeid):
            file = super()._split_scope(nodeid)
            return f"{file}, part {zlib.crc32(nodeid.encode()) % 3}" if file in LONG_FILES else file

    return ByFile(config, log) if config.getoption("dist") == "loadfile" else None


def pytest_collection_finish():
    """Collects garbage rarely, and never visits the modules, which stay until the end: this saves 5 % of the time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)


def pytest_collection_modifyitems(config, items):
    """`tests/run.sh lab without` leaves out the tests that need a part which it deleted."""
    gone = {*os.environ.get("WITHOUT_PARTS", "").split()}
    needs = {item: {name for mark in item.iter_markers("part") for name in mark.args} for item in items}
    if any(needs.values()):
        from tests.lab import without

        if unknown := set().union(*needs.values()) - {"all", *without.PARTS}:
            raise pytest.UsageError(f"pytest.mark.part names {sorted(unknown)}; parts: all, {', '.join(without.PARTS)}")
    left_out = [item for item in items if gone and needs[item] & {*gone, "all"}]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


class HostResult(NamedTuple):
    """How one host process ended."""

    returncode: int
    output: str


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(autouse=True, scope="module")
def _few_programs_of_other_files():
    """Compiled programs are dropped when the process has grown, and what they held is given back to the system.

    Without `malloc_trim`, glibc keeps it: a process then grows to 7 GiB in two hours.
    """
    yield
    if (jax := sys.modules.get("jax")) and _resident_bytes() > MOST_BYTES:
        jax.clear_caches()
        if sys.platform == "linux":
            ctypes.CDLL(None).malloc_trim(0)  # of glibc


@pytest.fixture(autouse=True, scope="module")
def _no_modules_of_other_files(tmp_path_factory):
    """Modules that tests wrote and imported are forgotten after their file: another one may use the same name."""
    yield
    written = tmp_path_factory.getbasetemp()
    for name, module in list(sys.modules.items()):
        if (file := getattr(module, "__file__", None)) and pathlib.Path(file).is_relative_to(written):
            del sys.modules[name]


def _resident_bytes() -> int:
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture(autouse=True)
def _whole_errors(monkeypatch):
    """An error is one line, so that a test can look for its words."""
    monkeypatch.setenv("COLUMNS", "1000")


@pytest.fixture(autouse=True)
def _no_copies():
    """No test reads or keeps the published folders of another one."""
    if found := sys.modules.get("core.checkpoints.published_files"):
        found.use_copies(None)


@pytest.fixture(autouse=True)
def _no_network(monkeypatch):
    """Refuses at once what a test sends to other machines, whether there is a network or not; libraries would retry."""
    look_up, connect = socket.getaddrinfo, socket.socket.connect

    def is_here(host: object) -> bool:
        name = host.decode() if isinstance(host, bytes) else host
        return name in (None, "", "localhost", "::1", socket.gethostname()) or str(name).startswith("127.")

    def guarded_look_up(host, *args, **kwargs):
        assert is_here(host), f"a test looks up {host!r}; the fixture `bucket` stands in for Google Cloud Storage"
        return look_up(host, *args, **kwargs)

    def guarded_connect(self, address):
        if self.family in (socket.AF_INET, socket.AF_INET6):
            assert is_here(address[0]), f"a test connects to {address}; the fixture `bucket` stands in for gs://"
        return connect(self, address)

    monkeypatch.setattr(socket, "getaddrinfo", guarded_look_up)
    monkeypatch.setattr(socket.socket, "connect", guarded_connect)


@pytest.fixture
def closed_port(monkeypatch):
    """The number of a port on which nobody listens, where gs:// is expected to be."""
    from core.files import buckets

    monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"127.0.0.1:{(port := free_port())}")
    monkeypatch.setattr(buckets, "REACH_SECONDS", 0.3)
    monkeypatch.setattr(buckets, "_failed", {})
    monkeypatch.setattr(buckets, "_reached", set())
    _forget_buckets()
    yield port
    _forget_buckets()


def _forget_buckets():
    """fsspec and etils both keep the file system of gs://, which was reached when a test made it."""
    from etils.epath import backend

    from core.files import buckets

    buckets.Buckets.clear_instance_cache()
    type(backend.fsspec_backend)._get_filesystem.cache_clear()


@pytest.fixture(scope="session")
def pinned_compiler():
    """{package: version} of jax, jaxlib and libtpu in requirements.txt: committed records were made with these."""
    pins = dict(re.findall(r"(?m)^([a-z-]+)==(\S+)", (ROOT / "requirements.txt").read_text()))
    return {package: pins[package] for package in ("jax", "jaxlib", "libtpu")}


@pytest.fixture
def run_hosts(tmp_path):
    """Runs one Python text as several processes: `run_hosts(text, hosts=2, timeout=60) -> [HostResult]`.

    Each process finds COORDINATOR, PROCESS and HOSTS in its globals, and the repository on its path. `only` starts
    some of the hosts.
    """
    started: list[subprocess.Popen] = []

    def run(text: str, *, hosts: int, only: tuple[int, ...] | None = None, timeout: float = 60) -> list[HostResult]:
        coordinator = f"127.0.0.1:{free_port()}"
        environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
        for index in range(hosts) if only is None else only:
            head = f"COORDINATOR, PROCESS, HOSTS = {coordinator!r}, {index}, {hosts}\n"
            script = tmp_path / f"host_{index}_{len(started)}.py"
            script.write_text(head + textwrap.dedent(text))
            started.append(
                subprocess.Popen(
                    [sys.executable, str(script)],
                    cwd=tmp_path,
                    env=environment,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
        running = started[-(hosts if only is None else len(only)) :]
        outputs = [process.communicate(timeout=timeout)[0] for process in running]
        return [HostResult(process.returncode, output) for process, output in zip(running, outputs, strict=True)]

    yield run
    for process in started:
        if process.poll() is None:
            process.kill()
            process.wait()


@pytest.fixture(scope="session")
def tpu_topology():
    """The chips of a slice, as the real TPU compiler describes them: `tpu_topology("v4-32") -> [device]`."""
    from core import slices
    from parallel import mesh

    return lambda name: mesh.topology_devices(slices.get(name))


@pytest.fixture(scope="module")
def bucket():
    """An emulator of Google Cloud Storage that starts empty, and answers without errors."""
    from tests.lab import gcs_emulator

    with gcs_emulator.start() as started:
        yield started
