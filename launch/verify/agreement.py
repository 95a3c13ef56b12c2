"""Measures the agreement of every strategy with one device, on CPU devices.

`parallel.agreement` compares two programs; this module supplies the models and batches, and loops over strategies.
Batches of the decoder are packed rows with uneven padding that differs in every step, so that weights, segments and
positions all matter. Batches of the recursive model have recurring puzzles, and labels that are ignored. For an
experiment, the model and the batches are its own (`sized`, `own_batches`).

The devices belong to this process (`measure`), or to several processes that simulate the slice (`measure_played`). In
the second case the processes read the batches from files, and the first one writes its results to files (`record`).
"""

from __future__ import annotations

import dataclasses
import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from core import optimizers, slices, wrappers
from core.batches import Field, batch_size
from core.errors import UserError
from core.health import phase
from core.types import IGNORED, Model
from launch.experiment import Experiment
from launch.hosts import cluster, simulate
from launch.runs import smoke
from models import transformer, trm
from parallel import agreement, strategies
from parallel.agreement import Batch, Difference, Example
from parallel.partitioner import Partitioner, Program

ROWS, LENGTH = 16, 24

FieldAxes = Mapping[str, tuple[str | None, ...]]  # logical axes of the fields of a batch, by name

# Grouped-query attention, and a vocabulary that no mesh divides before it is rounded up.
MODEL = transformer.Transformer(
    vocab_size=203, num_layers=4, embed_dim=64, mlp_dim=176, num_heads=8, num_kv_heads=4, dtype="float32"
)
OPTIMIZER = optimizers.adamw(
    eps=1e-4,  # an update is a smooth function of its gradient: at 1e-8 one that is nearly 0 rests on its last bits
    learning_rate=optimizers.warmup_cosine(peak=3e-3, warmup_steps=5, total_steps=20),
    weight_decay=0.1,
)
RECURSIVE = trm.TRM(
    vocab_size=11,
    vocab_multiple=8,
    embed_dim=64,
    num_heads=8,
    num_layers=1,
    h_cycles=2,
    l_cycles=2,
    num_puzzles=5,
    puzzle_multiple=48,
    prefix_length=8,
    halt_bias=0.5,  # rows halt when exploration lets them, at different steps
    halt_max_steps=3,
    exploration=0.5,
    dtype="float32",
)
_RATE = optimizers.warmup_floor(peak=1e-3, warmup_steps=5, total_steps=20, floor=0.1)
RECURSIVE_OPTIMIZER = optimizers.averaged(
    optimizer=optimizers.with_table(dense=optimizers.adam_atan2(learning_rate=_RATE), learning_rate=_RATE), decay=0.9
)
MODELS: Mapping[str, Model] = {"transformer": MODEL, "trm": RECURSIVE}
ONE_DEVICE = Example("v5e-1", strategies.data_parallel())


