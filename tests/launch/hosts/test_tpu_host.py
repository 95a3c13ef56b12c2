"""Detection of the machine: environment, devices and metadata server, separately and together."""

import contextlib
import http.server
import itertools
import threading
import time

import pytest

from core import slices
from launch.hosts import tpu_host


@pytest.fixture
def metadata():
    """Starts a metadata server on loopback: `metadata({"accelerator-type": "v4-32"}) -> url`."""
    servers = []

    def serve(values, *, delay_seconds=0.0, slow_answers=1000):
        questions = itertools.count()

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                if next(questions) < slow_answers:
                    time.sleep(delay_seconds)
                value = values.get(self.path.rpartition("/")[2])
                known = value is not None and self.headers["Metadata-Flavor"] == "Google"
                self.send_response(200 if known else 404)
                self.end_headers()
                if known:
                    with contextlib.suppress(BrokenPipeError):  # who asked has given up
                        self.wfile.write(value.encode())

            def log_message(self, *args):
                pass

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}/attributes"

    yield serve
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture
def chips(tmp_path):
    for index in range(4):
        (tmp_path / f"accel{index}").touch()
    return tmp_path


@pytest.fixture
def here(monkeypatch, tmp_path):
    """Where this machine is, by its environment, devices and metadata server."""
    names = ("TPU_ACCELERATOR_TYPE", "TPU_WORKER_ID", "TPU_WORKER_HOSTNAMES", "TPU_SKIP_MDS_QUERY")
    names += ("JAX_PROCESS_INDEX", "MEGASCALE_SLICE_ID")

    def place(environ=(), *, devices=tmp_path, url="http://127.0.0.1:1"):
        monkeypatch.setattr(tpu_host, "DEVICES", devices)
        monkeypatch.setattr(tpu_host, "METADATA_URL", url)
        for name in names:
            monkeypatch.delenv(name, raising=False)
        for name, value in dict(environ).items():
            monkeypatch.setenv(name, value)

    return place


def test_a_machine_without_chips_is_no_tpu_host_and_makes_no_request(here, tmp_path):
    (tmp_path / "accel").mkdir()  # what other accelerators use
    here()
    place = tpu_host.look()
    assert not place.on_tpu_host
    assert "environment: TPU_WORKER_ID is not set" in place.looked_at
    assert not any("metadata" in line for line in place.looked_at)


def test_a_host_knows_its_index_before_it_joins(here, chips, metadata, tmp_path):
    there = {"devices": chips, "url": metadata({"agent-worker-number": "3"})}
    of_two = {"MEGASCALE_SLICE_ID": "1"}
    here(**there)
    assert tpu_host.own_index() == 3
    for environ, index in ((of_two, 7), (of_two | {"TPU_WORKER_ID": "0"}, 4), (of_two | {"JAX_PROCESS_INDEX": "5"}, 5)):
        here(environ, **there)
        assert tpu_host.own_index(slices.get("2xv4-32")) == index
    variables = "TPU_CHIPS: '4'\nMEGASCALE_NUM_SLICES: '2'\nMEGASCALE_SLICE_ID: '1'\n"
    here(devices=chips, url=metadata({"agent-worker-number": "3", "tpu-env": variables}))
    assert (tpu_host.own_index(slices.get("2xv4-32")), tpu_host.own_index(slices.get("v4-32"))) == (7, 3)
    none = {"devices": tmp_path / "none"}
    for name in ("SLURM_PROCID", "OMPI_COMM_WORLD_RANK"):  # of GPUs
        here({name: "1"}, **there | none)
        assert tpu_host.own_index(slices.get("h100:8x2")) == 1
        assert tpu_host.own_index(slices.get("v4-16")) is None
        assert tpu_host.own_index(slices.get("h100:8")) is None  # each process has a run of its own
    here(**there | none)
    assert tpu_host.own_index() is None
    here(devices=chips, url=metadata({}))
    assert tpu_host.own_index() is None


