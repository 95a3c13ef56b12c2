"""Makes a smoke run: a few steps of a small version of an experiment.

Slice, mesh, strategy and optimizer are the same; the model, rows and the batch shrink to small sizes that the mesh
divides.
"""

import dataclasses
import math
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from core import logical, platforms, slices, step, units, wrappers
from core.batches import has_tokens, row_length
from core.checkpoints.store import Checkpoints
from core.errors import UserError
from core.files import paths
from core.hosts import distributed
from core.training import trainer
from core.types import (
    CouplesRows,
    DataLayout,
    HasVocabulary,
    LimitsPositions,
    Model,
    Rehearses,
    Shrinks,
    SplitsRows,
    Task,
    can,
    lacking,
)
from launch import environment, session
from launch.experiment import Experiment, Span
from launch.runs.prepared_run import Run
from launch.settings import Evaluation, Initialization, Logging
from parallel import strategy
from parallel.compiled import compiler_options
from tasks import synthetic
from tasks.sampled import SampledTask
from tasks.streams import BATCH_DTYPES

STEPS = 20
LENGTH = 128  # the smallest length of a row, or of a piece of it, that the splash kernel supports
_ROWS = 4  # rows for comparing the losses of a whole and a divided batch
_MOST_PARAMETERS = 20_000_000  # models without `shrink` that are larger are not compared


def shrink(experiment: Experiment, *, beside: Sequence[Experiment] = (), partly: bool = False) -> Experiment:
    """Returns an experiment shrunk to the sizes of a smoke run.

    `beside`: experiments whose layouts must fit the same sizes. `partly`: keep what cannot be made smaller.

    Raises:
      UserError: the model or the task cannot shrink, or the mesh does not fit the slice.
    """
    model, shrinks = experiment.model, can(experiment.model, Shrinks)
    if not (shrinks or partly):
        raise UserError(
            f"--check smoke: {lacking(model, Shrinks)} -> Model, which returns the model with the smallest "
            "sizes that are multiples of these, by logical axis"
        )
    every = (experiment, *beside)
    places = [(e.strategy, slices.get(e.slice)) for e in every]
    multiples = {
        name: math.lcm(*(strategy.multiple_of(*place, name) for place in places)) for name in logical.all_axes()
    }
    rows = multiples["batch"] * math.lcm(*(e.accum_steps * _microbatches(e) for e in every))
    # A piece of a row is at least a tile of the kernel.
    tiles = math.lcm(*(strategy.row_pieces(place[0], strategy.resolve(*place)) for place in places))
    length = math.lcm(LENGTH * tiles, multiples["length"]) if shrinks else experiment.row_length
    task = _small_task(experiment.task, model, streams=rows, length=length, partly=partly)
    return dataclasses.replace(
        experiment,
        model=_with_positions(wrappers.shrunk(model, multiples), task) if can(model, Shrinks) else model,
        task=task,
        batch_size=math.lcm(rows, task.num_streams) if partly else rows,
        total_steps=STEPS,
        phases=(),
        initialization=Initialization() if shrinks else experiment.initialization,
        logging=Logging(log_interval=5, statistics_interval=5 if experiment.logging.statistics_interval else 0),
        evaluation=Evaluation(
            eval_interval=STEPS,
            eval_batches=1,
            prompt=experiment.evaluation.prompt if isinstance(task, type(experiment.task)) else "",
        ),
        checkpointing=dataclasses.replace(
            experiment.checkpointing,
            checkpoint_interval=STEPS // 2,
            keep_checkpoints=2,
            keep_best="",
            checkpoint_mirror="",
        ),
    )


def _with_positions(model: Model, task: Task) -> Model:
    """Returns a model with at least as many positions as the rows of a task have."""
    most = model.max_positions if can(model, LimitsPositions) else None
    length = row_length(task.spec(task.num_streams))
    return model if most is None or length <= most else wrappers.with_field(model, "max_positions", length)


