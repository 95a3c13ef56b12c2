"""Collects measurements of all hosts on host 0: step times, the slowest host, and the memory of every chip.

Hosts that train together have the same step time, because each waits for the slowest in the collectives. They differ in
the time during which their devices are idle: the host's own work and its wait for data. Every host posts its latest
measurements without waiting for others. Host 0 compares the latest log line that all hosts have posted, usually the
previous one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax

from core import distributed
from core.slices import GIB

SENT = ("step_seconds", "input_wait_seconds", "device_seconds", "host_seconds")
WORTH_NAMING = 0.1  # fraction of a step that the slowest host must cost the others to be reported

_FOLDER = "figures"
_LINES = 3  # lines that a host keeps posted: hosts are at most two steps apart


class Slowest(NamedTuple):
    """The slowest host, and the seconds per step that it is slower than the fastest."""

    host: int
    seconds: float


def hbm_gib() -> dict[str, float]:
    """Returns the peak memory of each chip of this host in GiB, by `chip_5`; empty if not measured (CPU)."""
    used = {f"chip_{d.id}": (d.memory_stats() or {}).get("peak_bytes_in_use") for d in jax.local_devices()}
    return {name: count / GIB for name, count in used.items() if count is not None}


class HostMetrics:
    """The measurements of this host and, on host 0, of all hosts."""

    def __init__(self, *, hbm: Callable[[], Mapping[str, float]] = hbm_gib):
        """Takes `hbm()`, which returns GiB by chip."""
        self._hbm = hbm
        self._written: dict[str, float] = {}  # memory that was reported already, because it rarely changes
        self._latest: dict[int, Mapping[str, float]] = {}  # this host's last lines, by step
        self._compared = -1
        self._times_back = 0
        self.slowest: Slowest | None = None

    def own(self, values: Mapping[str, float]) -> dict[str, float]:
        """Selects this host's measurements from the values of a log line, and adds the memory of its chips."""
        memory = {f"hbm_gib/{chip}": gib for chip, gib in self._hbm().items()}
        return {name: values[name] for name in SENT if name in values} | memory

    def exchange(self, step: int, own: Mapping[str, float]) -> tuple[int, dict[str, float]]:
        """Posts this host's measurements of a log line; on host 0, returns those of all hosts.

        Returns:
          On host 0, the step of the latest line that all hosts have posted, and its values:
          `hosts/step_seconds/host_2`, `hosts/own_seconds/host_2` (work and wait for data, without the devices), for
          both the `…_spread` between hosts and the slowest host, and `hbm_gib/host_2/chip_5` if it has changed. No
          values on other hosts, or if there is no new line. A step that is not after the last one means that all hosts
          have rolled back; lines from before and after a rollback are not compared.
        """
        if self._latest and step <= max(self._latest):
            self._latest, self._compared, self._times_back = {}, -1, self._times_back + 1
        self._latest[step] = own
        self._latest = dict(sorted(self._latest.items())[-_LINES:])
        distributed.post(f"{_FOLDER}/{distributed.process_index()}", json.dumps([self._times_back, self._latest]))
        if not distributed.is_host_zero():
            return step, {}
        put_up = {int(host): json.loads(text) for host, text in distributed.posted(_FOLDER).items()}
        of_hosts = {host: lines if back == self._times_back else {} for host, (back, lines) in put_up.items()}
        common = set.intersection(*({int(line) for line in lines} for lines in of_hosts.values()))
        compared = max(common, default=-1)
        if len(of_hosts) < distributed.process_count() or compared <= self._compared:
            return step, {}
        self._compared = compared
        return compared, self._beside({host: lines[str(compared)] for host, lines in of_hosts.items()})

    def _beside(self, figures: Mapping[int, Mapping[str, float]]) -> dict[str, float]:
        alone = {host: own["input_wait_seconds"] + own["host_seconds"] for host, own in sorted(figures.items())}
        steps = {host: own["step_seconds"] for host, own in sorted(figures.items())}
        found: dict[str, float] = {}
        for name, by_host in (("step_seconds", steps), ("own_seconds", alone)):
            found |= {f"hosts/{name}/host_{host}": seconds for host, seconds in by_host.items()}
            found[f"hosts/{name}_spread"] = max(by_host.values()) - min(by_host.values())
        slowest = max(alone, key=alone.__getitem__)
        behind = Slowest(slowest, found["hosts/own_seconds_spread"])
        self.slowest = behind if behind.seconds > WORTH_NAMING * max(steps.values()) else None
        return found | {"hosts/slowest": float(slowest)} | self._memory(figures)

    def _memory(self, figures: Mapping[int, Mapping[str, float]]) -> dict[str, float]:
        now = {
            name.replace("hbm_gib/", f"hbm_gib/host_{host}/"): value
            for host, own in figures.items()
            for name, value in own.items()
            if name.startswith("hbm_gib/")
        }
        changed = {name: value for name, value in now.items() if self._written.get(name) != value}
        self._written |= changed
        return changed