@pytest.mark.covers("R01")
def test_chips_count_only_if_the_metadata_server_confirms_a_tpu(here, chips, metadata):
    here(devices=chips, url=metadata({"accelerator-type": "v4-32"}))
    place = tpu_host.look()
    assert (place.on_tpu_host, place.accelerator_type) == (True, "v4-32")
    here(devices=chips, url=metadata({}))
    elsewhere = tpu_host.look()
    assert (elsewhere.on_tpu_host, elsewhere.accelerator_type) == (False, None)
    assert "metadata server: accelerator-type is not there" in elsewhere.looked_at


def test_devices_bound_to_vfio_are_seen_but_not_its_control_file(here, tmp_path, metadata):
    (tmp_path / "vfio").mkdir()
    (tmp_path / "vfio/vfio").touch()
    here(url=metadata({"accelerator-type": "v6e-8"}))
    assert not tpu_host.look().on_tpu_host
    (tmp_path / "vfio/0").touch()
    assert tpu_host.look().accelerator_type == "v6e-8"


def test_the_environment_is_enough_in_a_container(here):
    here({"TPU_ACCELERATOR_TYPE": "v5p-64"})
    place = tpu_host.look()
    assert (place.on_tpu_host, place.accelerator_type) == (True, "v5p-64")
    here({"TPU_WORKER_ID": "1", "TPU_WORKER_HOSTNAMES": "a,b", "TPU_SKIP_MDS_QUERY": "1"})
    place = tpu_host.look()
    assert (place.on_tpu_host, place.accelerator_type) == (True, None)
    assert "metadata server: not asked (TPU_SKIP_MDS_QUERY is set)" in place.looked_at


def test_a_silent_metadata_server_takes_half_a_second_without_chips(here, metadata):
    url = metadata({"accelerator-type": "v4-32"}, delay_seconds=3)
    here({"TPU_WORKER_ID": "1", "TPU_WORKER_HOSTNAMES": "a,b"}, url=url)
    started = time.monotonic()
    place = tpu_host.look()
    assert time.monotonic() - started < 2
    assert place.accelerator_type is None
    assert "metadata server: no answer to 1 question" in place.looked_at


def test_a_host_without_a_metadata_server_knows_it_within_seven_seconds():
    assert tpu_host.METADATA_TIMEOUT_SECONDS + sum(tpu_host.METADATA_RETRY_SECONDS) < 7


def test_slow_answers_do_not_lose_a_host_that_has_chips(here, chips, metadata, monkeypatch):
    monkeypatch.setattr(tpu_host, "METADATA_TIMEOUT_SECONDS", 0.1)
    monkeypatch.setattr(tpu_host, "METADATA_RETRY_SECONDS", (0.1, 0.1, 5.0))
    here(devices=chips, url=metadata({"accelerator-type": "v4-32"}, delay_seconds=1, slow_answers=3))
    place = tpu_host.look()
    assert (place.on_tpu_host, place.accelerator_type) == (True, "v4-32")
    monkeypatch.setattr(tpu_host, "METADATA_RETRY_SECONDS", (0.1, 0.1, 0.1))
    here(devices=chips, url=metadata({}, delay_seconds=1))
    silent = tpu_host.look()
    assert not silent.on_tpu_host
    assert "metadata server: no answer to 4 questions" in silent.looked_at


@pytest.mark.covers("R08")
def test_another_slice_is_refused_with_both_sizes():
    v4_32 = slices.get("v4-32")
    tpu_host.require_slice(v4_32, accelerator_type="v4-32", where="here")
    tpu_host.require_slice(v4_32, accelerator_type=None, where="here")
    tpu_host.require_slice(slices.get("2xv4-32"), accelerator_type="v4-32", where="here")
    with pytest.raises(ValueError, match=r"is a v4-8 .* Give 2xv4-8 as the SLICE"):
        tpu_host.require_slice(slices.get("2xv4-32"), accelerator_type="v4-8", where="here")
    tpu_host.require_slice(slices.get("v5e-16"), accelerator_type="v5litepod-16", where="here")
    with pytest.raises(
        ValueError, match=r"here is a v4-8 \(4 devices on 1 host\), but SLICE is v4-32 \(16 devices on 4"
    ):
        tpu_host.require_slice(v4_32, accelerator_type="v4-8", where="here")
    with pytest.raises(ValueError, match="here is a v2-8, which the slice table does not have"):
        tpu_host.require_slice(v4_32, accelerator_type="v2-8", where="here")
