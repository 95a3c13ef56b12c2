"""Starts the emulator of Google Cloud Storage, points processes to it, and accesses its buckets from outside."""

import contextlib
import json
import os
import subprocess
import sys
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from launch.environment import WORKSPACE

_ADDRESS = "STORAGE_EMULATOR_HOST"


class Bucket(NamedTuple):
    """A process of `tests.lab.gcs_server`, which emulates all buckets, at a port of this machine."""

    port: int

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables with which a process uses the emulator."""
        address = f"http://127.0.0.1:{self.port}"
        return {
            "TENSORSTORE_GCS_HTTP_URL": address,
            _ADDRESS: address,
            "GOOGLE_AUTH_TOKEN_FOR_TESTING": "none",
            "NO_GCE_CHECK": "true",
            "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
        }

    def errors(self, rate: float, *, seconds: float = 0.0) -> dict[str, int]:
        """Sets the share of requests to refuse and the delay of each; returns how many were refused and answered."""
        return json.loads(self._ask(f"/stand-in/errors?rate={rate}&seconds={seconds}"))

    def ranges(self) -> list[tuple[str, int, int]]:
        """Returns what was sent since the last call: names such as BUCKET/NAME, first byte, and end."""
        return [tuple(entry) for entry in json.loads(self._ask("/stand-in/ranges"))]

    def list(self, prefix: str) -> dict[str, int]:
        """Returns the sizes of all objects at gs://BUCKET/PREFIX, by the rest of their names."""
        bucket, _, folder = prefix.removeprefix("gs://").partition("/")
        answer = self._ask(f"/storage/v1/b/{bucket}/o?maxResults=100000&prefix={urllib.parse.quote(folder)}")
        return {item["name"].removeprefix(folder): int(item["size"]) for item in json.loads(answer).get("items", [])}

    def read(self, name: str) -> bytes:
        """Returns the content of the object gs://…"""
        return self._ask(f"/storage/v1/b/{self._object(name)}?alt=media")

    def write(self, name: str, content: bytes) -> None:
        """Writes the object gs://…"""
        bucket, _, key = name.removeprefix("gs://").partition("/")
        to = f"/upload/storage/v1/b/{bucket}/o?uploadType=media&name={urllib.parse.quote(key)}"
        self._ask(to, data=content, method="POST")

    def delete(self, name: str) -> None:
        """Removes the object gs://…"""
        self._ask(f"/storage/v1/b/{self._object(name)}", method="DELETE")

    def _object(self, name: str) -> str:
        bucket, _, key = name.removeprefix("gs://").partition("/")
        return f"{bucket}/o/{urllib.parse.quote(key, safe='')}"

    def _ask(self, path: str, **request) -> bytes:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", headers={"Of-The-Stand-In": "1"}, **request
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.read()

    def copy(self, folder: str, *, to: Path) -> None:
        """Writes everything below gs://BUCKET/FOLDER/ into a folder on this disk."""
        for name in self.list(f"{folder}/"):
            file = to / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(self.read(f"{folder}/{name}"))


@contextlib.contextmanager
def start() -> Iterator[Bucket]:
    """Runs an emulator that starts empty and answers without errors."""
    command = [sys.executable, "-m", "tests.lab.gcs_server"]
    server = subprocess.Popen(command, cwd=WORKSPACE, stdout=subprocess.PIPE, text=True)
    try:
        yield Bucket(int(server.stdout.readline()))
    finally:
        server.kill()
        server.wait()


def of_environment() -> Bucket:
    """Returns the emulator that this process uses."""
    return Bucket(urllib.parse.urlsplit(os.environ[_ADDRESS]).port)
