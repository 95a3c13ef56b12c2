"""Chips, hosts, links and memory of TPU slices and other devices, by name, such as `v4-32` or `h100:8`.

The number in a v4, v5p or tpu7x name counts TensorCores, two per chip; in v5e and v6e names it counts chips. A chip is
one JAX device, except on tpu7x, where each core is one. `2xv4-32` is two slices, connected by the data-center network
(DCN).

Sources: Google's TPU system-architecture pages; libtpu's device lists; NVIDIA's data sheets (dense bfloat16).
"""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import math
import os
import re
from collections.abc import Mapping

from core import units
from core.errors import UserError

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Chip:
    """Properties of one JAX device: a chip, or one of the `devices` of a chip.

    Attributes:
      kinds: values of `device_kind`.
      peak_flops: bfloat16 FLOP/s; 0 for a CPU.
      usable_hbm_bytes: the memory that XLA may allocate.
      link_bytes_per_second: one direction of one ICI link of the chip, or of a GPU's NVLink or PCIe.
      host_memory_bytes: memory of a host divided by its devices.
      chips_per_name_unit: chips per unit of the number in a slice's name.
      platform: `tpu`, `cuda` or `cpu`.
      devices: JAX devices per chip.
    """

    kinds: tuple[str, ...]
    peak_flops: float
    hbm_bytes: int
    usable_hbm_bytes: int
    hbm_bytes_per_second: float
    link_bytes_per_second: float
    host_memory_bytes: float
    chips_per_name_unit: float = 1
    platform: str = "tpu"
    devices: int = 1
    has_fp8: bool = False

    @property
    def unit(self) -> str:
        """The word for one device: `chip`, or `device` where a chip has several."""
        return "chip" if self.devices == 1 else "device"


CHIPS: Mapping[str, Chip] = {
    "v4": Chip(("TPU v4",), 275e12, 32 * GIB, int(30.75 * GIB), 1.2e12, 45e9, 407e9 / 4, 0.5),
    "v5p": Chip(("TPU v5", "TPU v5p"), 459e12, 95 * GIB, 95 * GIB, 2.77e12, 90e9, 448e9 / 4, 0.5),
    "v5e": Chip(("TPU v5 lite", "TPU v5e"), 197e12, 16 * GIB, 16 * GIB, 0.81e12, 45e9, 48e9, 1),
    "v6e": Chip(("TPU v6 lite", "TPU v6e"), 918e12, 32 * GIB, 32 * GIB, 1.6e12, 90e9, 180e9, 1),
    # Half of a chip's 2,307 TFLOP/s, 192 GiB and 7.38 TB/s. Its six links are as fast as those of v5p.
    "tpu7x": Chip(
        ("TPU7x",), 1153.5e12, 96 * GIB, int(94.75 * GIB), 3.69e12, 90e9, 960e9 / 8, 0.5, devices=2, has_fp8=True
    ),
}

_A100 = ("NVIDIA A100-SXM4-80GB", "NVIDIA A100 80GB PCIe")
_A100_40G = ("NVIDIA A100-SXM4-40GB", "NVIDIA A100-PCIE-40GB")
GPUS: Mapping[str, Chip] = {
    "l4": Chip(("NVIDIA L4",), 121e12, 22 * GIB, 20 * GIB, 0.3e12, 32e9, 48e9, platform="cuda", has_fp8=True),
    "a100-40g": Chip(_A100_40G, 312e12, 40 * GIB, 36 * GIB, 1.555e12, 300e9, 120e9, platform="cuda"),
    "a100": Chip(_A100, 312e12, 80 * GIB, 73 * GIB, 2.04e12, 300e9, 120e9, platform="cuda"),
    "h100": Chip(
        ("NVIDIA H100 80GB HBM3",), 989e12, 80 * GIB, 73 * GIB, 3.35e12, 450e9, 240e9, platform="cuda", has_fp8=True
    ),
    "h200": Chip(("NVIDIA H200",), 989e12, 140 * GIB, 128 * GIB, 4.8e12, 450e9, 240e9, platform="cuda", has_fp8=True),
    "b200": Chip(("NVIDIA B200",), 2250e12, 178 * GIB, 163 * GIB, 8e12, 900e9, 240e9, platform="cuda", has_fp8=True),
}
GPU_MEMORY_FRACTION = 0.92  # share of a GPU's memory that JAX allocates at its start: the usable_hbm_bytes above

