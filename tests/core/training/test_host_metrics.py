"""Measurements of all hosts, collected on host 0."""

import re

import pytest

from core.hosts import distributed
from core.training import goodput
from core.training.goodput import HostMetrics, Slowest


def figures(*, wait=0.0, work=0.1, step=1.0, **memory):
    own = {"step_seconds": step, "input_wait_seconds": wait, "device_seconds": step - wait - work}
    return own | {"host_seconds": work} | {f"hbm_gib/{chip}": gib for chip, gib in memory.items()}


def test_the_slowest_host_has_the_longest_idle_devices():
    seen = HostMetrics()
    found = seen._beside({0: figures(), 1: figures(), 2: figures(wait=0.3), 3: figures(work=0.2)})
    assert found["hosts/slowest"] == 2
    assert found["hosts/own_seconds/host_2"] == pytest.approx(0.4)
    assert found["hosts/own_seconds_spread"] == pytest.approx(0.3)
    assert found["hosts/step_seconds_spread"] == 0.0  # in step, as they must be
    assert seen.slowest == Slowest(2, pytest.approx(0.3))


def test_hosts_that_are_alike_name_none():
    seen = HostMetrics()
    seen._beside({0: figures(), 1: figures(work=0.15)})
    assert seen.slowest is None


@pytest.mark.covers("O08")
def test_memory_of_every_chip_of_every_host_is_written_when_it_changes():
    memory = {"chip_0": 20.0, "chip_1": 21.5}
    seen = HostMetrics(hbm=lambda: memory)
    own = seen.own({**figures(), "loss": 3.0})
    assert own == figures(**memory)
    first = seen._beside({0: own, 1: figures(chip_4=19.0)})
    written = {name: gib for name, gib in first.items() if name.startswith("hbm")}
    assert written == {
        "hbm_gib/host_0/chip_0": 20.0,
        "hbm_gib/host_0/chip_1": 21.5,
        "hbm_gib/host_1/chip_4": 19.0,
    }
    second = seen._beside({0: figures(chip_0=20.5, chip_1=21.5), 1: figures(chip_4=19.0)})
    assert {name: gib for name, gib in second.items() if name.startswith("hbm")} == {"hbm_gib/host_0/chip_0": 20.5}


def test_unmeasured_memory_is_omitted():
    assert goodput.hbm_gib() == {}  # CPU devices


@pytest.fixture
def two_hosts(monkeypatch):
    """`says(host, step, seconds)`: what `exchange` gives that host, of two in one process."""
    put_up, seen, at = {}, (HostMetrics(), HostMetrics()), {"host": 0}
    monkeypatch.setattr(distributed, "process_count", lambda: 2)
    monkeypatch.setattr(distributed, "process_index", lambda: at["host"])
    monkeypatch.setattr(distributed, "post", lambda name, text: put_up.update({name.rpartition("/")[2]: text}))
    monkeypatch.setattr(distributed, "posted", lambda folder: put_up)

    def says(host, step, seconds):
        at["host"] = host
        return seen[host].exchange(step, figures(step=seconds))

    return says


def test_lines_from_before_a_rollback_are_not_compared(two_hosts):
    for step in (10, 15, 20, 25, 30):
        two_hosts(1, step, 1.0)
        assert two_hosts(0, step, 1.0)[0] == step
    assert two_hosts(0, 25, 2.0) == (25, {})  # host 1 has a line of step 25, but of before
    two_hosts(1, 25, 3.0)
    step, found = two_hosts(0, 30, 2.0)
    assert step == 25
    assert [found[f"hosts/step_seconds/host_{host}"] for host in (0, 1)] == [2.0, 3.0]
    two_hosts(1, 15, 4.0)  # back again, and ahead of host 0
    assert two_hosts(0, 15, 5.0)[0] == 15


def test_a_host_that_is_first_to_go_back_is_waited_for(two_hosts):
    for step in (10, 15):
        two_hosts(0, step, 1.0)
        two_hosts(1, step, 1.0)
    two_hosts(1, 10, 2.0)
    assert two_hosts(0, 20, 1.0) == (20, {})
    assert two_hosts(0, 10, 1.0)[1]["hosts/step_seconds/host_1"] == 2.0


EXCHANGE = """
import time
from core.hosts import distributed
distributed.initialize(coordinator=COORDINATOR, process_index=PROCESS, process_count=HOSTS, local_cpu_devices=1)
from core.training.goodput import HostMetrics
seen = HostMetrics()
own = {"step_seconds": 1.0, "input_wait_seconds": 0.5 * PROCESS, "device_seconds": 0.1, "host_seconds": 0.1}
if PROCESS == 0:
    print("EARLY", seen.exchange(5, own))  # waits for nobody
else:
    distributed.barrier("host 0 has put up its lines")
began = time.perf_counter()
for step in range(6 - PROCESS, 106 - PROCESS):  # host 1 is a line behind
    seen.exchange(step, {**own, "step_seconds": step / 100})
print("MILLISECONDS", (time.perf_counter() - began) * 10)
if PROCESS == 0:
    distributed.barrier("host 0 has put up its lines")
distributed.barrier("posted")
if PROCESS:
    distributed.barrier("host 0 has read")
print("FOUND", *seen.exchange(106, own), seen.slowest)
if not PROCESS:
    distributed.barrier("host 0 has read")
distributed.shutdown()
"""


@pytest.mark.simulated(2)
@pytest.mark.covers("O03")
def test_hosts_put_up_their_figures_and_host_0_reads_them(run_hosts):
    first, second = run_hosts(EXCHANGE, hosts=2)
    assert first.returncode == second.returncode == 0, first.output + second.output
    assert "EARLY (5, {})" in first.output
    assert re.search(r"FOUND 104 \{.*'hosts/step_seconds/host_1': 1.04", first.output)
    assert "'hosts/step_seconds_spread': 0" in first.output  # of one line of the log
    assert "Slowest(host=1, seconds=0.5" in first.output
    assert "FOUND 106 {} None" in second.output
    for host in (first, second):
        milliseconds = float(host.output.split("MILLISECONDS ")[1].split()[0])
        assert milliseconds < 20  # 0.5 to 1 on a quiet machine, once in a line of the log