def require_divisible_rows(experiment: Experiment) -> str:
    """Checks that a model's loss is the same if rows are divided into two microbatches.

    The model has random parameters and data, on the CPU. Nothing is compared, and "" returned, if no step divides its
    batch, the model declares `couples_rows`, or it cannot be tried here.

    Raises:
      UserError: the losses differ.
    """
    model = experiment.model
    divided = experiment.accum_steps > 1 or _microbatches(experiment) > 1 or experiment.strategy.overlap_reduction
    if not divided or _says_what_it_couples(model) or (cpu := _cpu()) is None:
        return ""
    if can(model, Shrinks):
        model = wrappers.shrunk(model, dict.fromkeys(logical.all_axes(), 1))
    if wrappers.field_path(model, "dtype") is not None:
        model = wrappers.with_field(model, "dtype", "float32")
    length = LENGTH if can(model, Shrinks) else experiment.row_length
    batch = _random_batch(_small_task(experiment.task, model, streams=_ROWS, length=length, partly=True), model)
    draw, options = np.random.default_rng(1), compiler_options.initialization_on_cpus()  # compile fast: it runs once
    with platforms.use("cpu"), jax.default_device(cpu):
        shapes = jax.eval_shape(model.init, jax.random.key(0), batch)
        if sum(math.prod(s.shape) for s in jax.tree.leaves(shapes)) > _MOST_PARAMETERS:
            return ""
        params = jax.tree.map(lambda s: jnp.asarray(draw.normal(scale=0.2, size=s.shape), s.dtype), shapes)
        found = step.rows_are_coupled(model, params, batch, compiler_options=options)
    if found:
        raise UserError(
            f"the loss of {type(experiment.model).__name__} couples rows: with random parameters and data it is "
            f"{found[0]:.6g} for {_ROWS} rows together and {found[1]:.6g} in 2 microbatches, so that accumulation "
            "(ACCUM_STEPS above 1), a pipeline or overlap_reduction train on another loss. Return sums over rows; or, "
            "if the rows belong together, as in a contrastive loss, give the model couples_rows = True and use "
            "ACCUM_STEPS = 1 and a strategy without these"
        )
    return f"{_ROWS} rows have the same loss together and in 2 microbatches"


def _cpu() -> jax.Device | None:
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:  # this is how JAX reports a backend that it does not have
        return None


def _says_what_it_couples(model: Model) -> bool:
    """Returns whether the class that defines the loss, or one around it, has `couples_rows`."""
    losses = [name for name in ("loss", "sums") if hasattr(model, name)]
    return can(model, CouplesRows) and not any(wrappers.is_outside(model, name, "couples_rows") for name in losses)


def _random_batch(task: Task, model: Model) -> dict[str, Any]:
    spec = task.spec(_ROWS)
    if spec.keys() == BATCH_DTYPES.keys() and can(model, HasVocabulary):
        length = spec["inputs"].shape[1]
        task = synthetic.random_tokens(vocab_size=model.vocab_size, length=length, num_streams=_ROWS)
    if isinstance(task, SampledTask):
        count = math.lcm(_ROWS, task.num_streams)  # which divides the rows that it draws
        drawn = next(task.train(DataLayout(count, tuple(range(count)), tuple(range(count))), seed=0))
        return {name: values[:_ROWS] for name, values in drawn.items()}
    rng = np.random.default_rng(0)
    values: dict[str, np.ndarray] = {name: rng.integers(0, 2, field.shape) for name, field in spec.items()}
    values |= {n: rng.normal(size=f.shape) for n, f in spec.items() if jnp.issubdtype(f.dtype, jnp.floating)}
    return {name: jnp.asarray(values[name], field.dtype) for name, field in spec.items()}


def shrink_phases(experiment: Experiment) -> tuple[Span, ...]:
    """Returns an experiment's phases, shrunk to the sizes of a smoke run, each with STEPS steps."""
    spans = experiment.spans()
    if len(spans) == 1:
        return shrink(spans[0].experiment).spans()
    wholes = [span.experiment for span in spans]
    small = [shrink(each, beside=[other for other in wholes if other is not each]) for each in wholes]
    total = STEPS * len(spans)
    found = []
    for span, each, whole in zip(spans, small, wholes, strict=True):
        rows = 1 + sorted({other.batch_size for other in wholes}).index(whole.batch_size)
        each = dataclasses.replace(each, batch_size=rows * each.batch_size, total_steps=total)
        length = 1 + sorted({other.row_length for other in wholes}).index(whole.row_length)
        task: Any = each.task
        if length > 1 and "length" in _field_names(task):
            task = _longer(task, length, rows=each.row_length)
            each = dataclasses.replace(each, task=task, model=_with_positions(each.model, task))
        first = STEPS * (span.number - 1)
        found.append(Span(span.number, span.count, first, first + STEPS, each))
    return tuple(found)