DCN_BYTES_PER_SECOND_PER_HOST = 25e9

_TOPOLOGIES_3D = {
    4: (2, 2, 1),
    8: (2, 2, 2),
    16: (2, 2, 4),
    32: (2, 4, 4),
    64: (4, 4, 4),
    128: (4, 4, 8),
    256: (4, 8, 8),
    512: (8, 8, 8),
    1024: (8, 8, 16),
    2048: (8, 16, 16),
    4096: (16, 16, 16),
    8192: (16, 16, 32),
    9216: (16, 24, 24),
}
_TOPOLOGIES_2D = {
    1: (1, 1),
    4: (2, 2),
    8: (2, 4),
    16: (4, 4),
    32: (4, 8),
    64: (8, 8),
    128: (8, 16),
    256: (16, 16),
}
_LARGEST = {"v4": 2048, "v5p": 512, "v5e": 256, "v6e": 256, "tpu7x": 9216}  # chips
_ALIASES = {"v5litepod": "v5e"}


@dataclasses.dataclass(frozen=True)
class Slice:
    """One TPU slice, or several equal slices in one run, connected by DCN.

    GPUs or CPU devices are a slice with one dimension.

    Attributes:
      name: `v4-32`; `2xv4-32` for two slices; `h100:8x2` for two hosts with 8 GPUs each.
      generation: a name in `CHIPS` or `GPUS`, or `cpu`.
      topology: chips along x, y (and z) of one slice.
      host_bounds: the block of chips of one host.
    """

    name: str
    generation: str
    topology: tuple[int, ...]
    host_bounds: tuple[int, ...]
    num_slices: int = 1

    @property
    def chip(self) -> Chip:
        """Properties of one JAX device."""
        if self.generation == "cpu":
            return _cpu(self.chips_per_host)
        return CHIPS.get(self.generation) or GPUS[self.generation]

    @property
    def is_tpu(self) -> bool:
        """Whether the chips are TPUs."""
        return self.generation in CHIPS

    @property
    def chips(self) -> int:
        """Number of chips of all slices."""
        return self.num_slices * math.prod(self.topology)

    @property
    def chips_per_host(self) -> int:
        """Number of chips per host."""
        return math.prod(self.host_bounds)

    @property
    def devices(self) -> int:
        """Number of JAX devices of all slices."""
        return self.chips * self.chip.devices

    @property
    def devices_per_slice(self) -> int:
        """Number of JAX devices of one slice."""
        return self.devices // self.num_slices

    @property
    def devices_per_host(self) -> int:
        """Number of JAX devices per host."""
        return self.chips_per_host * self.chip.devices

    @property
    def counted(self) -> str:
        """Number of chips, and of devices where it differs: `4 chips (8 devices)`."""
        return _counted(self.chips, self.chip)

    @property
    def counted_per_host(self) -> str:
        """Number of chips of a host, and of devices where it differs, as text."""
        return _counted(self.chips_per_host, self.chip)

    @property
    def single(self) -> Slice:
        """One of the equal slices."""
        return get(self.name.partition("x")[2]) if self.num_slices > 1 else self

    @property
    def hosts(self) -> int:
        """Number of hosts of all slices."""
        return self.chips // self.chips_per_host

    def shared_by(self, processes: int) -> Slice:
        """Returns this slice with its chips divided evenly over `processes` hosts.

        The `host_bounds` of the result have one dimension. Raises UserError if `processes` does not divide the number
        of chips.
        """
        if processes < 1 or self.chips % processes:
            counts = [n for n in range(1, self.chips + 1) if self.chips % n == 0]
            raise UserError(
                f"{units.counted(processes, 'process', 'processes')} cannot share the "
                f"{units.counted(self.chips, 'chip')} of {self.name} evenly; expected one of "
                f"{', '.join(map(str, counts))}"
            )
        return dataclasses.replace(self, host_bounds=(self.chips // processes,))

    @property
    def wraparound(self) -> tuple[bool, ...]:
        """Whether the links along each axis form a ring.

        Three axes are rings if every size is a multiple of 4; of two axes, those of size 16.
        """
        if not self.is_tpu:
            return (False,) * len(self.topology)
        if len(self.topology) == 3:
            return (all(n % 4 == 0 for n in self.topology),) * 3
        return tuple(n == 16 for n in self.topology)

    def share_of_peak(self, flops: float, *, seconds: float, peak_flops: float | None = None) -> float:
        """Returns `mfu` of a predicted time, which is above 1 if the model computes faster than in bfloat16.

        Args:
          flops, seconds, peak_flops: as in `mfu`.
        """
        peak = peak_flops or self.peak_flops
        assert peak, f"{self.name} has no peak in the table"
        return flops / (seconds * peak)

    def mfu(self, flops: float, *, seconds: float, peak_flops: float | None = None) -> float:
        """Returns model FLOPs utilization: the model's FLOP/s divided by the bfloat16 peak.

        Args:
          flops: FLOPs of one step on all devices, without recomputation.
          seconds: duration of the step.
          peak_flops: peak of all devices; None: that of the tables.

        Raises:
          UserError: the result is above 1.
        """
        share, peak = self.share_of_peak(flops, seconds=seconds, peak_flops=peak_flops), peak_flops or self.peak_flops
        if share > 1:
            raise UserError(
                f"{flops:.3g} FLOPs in {seconds:.3g} s on {self.name} are {share:.0%} of its peak of "
                f"{peak:.3g} FLOP/s: expected at most 100 %. Either the FLOPs belong to another batch or "
                "model, or the time is not that of a whole step"
            )
        return share

    @property
    def host_memory_bytes(self) -> int:
        """Memory of one host in bytes."""
        return int(self.devices_per_host * self.chip.host_memory_bytes)

    @property
    def peak_flops(self) -> float:
        """Peak bfloat16 FLOP/s of all devices; 0 for CPUs."""
        return self.devices * self.chip.peak_flops

    @property
    def hbm_bytes(self) -> int:
        """Memory of all devices in bytes."""
        return self.devices * self.chip.hbm_bytes

    @property
    def topology_name(self) -> str:
        """The topology as text, for example `2x2x4`."""
        return "x".join(map(str, self.topology))

    def devices_by_host(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """Returns the devices of each host of one slice: (x, y[, z], index on its chip).

        Devices of a chip are neighbors; then x varies fastest.
        """
        blocks = [t // b for t, b in zip(self.topology, self.host_bounds, strict=True)]
        return tuple(
            tuple(
                (*(h * b + c for h, b, c in zip(host, self.host_bounds, chip, strict=True)), core)
                for chip in _x_fastest(self.host_bounds)
                for core in range(self.chip.devices)
            )
            for host in _x_fastest(blocks)
        )


def _counted(chips: int, chip: Chip) -> str:
    also = f" ({units.counted(chips * chip.devices, 'device')})" if chip.devices > 1 else ""
    return units.counted(chips, "chip") + also


def _x_fastest(bounds) -> list[tuple[int, ...]]:
    return [tuple(reversed(c)) for c in itertools.product(*(range(n) for n in reversed(bounds)))]


def _host_bounds(topology: tuple[int, ...]) -> tuple[int, ...]:
    if len(topology) == 3:
        return (2, 2, 1)
    return topology if math.prod(topology) <= 8 else (2, 2)


def _slices() -> dict[str, Slice]:
    table = {}
    for generation, chip in CHIPS.items():
        topologies = _TOPOLOGIES_3D if chip.chips_per_name_unit == 0.5 else _TOPOLOGIES_2D
        for chips, topology in topologies.items():
            if chips <= _LARGEST[generation]:
                name = f"{generation}-{int(chips / chip.chips_per_name_unit)}"
                table[name] = Slice(name, generation, topology, _host_bounds(topology))
    return table


SLICES: Mapping[str, Slice] = _slices()


def get(name: str) -> Slice:
    """Returns the slice called `name`, such as `v5e-16`, `2xv4-32` or `h100:8`. Raises UserError if there is none."""
    if ":" in name:
        return _of_devices(name)
    count, times, single = name.partition("x")
    if times and count.isdigit() and int(count) >= 1 and not single[:1].isdigit():
        return _several(get(single), int(count))
    generation, _, number = name.partition("-")
    canonical = f"{_ALIASES.get(generation, generation)}-{number}"
    if canonical in SLICES:
        return SLICES[canonical]
    if name.endswith(".gin"):
        raise UserError(f"{name!r} is no slice: the slice comes first, such as v4-32, then the experiment file")
    if generation in (*GPUS, "gpu", "cuda", "cpu"):
        raise UserError(f"unknown devices {name!r}: expected local, or KIND:DEVICES, such as h100:8 or cpu:1")
    raise UserError(
        f"unknown TPU slice {name!r}: expected one of {', '.join(SLICES)}. "
        f"Nearest: {', '.join(_nearest(canonical))}.{_by_chips(canonical)} `launch/run slices` prints what each has."
    )


def _by_chips(name: str) -> str:
    generation, _, size = name.partition("-")
    for found in SLICES.values():
        if found.generation == generation and size in (found.topology_name, str(found.chips)):
            counts = "chips" if found.chip.chips_per_name_unit == 1 else "TensorCores, two per chip"
            return f" The number counts {counts}: {found.name} has {found.counted}, {found.topology_name}."
    return ""


def _of_devices(name: str) -> Slice:
    """Parses `h100:8`, `h100:8x2` (two hosts with 8 each) or `cpu:1`."""
    kind, _, counts = name.partition(":")
    parts = re.fullmatch(r"([1-9]\d*)(?:x([1-9]\d*))?", counts)
    if parts is None or kind not in (*GPUS, "cpu"):
        raise UserError(
            f"unknown devices {name!r}: expected KIND:DEVICES or KIND:DEVICES_PER_HOSTxHOSTS, such as h100:8 or "
            f"h100:8x2, with a KIND of {', '.join((*GPUS, 'cpu'))}"
        )
    per_host, hosts = int(parts[1]), int(parts[2] or 1)
    return Slice(f"{kind}:{per_host}" + (f"x{hosts}" if hosts > 1 else ""), kind, (per_host * hosts,), (per_host,))


def _cpu(devices: int) -> Chip:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // devices
    return Chip(("cpu",), 0.0, memory, memory, 20e9, 20e9, memory, platform="cpu")


def of_device_kind(kind: str, *, per_host: int, hosts: int) -> Slice:
    """Returns a slice of GPUs or CPU devices, or a TPU slice of one host; `kind` is JAX's `device_kind`.

    Raises UserError if it is unknown.
    """
    tpu = next((name for name, chip in CHIPS.items() if kind in chip.kinds), None)
    alike = [one for one in SLICES.values() if one.generation == tpu and (one.devices, one.hosts) == (per_host, 1)]
    if alike and hosts == 1:
        return alike[0]
    if tpu:
        raise UserError(
            f"this machine has {per_host} {kind!r} devices and does not say of which slice: name the SLICE, or set "
            "TPU_ACCELERATOR_TYPE"
        )
    found = next((name for name, chip in GPUS.items() if kind in chip.kinds), kind if kind == "cpu" else None)
    if found is None:
        raise UserError(
            f"this machine has {kind!r} devices, which Renga does not know: expected a CPU or one of "
            f"{', '.join(kind for chip in GPUS.values() for kind in chip.kinds)}"
        )
    return get(f"{found}:{per_host}x{hosts}")


def one_of_device_kind(kind: str) -> Slice:
    """Returns one chip of a TPU, one GPU or one CPU device; `kind` is JAX's `device_kind`.

    A chip is also a slice where no TPU slice is as small, such as `v4-2`. Raises UserError if the kind is unknown.
    """
    generation = next((name for name, chip in CHIPS.items() if kind in chip.kinds), None)
    if generation is None:
        return of_device_kind(kind, per_host=1, hosts=1)
    smallest = next(slice_ for slice_ in SLICES.values() if slice_.generation == generation)
    one = (1,) * len(smallest.topology)
    name = f"{generation}-{int(1 / smallest.chip.chips_per_name_unit)}"
    return dataclasses.replace(smallest, name=name, topology=one, host_bounds=one)


def require_tpu(name: str, *, what: str) -> Slice:
    """Returns the TPU slice called `name`; raises UserError for other devices."""
    if not (found := get(name)).is_tpu:
        raise UserError(f"{name} is not a TPU slice, and {what} are for TPU slices alone")
    return found


def _several(one: Slice, count: int) -> Slice:
    return one if count == 1 else dataclasses.replace(one, name=f"{count}x{one.name}", num_slices=count)


def _nearest(name: str) -> list[str]:
    generation, _, number = name.partition("-")
    siblings = [s for s in SLICES if s.startswith(generation + "-")]
    if siblings and number.isdigit():
        return sorted(siblings, key=lambda s: abs(int(s.split("-")[1]) - int(number)))[:2]
    return difflib.get_close_matches(name, SLICES, n=3, cutoff=0.3) or list(SLICES)[:3]
