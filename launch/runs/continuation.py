"""Decides whether a configuration can continue from a checkpoint, from the metadata of both.

The check before a start, the doctor and the start itself ask the same functions, before anything of the run is written.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax

from core import distributed, paths, units
from core.batches import is_same_data
from core.checkpoints import reading, steps, writing
from core.errors import UserError
from launch.config import differences
from launch.config.differences import Difference
from launch.experiment import Experiment, Span
from parallel.partitioner import Program

ORDER = "data_order"  # in the metadata of checkpoints: the settings on which a position in the data depends
_MOST_LINES = 20


class Newest(NamedTuple):
    """The newest checkpoint with intact metadata; a start takes no other, unless its arrays are damaged."""

    step: int
    described: steps.Description


def newest(run_dir: str) -> Newest | None:
    """Returns the newest checkpoint of a run with intact metadata; None if there is none. Not collective."""
    folder = paths.resolve(run_dir) / steps.FOLDER
    for step in reversed(steps.complete(folder)):
        try:
            with reading.refusing_damage(folder / str(step)):
                return Newest(step, steps.read(folder / str(step)))
        except UserError:
            continue
    return None


def phase_after(spans: Sequence[Span], step: int) -> Span:
    """Returns the phase that trains after a step; the last one if all are done."""
    return next((span for span in spans if step < span.last_step), spans[-1])


def phase_of(spans: Sequence[Span], step: int) -> Span:
    """Returns the phase that trained a step, whose checkpoint at a boundary it saved."""
    return next((span for span in spans if step <= span.last_step), spans[-1])


def order(span: Span) -> dict[str, Any]:
    """Returns `settings`, and the hash of the vocabulary, which must be prepared."""
    vocabulary = span.experiment.task.vocabulary
    return {**settings(span), "vocabulary": None if vocabulary is None else vocabulary.hash}


def settings(span: Span) -> dict[str, Any]:
    """Returns the settings of a phase on which a position in its data depends."""
    experiment = span.experiment
    return {
        "SEED": experiment.seed,
        "BATCH_SIZE": experiment.batch_size,
        "NUM_STREAMS": experiment.task.num_streams,
        "LENGTH": experiment.row_length,
        "phase": span.number,
    }


def problems(found: Newest, now: Mapping[str, Any], *, span: Span, abstract_state: Any) -> list[str]:
    """Returns why a phase cannot continue from a checkpoint.

    Args:
      found: the checkpoint.
      now: metadata that the run would save (`prepared_run.metadata`).
      span: the phase.
      abstract_state: the state that a restore would request.
    """
    data = data_problems(found.step, found.described.meta, now, span=span)
    misfits = reading.differences(found.described.kinds, abstract_state)
    advice = reading.advice(found.described.kinds, abstract_state)
    return [*data, *units.shortened(misfits, most=_MOST_LINES), *advice]


def data_problems(step: int, then: Mapping[str, Any], now: Mapping[str, Any], *, span: Span) -> list[str]:
    """Returns why a phase cannot continue in its data; the first step of a phase begins them.

    `then` is the metadata of the checkpoint. Earlier revisions recorded no ORDER; the position itself is then checked.
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
    if name == "vocabulary":
        return "the vocabulary is another one"
    if name == "phase":
        return f"it is of phase {before}, and its step is now in phase {after}"
    return f"{name} = {after}, was {before}"


def require_space(run_dir: str, experiment: Experiment, program: Program) -> None:
    """Requires that one checkpoint fits on the disk. Raises UserError.

    Frozen parameters of a run that starts from others are not counted: checkpoints may leave them out.
    """
    num_bytes = sum(map(_bytes, jax.tree.leaves(program.abstract_state)))
    if experiment.init_from:
        specs = jax.tree.leaves(program.param_specs)
        params = jax.tree.leaves(program.abstract_state.params)
        num_bytes -= sum(_bytes(p) for p, spec in zip(params, specs, strict=True) if not spec.trainable)
    writing.require_space(run_dir, num_bytes)


def _bytes(array: jax.ShapeDtypeStruct) -> int:
    return math.prod(array.shape) * array.dtype.itemsize


def refuse(step: int, found: Sequence[str]) -> None:
    """Raises UserError, which lists the problems of a checkpoint, if there are any."""
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


def changes(then: Mapping[str, Any], config_text: str) -> list[Difference]:
    """Returns the settings in which a configuration differs from that of a checkpoint with the metadata `then`."""
    return differences.between(then["config"], config_text) if "config" in then else []


def described_changes(step: int, found: Sequence[Difference]) -> str:
    """Formats changed settings for the screen and the log, a line for each."""
    what = units.counted(len(found), "setting differs", "settings differ")
    lines = units.shortened([str(one) for one in found], most=_MOST_LINES)
    return "\n  ".join([f"{what} from the checkpoint of step {step}:", *lines])


def has_ended(run_dir: str, config_text: str, *, total_steps: int, steps: int | None) -> bool:
    """Returns whether nothing is left to train, and prints it on host 0. Collective.

    If checkpoints cannot be listed, there may be something left.

    Args:
      run_dir: the run directory.
      config_text: the configuration.
      total_steps: of the experiment.
      steps: of --steps.

    Raises:
      UserError: nothing is left, and the run has other settings; lists them.
    """
    last_step, named = (steps, "--steps") if steps and steps < total_steps else (total_steps, "TOTAL_STEPS")
    said = distributed.decided_by_host_zero(lambda: _ended(run_dir, last_step, named, config_text))
    if said and distributed.is_host_zero():
        print(said, flush=True)
    return bool(said)


def _ended(run_dir: str, last_step: int, named: str, config_text: str) -> str:
    try:
        found = newest(run_dir)
    except Exception as error:  # a bucket may be out of reach of a workstation, or fail with its client's own types
        print(f"cannot list checkpoints: {type(error).__name__}: {error}", flush=True)
        return ""
    if found is None or found.step < last_step:
        return ""
    what = f"{run_dir} has the checkpoint of step {found.step:,}, and this run ends after step {last_step:,} ({named})"
    if changed := changes(found.described.meta, config_text):
        raise UserError(
            f"nothing would be trained: {what}. {described_changes(found.step, changed)}\n"
            f"Give another --run-dir for a new run, or raise {named} to train this one further"
        )
    return (
        f"nothing to train: {what}.\n"
        f"  train longer   raise {named}\n"
        "  start over     give another --run-dir\n"
        f"  evaluate it    launch/run evaluate {run_dir}"
    )
