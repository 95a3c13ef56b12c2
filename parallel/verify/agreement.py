"""Measures how far two layouts of one training run differ.

A few steps of the same model on the same batches are run under each layout. Differences are also given in units of the
float32 spacing at the largest entry of their leaf ("ulp"): rounding in float32 gives a few ulp, and a wrong sum usually
thousands or more. Some leaves contain only rounding errors, so the size of a leaf has a lower bound (`FLOORS`): a
fraction of the norm of all leaves of its kind.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from core import slices, wrappers
from core.batches import Field, batch_size
from core.errors import UserError
from core.optimizers import Optimizer
from core.parameters import Specs
from core.types import Model, Task, WeightedSum
from parallel import strategies
from parallel.partitioner import Partitioner, Program
from parallel.pipeline import schedules
from parallel.strategy import Strategy, mesh_text

Batch = Mapping[str, np.ndarray]
FieldAxes = Mapping[str, tuple[str | None, ...]]  # logical axes of the fields of a batch, by name


class Example(NamedTuple):
    """A strategy, and the name of a slice that it fits."""

    slice: str
    strategy: Strategy


EXAMPLES: Mapping[str, Example] = {
    "data_parallel": Example("v4-32", strategies.data_parallel()),
    "zero1": Example("v4-32", strategies.zero1()),
    "fsdp": Example("v4-32", strategies.fsdp()),
    "fsdp_overlapped": Example("v4-32", strategies.fsdp(overlap_reduction=True)),
    "hsdp": Example("v4-32", strategies.hsdp(data=4)),
    "tensor": Example("v4-8", strategies.tensor()),
    "fsdp_tensor": Example("v4-32", strategies.fsdp_tensor(tensor=4)),
    "sequence_tensor": Example("v4-32", strategies.sequence_tensor(tensor=4)),
    "context": Example("v4-32", strategies.context(sequence=4)),
    "context_ring": Example("v4-32", strategies.context(sequence=4, ring=True)),
    "mesh3d": Example("v4-32", strategies.mesh3d(data=2, tensor=2)),
    "multislice": Example("2xv4-16", strategies.multislice(slices=2)),
    "experts": Example("v4-32", strategies.experts(expert=2, tensor=2)),
    "pipeline": Example("v4-32", strategies.pipeline(schedule=schedules.gpipe(num_microbatches=4))),
    "pipeline_fsdp": Example(
        "v4-32", strategies.pipeline_fsdp(stage=4, schedule=schedules.one_f_one_b(num_microbatches=4))
    ),
    "pipeline_fsdp_tensor": Example(
        "v4-32",
        strategies.pipeline_fsdp_tensor(stage=2, tensor=4, schedule=schedules.circular(num_microbatches=4, repeats=2)),
    ),
    "pipeline_experts": Example(
        "v4-32",
        strategies.pipeline_experts(stage=2, expert=2, tensor=2, schedule=schedules.one_f_one_b(num_microbatches=4)),
    ),
    "pipeline_data": Example(
        "2xv4-16", strategies.pipeline_data(slices=2, schedule=schedules.gpipe(num_microbatches=2))
    ),
}


ONE_DEVICE = Example("v5e-1", strategies.data_parallel())
# Largest measured difference from one device, in ulp: `models.agreement_subjects.MODEL` in float32, 20 AdamW steps, 16
# CPU devices. All of it comes from the order of sums. Adam's eps is 1e-4: at 1e-8, an update with a gradient near zero
# depends on that gradient's last bits, and parameters differed by up to 2,556 ulp, moments by 669. For comparison, a
# leaf that is wrong by 1 % differs by 80,000 ulp.
MEASURED: Mapping[str, tuple[float, float, float, float]] = {  # gradients, losses, params, opt_state
    "data_parallel": (13, 4, 5, 10),
    "zero1": (13, 4, 5, 10),
    "fsdp": (13, 4, 5, 10),
    "fsdp_overlapped": (12, 4, 6, 10),
    "hsdp": (13, 4, 5, 10),
    "tensor": (13, 2, 6, 10),
    "fsdp_tensor": (15, 4, 7, 9),
    "sequence_tensor": (19, 4, 6, 10),
    "context": (15, 4, 6, 11),
    "context_ring": (19, 5, 6, 10),
    "mesh3d": (15, 4, 7, 9),
    "multislice": (13, 4, 5, 10),
    "experts": (15, 4, 6, 10),
    "pipeline": (16, 4, 6, 10),
    "pipeline_fsdp": (16, 4, 6, 10),
    "pipeline_fsdp_tensor": (14, 3, 9, 12),
    "pipeline_experts": (18, 4, 6, 11),
    "pipeline_data": (15, 4, 6, 12),
}
# Lower bound of the size of a leaf, as a fraction of a norm: of all gradients, of all moments of one kind or, for
# parameters that start at zero, of all changes by the steps. With a model that has biases, after 1 and 20 steps of
# four strategies, gradients differed by at most 8 ulp, parameters by 9 and moments by 12, as without biases. Faults
# stay visible: a leaf whose gradient is 1/18,000 of the norm and wrong by 1 % differs by more than 1,000 ulp.
FLOORS = {"gradients": 1 / 256, "params": 1 / 8, "opt_state": 1 / 256}
HEADROOM = 8  # other processors, thread counts and process counts compute sums in other orders


class Trajectory(NamedTuple):
    """The results of a short run as numpy arrays, complete on every host.

    Attributes:
      fresh: parameters before the first step.
      gradients: gradients of the first step, as passed to the optimizer.
      losses: loss of each step, [steps].
      params, opt_state: after the last step.
      metrics: the step's other metrics by name; [steps] each.
      carry: the carry after the last step, as `{"carry": …}`.
      is_whole: for each metric, whether it is a mean (`WeightedSum`) of whole sums, as of counts.
    """

    fresh: Any
    gradients: Any
    losses: np.ndarray
    params: Any
    opt_state: Any
    metrics: Mapping[str, np.ndarray]
    carry: Mapping[str, Any]
    is_whole: Mapping[str, np.ndarray]


class Difference(NamedTuple):
    """The largest differences between two trees; each number is the largest over all leaves.

    The size of a leaf is its largest absolute entry in the second tree, or its floor if that is larger.

    Attributes:
      ulp: absolute difference divided by the float32 spacing at the leaf's size.
      where: the leaf with the largest `ulp`.
      relative: absolute difference divided by the leaf's size.
    """

    absolute: float
    ulp: float
    where: str
    relative: float = 0.0


class RecordedGradients(NamedTuple):
    """Optimizer state with the gradients of the last update, zeros before the first."""

    inner: Any
    gradients: Any


def record_gradients(optimizer: Optimizer) -> Optimizer:
    """Returns the optimizer with the gradients of its last update stored in its state."""
    averages = optimizer.averages

    def recording(specs: Specs):
        inner = optimizer.bound(specs).transformation

        def init(params):
            return RecordedGradients(inner.init(params), jax.tree.map(jnp.zeros_like, params))

        def update(gradients, state, params=None, **extras):
            updates, after = inner.update(gradients, state.inner, params, **extras)
            return updates, RecordedGradients(after, gradients)

        return inner._replace(init=init, update=update)

    return dataclasses.replace(optimizer, rule=recording, averages=averages and (lambda state: averages(state.inner)))


def run(program: Program, batches: Iterable[Batch]) -> Trajectory:
    """Trains on the batches from a fresh state. All hosts must call it.

    `batches`: this host's rows of each global batch, in the order of `data_layout(...).rows`; at least one batch.
    """
    program = dataclasses.replace(program, optimizer=record_gradients(program.optimizer))
    state = program.init()
    fresh, gradients, measured, whole = gather_to_hosts(program, state.params), None, [], []
    for batch in batches:
        state, metrics = program.train_step(state, program.put(batch))
        metrics = jax.device_get(metrics)
        measured.append({name: _mean(value) for name, value in metrics.items()})
        whole.append({name: _has_whole_sum(value) for name, value in metrics.items()})
        if gradients is None:
            gradients = gather_to_hosts(program, state.opt_state.gradients)
    params, opt_state = (gather_to_hosts(program, tree) for tree in (state.params, state.opt_state.inner))
    every = {name: np.asarray([values[name] for values in measured]) for name in sorted(measured[0])}
    carry = {"carry": gather_to_hosts(program, state.carry)}
    losses = every.pop("loss")
    is_whole = {name: np.asarray(all(step[name] for step in whole)) for name in every}
    return Trajectory(fresh, gradients, losses, params, opt_state, every, carry, is_whole)


def _mean(value: Any) -> float:
    if not isinstance(value, WeightedSum):
        return float(value)
    return float(value.total / value.weight) if value.weight else 0.0


def _has_whole_sum(value: Any) -> bool:
    return isinstance(value, WeightedSum) and bool(value.total % 1 == 0)


def batches_of(task: Task, program: Program, *, steps: int) -> list[Batch]:
    """Returns the first `steps` global training batches of a prepared task.

    All hosts must call it, and get all rows. Raises UserError if the batches end before.
    """
    stream = task.train(program.partitioner.data_layout(batch_size(program.spec)), seed=program.seed)
    batches = []
    for step in range(steps):
        if (batch := next(stream, None)) is None:
            raise UserError(
                f"the training batches of {type(task).__name__} ended after {step}; {steps} are needed, and "
                "train(layout, seed) must never end"
            )
        batches.append(gather_to_hosts(program, program.put(batch)))
    return batches


def gather_to_hosts(program: Program, tree: Any) -> Any:
    """Returns the tree as numpy arrays, complete on every host. All hosts must call it."""
    if all(a.is_fully_addressable for a in jax.tree.leaves(tree)):
        return jax.device_get(tree)
    replicated = jax.sharding.NamedSharding(program.partitioner.mesh, jax.sharding.PartitionSpec())
    gathered = jax.jit(lambda t: t, out_shardings=replicated)(tree)
    return jax.tree.map(lambda a: np.asarray(a.addressable_data(0)), gathered)


def difference(ours: Any, theirs: Any, *, floors: Iterable[float] = ()) -> Difference:
    """Compares two trees of one structure; `theirs` is the second tree of `Difference`.

    `floors`: lower bounds of the sizes of leaves, in order; empty: none.
    """
    pairs = list(zip(jax.tree_util.tree_leaves_with_path(ours), jax.tree.leaves(theirs), strict=True))
    sizes = list(floors) or [0.0] * len(pairs)
    each = [
        Difference(absolute, ulp, jax.tree_util.keystr(path), relative)
        for ((path, a), b), floor in zip(pairs, sizes, strict=True)
        for absolute, ulp, relative in [_apart(a, b, floor)]
    ]
    worst = max(each, key=lambda leaf: leaf.ulp, default=Difference(0.0, 0.0, ""))
    return worst._replace(
        absolute=max((leaf.absolute for leaf in each), default=0.0),
        relative=max((leaf.relative for leaf in each), default=0.0),
    )


def _apart(ours: Any, theirs: Any, floor: float) -> tuple[float, float, float]:
    a, b = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
    if a.shape != b.shape or not (np.isfinite(a).all() and np.isfinite(b).all()):
        return np.inf, np.inf, np.inf
    absolute = np.max(np.abs(a - b), initial=0.0)
    size = np.max(np.abs(b), initial=max(floor, float(np.finfo(np.float32).tiny)))
    return float(absolute), float(absolute / np.spacing(np.float32(size))), float(absolute / size)


def _floors(tree: Any, share: float) -> list[float]:
    """Returns `share` of the norm of each leaf's kind: leaves whose paths differ only in keys of dicts."""
    squares: dict[tuple, float] = {}
    kinds = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        # The path without the names of parameters, which are dict keys.
        kinds.append(tuple(key for key in path if not isinstance(key, jax.tree_util.DictKey)))
        size = float(np.sum(np.square(np.asarray(leaf, np.float64))))
        squares[kinds[-1]] = squares.get(kinds[-1], 0.0) + (size if np.isfinite(size) else 0.0)
    return [share * squares[kind] ** 0.5 for kind in kinds]


