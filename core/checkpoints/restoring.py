"""The arrays of one saved step, read into the shardings that are asked for, by each host its part.

The one idea: a restore reads what `arrays` reads and nothing else, so that a step which is sound to one is sound to the
other. What else orbax writes beside the arrays (its own account of the tree, of shards and of shardings) the sealed
description says too; it serves other tools, and may be damaged or gone.
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

_AHEAD_BYTES = 96 * 10**9  # of memory of one host: so much is read at once


def restore(step_folder: paths.Path, abstract_state: Any) -> Any:
    """A tree like `abstract_state` of the arrays that the step has under the same names; waits for no other host.

    Args:
      step_folder: of a step.
      abstract_state: a tree of jax.ShapeDtypeStruct, each with the sharding to restore into.

    Raises:
      Exception: of many types, whatever files and formats make of a wrong byte.
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
    """The names in their order, in groups that a host has the memory for on the way to its devices."""
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
