"""Where am I: environment, devices and metadata server, each on its own and together."""

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


def test_a_plain_machine_is_no_tpu_host_and_nobody_is_asked(tmp_path):
    (tmp_path / "accel").mkdir()  # what other accelerators use
    place = tpu_host.look(environ={}, devices=tmp_path, metadata_url="http://127.0.0.1:1")
    assert not place.on_tpu_host
    assert "environment: TPU_WORKER_ID is not set" in place.looked_at
    assert not any("metadata" in line for line in place.looked_at)


def test_a_host_knows_its_index_before_it_joins(chips, metadata, tmp_path):
    here = {"devices": chips, "metadata_url": metadata({"agent-worker-number": "3"})}
    of_two = {"MEGASCALE_SLICE_ID": "1"}
    assert tpu_host.own_index(environ={}, **here) == 3
    assert tpu_host.own_index(slices.get("2xv4-32"), environ=of_two, **here) == 7
    assert tpu_host.own_index(slices.get("2xv4-32"), environ=of_two | {"TPU_WORKER_ID": "0"}, **here) == 4
    assert tpu_host.own_index(slices.get("2xv4-32"), environ=of_two | {"JAX_PROCESS_INDEX": "5"}, **here) == 5
    assert tpu_host.own_index(environ={}, devices=tmp_path / "none", metadata_url=here["metadata_url"]) is None
    assert tpu_host.own_index(environ={}, devices=chips, metadata_url=metadata({})) is None


@pytest.mark.covers("R01")
def test_chips_count_once_the_metadata_server_speaks_of_a_tpu(chips, metadata):
    place = tpu_host.look(environ={}, devices=chips, metadata_url=metadata({"accelerator-type": "v4-32"}))
    assert (place.on_tpu_host, place.accelerator_type) == (True, "v4-32")
    elsewhere = tpu_host.look(environ={}, devices=chips, metadata_url=metadata({}))
    assert (elsewhere.on_tpu_host, elsewhere.accelerator_type) == (False, None)
    assert "metadata server: accelerator-type is not there" in elsewhere.looked_at


def test_devices_bound_to_vfio_are_seen_but_not_its_control_file(tmp_path, metadata):
    (tmp_path / "vfio").mkdir()
    (tmp_path / "vfio/vfio").touch()
    url = metadata({"accelerator-type": "v6e-8"})
    assert not tpu_host.look(environ={}, devices=tmp_path, metadata_url=url).on_tpu_host
    (tmp_path / "vfio/0").touch()
    assert tpu_host.look(environ={}, devices=tmp_path, metadata_url=url).accelerator_type == "v6e-8"


def test_the_environment_is_enough_in_a_container(tmp_path):
    place = tpu_host.look(
        environ={"TPU_ACCELERATOR_TYPE": "v5p-64"}, devices=tmp_path, metadata_url="http://127.0.0.1:1"
    )
    assert (place.on_tpu_host, place.accelerator_type) == (True, "v5p-64")
    workers = {"TPU_WORKER_ID": "1", "TPU_WORKER_HOSTNAMES": "a,b"}
    place = tpu_host.look(environ=workers | {"TPU_SKIP_MDS_QUERY": "1"}, devices=tmp_path)
    assert (place.on_tpu_host, place.accelerator_type) == (True, None)
    assert "metadata server: not asked (TPU_SKIP_MDS_QUERY is set)" in place.looked_at


def test_a_silent_metadata_server_costs_half_a_second_where_there_are_no_chips(tmp_path, metadata):
    url = metadata({"accelerator-type": "v4-32"}, delay_seconds=3)
    workers = {"TPU_WORKER_ID": "1", "TPU_WORKER_HOSTNAMES": "a,b"}
    started = time.monotonic()
    place = tpu_host.look(environ=workers, devices=tmp_path, metadata_url=url)
    assert time.monotonic() - started < 2
    assert place.accelerator_type is None
    assert "metadata server: no answer to 1 question" in place.looked_at


def test_slow_answers_do_not_lose_a_host_that_has_chips(chips, metadata, monkeypatch):
    monkeypatch.setattr(tpu_host, "METADATA_TIMEOUT_SECONDS", 0.1)
    monkeypatch.setattr(tpu_host, "METADATA_RETRY_SECONDS", (0.1, 0.1, 5.0))
    url = metadata({"accelerator-type": "v4-32"}, delay_seconds=1, slow_answers=3)
    place = tpu_host.look(environ={}, devices=chips, metadata_url=url)
    assert (place.on_tpu_host, place.accelerator_type) == (True, "v4-32")
    monkeypatch.setattr(tpu_host, "METADATA_RETRY_SECONDS", (0.1, 0.1, 0.1))
    silent = tpu_host.look(environ={}, devices=chips, metadata_url=metadata({}, delay_seconds=1))
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
