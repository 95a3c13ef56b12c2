"""Builds the mesh of a strategy over the chips of a slice, and distributes rows of a batch over hosts and chips.

CPU devices that simulate a TPU slice get the coordinates of its chips, from which JAX's `create_device_mesh` orders
them. The rows of a host are often strided, and several hosts may supply the same row.
"""

import contextlib
import dataclasses
import functools
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils, topologies
from jax.sharding import AxisType, Mesh, NamedSharding

from core import units
from core.batches import BatchSpec, batch_size
from core.errors import UserError
from core.slices import Slice
from core.types import Batch, DataLayout

# Without these, libtpu queries the cloud's metadata server, takes a lock file and logs errors when there is no TPU.
_COMPILE_ONLY = {
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
}


@dataclasses.dataclass(frozen=True)
class _Described:
    device: jax.Device
    id: int
    process_index: int
    coords: tuple[int, ...]
    device_kind: str
    platform: str = "tpu"
    core_on_chip: int = 0
    slice_index: int = 0


def make_mesh(
    shape: Mapping[str, int],
    *,
    slice: Slice,
    devices: Sequence[jax.Device],
    dcn_shape: Mapping[str, int] | None = None,
    leading: Sequence[str] = (),
) -> Mesh:
    """Returns the mesh with the given degrees over the devices of one or more slices.

    Args:
      shape: degree by mesh axis over all slices, slowest network first.
      leading: axes that come first in the mesh; XLA needs outer manual regions first.
      dcn_shape: degree by mesh axis across slices; None: a single slice.

    Raises:
      UserError: the number or kind of devices does not match the slice.
    """
    devices = sorted(devices, key=lambda d: (d.process_index, d.id))
    simulated = devices[0].platform == "cpu"
    if not simulated:
        _check_kind(devices, slice)
    if len(devices) < slice.devices or (len(devices) > slice.devices and not simulated):
        raise UserError(
            f"{slice.name} has {units.counted(slice.devices, 'device')} on {units.counted(slice.hosts, 'host')}, but "
            f"JAX sees {units.counted(len(devices), f'{devices[0].device_kind} device')} on "
            f"{units.counted(len({d.process_index for d in devices}), 'host')}. "
            + (
                f"Simulate it with JAX_NUM_CPU_DEVICES={slice.devices} or more"
                if simulated
                else "Name the actual slice"
            )
        )
    if slice.is_tpu:
        chips = simulated_devices(devices, slice) if simulated else [_described(device, slice) for device in devices]
        grid = np.vectorize(lambda chip: chip.device, otypes=[object])(_grid(shape, dcn_shape or {}, chips))
    else:  # GPUs of a host are connected alike, and the last axes of a mesh are those of the fastest network
        grid = np.asarray(devices[: slice.devices]).reshape(tuple(shape.values()))
    axes = sorted(shape, key=lambda axis: leading.index(axis) if axis in leading else len(leading))
    grid = grid.transpose([list(shape).index(axis) for axis in axes])
    return Mesh(grid, tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def _grid(shape: Mapping[str, int], dcn_shape: Mapping[str, int], chips: Sequence) -> np.ndarray:
    across = [dcn_shape.get(axis, 1) for axis in shape]
    if max(across) == 1:
        return mesh_utils.create_device_mesh(tuple(shape.values()), chips, allow_split_physical_axes=True)
    within = [degree // n for degree, n in zip(shape.values(), across, strict=True)]
    return mesh_utils.create_hybrid_device_mesh(within, across, chips, allow_split_physical_axes=True)


def _check_kind(devices: Sequence[jax.Device], slice: Slice) -> None:
    if devices[0].device_kind not in slice.chip.kinds:
        raise UserError(
            f"{slice.name} has {units.counted(slice.devices, f'{slice.chip.kinds[0]} {slice.chip.unit}')}, but JAX "
            f"sees {units.counted(len(devices), f'{devices[0].device_kind} device')}; name the slice that this runs on"
        )


def simulated_devices(devices: Sequence[jax.Device], slice: Slice) -> list[_Described]:
    """Describes CPU devices as the devices of the TPU slice that they simulate.

    `devices` are sorted by process and ID.
    """
    places = [
        ((c[0], c[1], *c[2:], 0)[:3], core) for host in slice.devices_by_host() for *c, core in host
    ] * slice.num_slices
    x, y = slice.topology[:2]
    return [
        _Described(
            device=device,
            id=core
            + slice.chip.devices * (c[0] + x * (c[1] + y * c[2]))
            + slice.devices_per_slice * (i // slice.devices_per_slice),
            process_index=i // slice.devices_per_host,
            coords=c,
            device_kind=slice.chip.kinds[0],
            core_on_chip=core,
            slice_index=i // slice.devices_per_slice,
        )
        for i, (device, (c, core)) in enumerate(zip(devices, places, strict=False))
    ]


def _described(device: jax.Device, slice: Slice) -> _Described:
    """JAX orders the chips of some slices by their kind, so this uses the first of `slice.chip.kinds`."""
    return _Described(
        device=device,
        id=device.id,
        process_index=device.process_index,
        coords=tuple(device.coords),
        device_kind=slice.chip.kinds[0],
        core_on_chip=device.core_on_chip,
        slice_index=getattr(device, "slice_index", 0),  # not defined for a single slice
    )


def devices_of(slice: Slice) -> list[jax.Device]:
    """Returns devices to which a program for the slice can be bound without its hardware.

    They are libtpu's descriptions of TPU devices, or CPU devices.

    Raises:
      UserError: this process already has fewer CPU devices.
    """
    if slice.is_tpu:
        return topology_devices(slice)
    provide_cpu_devices(slice.devices)
    return jax.devices("cpu")[: slice.devices]


def provide_cpu_devices(count: int) -> None:
    """Makes JAX create at least `count` CPU devices; raises UserError if it has created fewer."""
    try:
        if max(jax.config.values["jax_num_cpu_devices"], 1) < count:
            jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError as error:  # they exist
        if (number := len(jax.devices("cpu"))) < count:
            raise UserError(
                f"{count} devices are needed, and this process has made {number} (a module of the experiment may have "
                f"used one when it was imported: an array, jax.random.key …): set JAX_NUM_CPU_DEVICES={count}"
            ) from error


def topology_devices(slice: Slice) -> list[jax.Device]:
    """Returns the devices of a TPU slice as libtpu describes them; nothing can run on them.

    Raises UserError for other slices.
    """
    if not slice.is_tpu:
        raise UserError(f"{slice.name} is not a TPU slice; ahead-of-time compilation needs one")
    bounds = (*slice.host_bounds, 1)[:3]
    wrap = (*slice.wraparound, False)[:3]
    options: dict[str, Any] = {"chips_per_host_bounds": bounds, "wrap": wrap}
    if slice.num_slices > 1:
        options["num_slices"] = slice.num_slices
    if slice.generation == "v4":
        options["chip_config_name"] = "megacore"  # without it a device is one of a chip's two cores
    name = f"{slice.generation}:{slice.topology_name}"
    with _environment(_COMPILE_ONLY | {"TPU_ACCELERATOR_TYPE": slice.single.name}):
        return list(topologies.get_topology_desc(platform="tpu", topology_name=name, **options).devices)


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    added = {k: v for k, v in values.items() if k not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


def data_layout(by_rows: NamedSharding, batch_size: int) -> DataLayout:
    """Returns the rows of a global batch that this host supplies.

    `by_rows`: the sharding of an array [batch_size].
    """
    by_host = _rows_by_host(by_rows, batch_size)
    me = jax.process_index()
    mine = by_host.get(me, set())
    earlier = set().union(*(rows for host, rows in by_host.items() if host < me))
    return DataLayout(batch_size, tuple(sorted(mine)), tuple(sorted(mine - earlier)))


def largest_share(by_rows: NamedSharding, batch_size: int) -> float:
    """Returns the fraction of a global batch that the host with the most rows supplies.

    `by_rows`: the sharding of an array [batch_size].
    """
    return max(map(len, _rows_by_host(by_rows, batch_size).values())) / batch_size


def _rows_by_host(by_rows: NamedSharding, batch_size: int) -> dict[int, set[int]]:
    by_host: dict[int, set[int]] = {}
    placed: Mapping[Any, Any] = by_rows.devices_indices_map((batch_size,))  # {device: (slice of rows,)}
    for device, (rows,) in placed.items():
        by_host.setdefault(device.process_index, set()).update(range(*rows.indices(batch_size)))
    return by_host


def put(
    batch: Mapping[str, np.ndarray], spec: BatchSpec, layouts: Mapping[str, NamedSharding], *, rows: Sequence[int]
) -> Batch:
    """Places this host's rows of a global batch on its devices; returns global arrays.

    Args:
      batch: arrays [rows of this host, ...], in the order of `rows`.
      rows: the rows of this host, ascending.

    Raises:
      UserError: a feature is missing or unknown, or has a wrong shape or dtype.
    """
    _check_batch(batch, spec, len(rows))
    first = np.asarray(rows)

    def shard(local: np.ndarray, height: int, index: tuple[slice, ...]) -> np.ndarray:
        start, stop, _ = index[0].indices(height)
        at = np.searchsorted(first, start)
        return local[(slice(at, at + stop - start), *index[1:])]

    return {
        k: jax.make_array_from_callback(s.shape, layouts[k], functools.partial(shard, np.asarray(batch[k]), s.shape[0]))
        for k, s in spec.items()
    }


def _check_batch(batch: Mapping[str, np.ndarray], spec: BatchSpec, count: int) -> None:
    problems = [f"feature {name!r} is missing" for name in spec if name not in batch]
    problems += [f"feature {name!r} is not one of {', '.join(spec)}" for name in batch if name not in spec]
    for name in spec.keys() & batch.keys():
        given, expected = batch[name], (count, *spec[name].shape[1:])
        if np.shape(given) != expected:
            problems.append(f"feature {name!r} has shape {np.shape(given)}, expected {expected}")
        if np.asarray(given).dtype != spec[name].dtype:
            problems.append(f"feature {name!r} is {np.asarray(given).dtype}, expected {spec[name].dtype}")
    if problems:
        raise UserError(
            f"host {jax.process_index()} must supply {count} of the {batch_size(spec)} rows of a batch:\n  "
            + "\n  ".join(sorted(problems))
            + "\nSupply exactly the rows data_layout(batch_size).rows, in that order"
        )
