"""Finds and reads the parameters of INIT_FROM, and frozen ones that are not in checkpoints."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from core import logical, parameters, units
from core.batches import batch_shapes
from core.checkpoints import layer_map, published_files, reading, steps, warm_start
from core.errors import UnreachableError, UserError
from core.hosts import distributed
from core.model_settings import differing_settings
from core.parameters import Specs
from core.step import TrainState
from core.types import Model, ReadsPublished, can, lacking
from launch import terminal
from launch.config import loader
from launch.config.trust import Trust
from launch.experiment import OF_PYTHON, Experiment
from launch.runs.continuation import ORDER
from parallel.partitioner import Program


class Initial(NamedTuple):
    """The source of the parameters that a run starts from, checked against its model.

    Attributes:
      source: a step of a run, a published model's folder, or memory.
      notes: text for the user; "" if there is nothing to say.
      left_out: frozen parameters that checkpoints leave out; None: there are none.
      layers: maps layers of the source to layers of the model.
    """

    source: warm_start.ParameterSource
    notes: str
    left_out: steps.LeftOut | None
    layers: layer_map.LayerMap


def find(
    experiment: Experiment,
    program: Program,
    *,
    given: warm_start.GivenParameters | None = None,
    is_visible: Callable[[str], bool] = lambda place: True,
) -> Initial | None:
    """Finds the source of the parameters that INIT_FROM names, and checks that they fit.

    Returns None if the run starts from its seed. Reads no array. All hosts must call it.

    Args:
      given: parameters in memory, used instead; None: there are none.
      is_visible: returns whether a folder with frozen parameters can be read here.

    Raises:
      UserError: there is no such source, or the parameters do not fit the model.
    """
    chosen = experiment.initialization
    if given is None and not chosen.init_from:
        return None
    found = _renamed(given or _named(experiment), chosen.init_renames)
    shapes, specs, optional = program.abstract_state.params, program.param_specs, _optional(experiment)
    read, of_these = (warm_start.read_from(found, t, chosen.init_patterns, optional=optional) for t in (shapes, specs))
    layers = layer_map.of(chosen.init_layers, found, read, of_these)
    warm_start.require_fit(found, shapes, specs, chosen.init_patterns, optional=optional, layers=layers)
    lines = [*found.notes, *layers.notes]
    if isinstance(found, warm_start.SavedParameters) and (left_out := found.left_out):
        if is_visible(left_out.source):
            found.require_source(layers.in_source(read), of_these)
        else:
            lines.append(f"not checked: {left_out.source}, where the parameters that {found.describe()} leaves out are")
    notes = "INIT_FROM:\n  " + "\n  ".join(lines) if lines else ""
    return Initial(found, notes, _left_out(experiment, of_these, found, layers), layers)


def _named(experiment: Experiment) -> warm_start.ParameterSource:
    source = distributed.decided_by_host_zero(lambda: _pinned(experiment.initialization.init_from))
    found = _opened(experiment.model, source)
    if isinstance(found, warm_start.SavedParameters):
        found.notes = _notes(found, experiment)
    return found


def vocabulary_note(source: warm_start.ParameterSource, order: Mapping[str, Any]) -> str:
    """Returns a note if the run of the source had another vocabulary, otherwise "".

    `order` is `continuation.order` of the run to start.
    """
    if not isinstance(source, warm_start.SavedParameters):
        return ""
    theirs, ours = source.meta.get(ORDER, {}).get("vocabulary"), order["vocabulary"]
    if theirs is None or ours is None or theirs == ours:
        return ""
    return (
        f"the run of {source.describe()} had another vocabulary (sha256 {theirs[:12]}, here {ours[:12]}): the "
        "embeddings of an id belong to another text. Use its vocabulary, such as a model in its folder vocabulary/, or "
        "leave out the embeddings (INIT_PATTERNS)"
    )


def source_again(experiment: Experiment, left_out: steps.LeftOut) -> warm_start.ParameterSource:
    """Opens the source of the parameters that a checkpoint leaves out, or raises UserError."""
    return _source_of(left_out, experiment.model, place_again(experiment, left_out), "the checkpoint")


def find_again(experiment: Experiment, program: Program, described: steps.Description) -> warm_start.ParameterSource:
    """Opens the source of the parameters that a checkpoint leaves out, and checks them.

    Reads no array. Raises UserError if it cannot be opened, or lacks some of them.
    """
    assert described.left_out is not None
    source = source_again(experiment, described.left_out)
    wanted = warm_start.left_out_of(described, program.abstract_state, program.param_specs)
    warm_start.require_left_out(source, described, wanted)
    return source


def place_again(experiment: Experiment, left_out: steps.LeftOut) -> str:
    """Returns where the parameters that a checkpoint leaves out are: a folder or a run.

    A changed INIT_FROM replaces the place where the run read them.
    """
    is_named = experiment.initialization.init_from not in ("", left_out.init_from)
    return experiment.initialization.init_from if is_named else left_out.source


def _source_of(left_out: steps.LeftOut, model: Model, place: str, checkpoint: str) -> warm_start.ParameterSource:
    try:
        found = _opened(model, _pinned(place))
    except (UserError, OSError) as error:
        kind = UnreachableError if isinstance(error, UnreachableError) else UserError
        raise kind(
            f"{checkpoint} does not contain {units.counted(len(left_out.arrays), 'frozen parameter')}, which the run "
            f"read from {left_out.source}. {error}\n{left_out.source}: {warm_start.PUT_BACK}"
        ) from error
    return _renamed(found, left_out.renames)


def _renamed(found: warm_start.ParameterSource, renames: Mapping[str, str]) -> warm_start.ParameterSource:
    return found.renamed(renames) if renames else found


def _pinned(text: str) -> str:
    """Returns RUN@STEP, with a number, for RUN and RUN@best; otherwise the text itself."""
    if published_files.is_published(text):
        return text
    if not steps.has_folder(text):
        raise UserError(f"INIT_FROM = {published_files.unknown(text)}")
    run, step = steps.split(text)
    found = steps.find(text)
    return text if step not in (None, steps.BEST) else f"{run}@{found.name}"


def _opened(model: Model, text: str) -> warm_start.ParameterSource:
    if published_files.is_published(text):
        if not can(model, ReadsPublished):
            raise UserError(f"INIT_FROM = {text!r} is a published model: {lacking(model, ReadsPublished)}")
        return model.published(text)

    def open_source(left_out: steps.LeftOut) -> warm_start.ParameterSource:
        return _source_of(left_out, model, left_out.source, f"INIT_FROM = {text!r}")

    return warm_start.SavedParameters(steps.find(text), open_source=open_source)


def _trust(experiment: Experiment) -> Trust:
    """Another run's configuration may also name the modules of this experiment's own classes."""
    parts = (experiment.model, experiment.task, experiment.optimizer, experiment.strategy)
    return Trust({type(part).__module__ for part in parts})


def _notes(saved: warm_start.SavedParameters, experiment: Experiment) -> tuple[str, ...]:
    where = saved.describe()
    if "config" not in saved.meta:
        return (f"{where} does not record its configuration, so the settings of its model were not compared",)
    if saved.meta["config"].startswith(OF_PYTHON):
        return (f"{where} is of a run of renga.Trainer, so the settings of its model were not compared",)
    try:
        with published_files.copies_of(str(saved.folder.parent.parent)):
            other = loader.load(
                f"the configuration of {where}", text=saved.meta["config"], trust=_trust(experiment)
            ).build()
            shapes, specs = logical.abstract_init(
                other.model.init, jax.random.key(0), batch_shapes(other.task.spec(other.batch_size))
            )
            optimizer = other.optimizer.bound(specs)
            is_averaging = optimizer.is_averaging(jax.eval_shape(optimizer.init, shapes))
    except UserError as error:
        return (f"the model of {where} cannot be built here, so its settings were not compared: {error}",)
    lines = [
        f"{name} = {theirs!r} in {where}, {ours!r} in the model"
        for name, (theirs, ours) in differing_settings(other.model, experiment.model).items()
    ]
    if saved.is_averaged:
        lines.append(f"the parameters of {where} are an average, which its optimizer keeps for evaluation")
    elif is_averaging:
        lines.append(f"the optimizer of {where} averages parameters: the parameters are taken, not their average")
    return tuple(lines)


def first_state(experiment: Experiment, program: Program, initial: Initial | None, *, is_host_zero: bool) -> TrainState:
    """Returns the state before the first step.

    Args:
      initial: the result of `find`; None: all parameters are initialized.
      is_host_zero: whether to show the progress of reading.
    """
    if initial is None:
        return program.init()
    source = initial.source
    progress = terminal.progress(f"parameters of {source.describe()}") if is_host_zero else lambda *_: None
    params = warm_start.load(
        source,
        program.init_params,
        program.abstract_state.params,
        program.param_specs,
        experiment.initialization.init_patterns,
        optional=_optional(experiment),
        layers=initial.layers,
        progress=progress,
    )
    return program.init_from(params)


def _left_out(
    experiment: Experiment, read: Specs, found: warm_start.ParameterSource, layers: layer_map.LayerMap
) -> steps.LeftOut | None:
    """Frozen parameters from another run or from memory are saved in checkpoints: their source may disappear."""
    if isinstance(found, warm_start.SavedParameters | warm_start.GivenParameters):
        return None
    names = zip(reading.by_name({"params": read}).items(), parameters.names(read), strict=True)
    arrays = [name for (name, spec), path in names if not spec.trainable and path not in layers.layers]
    if not arrays:
        return None
    source = published_files.described(experiment.initialization.init_from)
    return steps.LeftOut(
        experiment.initialization.init_from, source, dict(experiment.initialization.init_renames), arrays
    )


def _optional(experiment: Experiment) -> Sequence[str]:
    return experiment.model.added_parameters if can(experiment.model, ReadsPublished) else ()
