"""Compares the replicated arrays of all hosts periodically, by fingerprints that must be equal.

Without it, a host with another learning rate, other data or a faulty chip would go unnoticed: shapes and programs are
the same, and the loss looks normal. Every chip hashes its own copies, in a program without communication. The hosts
send the fingerprints to host 0 (`core.hosts.heartbeat`), which compares them; no host waits for that.

It compares the metrics of the step and all shards of the state that more than one chip has: with FSDP over all chips
the norms and the step counter, with data parallelism everything. The cost is one pass over those copies, and the loop
reads the metrics of that step before it dispatches the next.
"""

import collections
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from core.checkpoints import reading
from core.hosts.failure_diagnosis import Numbers
from core.step import TrainState
from core.training.trainer import Hook, StepReport


class _Common(NamedTuple):
    """A leaf with replicated shards.

    Attributes:
      pieces: name of the shard on each chip of this host: `params/w [0:4, :]`.
      shape: shape of a shard.
    """

    pieces: tuple[str, ...]
    shape: tuple[int, ...]


class Replicas:
    """Fingerprints the replicated shards on the chips of this host, for states with the same shardings."""

    def __init__(self, state: Any):
        """Reads the shardings of `state`; does not use the devices."""
        by_name = reading.by_name(state)
        own = next(iter(by_name.values())).sharding.addressable_devices
        self._devices = sorted(own, key=lambda device: device.id)
        found = {name: _common(name, leaf, self._devices) for name, leaf in by_name.items()}
        self._common: Mapping[str, _Common] = {name: common for name, common in found.items() if common}
        here = Mesh(np.array(self._devices), ("chip",))
        self._copies = NamedSharding(here, PartitionSpec())  # the chips' copies may differ
        self._numbers = jax.jit(
            jax.shard_map(
                lambda copies: jax.tree.map(lambda x: reading.fingerprint(x)[None], copies),
                mesh=here,
                in_specs=PartitionSpec(),
                out_specs=PartitionSpec("chip"),
                check_vma=False,
            )
        )

    def hash(self, state: Any) -> Callable[[], Numbers]:
        """Starts hashing on the chips; returns a function that waits for the fingerprints and returns them."""
        by_name = reading.by_name(state)
        numbers = self._numbers({name: self._on_chips(by_name[name], at.shape) for name, at in self._common.items()})
        return lambda: self._by_piece(jax.device_get(numbers))

    def _on_chips(self, leaf: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        held = {shard.device: shard.data for shard in leaf.addressable_shards}
        return jax.make_array_from_single_device_arrays(shape, self._copies, [held[d] for d in self._devices])

    def _by_piece(self, found: Mapping[str, np.ndarray]) -> Numbers:
        numbers = collections.defaultdict(list)
        for name, common in self._common.items():
            for piece, number in zip(common.pieces, found[name], strict=True):
                numbers[piece].append(int(number))
        return numbers


def _common(name: str, leaf: jax.Array, own: list[jax.Device]) -> _Common | None:
    """Returns the shards of a leaf on this host's chips; None if no other chip has a copy of any of them."""
    where = {
        device: _range(index, leaf.shape) for device, index in leaf.sharding.devices_indices_map(leaf.shape).items()
    }
    copies = collections.Counter(where.values())
    if all(copies[where[device]] == 1 for device in own):
        return None
    whole = len(copies) == 1
    pieces = tuple(name if whole else f"{name} {where[device]}" for device in own)
    return _Common(pieces, leaf.sharding.shard_shape(leaf.shape))


def _range(index: tuple[slice, ...], shape: tuple[int, ...]) -> str:
    """Formats an index: `[0:4, 2:6]`."""
    ends = [part.indices(size)[:2] for part, size in zip(index, shape, strict=True)]
    return "[" + ", ".join(f"{start}:{stop}" for start, stop in ends) + "]"


class Compare(Hook):
    """A hook that reports fingerprints of this host's replicated shards, and metrics, at every `every`-th step."""

    def __init__(self, hand_over: Callable[[int, Numbers], None], *, every: int):
        """Takes `hand_over(step, numbers)`, which gets the fingerprints of a step when the next step is done."""
        self._hand_over = hand_over
        self._every = every
        self._replicas: Replicas | None = None
        self._metrics: dict[str, list[str]] = {}
        self._pending: tuple[int, Callable[[], Numbers]] | None = None

    def needs_state(self, step: int) -> bool:
        """Returns True at multiples of `every`."""
        return step % self._every == 0

    def after_step(self, report: StepReport) -> None:
        """Hands over the fingerprints that wait, and keeps the metrics of a step that will be compared."""
        self._flush()
        if self.needs_state(report.step):
            self._metrics = {f"metrics/{name}": [value.hex()] for name, value in report.metrics.items()}

    def at_boundary(self, step: int, state: TrainState) -> None:
        """Starts hashing."""
        self._replicas = self._replicas or Replicas(state)
        self._pending = step, self._replicas.hash(state)

    def close(self) -> None:
        """Hands over the fingerprints that wait."""
        self._flush()

    def _flush(self) -> None:
        if self._pending is not None:
            (step, numbers), self._pending = self._pending, None
            self._hand_over(step, {**numbers(), **self._metrics})
