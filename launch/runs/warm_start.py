"""Reads INIT_FROM: the parameters that a new run starts from."""

from collections.abc import Sequence
from typing import NamedTuple

from core import paths, published_files
from core.checkpoints import steps, warm_start
from core.errors import UserError
from core.step import TrainState
from core.types import AddsParameters, ReadsPublished, can, missing
from launch import terminal
from launch.experiment import Experiment
from parallel.partitioner import Program


def source(experiment: Experiment) -> warm_start.ParameterSource | None:
    """Returns the parameters to start from; None if the run starts from its seed.

    Raises:
      UserError: there is no such run, step or folder, or the model cannot read published parameters.
    """
    if not experiment.init_from:
        return None
    found = _source(experiment, experiment.init_from)
    return found.renamed(experiment.init_renames) if experiment.init_renames else found


def _source(experiment: Experiment, text: str) -> warm_start.ParameterSource:
    if published_files.is_published(text):
        if not can(experiment.model, ReadsPublished):
            lacks = ", ".join(missing(experiment.model, ReadsPublished))
            raise UserError(
                f"INIT_FROM = {text!r} is a published model, and {type(experiment.model).__name__} cannot read one: "
                f"it lacks {lacks} (ReadsPublished in core/types.py)"
            )
        return experiment.model.published(text)
    if not paths.resolve(text).exists() and "@" not in text:
        raise UserError(
            f"INIT_FROM = {text!r} does not exist; give a run (runs/first), a step of it (runs/first@1000), or the "
            "folder of a published model, with config.json and *.safetensors"
        )
    return warm_start.SavedParameters(steps.find(text))


class Fit(NamedTuple):
    """Parameters that fit the model.

    Attributes:
      source: describes them in one line; "" without INIT_FROM.
      notes: how the model that they belong to differs.
    """

    source: str = ""
    notes: str = ""


def require_fit(experiment: Experiment, program: Program) -> Fit:
    """Checks that the parameters of INIT_FROM fit the model; reads metadata and headers, but no array."""
    if (found := source(experiment)) is None:
        return Fit()
    warm_start.require_fit(
        found,
        program.abstract_state.params,
        program.param_specs,
        experiment.init_patterns,
        optional=_optional(experiment),
    )
    notes = "INIT_FROM is of another model:\n  " + "\n  ".join(found.notes) if found.notes else ""
    return Fit(found.describe(), notes)


def first_state(experiment: Experiment, program: Program, *, is_host_zero: bool) -> TrainState:
    """Returns the state before the first step, from INIT_FROM or from the seed."""
    if (found := source(experiment)) is None:
        return program.init()

    progress = terminal.progress(f"parameters of {found.describe()}") if is_host_zero else lambda *_: None
    params = warm_start.load(
        found,
        program.init_params,
        program.abstract_state.params,
        program.param_specs,
        experiment.init_patterns,
        optional=_optional(experiment),
        progress=progress,
    )
    return program.init_from(params)


def _optional(experiment: Experiment) -> Sequence[str]:
    return experiment.model.added_parameters if can(experiment.model, AddsParameters) else ()
