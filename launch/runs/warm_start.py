"""Reads INIT_FROM: the parameters that a new run starts from."""

from __future__ import annotations

from core import distributed, paths, published_files
from core.checkpoints import steps, warm_start
from core.errors import UserError
from core.step import TrainState
from core.types import ReadsPublished, can, missing
from launch import terminal
from launch.experiment import Experiment
from parallel.partitioner import Program


def source(experiment: Experiment) -> warm_start.ParameterSource | None:
    """Returns the parameters to start from; None if the run starts from its seed.

    Raises:
      UserError: there is no such run, step or folder, or the model cannot read published parameters.
    """
    text = experiment.init_from
    if not text:
        return None
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


def require_fit(experiment: Experiment, program: Program) -> str:
    """Checks that the parameters of INIT_FROM fit the model; returns a description of them, "" without INIT_FROM."""
    if (found := source(experiment)) is None:
        return ""
    warm_start.require_fit(found, program.abstract_state.params, program.param_specs, experiment.init_patterns)
    if found.notes and distributed.is_host_zero():
        print("note: INIT_FROM is of another model:\n  " + "\n  ".join(found.notes), flush=True)
    return found.describe()


def first_state(experiment: Experiment, program: Program, *, is_host_zero: bool) -> TrainState:
    """Returns the state before the first step, from INIT_FROM or from the seed."""
    if (found := source(experiment)) is None:
        return program.init()

    progress = terminal.progress(f"parameters of {found.describe()}") if is_host_zero else lambda *_: None
    abstract, specs = program.abstract_state.params, program.param_specs
    params = warm_start.load(found, program.init_params, abstract, specs, experiment.init_patterns, progress=progress)
    return program.init_from(params)
