"""Joins this process to the other hosts of the slice, and refuses to continue if anything differs from the request.

All checks run on all hosts before the first array is created.
"""

from __future__ import annotations

import faulthandler
from collections.abc import Callable

import jax

from core import distributed, units
from core.errors import UserError
from core.health.failure_diagnosis import USUAL_LIMITS, Limits
from core.slices import Slice
from launch import environment
from launch.host import Host
from launch.hosts import tpu_host


def join(
    slice_: Slice,
    *,
    description: str = "",
    limits: Limits = USUAL_LIMITS,
    before_devices: Callable[[distributed.Cluster], None] = lambda cluster: None,
) -> Host:
    """Joins this process to the hosts of the slice, which monitor one another from then on.

    In a simulation (RENGA_SIMULATE) the processes divide the slice's chips among them; a single process has them all.

    Args:
      slice_: whose hosts these are.
      description: what this host would run (`launch.runs.prepared_run.run_signature`), to be the same on all of them.
      limits: how long a host may stay in one phase.
      before_devices: as for `distributed.initialize`.

    Raises:
      UserError: the environment contradicts itself or the slice; the hosts would not run the same; JAX found another
        accelerator than was asked for.
    """
    layout = environment.process_layout()
    played = environment.read("RENGA_SIMULATE")
    if played and played != slice_.name:
        raise UserError(f"RENGA_SIMULATE={played} but SLICE is {slice_.name}: they must name the same slice")
    processes = layout.count or 1
    if played and slice_.chips % processes:
        raise UserError(
            f"{slice_.name} has {units.counted(slice_.chips, 'chip')}, which "
            f"{units.counted(processes, 'process', 'processes')} cannot share evenly"
        )
    if not played and layout.count not in (None, slice_.hosts):
        raise UserError(
            f"JAX_PROCESS_COUNT={layout.count}, but {slice_.name} has {units.counted(slice_.hosts, 'host')} with "
            f"{units.counted(slice_.chips_per_host, 'chip')} each: set {slice_.hosts}, or on a TPU leave it unset: JAX "
            "finds the peers"
        )
    faulthandler.enable()  # if C++ code aborts this process, its log has the stacks
    distributed.exit_at_once_on_exception()
    cluster = distributed.initialize(
        coordinator=layout.coordinator,
        process_index=layout.index,
        process_count=layout.count,
        local_cpu_devices=slice_.chips // processes if played else None,
        single_process=layout.count is None and (bool(played) or slice_.hosts == 1),
        description=description,
        addresses=environment.worker_addresses(),
        watch=limits,
        before_devices=before_devices,
        timeout_seconds=environment.join_seconds(),
    )
    _require_chips(slice_, played=bool(played))
    return Host(cluster.process_index, cluster.process_count, bool(played))


def _require_chips(slice_: Slice, *, played: bool) -> None:
    devices = jax.devices()
    platform = devices[0].platform
    if not played and platform != "tpu":
        holders, unseen = tpu_host.chip_holders()
        held = "; ".join(holders.values()) or tpu_host.without_holders(unseen)
        raise UserError(
            f"{slice_.name} was asked for, but JAX found {units.counted(len(devices), f'{platform} device')} "
            "and no TPU. "
            f"On a TPU host: is libtpu missing? Its chips: {held}. Elsewhere: rehearse, "
            "--simulate"
        )
    if len(devices) != slice_.chips:
        raise UserError(
            f"{slice_.name} has {units.counted(slice_.chips, 'device')} on {units.counted(slice_.hosts, 'host')}, but "
            f"JAX sees {len(devices)} on {units.counted(jax.process_count(), 'host')}: run the same command on every "
            "host of the slice, or name the slice this is"
            + ("; slices find one another through MEGASCALE_NUM_SLICES, …_SLICE_ID" if slice_.num_slices > 1 else "")
        )
