"""Decides from metadata whether a configuration can continue from a checkpoint."""

import contextlib
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from core import units
from core.batches import is_same_data
from core.checkpoints import reading, steps, writing
from core.errors import UnreachableError, UserError
from core.files import paths
from core.hosts import distributed
from core.training import metrics
from launch import environment
from launch.config import Settings, differences
from launch.config.differences import Difference
from launch.experiment import Experiment, Span
from parallel.partitioner import Program
from tasks import streams

ORDER = "data_order"  # key in checkpoint metadata: the settings on which positions in the data depend
_MOST_LINES = 20


class Newest(NamedTuple):
    """The newest checkpoint with intact metadata."""

    step: int
    described: steps.Description


def newest(run_dir: str) -> Newest | None:
    """Returns a run's newest checkpoint with intact metadata; None if there is none. Not collective.

    Raises:
      UserError: the checkpoints cannot be read from here.
    """
    with _reading(run_dir):
        folder = paths.resolve(run_dir) / steps.FOLDER
        for step in reversed(steps.complete(folder)):
            try:
                with reading.refusing_damage(folder / str(step)):
                    return Newest(step, steps.read(folder / str(step)))
            except UnreachableError:
                raise
            except UserError:
                continue
        return None


@contextlib.contextmanager
def _reading(run_dir: str) -> Iterator[None]:
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # disks and bucket clients raise many types
        raise UserError(
            f"the checkpoints of {run_dir} cannot be read from here: {type(error).__name__}: {error}. Check the "
            "permissions and the credentials, then start again"
        ) from error


def require_not_moved(run_dir: str, experiment: str, slice_name: str) -> None:
    """Raises UserError if the run's checkpoints are in the default directory of an earlier version."""
    if paths.resolve(run_dir) != paths.resolve(environment.run_directory(experiment, slice_name)):
        return
    former = environment.former_run_directory(experiment)
    with _reading(run_dir):
        now, then = (steps.complete(paths.resolve(place) / steps.FOLDER) for place in (run_dir, former))
    if then and not now:
        raise UserError(
            f"{run_dir} has no checkpoints, and {former}, the default of an earlier version, has step {then[-1]:,}. "
            f"Give --run-dir {former} to continue that run. For a new run, give another --run-dir or rename that folder"
        )


def phase_after(spans: Sequence[Span], step: int) -> Span:
    """Returns the phase that trains step `step + 1`; the last one if none is left."""
    return next((span for span in spans if step < span.last_step), spans[-1])


def phase_of(spans: Sequence[Span], step: int) -> Span:
    """Returns the phase that trained `step`; the last one for later steps."""
    return next((span for span in spans if step <= span.last_step), spans[-1])


def order(span: Span) -> dict[str, Any]:
    """Returns `settings(span)`, and as `vocabulary` the hash of the prepared vocabulary or None."""
    vocabulary = span.experiment.task.vocabulary
    return {**settings(span), "vocabulary": None if vocabulary is None else vocabulary.hash}


def settings(span: Span) -> dict[str, Any]:
    """Returns the settings on which positions in a phase's data depend, by name."""
    experiment = span.experiment
    return {
        "SEED": experiment.seed,
        "BATCH_SIZE": experiment.batch_size,
        "NUM_STREAMS": experiment.task.num_streams,
        "LENGTH": experiment.row_length,
        "phase": span.number,
    }


def problems(found: Newest, now: Mapping[str, Any], *, span: Span, abstract_state: Any) -> list[str]:
    """Returns the reasons why a phase cannot continue from a checkpoint; [] if it can.

    Args:
      now: metadata that the run would save.
      abstract_state: shapes, dtypes and shardings of the state to restore.
    """
    data = data_problems(found.step, found.described.meta, now, span=span)
    misfits = reading.differences(found.described.kinds, abstract_state)
    advice = reading.advice(found.described.kinds, abstract_state)
    return [*data, *units.shortened(misfits, most=_MOST_LINES), *advice]


def data_problems(step: int, then: Mapping[str, Any], now: Mapping[str, Any], *, span: Span) -> list[str]:
    """Returns the reasons why a phase cannot continue in the data of a checkpoint.

    [] for a checkpoint of an earlier phase: every phase begins with the start of its data.

    Args:
      then: metadata of the checkpoint.
      now: metadata that the run would save.
    """
    if 0 < step <= span.first_step:
        return []
    before, after = ({"SEED": meta.get("seed"), **meta.get(ORDER, {})} for meta in (then, now))
    found = [_told(name, before[name], after[name]) for name in before if name in after and before[name] != after[name]]
    if not is_same_data(then["data"], now["data"]):
        found.append(
            "it was trained on other data, or on another part of it (files are compared by name, size and content)\n"
            f"    then: {then.get('data_source', 'not recorded')}\n    now:  {now['data_source']}"
        )
    return found


