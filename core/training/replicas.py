"""Compares the replicated arrays of all hosts periodically, by fingerprints that must be equal.

Every chip hashes its own copies, without communication; host 0 compares the fingerprints.
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
    """A leaf's replicated shards: their names on this host's chips (`params/w [0:4, 0:6]`), and their shape."""

    pieces: tuple[str, ...]
    shape: tuple[int, ...]


class Replicas:
    """Fingerprints the replicated shards on this host's chips, for states with the same shardings."""

    def __init__(self, state: Any):
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
        """Starts hashing on the chips; returns a function that waits for the fingerprints."""
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
    ends = [part.indices(size)[:2] for part, size in zip(index, shape, strict=True)]
    return "[" + ", ".join(f"{start}:{stop}" for start, stop in ends) + "]"


class Compare(Hook):
    """A hook that hands over fingerprints of replicated shards, and metrics, at multiples of `every`."""

    def __init__(self, hand_over: Callable[[int, Numbers], None], *, every: int):
        """`hand_over(n, numbers)` is called when step n + 1 is done, or at the end."""
        self._hand_over = hand_over
        self._every = every
        self._replicas: Replicas | None = None
        self._metrics: dict[str, list[str]] = {}
        self._pending: tuple[int, Callable[[], Numbers]] | None = None

    def needs_state(self, step: int) -> bool:
        return step % self._every == 0

    def after_step(self, report: StepReport) -> None:
        self._flush()
        if self.needs_state(report.step):
            self._metrics = {f"metrics/{name}": [value.hex()] for name, value in report.metrics.items()}

    def at_boundary(self, step: int, state: TrainState) -> None:
        self._replicas = self._replicas or Replicas(state)
        self._pending = step, self._replicas.hash(state)

    def close(self) -> None:
        self._flush()

    def _flush(self) -> None:
        if self._pending is not None:
            (step, numbers), self._pending = self._pending, None
            self._hand_over(step, {**numbers(), **self._metrics})