def tolerance(strategy: str) -> dict[str, float]:
    """Returns the allowed ulp by part of a trajectory, for a strategy in `MEASURED`.

    For other names, the largest numbers of `MEASURED` are used.
    """
    return limits(MEASURED.get(strategy) or [max(ulp) for ulp in zip(*MEASURED.values(), strict=True)])


def limits(measured: Iterable[float]) -> dict[str, float]:
    """Returns the allowed difference in ulp by part of a trajectory.

    `measured`: differences of gradients, losses, parameters and optimizer state; HEADROOM times as much is allowed.
    """
    allowed = [HEADROOM * ulp for ulp in measured]
    others = {"fresh": 0.0, "metrics": max(allowed), "carry": max(allowed), "counts": np.inf}
    return dict(zip(("gradients", "losses", "params", "opt_state"), allowed, strict=True)) | others


def exceeding(strategy: str, apart: Mapping[str, Difference]) -> dict[str, Difference]:
    """Returns the parts whose difference exceeds `tolerance(strategy)` or is infinite."""
    allowed = tolerance(strategy)
    return {part: found for part, found in apart.items() if found.ulp > allowed[part] or found.ulp == np.inf}


def compare(ours: Trajectory, theirs: Trajectory) -> dict[str, Difference]:
    """Returns the differences of two trajectories, by name of the part.

    Metrics with whole sums in `theirs`, and integers of the carry, are in `counts`: rounding can change them by one.
    """
    changed = jax.tree.map(np.subtract, theirs.params, theirs.fresh)
    measured_by = {"gradients": theirs.gradients, "params": changed, "opt_state": theirs.opt_state}
    floors = {name: _floors(tree, FLOORS[name]) for name, tree in measured_by.items()}
    starts = jax.tree.leaves(theirs.fresh)
    every = zip(starts, floors["params"], strict=True)
    floors["params"] = [0.0 if np.any(start) else floor for start, floor in every]
    whole = ("fresh", "gradients", "losses", "params", "opt_state")
    found = {n: difference(getattr(ours, n), getattr(theirs, n), floors=floors.get(n, ())) for n in whole}
    is_count = {"metrics": theirs.is_whole, "carry": jax.tree.map(_is_integer, theirs.carry)}
    both = [{"metrics": each.metrics, "carry": each.carry} for each in (ours, theirs)]
    for name in is_count:
        found[name] = difference(*(_leaves_that(each[name], is_count[name], are=False) for each in both))
    return {**found, "counts": difference(*(_leaves_that(each, is_count, are=True) for each in both))}


