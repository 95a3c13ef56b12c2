"""Joins this process to the other hosts of the slice, and checks hosts, devices, library versions and clocks."""

import faulthandler
import importlib.metadata
import os
import platform
import re
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

import jax
from packaging.version import Version

from core import extras, units
from core.errors import Problem, UserError
from core.hosts import distributed
from core.hosts.failure_diagnosis import ON_TPU, USUAL_LIMITS, Limits
from core.slices import Slice
from core.versions import COMPILER
from launch import environment
from launch.findings import Finding
from launch.hosts import tpu_host
from launch.settings import Health

_ABOUT = "hosts/about"
SKEW_SECONDS = 5.0  # logs are merged by time, and servers reject credentials with a wrong time


@dataclass(frozen=True)
class Host:
    """The host that this process is, one of `count`."""

    index: int
    count: int
    simulated: bool

    @property
    def is_zero(self) -> bool:
        """Whether this is host 0."""
        return self.index == 0

    @property
    def name(self) -> str:
        """The host's name in messages, such as `host 2 of 4`."""
        return f"host {self.index} of {self.count}"


ALONE = Host(0, 1, simulated=False)


def limits(health: Health) -> Limits:
    """Returns the time limits of a run's health checks."""
    return health.limits(USUAL_LIMITS if environment.read("RENGA_SIMULATE") else ON_TPU)


def join(
    slice_: Slice,
    *,
    description: str = "",
    limits: Limits = USUAL_LIMITS,
    before_devices: Callable[[distributed.Cluster], None] = lambda cluster: None,
) -> Host:
    """Joins this process to the hosts of the slice. All hosts must call it.

    Args:
      description: describes the run; must be equal on all hosts.
      before_devices: called when all hosts are connected, before devices are initialized.

    Raises:
      UserError: the environment, the devices or the hosts' descriptions do not fit.
      TimeoutError: some hosts are missing.
    """
    layout = environment.process_layout()
    played = environment.read("RENGA_SIMULATE")
    if played and played != slice_.name:
        raise UserError(f"RENGA_SIMULATE={played} but SLICE is {slice_.name}: they must name the same slice")
    own_devices = slice_.shared_by(layout.count or 1).devices_per_host if played else None
    if not played and not slice_.is_tpu:
        own_devices = _use_platform(slice_)
    if not played and layout.count not in (None, slice_.hosts):
        raise UserError(
            f"JAX_PROCESS_COUNT={layout.count}, but {slice_.name} has {units.counted(slice_.hosts, 'host')} with "
            f"{slice_.counted_per_host} each: set {slice_.hosts}, or on a TPU leave it unset: JAX finds the peers"
        )
    faulthandler.enable()  # logs the stacks if C++ code aborts this process
    distributed.exit_at_once_on_exception()
    cluster = distributed.initialize(
        coordinator=layout.coordinator,
        process_index=layout.index,
        process_count=layout.count,
        local_cpu_devices=own_devices,
        single_process=layout.count is None and (bool(played) or slice_.hosts == 1),
        description=description,
        addresses=environment.worker_addresses(),
        secret=environment.join_secret(),
        watch=limits,
        before_devices=before_devices,
        timeout_seconds=environment.join_seconds(),
    )
    _require_chips(slice_, played=bool(played))
    return Host(cluster.process_index, cluster.process_count, bool(played))


def _use_platform(slice_: Slice) -> int | None:
    platform_ = slice_.chip.platform
    if (asked := environment.read("JAX_PLATFORMS")) not in (None, platform_, "gpu" if platform_ == "cuda" else None):
        raise UserError(f"{slice_.name} are {platform_} devices, but JAX_PLATFORMS={asked}: unset it, or name others")
    if platform_ == "cuda":
        from launch.hosts import machine

        machine.prepare_gpus()
    jax.config.update("jax_platforms", platform_)
    return slice_.devices_per_host if platform_ == "cpu" else None


def _devices(slice_: Slice) -> list[jax.Device]:
    try:
        return jax.devices()
    except (RuntimeError, AssertionError) as error:  # JAX asserts that the platform in JAX_PLATFORMS has a backend
        if slice_.is_tpu:
            raise
        raise UserError(
            f"{slice_.name} was asked for, but JAX cannot use {slice_.chip.platform} devices here: "
            f"{str(error) or 'no backend'}. GPUs need `{extras.install('cuda')}` and a driver that "
            "it supports (nvidia-smi shows the driver); `launch/pod.sh local …` takes what this machine has"
        ) from error


