"""A candidate as gin says it: the bindings that make it of an experiment, and the file that a user includes.

The one idea: a candidate is nothing but bindings on the user's own experiment, so that what was planned is what a run
with the same bindings does. Applied directly to the built experiment it gives an equal one, which is how hundreds are
judged without reading gin again.
"""

from __future__ import annotations

import dataclasses

from core.types import ChoosesRemat, can
from launch.config import LoadedConfig, Macro, Reference
from launch.experiment import Experiment
from parallel.planning import candidates
from parallel.planning.candidates import Candidate, Layout


class Writer:
    """Says candidates of one experiment as gin bindings.

    Attributes:
      remat_home: what `remat` is bound on, such as `transformer.Transformer`; None where the file builds its model in
        a way that has no such name.
    """

    def __init__(self, config: LoadedConfig, experiment: Experiment):
        self._experiment = experiment
        home = next((s for s, module in config.imports.items() if module == Experiment.__module__), "")
        self._home = f"{home}.Experiment"
        self._values = {binding.name: binding.value for binding in config.bindings}
        model = self._values.get(f"{self._home}.model")
        while isinstance(model, Macro):
            model = self._values.get(model.name)
        is_named = isinstance(model, Reference) and model.evaluate and not model.scope
        self.remat_home = model.selector if is_named and can(experiment.model, ChoosesRemat) else None
        self._model_import = config.import_line(self.remat_home.partition(".")[0]) if self.remat_home else ""

    def bindings(self, candidate: Candidate) -> list[str]:
        """Statements that make the candidate of the experiment; none where it is the experiment."""
        said = _layout(candidate.layout) if candidate.layout else []
        if candidate.remat not in (None, candidates.remat_of(self._experiment.model)):
            said += [self._model_import, f"{self.remat_home}.remat = {candidate.remat!r}"]
        if candidate.accum_steps != self._experiment.accum_steps:
            said += self._field("accum_steps", candidate.accum_steps)
        if candidate.batch_size != self._experiment.batch_size:
            said += self._field("batch_size", candidate.batch_size)
            said += self._field("total_steps", total_steps(self._experiment, candidate.batch_size))
        return said

    def _field(self, field: str, value: int) -> list[str]:
        """Gives a field of the experiment a value: by its macro where it has that, for others may refer to it too."""
        macro = field.upper()
        if self._values.get(f"{self._home}.{field}") == Macro(macro):
            return [f"{macro} = {value}"]
        return ["from launch import experiment", f"experiment.Experiment.{field} = {value}"]

    def file(self, candidate: Candidate, header: list[str]) -> str:
        """A gin file to include behind the others."""
        said = self.bindings(candidate)
        imports = sorted({s for s in said if s.startswith(("from ", "import "))})
        rest = [s for s in said if s not in imports]
        comment = [f"# {line}" for line in header]
        return "\n".join([*comment, "from __gin__ import dynamic_registration", *imports, "", *rest]) + "\n"


def total_steps(experiment: Experiment, batch_size: int) -> int:
    """Steps of so many rows that see all the tokens that the experiment is to see, whole batches of them."""
    return -(-experiment.total_steps * experiment.batch_size // batch_size)


def apply(experiment: Experiment, candidate: Candidate) -> Experiment:
    """The experiment that the bindings of a candidate make."""
    model = experiment.model
    if candidate.remat is not None and candidate.remat != candidates.remat_of(model):
        model = dataclasses.replace(model, remat=candidate.remat)
    return dataclasses.replace(
        experiment,
        model=model,
        strategy=candidate.layout.strategy() if candidate.layout else experiment.strategy,
        accum_steps=candidate.accum_steps,
        batch_size=candidate.batch_size,
        total_steps=total_steps(experiment, candidate.batch_size),
    )


def _layout(layout: Layout) -> list[str]:
    home = f"strategies.{layout.constructor}"
    said = ["from parallel import strategies", f"STRATEGY = @{home}()"]
    said += [f"{home}.{axis} = {degree}" for axis, degree in layout.degrees]
    if layout.choice:
        schedule = f"schedules.{layout.choice.constructor}"
        said += ["from parallel.pipeline import schedules", f"{home}.schedule = @{schedule}()"]
        said += [f"{schedule}.{name} = {value!r}" for name, value in layout.choice.arguments]
    return said


def name(candidate: Candidate, mesh: str) -> str:
    """`fsdp_tensor: fsdp 4 x tensor 4, remat full, accum 2`: what a reader needs to tell candidates apart."""
    layout = candidate.layout
    parts = [f"{layout.constructor if layout else 'as written'}: {mesh}".removesuffix(": ")]
    if layout and layout.choice:
        given = dict(layout.choice.arguments)
        rounds = f" x {given['repeats']}" if "repeats" in given else ""
        parts.append(f"{layout.choice.constructor} {given['num_microbatches']}{rounds}, keeps {given['save']}")
    if candidate.remat is not None:
        parts.append(f"remat {candidate.remat}")
    if candidate.accum_steps > 1:
        parts.append(f"accum {candidate.accum_steps}")
    return ", ".join(parts)
