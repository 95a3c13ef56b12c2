"""Decides from metadata whether a configuration can continue from a checkpoint.

Both `launch/run check` and the start of a run call these functions.
"""

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from core import units
from core.batches import is_same_data
from core.checkpoints import reading, steps, writing
from core.errors import UnreachableError, UserError
from core.files import paths
from core.hosts import distributed
from launch import environment
from launch.config import Settings, differences
from launch.config.differences import Difference
from launch.experiment import Experiment, Span
from parallel.partitioner import Program
from tasks import streams

ORDER = "data_order"  # key in checkpoint metadata: the settings on which positions in the data depend
_MOST_LINES = 20


class Newest(NamedTuple):
    """The newest checkpoint with intact metadata, from which a run continues unless its arrays are damaged."""

    step: int
    described: steps.Description


def newest(run_dir: str) -> Newest | None:
    """Returns a run's newest checkpoint with intact metadata; None if there is none. Not collective.

    Raises:
      UserError: the checkpoints cannot be listed or read from here, so whether there is one is unknown.
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
    """Checks that a run does not start anew because earlier versions of Renga had another default run directory.

    Args:
      run_dir: the run directory.
      experiment: the experiment file.
      slice_name: name of the slice.

    Raises:
      UserError: `run_dir` is the default directory and has no checkpoints, but the former default directory
        (`environment.former_run_directory`) has; or one of them cannot be read.
    """
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
    """Returns the phase that trains the step after `step`; the last one if all are done."""
    return next((span for span in spans if step < span.last_step), spans[-1])


def phase_of(spans: Sequence[Span], step: int) -> Span:
    """Returns the phase that trained `step` (at a boundary, the one that ended there); the last one for later steps."""
    return next((span for span in spans if step <= span.last_step), spans[-1])


def order(span: Span) -> dict[str, Any]:
    """Returns `settings(span)`, and as `vocabulary` the hash of the prepared vocabulary, or None if there is none."""
    vocabulary = span.experiment.task.vocabulary
    return {**settings(span), "vocabulary": None if vocabulary is None else vocabulary.hash}


def settings(span: Span) -> dict[str, Any]:
    """Returns the settings on which positions in a phase's data depend, by name, and the number of the phase."""
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
      found: the checkpoint.
      now: metadata that the run would save (`prepared_run.metadata`).
      span: the phase.
      abstract_state: shapes, dtypes and shardings of the state to restore.
    """
    data = data_problems(found.step, found.described.meta, now, span=span)
    misfits = reading.differences(found.described.kinds, abstract_state)
    advice = reading.advice(found.described.kinds, abstract_state)
    return [*data, *units.shortened(misfits, most=_MOST_LINES), *advice]


def data_problems(step: int, then: Mapping[str, Any], now: Mapping[str, Any], *, span: Span) -> list[str]:
    """Returns the reasons why a phase cannot continue in its data from where a checkpoint was saved; [] if it can.

    It is [] for a checkpoint of an earlier phase, because every phase begins with the start of its data.

    Args:
      step: the step of the checkpoint.
      then: metadata of the checkpoint. If ORDER is missing, as in those of earlier revisions, fewer settings are
        compared.
      now: metadata that the run would save.
      span: the phase.
    """
    if 0 < step <= span.first_step:
        return []
    before, after = ({"SEED": meta.get("seed"), **meta.get(ORDER, {})} for meta in (then, now))
    found = [_told(name, before[name], after[name]) for name in before if name in after and before[name] != after[name]]
    if not is_same_data(then["data"], now["data"]):
        found.append(
            f"it was trained on other data (files are compared by name, size and content)\n"
            f"    then: {then.get('data_source', 'not recorded')}\n    now:  {now['data_source']}"
        )
    return found


def _told(name: str, before: Any, after: Any) -> str:
    if name == "phase":
        return f"it is of phase {before}, and its step is now in phase {after}"
    return streams.difference(name, now=after, was=before)


def require_fit(run_dir: str, meta: Mapping[str, Any], span: Span, program: Program) -> None:
    """Checks that the newest checkpoint, if any, fits by its metadata, and that another one fits on the disk.

    Args:
      run_dir: the run directory.
      meta: metadata that the run would save.
      span: the phase.
      program: the program of the phase.

    Raises:
      UserError: lists the problems.
    """
    if found := newest(run_dir):
        refuse(found.step, problems(found, meta, span=span, abstract_state=program.abstract_state))
    require_space(run_dir, span.experiment, program)


def require_space(run_dir: str, experiment: Experiment, program: Program) -> None:
    """Raises UserError unless one more checkpoint fits on the disk.

    Frozen parameters are not counted if the run starts from other parameters, as checkpoints may leave them out.
    """
    num_bytes = sum(map(_bytes, jax.tree.leaves(program.abstract_state)))
    if experiment.initialization.init_from:
        specs = jax.tree.leaves(program.param_specs)
        params = jax.tree.leaves(program.abstract_state.params)
        num_bytes -= sum(_bytes(p) for p, spec in zip(params, specs, strict=True) if not spec.trainable)
    writing.require_space(run_dir, num_bytes)


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
    """Returns the settings in which a configuration differs from the one in `then`, the metadata of a checkpoint.

    It is [] if none differ, or the metadata have no configuration.
    """
    return differences.between(then["config"], config) if "config" in then else []


def described_changes(step: int, found: Sequence[Difference]) -> str:
    """Formats settings that differ from the checkpoint of `step`: a heading, and a line for each of at most 20."""
    what = units.counted(len(found), "setting differs", "settings differ")
    lines = units.shortened([str(one) for one in found], most=_MOST_LINES)
    return "\n  ".join([f"{what} from the checkpoint of step {step}:", *lines])


def has_ended(
    run_dir: str, config: Settings | str, spans: Sequence[Span], *, steps: int | None, is_elsewhere: bool = False
) -> bool:
    """Returns whether nothing is left to train; if so, host 0 prints it. All hosts must call it.

    Args:
      run_dir: the run directory.
      config: the configuration.
      spans: the phases of the experiment.
      steps: the value of --steps; None: the run ends at the last step of the experiment.
      is_elsewhere: whether other machines will train. Checkpoints that this machine cannot read are then no error, and
        the result is False.

    Raises:
      UserError: nothing is left, but the run was trained with other settings (lists them); or the checkpoints cannot be
        read.
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


def _ended(found: Newest, run_dir: str, config: Settings | str, spans: Sequence[Span], steps: int | None) -> str:
    total = spans[-1].last_step
    last_step, named = (steps, "--steps") if steps and steps < total else (total, "TOTAL_STEPS")
    if found.step < last_step:
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
