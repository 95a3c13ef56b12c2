"""Measures how far apart two layouts of one training run are.

A strategy may change speed and memory, and the order in which sums are taken; nothing else. So a few steps of the same
model on the same batches are run under each layout, and everything that training produces is compared: the loss of
every step, every gradient of the first batch, every parameter and every leaf of the optimizer's state.

Differences are given twice: as they are, and in units of the float32 spacing at the largest entry of their leaf
("ulp"), which tells rounding (a few) from a wrong sum (thousands or more) whatever the scale of the leaf.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from parallel import strategies
from parallel.partitioner import Program
from parallel.pipeline import schedules
from parallel.strategy import Strategy

Batch = Mapping[str, np.ndarray]


class Example(NamedTuple):
    """A strategy with degrees, on the slice that they fit."""

    slice: str
    strategy: Strategy


EXAMPLES: Mapping[str, Example] = {
    "data_parallel": Example("v4-32", strategies.data_parallel()),
    "zero1": Example("v4-32", strategies.zero1()),
    "fsdp": Example("v4-32", strategies.fsdp()),
    "hsdp": Example("v4-32", strategies.hsdp(data=4)),
    "tensor": Example("v4-8", strategies.tensor()),
    "fsdp_tensor": Example("v4-32", strategies.fsdp_tensor(tensor=4)),
    "sequence_tensor": Example("v4-32", strategies.sequence_tensor(tensor=4)),
    "context": Example("v4-32", strategies.context(sequence=4)),
    "mesh3d": Example("v4-32", strategies.mesh3d(data=2, tensor=2)),
    "multislice": Example("2xv4-16", strategies.multislice(slices=2)),
    "pipeline": Example("v4-32", strategies.pipeline(schedule=schedules.gpipe(num_microbatches=4))),
    "pipeline_fsdp": Example(
        "v4-32", strategies.pipeline_fsdp(stage=4, schedule=schedules.one_f_one_b(num_microbatches=4))
    ),
    "pipeline_fsdp_tensor": Example(
        "v4-32",
        strategies.pipeline_fsdp_tensor(stage=2, tensor=4, schedule=schedules.circular(num_microbatches=4, repeats=2)),
    ),
    "pipeline_data": Example(
        "2xv4-16", strategies.pipeline_data(slices=2, schedule=schedules.gpipe(num_microbatches=2))
    ),
}


class Trajectory(NamedTuple):
    """What a short run produced, on the host; every host has all of it.

    Attributes:
      fresh: parameters before the first step.
      gradients: of the mean loss of the first batch, by parameter.
      losses: [steps].
      params, opt_state: behind the last step.
    """

    fresh: Any
    gradients: Any
    losses: np.ndarray
    params: Any
    opt_state: Any


class Difference(NamedTuple):
    """The largest difference between two trees, over all leaves and entries.

    Attributes:
      absolute: as it is.
      ulp: over the float32 spacing at the largest entry of the leaf.
      where: the leaf with the largest `ulp`.
    """

    absolute: float
    ulp: float
    where: str


def run(program: Program, batches: Iterable[Batch]) -> Trajectory:
    """Trains on the batches from a fresh state.

    Args:
      program: bound to devices that exist.
      batches: this host's rows of every global batch, in the order of `data_layout(...).rows`.
    """
    on_device = [program.put(batch) for batch in batches]
    state = program.init()
    fresh, gradients = everywhere(program, state.params), _gradients(program, state.params, on_device[0])
    losses = []
    for batch in on_device:
        state, metrics = program.train_step(state, batch)
        losses.append(float(metrics["loss"]))
    return Trajectory(
        fresh, gradients, np.asarray(losses), everywhere(program, state.params), everywhere(program, state.opt_state)
    )


def _gradients(program: Program, params: Any, batch: Any) -> Any:
    def mean_loss(params, batch):
        _, out = program.model.loss(params, program.model.init_carry(batch), jax.random.key(program.seed), batch)
        return out.loss_sum / out.weight_sum

    with program.partitioner.tracing():
        return everywhere(program, jax.jit(jax.grad(mean_loss))(params, batch))


def everywhere(program: Program, tree: Any) -> Any:
    """The tree as numpy arrays, whole on every host."""
    if all(a.is_fully_addressable for a in jax.tree.leaves(tree)):
        return jax.device_get(tree)
    whole = jax.sharding.NamedSharding(program.partitioner.mesh, jax.sharding.PartitionSpec())
    gathered = jax.jit(lambda t: t, out_shardings=whole)(tree)
    return jax.tree.map(lambda a: np.asarray(a.addressable_data(0)), gathered)


def difference(ours: Any, theirs: Any) -> Difference:
    """Compares two trees of one structure."""
    worst = Difference(0.0, 0.0, "")
    pairs = zip(jax.tree_util.tree_leaves_with_path(ours), jax.tree.leaves(theirs), strict=True)
    for (path, a), b in pairs:
        apart = np.max(np.abs(np.asarray(a, np.float64) - np.asarray(b, np.float64)), initial=0.0)
        spacing = np.spacing(np.max(np.abs(np.asarray(b, np.float32)), initial=np.finfo(np.float32).tiny))
        found = Difference(float(apart), float(apart / spacing), jax.tree_util.keystr(path))
        worst = Difference(
            max(worst.absolute, found.absolute), *max(worst[1:], found[1:], key=lambda ulp_where: ulp_where[0])
        )
    return worst


def compare(ours: Trajectory, theirs: Trajectory) -> dict[str, Difference]:
    """The difference of every part, by its name."""
    return {name: difference(getattr(ours, name), getattr(theirs, name)) for name in Trajectory._fields}
