"""What every test stands on: 16 CPU devices, no accelerator, and host processes on loopback.

The environment is set before anything imports jax; nothing here imports it, so that tests which need no jax stay quick.
"""

from __future__ import annotations

import json
import os
import pathlib
import socket
import subprocess
import sys
import textwrap
import urllib.parse
import urllib.request
from typing import NamedTuple

import pytest

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_NUM_CPU_DEVICES"] = "16"
os.environ["TPU_SKIP_MDS_QUERY"] = "1"
os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"

ROOT = pathlib.Path(__file__).resolve().parent.parent


class HostResult(NamedTuple):
    """How one host process ended."""

    returncode: int
    output: str


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


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


class Bucket(NamedTuple):
    """The stand-in for buckets of `tests/bucket.py`, any of them, reachable at a port of this machine."""

    port: int

    @property
    def environment(self) -> dict[str, str]:
        """What makes a process of ours talk to it."""
        address = f"http://127.0.0.1:{self.port}"
        return {
            "TENSORSTORE_GCS_HTTP_URL": address,
            "STORAGE_EMULATOR_HOST": address,
            "GOOGLE_AUTH_TOKEN_FOR_TESTING": "none",
            "NO_GCE_CHECK": "true",
            "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
        }

    def errors(self, rate: float) -> dict[str, int]:
        """From now on that share of requests is refused; how many were, of how many, so far."""
        return json.loads(self._ask(f"/stand-in/errors?rate={rate}"))

    def list(self, prefix: str) -> dict[str, int]:
        """Sizes by what follows `gs://BUCKET/PREFIX`."""
        bucket, _, folder = prefix.removeprefix("gs://").partition("/")
        answer = self._ask(f"/storage/v1/b/{bucket}/o?maxResults=100000&prefix={urllib.parse.quote(folder)}")
        return {item["name"].removeprefix(folder): int(item["size"]) for item in json.loads(answer).get("items", [])}

    def read(self, name: str) -> bytes:
        """What is at gs://…"""
        return self._ask(f"/storage/v1/b/{self._object(name)}?alt=media")

    def write(self, name: str, content: bytes) -> None:
        """Puts it at gs://…"""
        bucket, _, key = name.removeprefix("gs://").partition("/")
        to = f"/upload/storage/v1/b/{bucket}/o?uploadType=media&name={urllib.parse.quote(key)}"
        self._ask(to, data=content, method="POST")

    def delete(self, name: str) -> None:
        """Removes what is at gs://…"""
        self._ask(f"/storage/v1/b/{self._object(name)}", method="DELETE")

    def _object(self, name: str) -> str:
        bucket, _, key = name.removeprefix("gs://").partition("/")
        return f"{bucket}/o/{urllib.parse.quote(key, safe='')}"

    def _ask(self, path: str, **request) -> bytes:
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", headers={"Of-The-Test": "1"}, **request)
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.read()


@pytest.fixture(scope="module")
def bucket():
    """A stand-in that starts empty, and answers without errors."""
    command = [sys.executable, str(ROOT / "tests" / "bucket.py")]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield Bucket(int(server.stdout.readline()))
    finally:
        server.kill()
        server.wait()