def _is_integer(leaf: Any) -> bool:
    return not jnp.issubdtype(np.asarray(leaf).dtype, jnp.inexact)


def _leaves_that(tree: Any, counts: Any, *, are: bool) -> Any:
    """Returns the leaves that are counts, or those that are not; the others are None."""
    return jax.tree.map(lambda leaf, is_count: leaf if bool(is_count) == are else None, tree, counts)


def bind(
    model: Model,
    optimizer: Optimizer,
    example: Example,
    batch: Batch,
    *,
    axes: FieldAxes | None = None,
    seed: int = 7,
    **options: Any,
) -> Program:
    """Returns the model under a strategy, on `jax.devices()`.

    Args:
      batch: gives the shapes and dtypes of the fields.
      axes: logical axes of the fields; None: `batch` and `length`.
      **options: further arguments of `Partitioner.program`.
    """
    named = axes or {name: ("batch", "length")[: array.ndim] for name, array in batch.items()}
    spec = {name: Field(array.shape, array.dtype, named[name]) for name, array in batch.items()}
    bound = Partitioner(example.strategy, slice=slices.get(example.slice), devices=jax.devices())
    return bound.program(model, optimizer, spec, seed=seed, **options)


class Subject(NamedTuple):
    """A model and how it is trained.

    Attributes:
      axes: logical axes of the fields of a batch; None: `batch` and `length`.
      options: arguments of `Partitioner.program` under a strategy, such as accum_steps.
      frozen: arguments of `Partitioner.program` that freeze parameters.
    """

    model: Any
    optimizer: Optimizer
    axes: FieldAxes | None = None
    seed: int = 7
    options: Mapping[str, Any] = {}
    frozen: Mapping[str, Any] = {}

    def under(self, example: Example, batch: Batch, *, dtype: str = "") -> Program:
        """Returns the program under a strategy, with the model as `computing_in(model, dtype)`."""
        model, options = computing_in(self.model, dtype), {**self.options, **self.frozen}
        return bind(model, self.optimizer, example, batch, axes=self.axes, seed=self.seed, **options)

    def alone(self, batch: Batch, *, dtype: str) -> Program:
        """Returns the program on one device, without `options`; otherwise as `under`."""
        return self._replace(options={}).under(ONE_DEVICE, batch, dtype=dtype)


