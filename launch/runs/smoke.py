"""The smoke run: a small run that uses everything that a real run uses.

Slice, mesh, strategy, tables, task and code path are the same; width, depth and batch shrink to the smallest sizes that
the mesh divides. It shows that the configuration works, not that it trains well.
"""

import dataclasses
import math
import secrets
import time
from collections.abc import Sequence

from core import distributed, logical, slices, units, wrappers
from core.batches import has_tokens
from core.checkpoints.store import Checkpoints
from core.errors import UserError
from core.training import trainer
from core.types import HasVocabulary, Model, Rehearses, Shrinks, SplitsRows, Task, can, lacking
from launch.experiment import Experiment
from launch.runs import training
from launch.runs.prepared_run import Run
from parallel import strategy
from tasks import synthetic
from tasks.streams import BATCH_DTYPES

STEPS = 20
LENGTH = 128  # the smallest that the splash kernel takes


def shrink(experiment: Experiment, *, beside: Sequence[Experiment] = (), partly: bool = False) -> Experiment:
    """Returns an experiment shrunk to the sizes of a smoke run.

    Args:
      experiment: the experiment to shrink.
      beside: other experiments whose layouts must fit the same sizes, so that the runs can be compared.
      partly: keep the size of a model or a task that cannot be made smaller, instead of refusing it.

    Raises:
      UserError: the model cannot shrink (it has no `shrink(multiples)`), the task cannot, or the mesh does not fit the
        slice.
    """
    shrinks = can(experiment.model, Shrinks)
    if not (shrinks or partly):
        raise UserError(
            f"--smoke: {lacking(experiment.model, Shrinks)} -> Model, which returns the model with the smallest sizes "
            "that are multiples of these, by logical axis"
        )
    every = (experiment, *beside)
    places = [(e.strategy, slices.get(e.slice)) for e in every]
    multiples = {
        name: math.lcm(*(strategy.multiple_of(*place, name) for place in places)) for name in logical.all_axes()
    }
    rows = multiples["batch"] * math.lcm(*(e.accum_steps * _microbatches(e) for e in every))
    length = math.lcm(LENGTH, multiples["length"]) if shrinks else experiment.row_length
    task = _small_task(experiment.task, experiment.model, streams=rows, length=length, partly=partly)
    return dataclasses.replace(
        experiment,
        model=wrappers.shrunk(experiment.model, multiples) if shrinks else experiment.model,
        task=task,
        batch_size=math.lcm(rows, task.num_streams) if partly else rows,
        total_steps=STEPS,
        phases=(),
        log_interval=5,
        eval_interval=STEPS,
        eval_batches=1,
        checkpoint_interval=STEPS // 2,
        keep_checkpoints=2,
        profile_steps=(),
        memory_profile_steps=(),
        statistics_interval=5 if experiment.statistics_interval else 0,
        persistent_directory="",
        wandb_project="",
        init_from="" if shrinks else experiment.init_from,
        init_patterns=("*",) if shrinks else experiment.init_patterns,
        init_renames={} if shrinks else experiment.init_renames,
        prompt=experiment.prompt if isinstance(task, type(experiment.task)) else "",
    )


def attempt(run_dir: str) -> str:
    """Returns a new folder inside that of the smoke run, equal on all hosts, because a smoke run never resumes one."""
    return f"{run_dir}/{distributed.from_host_zero(time.strftime('%Y%m%d-%H%M%S') + f'-{secrets.token_hex(2)}')}"


class _Losses(trainer.Hook):
    """A hook that records the loss of every step."""

    def __init__(self):
        self.by_step: dict[int, float] = {}

    def after_step(self, report: trainer.StepReport) -> None:
        self.by_step[report.step] = report.metrics["loss"]


def rehearse(run: Run) -> None:
    """Trains, then restores the checkpoint of the middle step and repeats the second half: the losses must be equal.

    Raises:
      RuntimeError: they are not.
    """
    first, again = _Losses(), _Losses()
    training.train(run, also=[first])
    checkpoints = Checkpoints(run.checkpoint_dir, keep=run.experiment.keep_checkpoints, origin=run.origin)
    start = training.restore_or_init(run, checkpoints, step=STEPS // 2)
    with training.open_batches(run, start.position) as batches:
        trainer.train(
            run.program.train_step,
            batches,
            start.state,
            total_steps=STEPS,
            hooks=[again],
            statistics=training.statistics_step(run),
        )
    checkpoints.close()
    for number, loss in again.by_step.items():
        if loss != first.by_step[number]:
            raise RuntimeError(
                f"smoke: step {number} has loss {first.by_step[number]!r}, after a restore from step {start.step} "
                f"{loss!r}"
            )
    if run.host.is_zero:
        print(
            f"PASS  {STEPS} steps; restored at step {start.step}, "
            f"{units.counted(len(again.by_step), 'step')} repeated bit for bit"
        )


def _microbatches(experiment: Experiment) -> int:
    schedule = experiment.strategy.pipeline
    return schedule.num_microbatches if schedule else 1


def _small_task(task: Task, model: Model, *, streams: int, length: int, partly: bool) -> Task:
    """Returns the task with short rows and few streams, or its rehearsal; random tokens if text is not named yet."""
    if can(task, SplitsRows):
        return task.with_rows(_small_task(task.whole, model, streams=streams, length=2 * length, partly=partly), length)
    if can(task, Rehearses):
        return task.rehearsal()
    spec = task.spec(task.num_streams)
    is_text = can(model, HasVocabulary) and spec.keys() == BATCH_DTYPES.keys()
    if task.problems() and is_text:
        return synthetic.random_tokens(vocab_size=model.vocab_size, length=length, num_streams=streams)
    fields = {f.name for f in dataclasses.fields(task)} if dataclasses.is_dataclass(task) else ()
    sizes = {"num_streams": streams}
    if has_tokens(spec):
        sizes = {"length": length, **sizes}
    if not sizes.keys() <= set(fields):
        if partly:
            return task
        raise UserError(
            f"--smoke: {lacking(task, Rehearses)} -> Task, which returns a small task of the same shapes "
            f"that needs no files; or make it a dataclass with {' and '.join(sizes)}"
        )
    return dataclasses.replace(task, **sizes)
