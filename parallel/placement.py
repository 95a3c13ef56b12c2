"""Distributes rows of a batch over hosts and chips: which rows a host supplies, and how they become global arrays.

On a real slice the rows of a host are often strided, and several hosts may supply the same row. They are therefore read
from the sharding of the batch, never computed from host indices, and batches are checked against it before transfer.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from core.batches import BatchSpec, batch_size
from core.errors import UserError
from core.types import Batch, DataLayout


def data_layout(by_rows: NamedSharding, batch_size: int) -> DataLayout:
    """Returns the rows of a global batch that this host supplies.

    Args:
      by_rows: the sharding of an array [batch_size].
      batch_size: rows of the global batch.
    """
    by_host = _rows_by_host(by_rows, batch_size)
    me = jax.process_index()
    mine = by_host.get(me, set())
    earlier = set().union(*(rows for host, rows in by_host.items() if host < me))
    return DataLayout(batch_size, tuple(sorted(mine)), tuple(sorted(mine - earlier)))


def largest_share(by_rows: NamedSharding, batch_size: int) -> float:
    """Returns the fraction of a global batch that the host with the most rows supplies.

    Args:
      by_rows: the sharding of an array [batch_size].
      batch_size: rows of a batch; any size that divides.
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
    """Places this host's rows of a global batch on its devices.

    Args:
      batch: arrays [rows of this host, ...], in the order of `rows`.
      spec: fields of the global batch.
      layouts: sharding of every array of the global batch.
      rows: the rows of this host (`data_layout(...).rows`).

    Returns:
      Global arrays.

    Raises:
      UserError: lists every feature whose presence, rows, shape or dtype is wrong.
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