Apart = Mapping[str, Difference]  # by part of the trajectory


class StrategyRow(NamedTuple):
    """The differences between training under one strategy and on one device.

    Attributes:
      float32, bfloat16: differences if the model computes in this dtype; None: not compared.
      played: differences in float32 with several processes, by their number.
      refused: why the strategy does not fit the model; "" if it fits.
      mesh: the degrees as text.
    """

    name: str
    slice: str
    float32: Apart
    bfloat16: Apart | None
    played: Mapping[int, Apart]
    refused: str = ""
    mesh: str = ""

    @property
    def beyond(self) -> list[str]:
        """Describes the parts that differ in float32 by more than the strategy's tolerance."""
        every = {self.slice: self.float32, **{f"{n} processes": apart for n, apart in self.played.items()}}
        limits = tolerance(self.name)
        return [
            f"{self.name}, {where}: {part} {found.where} {found.ulp:.0f} ulp apart, tolerance {limits[part]:.0f}"
            for where, apart in every.items()
            for part, found in exceeding(self.name, apart).items()
        ]


def measure(
    subject: Subject, examples: Mapping[str, Example], data: Sequence[Batch], *, bfloat16: bool
) -> list[StrategyRow]:
    """Compares every example with one device, on the CPU devices of this process.

    Args:
      data: the global batch of every step.
      bfloat16: whether to compare in bfloat16 too, if the model has a `dtype`.
    """
    dtypes = ("float32", "bfloat16") if bfloat16 and _has_dtype(subject.model) else ("float32",)
    refused = {name: _refusal(subject, example, data[0]) for name, example in examples.items()}
    want = {d: run(subject.alone(data[0], dtype=d), data) for d in dtypes if not all(refused.values())}
    rows = []
    for name, example in examples.items():
        found: dict[str, Apart] = {}
        mesh = ""
        for dtype in () if refused[name] else dtypes:
            program = subject.under(example, data[0], dtype=dtype)
            mesh = mesh_text(program.partitioner.shape)
            found[dtype] = compare(run(program, data), want[dtype])
        by_dtype = found.get("float32", {}), found.get("bfloat16")
        rows.append(StrategyRow(name, example.slice, *by_dtype, {}, refused[name], mesh))
    return rows


def _refusal(subject: Subject, example: Example, batch: Batch) -> str:
    try:
        subject.under(example, batch)
    except UserError as error:
        return str(error)
    return ""


def _has_dtype(model: Any) -> bool:
    return wrappers.field_path(model, "dtype") is not None


def computing_in(model: Any, dtype: str) -> Any:
    """Returns the model, computing in `dtype` if that is not "" and it has the field."""
    return wrappers.with_field(model, "dtype", dtype) if dtype and _has_dtype(model) else model
