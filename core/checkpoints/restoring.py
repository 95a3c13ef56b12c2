"""Restores the arrays of a saved step into the requested shardings; each host reads its part.

A restore reads the same files as `arrays` and no others, so that both agree on whether a step is intact. Orbax's
metadata of the tree and of shardings is not needed, because the checksummed description contains it; it may be damaged
or missing.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Mapping
from typing import Any

from core import paths  # isort: skip (paths decides how etils reaches buckets, before orbax imports it)
import jax
import numpy as np
import orbax.checkpoint as ocp

from core.checkpoints import arrays, leaves

_AHEAD_BYTES = 96 * 10**9  # limit on the host memory used for arrays that are read at the same time


def restore(step_folder: paths.Path, abstract_state: Any) -> Any:
    """Returns a tree like `abstract_state` with the arrays of the same names; does not wait for other hosts.

    Args:
      step_folder: folder of a step.
      abstract_state: a tree of jax.ShapeDtypeStruct, each with the sharding to restore into.

    Raises:
      Exception: of many types, if files are damaged.
    """
    handler = ocp.type_handlers.ArrayHandler(array_metadata_store=None)
    context = ocp.type_handlers.get_ts_context(use_ocdbt=True)
    wanted = leaves.by_name(abstract_state, joined_by=arrays.JOINED_BY)
    found: list[jax.Array] = []
    for names in _together(wanted):
        infos = [_stored(step_folder / arrays.PART, name, context) for name in names]
        found += asyncio.run(handler.deserialize(infos, [_asked(wanted[name]) for name in names]))
    return jax.tree.unflatten(jax.tree.structure(abstract_state), found)


def _together(wanted: Mapping[str, Any]) -> Iterator[list[str]]:
    """Yields the names, in order, in groups that fit into a host's memory on the way to its devices."""
    group: list[str] = []
    group_bytes = 0
    for name, leaf in wanted.items():
        own_bytes = math.prod(leaf.sharding.shard_shape(leaf.shape)) * np.dtype(leaf.dtype).itemsize
        own_bytes *= len(leaf.sharding.addressable_devices)
        if group and group_bytes + own_bytes > _AHEAD_BYTES:
            yield group
            group, group_bytes = [], 0
        group.append(name)
        group_bytes += own_bytes
    if group:
        yield group


def _stored(folder: paths.Path, name: str, context: Any) -> Any:
    return ocp.type_handlers.ParamInfo(name=name, parent_dir=folder, is_ocdbt_checkpoint=True, ts_context=context)


def _asked(leaf: Any) -> Any:
    return ocp.type_handlers.ArrayRestoreArgs(sharding=leaf.sharding, global_shape=leaf.shape, dtype=leaf.dtype)
