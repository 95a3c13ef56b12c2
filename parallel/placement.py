"""Rows of a batch between hosts and chips: which rows a host owes, and how what it brings becomes global arrays.

On a real slice a host's rows are often strided, and several hosts may need the same row. So a host never counts: what
it owes is read from the layout of the batch, and what it brings is held against that before it reaches a chip.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from core.errors import UserError
from core.types import Batch, DataLayout

BatchSpec = Mapping[str, jax.ShapeDtypeStruct]


def data_layout(by_rows: NamedSharding, batch_size: int) -> DataLayout:
    """The rows of a global batch that this host supplies.

    Args:
      by_rows: the layout of an array [batch_size].
      batch_size: rows of the global batch.
    """
    by_host = _rows_by_host(by_rows, batch_size)
    me = jax.process_index()
    mine = by_host.get(me, set())
    earlier = set().union(*(rows for host, rows in by_host.items() if host < me))
    return DataLayout(batch_size, tuple(sorted(mine)), tuple(sorted(mine - earlier)))


def largest_share(by_rows: NamedSharding, batch_size: int) -> float:
    """The part of a global batch that the host with the most rows supplies.

    Args:
      by_rows: the layout of an array [batch_size].
      batch_size: rows of a small batch, laid out as any other.
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
    """This host's rows of a global batch, placed on its devices.

    Args:
      batch: arrays [rows of this host, ...], in the order of `rows`.
      spec: shapes of the global batch.
      layouts: of every array of the global batch.
      rows: what this host owes, of `data_layout`.

    Returns:
      Global arrays.

    Raises:
      ValueError: other features, rows, shapes or dtypes than this host owes; every one at once.
    """
    _require_owed(batch, spec, len(rows))
    first = np.asarray(rows)

    def shard(local: np.ndarray, batch_size: int, index: tuple[slice, ...]) -> np.ndarray:
        start, stop, _ = index[0].indices(batch_size)
        at = np.searchsorted(first, start)
        return local[(slice(at, at + stop - start), *index[1:])]

    return {
        k: jax.make_array_from_callback(s.shape, layouts[k], functools.partial(shard, np.asarray(batch[k]), s.shape[0]))
        for k, s in spec.items()
    }


def _require_owed(batch: Mapping[str, np.ndarray], spec: BatchSpec, count: int) -> None:
    problems = [f"feature {name!r} is missing" for name in spec if name not in batch]
    problems += [f"feature {name!r} is not one of {', '.join(spec)}" for name in batch if name not in spec]
    for name in spec.keys() & batch.keys():
        given, owed = batch[name], (count, *spec[name].shape[1:])
        if np.shape(given) != owed:
            problems.append(f"feature {name!r} has shape {np.shape(given)}, expected {owed}")
        if np.asarray(given).dtype != spec[name].dtype:
            problems.append(f"feature {name!r} is {np.asarray(given).dtype}, expected {spec[name].dtype}")
    if problems:
        whole = next(iter(spec.values())).shape[0]
        raise UserError(
            f"host {jax.process_index()} owes {count} of the {whole} rows of a batch:\n  "
            + "\n  ".join(sorted(problems))
            + "\nGive the rows that data_layout(batch_size).rows names, in that order, and no others"
        )
