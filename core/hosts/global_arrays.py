"""Shows arrays whose shards are on several hosts, of which no host can read all values.

print(global_arrays.describe(state.params))          # any host alone, at any time
values = global_arrays.gathered(state.params["head"]["w"])   # all hosts, in the same order
"""

from typing import Any

import jax
import numpy as np

from core import parameters, units
from core.errors import UserError
from core.hosts import distributed

MOST_GATHERED_BYTES = 2**28
_EDGE_ITEMS, _MOST_SHARDS = 2, 4


def describe(tree: Any) -> str:
    """Describes arrays of a tree: shape, layout, and the values of some of this host's shards.

    params/head/w float32[8, 6], P('fsdp',), 2 hosts; here:
      [0:4, 0:6] from -1.2 to 3.1, mean 0.02, 0 not finite: [[0.1 0.2 ... 0.5 0.6] ...]
    """
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return "\n".join(_leaf(parameters.path_name(path) or "array", leaf) for path, leaf in leaves)


def _leaf(name: str, leaf: Any) -> str:
    if not isinstance(leaf, jax.Array) or jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.extended):
        return f"{name} {leaf!r}"
    kind = f"{name} {leaf.dtype.name}{list(leaf.shape)}"
    if leaf.is_deleted():
        return f"{kind}: deleted, because it was donated to a later computation"
    layout = getattr(leaf.sharding, "spec", leaf.sharding)
    devices: set[Any] = leaf.sharding.device_set
    hosts = units.counted(len({device.process_index for device in devices}), "host")
    places = {_place(shard.index, leaf.shape): shard for shard in leaf.addressable_shards}  # copies count once
    lines = [f"  {place} {_values(np.asarray(shard.data))}" for place, shard in places.items()]
    return "\n".join([f"{kind}, {layout}, {hosts}; here:", *units.shortened(lines, most=_MOST_SHARDS)])


def _place(index: tuple[slice, ...], shape: tuple[int, ...]) -> str:
    ranges = [part.indices(size)[:2] for part, size in zip(index, shape, strict=True)]
    return f"[{', '.join(f'{start}:{stop}' for start, stop in ranges)}]"


def _values(values: np.ndarray) -> str:
    if not values.size:
        return "no values"
    with np.printoptions(precision=4, edgeitems=_EDGE_ITEMS, threshold=2 * _EDGE_ITEMS + 1):
        shown = " ".join(str(values).split())
    if values.dtype == bool:
        return f"{int(values.sum())} of {values.size} are True: {shown}"
    wide = values.astype(np.float64)
    finite = wide[np.isfinite(wide)]
    span = f"from {finite.min():.4g} to {finite.max():.4g}, mean {finite.mean():.4g}, " if finite.size else ""
    return f"{span}{values.size - finite.size} not finite: {shown}"


def gathered(array: jax.Array, *, most_bytes: int = MOST_GATHERED_BYTES) -> np.ndarray:
    """Returns all values of an array of at most `most_bytes`. All hosts must call it, in the same order.

    Raises UserError if it has more.
    """
    if array.nbytes > most_bytes:
        raise UserError(
            f"gathered: {array.dtype.name}{list(array.shape)} has {units.size(array.nbytes)}, and every host would "
            f"hold all of it; at most {units.size(most_bytes)} (most_bytes) are allowed. Gather a part: array[:8]"
        )
    return np.asarray(array) if array.is_fully_addressable else distributed.all_gather_array(array)