def _longer(task: Any, times: int, *, rows: int) -> Any:
    """Returns a task with longer rows; `rows` is their length now."""
    if not can(task, SplitsRows):
        return dataclasses.replace(task, length=times * rows)
    whole: Any = task.whole
    if "length" in _field_names(whole):
        whole = dataclasses.replace(whole, length=times * whole.length)
    return task.with_rows(whole, times * rows)


def attempt(run_dir: str) -> str:
    """Returns a new path in `run_dir`, equal on all hosts. All hosts must call it."""
    return f"{run_dir}/{distributed.from_host_zero(time.strftime('%Y%m%d-%H%M%S') + f'-{secrets.token_hex(2)}')}"


def rehearse_phases(spans: Sequence[Span], prepare: Callable[..., Run], run_dir: str) -> None:
    """Calls `rehearse` for each phase in order, in a new folder of `run_dir`.

    `prepare(span, run_dir=…)` returns the run of a phase.
    """
    folder = attempt(run_dir)
    if distributed.is_host_zero():
        paths.write_text_atomically(paths.resolve(folder) / environment.REHEARSAL, "")
    for span in spans:
        rehearse(prepare(span, run_dir=folder))


class _Losses(trainer.Hook):
    def __init__(self):
        self.by_step: dict[int, float] = {}

    def after_step(self, report: trainer.StepReport) -> None:
        self.by_step[report.step] = report.metrics["loss"]


def rehearse(run: Run) -> None:
    """Trains a phase, then restores its middle checkpoint and repeats the second half.

    Raises:
      RuntimeError: the losses of the repeated steps differ.
    """
    require_divisible_rows(run.experiment)
    first, again, span = _Losses(), _Losses(), run.span
    if run.host.is_zero and span.count > 1:
        print(f"\n{span}: steps {span.first_step + 1} to {span.last_step}", flush=True)
    session.Session(run, also=[first]).run()
    checkpoints = Checkpoints(run.checkpoint_dir, keep=run.experiment.checkpointing.keep_checkpoints, origin=run.origin)
    start = session.restore_or_init(run, checkpoints, step=span.first_step + STEPS // 2)
    with run.open_batches(start.position) as batches:
        trainer.train(
            run.program.train_step,
            batches,
            start.state,
            total_steps=run.last_step,
            hooks=[again],
            statistics=run.statistics_step,
        )
    checkpoints.close()
    _require_equal(first.by_step, again.by_step, restored=start.step)
    if run.host.is_zero:
        begun = f"continued from the checkpoint of step {span.first_step}; " if span.first_step else ""
        print(
            f"PASS  {f'{span}, ' if span.count > 1 else ''}{STEPS} steps; {begun}restored at step {start.step}, "
            f"{units.counted(len(again.by_step), 'step')} repeated bit for bit"
        )


def _require_equal(first: Mapping[int, float], again: Mapping[int, float], *, restored: int | None) -> None:
    for number, loss in again.items():
        if loss != first[number]:
            raise RuntimeError(
                f"smoke: step {number} has loss {first[number]!r}, after a restore from step {restored} {loss!r}"
            )


def _microbatches(experiment: Experiment) -> int:
    shape = strategy.resolve(experiment.strategy, slices.get(experiment.slice))
    schedule = strategy.schedule_of(experiment.strategy, shape)
    return schedule.num_microbatches if schedule else 1


def _small_task(task: Task, model: Model, *, streams: int, length: int, partly: bool) -> Task:
    """Returns a small version of a task, or the task itself if there is none and `partly`."""
    if can(task, SplitsRows):
        return task.with_rows(_small_task(task.whole, model, streams=streams, length=2 * length, partly=partly), length)
    if can(task, Rehearses):
        return task.rehearsal()
    spec = task.spec(task.num_streams)
    if task.problems() and can(model, HasVocabulary) and spec.keys() == BATCH_DTYPES.keys():
        return synthetic.random_tokens(vocab_size=model.vocab_size, length=length, num_streams=streams)
    sizes = {"num_streams": streams}
    if has_tokens(spec):
        sizes = {"length": length, **sizes}
    if not sizes.keys() <= _field_names(task):
        if partly:
            return task
        raise UserError(
            f"--check smoke: {lacking(task, Rehearses)} -> Task, which returns a small task of the same shapes "
            f"that needs no files; or make it a dataclass with {' and '.join(sizes)}"
        )
    small: Any = task
    return dataclasses.replace(small, **sizes)


def _field_names(task: Task) -> set[str]:
    return {field.name for field in dataclasses.fields(task)} if dataclasses.is_dataclass(task) else set()