def _told(name: str, before: Any, after: Any) -> str:
    if name == "phase":
        return f"it is of phase {before}, and its step is now in phase {after}"
    return streams.difference(name, now=after, was=before)


def require_fit(
    run_dir: str, meta: Mapping[str, Any], span: Span, program: Program, *, left_out: steps.LeftOut | None = None
) -> None:
    """Raises UserError unless the newest checkpoint, if any, fits, and there is space for another.

    Args:
      run_dir: the run directory.
      meta: metadata that the run would save.
      span: the phase.
      program: its program.
      left_out: the arrays that checkpoints of a fresh start leave out; None: none.
    """
    if found := newest(run_dir):
        refuse(found.step, problems(found, meta, span=span, abstract_state=program.abstract_state))
        left_out = found.described.left_out
    require_space(run_dir, program, without=left_out.arrays if left_out else ())


def require_space(run_dir: str, program: Program, *, without: Collection[str]) -> None:
    """Raises UserError unless one more checkpoint, without the arrays of these names, fits on the disk."""
    saved = reading.without(program.abstract_state, without)
    writing.require_space(run_dir, sum(map(_bytes, jax.tree.leaves(saved))))


def _bytes(array: jax.ShapeDtypeStruct) -> int:
    return math.prod(array.shape) * array.dtype.itemsize


def refuse(step: int, found: Sequence[str]) -> None:
    """Raises UserError that lists the problems of a checkpoint, if there are any."""
    if found:
        raise UserError(
            "\n  ".join(
                [f"the run cannot continue from its checkpoint of step {step} with this configuration:", *found]
            )
            + f"\n{FIX}"
        )


FIX = (
    "Continue with the settings of the checkpoint, or give another --run-dir; a new run can start from the parameters "
    "of the checkpoint (INIT_FROM)"
)


def changes(then: Mapping[str, Any], config: Settings | str) -> list[Difference]:
    """Returns the settings that differ from `then`, a checkpoint's metadata; [] if it has no configuration."""
    return differences.between(then["config"], config) if "config" in then else []


def described_changes(step: int, found: Sequence[Difference]) -> str:
    """Formats settings that differ from the checkpoint of `step`, at most 20 of them."""
    what = units.counted(len(found), "setting differs", "settings differ")
    lines = units.shortened([str(one) for one in found], most=_MOST_LINES)
    return "\n  ".join([f"{what} from the checkpoint of step {step}:", *lines])


def has_ended(
    run_dir: str, config: Settings | str, spans: Sequence[Span], *, steps: int | None, is_elsewhere: bool = False
) -> bool:
    """Returns whether nothing is left to train or to evaluate. All hosts must call it.

    Args:
      steps: the value of --steps; None: the experiment's last step.
      is_elsewhere: whether other machines will train; unreadable checkpoints are then no error.

    Raises:
      UserError: nothing is left, but settings have changed; or the checkpoints cannot be read.
    """

    def decide() -> str:
        try:
            found = newest(run_dir)
        except UserError as error:
            if not is_elsewhere:
                raise
            print(f"note: {error}", flush=True)
            return ""
        return _ended(found, run_dir, config, spans, steps) if found else ""

    said = distributed.decided_by_host_zero(decide)
    if said and distributed.is_host_zero():
        print(said, flush=True)
    return bool(said)


def is_evaluated(run_dir: str, experiment: Experiment, step: int) -> bool:
    """Returns whether the evaluation at the last step is recorded, or the experiment has none."""
    return not experiment.evaluation.eval_batches or metrics.read(run_dir).has_evaluation(step)


def _ended(found: Newest, run_dir: str, config: Settings | str, spans: Sequence[Span], steps: int | None) -> str:
    total = spans[-1].last_step
    last_step, named = (steps, "--steps") if steps and steps < total else (total, "TOTAL_STEPS")
    if found.step < last_step:
        return ""
    if found.step == last_step and not is_evaluated(run_dir, phase_of(spans, last_step).experiment, last_step):
        return ""
    what = f"{run_dir} has the checkpoint of step {found.step:,}, and this run ends after step {last_step:,} ({named})"
    if changed := changes(then := found.described.meta, config):
        span = phase_after(spans, found.step)
        cannot_continue = data_problems(found.step, then, {**then, ORDER: settings(span)}, span=span)
        further = "" if cannot_continue else f", or raise {named} to train this one further"
        raise UserError(
            f"nothing would be trained: {what}. {described_changes(found.step, changed)}\n"
            f"Give another --run-dir for a new run{further}"
        )
    return (
        f"nothing to train: {what}.\n"
        f"  train longer   raise {named}\n"
        "  start over     give another --run-dir\n"
        f"  evaluate it    launch/run evaluate {run_dir}"
    )