def random_batches(vocab_size: int, *, steps: int, rows: int = ROWS) -> Iterator[Batch]:
    """Returns batches with two documents per row and padding; lengths differ between rows and steps."""
    rng = np.random.default_rng(0)
    position = np.arange(LENGTH)[None]
    for _ in range(steps):
        first = rng.integers(4, LENGTH // 2, (rows, 1))
        second = position >= first
        padding = position >= LENGTH - rng.integers(0, 6, (rows, 1))
        yield {
            "inputs": rng.integers(0, vocab_size, (rows, LENGTH), dtype=np.int32),
            "targets": rng.integers(0, vocab_size, (rows, LENGTH), dtype=np.int32),
            "weights": (~padding).astype(np.float32),
            "segment_ids": np.where(padding, 0, 1 + second).astype(np.int32),
            "positions": np.where(second, position - first, position).astype(np.int32),
        }


def batches_for(model: Model, *, steps: int, rows: int = ROWS) -> Iterator[Batch]:
    """Returns batches for a model: packed documents, or puzzles that recur."""
    if not isinstance(model, trm.TRM):
        return random_batches(model.vocab_size, steps=steps, rows=rows)
    rng = np.random.default_rng(0)

    def puzzles() -> Batch:
        labels = rng.integers(1, model.vocab_size, (rows, LENGTH), dtype=np.int32)
        return {
            "inputs": rng.integers(0, model.vocab_size, (rows, LENGTH), dtype=np.int32),
            "labels": np.where(rng.random((rows, LENGTH)) < 0.2, np.int32(IGNORED), labels),
            "puzzle_ids": rng.integers(0, model.num_puzzles, rows, dtype=np.int32),
        }

    return (puzzles() for _ in range(steps))


def sized(experiment: Experiment, examples: Mapping[str, Example]) -> Experiment:
    """Shrinks the experiment to sizes that all examples can shard; a model or task that cannot shrink is kept.

    Raises:
      UserError: a strategy's mesh does not fit its slice.
    """
    first, *others = [dataclasses.replace(experiment, slice=e.slice, strategy=e.strategy) for e in examples.values()]
    return smoke.shrink(first, beside=others, partly=True)


def own_batches(experiment: Experiment, *, steps: int) -> list[Batch]:
    """Returns the first training batches of the experiment's own task, in the shapes of its spec.

    Raises:
      UserError: the data is missing, does not fit the model, or differs from the task's spec.
    """
    layout = {"slice": ONE_DEVICE.slice, "strategy": ONE_DEVICE.strategy, "accum_steps": 1, "gather_once": False}
    alone = dataclasses.replace(experiment, **layout)
    program = alone.bind(jax.devices())
    with tempfile.TemporaryDirectory(prefix="renga-agreement-") as folder:
        if not (problems := alone.data_problems(prepared=False)):
            alone.task.prepare(folder, is_host_zero=True)
            problems = alone.data_problems(prepared=True)
        if problems:
            raise UserError("\n".join(problems))
        return agreement.batches_of(alone.task, program, steps=steps)


def rows_for(examples: Mapping[str, Example]) -> int:
    """Returns a number of rows that divides over the chips of all these slices."""
    return math.lcm(ROWS, *(slices.get(example.slice).chips for example in examples.values()))


def bind(
    model: Model, example: Example, batch: Batch, *, axes: FieldAxes | None = None, seed: int = 7, **options
) -> Program:
    """Binds a model to a strategy, on CPU devices that simulate the example's slice.

    Args:
      model: the model.
      example: the strategy and its slice.
      batch: gives the shapes and dtypes of the fields.
      axes: logical axes of the fields; None: rows and positions, as in `batches_for`.
      seed: seed of parameters and random bits.
      **options: of `Partitioner.program`.
    """
    named = axes or {name: ("batch", "length")[: array.ndim] for name, array in batch.items()}
    spec = {name: Field(array.shape, array.dtype, named[name]) for name, array in batch.items()}
    bound = Partitioner(example.strategy, slice=slices.get(example.slice), devices=jax.devices())
    optimizer = RECURSIVE_OPTIMIZER if isinstance(model, trm.TRM) else OPTIMIZER
    return bound.program(model, optimizer, spec, seed=seed, **options)


class Subject(NamedTuple):
    """A model and how it is trained.

    Attributes:
      model: a `core.types.Model`.
      axes: logical axes of the fields of a batch; None: rows and positions.
      seed: seed of the parameters and of random bits.
      options: options of the program under a strategy, such as accum_steps; one device trains without them.
      frozen: arguments of `Partitioner.program` that freeze parameters, also on one device.
    """

    model: Any
    axes: FieldAxes | None = None
    seed: int = 7
    options: Mapping[str, Any] = {}
    frozen: Mapping[str, Any] = {}

    def under(self, example: Example, batch: Batch, *, dtype: str = "") -> Program:
        """Returns the program under a strategy; computes in `dtype` if the model has a field for it."""
        options = {**self.options, **self.frozen}
        return bind(computing_in(self.model, dtype), example, batch, axes=self.axes, seed=self.seed, **options)

    def alone(self, batch: Batch, *, dtype: str) -> Program:
        """Returns the program on one device."""
        return bind(computing_in(self.model, dtype), ONE_DEVICE, batch, axes=self.axes, seed=self.seed, **self.frozen)


Apart = Mapping[str, Difference]  # by part of the trajectory


class Row(NamedTuple):
    """The differences between one strategy and one device, with one process and with several (`played`).

    If the strategy does not fit the model, `refused` is the reason, and the other fields are empty.
    """

    name: str
    slice: str
    float32: Apart
    bfloat16: Apart | None
    played: Mapping[int, Apart]
    refused: str = ""

    @property
    def beyond(self) -> list[str]:
        """Describes the leaves that differ from one device by more than the strategy's tolerance."""
        every = {self.slice: self.float32, **{f"{n} processes": apart for n, apart in self.played.items()}}
        limits = agreement.tolerance(self.name)
        return [
            f"{self.name}, {where}: {part} {found.where} {found.ulp:.0f} ulp apart, tolerance {limits[part]:.0f}"
            for where, apart in every.items()
            for part, found in agreement.exceeding(self.name, apart).items()
        ]


def measure(subject: Subject, examples: Mapping[str, Example], data: Sequence[Batch], *, bfloat16: bool) -> list[Row]:
    """Compares every example with one device, on the CPU devices of this process.

    Args:
      subject: the model and its training options.
      examples: strategies with their slices, by name.
      data: the global batch of every AdamW step.
      bfloat16: also compare in bfloat16, with one device in bfloat16, if the model has a field `dtype`.
    """
    dtypes = ("float32", "bfloat16") if bfloat16 and _has_dtype(subject.model) else ("float32",)
    refused = {name: _refusal(subject, example, data[0]) for name, example in examples.items()}
    want = {d: agreement.run(subject.alone(data[0], dtype=d), data) for d in dtypes if not all(refused.values())}
    rows = []
    for name, example in examples.items():
        found: dict[str, Apart] = {}
        for dtype in () if refused[name] else dtypes:
            trajectory = agreement.run(subject.under(example, data[0], dtype=dtype), data)
            found[dtype] = agreement.compare(trajectory, want[dtype])
        rows.append(Row(name, example.slice, found.get("float32", {}), found.get("bfloat16"), {}, refused[name]))
    return rows


def _refusal(subject: Subject, example: Example, batch: Batch) -> str:
    """Returns why the strategy refuses the model; empty if it does not."""
    try:
        subject.under(example, batch)
    except UserError as error:
        return str(error)
    return ""


def measure_played(
    subject: Subject,
    examples: Mapping[str, Example],
    data: Sequence[Batch],
    *,
    processes: int,
    command: Sequence[str],
) -> dict[str, Apart]:
    """Compares every example with one device in float32, with its chips divided among several processes.

    Args:
      subject, examples, data: as for `measure`.
      processes: number of processes on this machine; each has an equal share of the chips.
      command: argv of a process that calls `record`; `--into FOLDER --record NAME …` is added.

    Raises:
      UserError: the processes could not be run.
    """
    want = agreement.run(subject.alone(data[0], dtype="float32"), data)
    found = {}
    with tempfile.TemporaryDirectory(prefix="renga-agreement-") as name:
        folder = Path(name)
        for step, batch in enumerate(data):
            np.savez(folder / f"batch_{step}.npz", **batch)
        for slice_name in dict.fromkeys(example.slice for example in examples.values()):
            names = [name for name, example in examples.items() if example.slice == slice_name]
            argv = [*command, "--into", str(folder), "--record", *names]
            played = slices.get(slice_name).shared_by(processes)
            if code := simulate.run(played, command=argv, log_directory=folder / f"logs_{slice_name}"):
                raise UserError(f"{processes} processes of {slice_name} could not be run (exit code {code})")
        for name in examples:
            with np.load(folder / f"{name}.npz") as leaves:
                played = jax.tree.unflatten(jax.tree.structure(want), [leaves[key] for key in leaves.files])
            found[name] = agreement.compare(played, want)
    return found


def record(subject: Subject, examples: Mapping[str, Example], *, steps: int, into: Path) -> None:
    """Trains on the batches in `into` as one process of a simulated slice; host 0 writes the results there."""
    data = [dict(np.load(into / f"batch_{step}.npz")) for step in range(steps)]
    (slice_name,) = {example.slice for example in examples.values()}
    host = cluster.join(slices.get(slice_name))
    for name, example in examples.items():
        phase.at(name)
        program = subject.under(example, data[0], dtype="float32")
        mine = list(program.partitioner.data_layout(batch_size(data[0])).rows)
        trajectory = agreement.run(program, [{k: a[mine] for k, a in batch.items()} for batch in data])
        if host.is_zero:
            np.savez(into / f"{name}.npz", *jax.tree.leaves(trajectory))


def _has_dtype(model: Any) -> bool:
    return wrappers.field_path(model, "dtype") is not None


def computing_in(model: Any, dtype: str) -> Any:
    """Returns a copy of the model that computes in `dtype`; the model itself if `dtype` is "" or there is no field."""
    return wrappers.with_field(model, "dtype", dtype) if dtype and _has_dtype(model) else model
