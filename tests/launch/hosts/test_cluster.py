"""A host whose chips, configuration or run directory differ from the request is refused."""

import os
import re

import pytest

from core import slices
from launch import environment
from launch.findings import Finding
from launch.hosts import cluster, tpu_host

JOINED = """
import os, time
os.environ |= {
    "RENGA_SIMULATE": "v4-16",
    "JAX_COORDINATOR_ADDRESS": COORDINATOR,
    "JAX_PROCESS_INDEX": str(PROCESS),
    "JAX_PROCESS_COUNT": str(HOSTS),
}
from core.hosts import distributed; from core import slices
from launch.hosts import cluster
distributed._SHARED_FILE_SECONDS = 1.0
host = cluster.join(slices.get("v4-16"))
print(host.name, flush=True)

def refuses(what, *args):
    more = {"is_host_zero": host.is_zero} if what is distributed.require_shared else {}
    try:
        what(*args, **more)
        print("accepted", flush=True)
    except ValueError as error:
        print("refused:", error, flush=True)
"""


def test_the_chips_must_be_as_many_as_the_slice_has():
    cluster._require_chips(slices.get("v4-32"), played=True)  # the 16 CPU devices of every test
    says = r"v4-8 has 4 devices on 1 host, but JAX sees 16 on 1 host: run the same command on every host"
    with pytest.raises(ValueError, match=says):
        cluster._require_chips(slices.get("v4-8"), played=True)


@pytest.mark.covers("R10")
def test_cpus_are_no_tpu():
    says = r"v4-32 was asked for, but JAX found 16 cpu devices and no TPU.* add --simulate"
    with pytest.raises(ValueError, match=says):
        cluster._require_chips(slices.get("v4-32"), played=False)


@pytest.mark.covers("R10")
def test_the_error_names_the_processes_that_hold_the_chips(monkeypatch):
    monkeypatch.setattr(tpu_host, "chip_holders", lambda: Finding("chips", True, "held by no other process; 2 unseen"))
    says = "Its chips: held by no other process; 2 unseen. On another machine"
    with pytest.raises(ValueError, match=says):
        cluster._require_chips(slices.get("v4-32"), played=False)


@pytest.mark.covers("R10")
def test_training_on_cpus_in_place_of_a_tpu_ends_at_once(launch, tmp_path):
    assert not os.environ.get("RENGA_SIMULATE")
    said = launch("train", "gin/quickstart.gin", "--slice", "v4-8", "--run-dir", str(tmp_path / "run"), code=2)
    assert re.search(r"error: v4-8 was asked for, but JAX found \d+ cpu devices and no TPU", said)
    assert not (tmp_path / "run").exists()


OTHER_CONFIGURATION = """
import os, sys
os.chdir({workspace!r})
os.environ |= {{
    "RENGA_SIMULATE": "v4-16",
    "JAX_COORDINATOR_ADDRESS": COORDINATOR,
    "JAX_PROCESS_INDEX": str(PROCESS),
    "JAX_PROCESS_COUNT": str(HOSTS),
}}
from launch.__main__ import main
size = ["--gin", "BATCH_SIZE = 64"] if PROCESS == 1 else []
sys.exit(main(["train", "gin/quickstart.gin", "--slice", "v4-16", "--run-dir", {run_dir!r}, *size]))
"""


@pytest.mark.slow  # hosts that differ are quick
@pytest.mark.covers("R05", "X15")
@pytest.mark.simulated(2)
def test_a_host_with_another_configuration_is_named_by_all_before_anything_starts(run_hosts, tmp_path):
    told = {"workspace": str(environment.WORKSPACE), "run_dir": str(tmp_path / "run")}
    for result in run_hosts(OTHER_CONFIGURATION.format(**told), hosts=2, timeout=120):
        assert result.returncode == 2, result.output
        assert "host 1: -BATCH_SIZE = 16 +BATCH_SIZE = 64\n" in result.output
        assert "Traceback" not in result.output
    assert not (tmp_path / "run").exists()


@pytest.mark.covers("R02", "R03")
@pytest.mark.simulated(2)
def test_hosts_that_differ_all_refuse(run_hosts, tmp_path):
    (tmp_path / "ours").mkdir()
    (tmp_path / "file").touch()
    text = f"""
refuses(distributed.require_same, "the configuration", "SEED = 1\\nLENGTH = 8")
refuses(distributed.require_same, "the configuration", f"SEED = {{PROCESS}}\\nLENGTH = 8")
refuses(distributed.require_shared, {str(tmp_path / "ours")!r})
refuses(distributed.require_shared, {str(tmp_path)!r} + f"/of_{{PROCESS}}")
began = time.monotonic()
refuses(distributed.require_shared, {str(tmp_path / "file/run")!r})
assert time.monotonic() - began < 30
distributed.shutdown()
"""
    results = run_hosts(JOINED + text, hosts=2, timeout=90)
    for index, result in enumerate(results):
        assert result.returncode == 0, result.output
        lines = result.output[result.output.index(f"host {index} of 2\n") :].splitlines()[1:]
        assert lines[0] == "accepted"
        assert lines[1] == "refused: the configuration differs between hosts (- marks the other hosts' lines):"
        assert lines[2] == "host 1: -SEED = 0 +SEED = 1"
        assert lines[3] == "accepted"
        assert "/of_" in lines[4]
        assert "is not shared: 1 host (1) cannot see host 0's file there" in lines[4]
        assert "--run-dir (or RENGA_RUN_ROOT) to gs://BUCKET/" in lines[4]
        assert lines[5].startswith(f"refused: cannot write to {tmp_path}/file/run: NotADirectoryError")


@pytest.mark.covers("R12")
def test_devices_of_another_kind_are_refused():
    cluster._require_chips(slices.get("cpu:16"), played=False)  # the CPU devices of every test
    cluster._require_chips(slices.get("h100:16"), played=True)
    with pytest.raises(ValueError, match=r"h100:16 was asked for, but this machine has cpu devices"):
        cluster._require_chips(slices.get("h100:16"), played=False)


@pytest.mark.slow  # the same for a TPU is quick
@pytest.mark.covers("R12")
def test_training_on_gpus_that_are_not_there_ends_at_once(launch, tmp_path, monkeypatch):
    run = ("train", "gin/quickstart.gin", "--slice", "h100:1", "--run-dir", str(tmp_path / "run"))
    assert "h100:1 are cuda devices, but JAX_PLATFORMS=cpu" in launch(*run, code=2)
    monkeypatch.delenv("JAX_PLATFORMS")
    said = launch(*run, code=2)
    assert re.search(r"error: h100:1 was asked for, but JAX cannot use cuda devices here: .*--extra cuda", said)
    assert not (tmp_path / "run").exists()
