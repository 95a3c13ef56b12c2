"""What every host measures of itself, on host 0: step times side by side, the slowest by name, memory of every chip.

Hosts that train together have the same step time, since each waits for the slowest in the collectives. What tells them
apart is what a host does while no device works for it: its own work and its wait for data. The one idea: every host
puts up its latest figures where host 0 finds them, and nobody waits for anybody: what is compared is the latest line of
the log that all of them have put up, usually the one before this.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax

from core import distributed
from core.slices import GIB

SENT = ("step_seconds", "input_wait_seconds", "device_seconds", "host_seconds")
WORTH_NAMING = 0.1  # of a step, that the slowest host makes the others wait

_FOLDER = "figures"
_LINES = 3  # that a host leaves up: hosts are two steps apart at most


class Slowest(NamedTuple):
    """The host that the others wait for, and how long in every step, against the fastest."""

    host: int
    seconds: float


def hbm_gib() -> dict[str, float]:
    """What each chip of this host has used at most, by `chip_5`; empty where the runtime does not say (CPU)."""
    used = {f"chip_{d.id}": (d.memory_stats() or {}).get("peak_bytes_in_use") for d in jax.local_devices()}
    return {name: count / GIB for name, count in used.items() if count is not None}


class HostMetrics:
    """What this host knows of itself and, on host 0, of all."""

    def __init__(self, *, hbm: Callable[[], Mapping[str, float]] = hbm_gib):
        """`hbm()` gives GiB by chip."""
        self._hbm = hbm
        self._written: dict[str, float] = {}  # memory that is known already: it grows once and stays
        self._latest: dict[int, Mapping[str, float]] = {}  # this host's last lines, by step
        self._compared = -1
        self._times_back = 0
        self.slowest: Slowest | None = None

    def own(self, values: Mapping[str, float]) -> dict[str, float]:
        """This host's figures out of a line of the log, with the memory of its chips."""
        memory = {f"hbm_gib/{chip}": gib for chip, gib in self._hbm().items()}
        return {name: values[name] for name in SENT if name in values} | memory

    def exchange(self, step: int, own: Mapping[str, float]) -> tuple[int, dict[str, float]]:
        """Puts up this host's figures of a line; on host 0, the step of a line that all have put up, and all of it.

        `hosts/step_seconds/host_2`, `hosts/own_seconds/host_2` (work and wait for data, without the devices), of these
        the `…_spread` between hosts and the number of the slowest, and `hbm_gib/host_2/chip_5` where it has changed.
        Nothing on other hosts, nor twice. Where the step is not behind the last one the run went back, on all hosts;
        lines of before are then compared with none of after.
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