def _require_chips(slice_: Slice, *, played: bool) -> None:
    devices = _devices(slice_)
    platform_ = devices[0].platform
    if not played and not slice_.is_tpu and devices[0].device_kind not in slice_.chip.kinds:
        raise UserError(
            f"{slice_.name} was asked for, but this machine has {devices[0].device_kind} devices: "
            "name their slice (`local` is what this machine has), or add --simulate"
        )
    if not played and slice_.is_tpu and platform_ != "tpu":
        raise UserError(
            f"{slice_.name} was asked for, but JAX found {units.counted(len(devices), f'{platform_} device')} "
            f"and no TPU. On a TPU host: is libtpu missing? Its chips: {tpu_host.chip_holders().detail}. "
            "On another machine, add --simulate"
        )
    if len(devices) != slice_.devices:
        raise UserError(
            f"{slice_.name} has {units.counted(slice_.devices, 'device')} on {units.counted(slice_.hosts, 'host')}, "
            f"but JAX sees {len(devices)} on {units.counted(jax.process_count(), 'host')}: run the same command on "
            "every host of the slice, or name the slice this is"
            + ("; slices find one another through MEGASCALE_NUM_SLICES, …_SLICE_ID" if slice_.num_slices > 1 else "")
        )


def announce(host: Host) -> None:
    """Prints this host's name and devices, and tells the other hosts."""
    devices = jax.local_devices()
    kind = f"{devices[0].platform} device" if devices[0].device_kind == devices[0].platform else devices[0].device_kind
    ids = ", ".join(units.shortened([str(device.id) for device in devices], most=8))
    said = (
        f"process {os.getpid()} on {socket.gethostname()}, {len(devices)} of {len(jax.devices())} devices: {kind} {ids}"
    )
    places = [str(tuple(device.coords)).replace(" ", "") for device in devices if hasattr(device, "coords")]
    said += f", at {' '.join(units.shortened(places, most=8))}" if places else ""
    print(f"{host.name}: {said}", flush=True)
    distributed.post(f"{_ABOUT}/{host.index}", said)


def about_hosts() -> list[str]:
    """Returns a line for each host that has announced itself; none in a single process."""
    if distributed.process_count() == 1:
        return []
    return [
        f"host {index}: {said}" for index, said in sorted((int(i), s) for i, s in distributed.posted(_ABOUT).items())
    ]


def warn_at_start(host: Host, slice_: Slice) -> None:
    """Prints warnings about library versions and clocks. All hosts must call it."""
    for finding, is_mine in ((check_versions(slice_), True), (check_clocks(), host.is_zero)):
        if is_mine and not finding.ok:
            print(f"{host.name}: warning: {finding.name}: {finding.detail}", flush=True)
        elif finding.is_note:
            print(f"{host.name}: note: {finding.name}: {finding.detail}", flush=True)


def check_versions(
    slice_: Slice, *, installed: Callable[[str], str] = importlib.metadata.version, pins: str | None = None
) -> Finding:
    """Compares jax, jaxlib and libtpu with the tested versions; older or missing ones fail.

    Args:
      slice_: the slice; only TPUs need libtpu.
      installed: returns the version of a package.
      pins: the text of a requirements.txt; None: this project's.
    """
    text = (environment.WORKSPACE / "requirements.txt").read_text() if pins is None else pins
    pinned = dict(re.findall(r"(?m)^([A-Za-z0-9_.-]+)==([^\s;]+)", text))
    have, older, newer = [f"Python {platform.python_version()}"], [], []
    for name in COMPILER:
        try:
            version = installed(name)
        except importlib.metadata.PackageNotFoundError:
            if name == "libtpu" and not slice_.is_tpu:
                continue
            older.append(f"{name} is not installed")
            continue
        have.append(f"{name} {version}")
        if Version(version) > Version(pinned[name]):
            newer.append(f"{name} (tested with {pinned[name]})")
        elif version != pinned[name]:
            older.append(f"{name} {version} is older than the {pinned[name]} of requirements.txt")
    if older:
        fix = "launch/setup.sh installs requirements.txt"
        return Finding("versions", False, Problem("; ".join(older), fix=fix))
    said = ", ".join(have) + (f"; newer than tested: {', '.join(newer)}" if newer else "")
    return Finding("versions", True, said, is_note=bool(newer))


def check_clocks(*, now: Callable[[], float] = time.time) -> Finding:
    """Compares the clocks of all hosts. All hosts must call it."""
    distributed.barrier("start/clocks")
    started, asked = now(), time.perf_counter()
    every = [float(text) for text in distributed.all_gather_text("start/clocks", repr(started))]
    within = max(float(t) for t in distributed.all_gather_text("start/asked", repr(time.perf_counter() - asked)))
    apart = max(every) - min(every)
    said = f"{apart:.3f} s apart (within {within:.3f} s)"
    if apart - within <= SKEW_SECONDS:
        return Finding("clocks", True, said)
    first, last = every.index(min(every)), every.index(max(every))
    fix = f"set the clock of the one that is wrong: sudo systemctl restart chrony (at most {SKEW_SECONDS:g} s)"
    return Finding("clocks", False, Problem(f"{said}: host {last} is ahead of host {first}", fix=fix))
