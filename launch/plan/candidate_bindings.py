"""Expresses candidates as gin bindings, and as a file that a user includes.

A candidate is a set of bindings on the user's own experiment, so a run with the same bindings does what was planned.
`apply` makes the same changes to the built experiment, so that hundreds of candidates are judged without loading gin
files again.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from core import wrappers
from launch.config import LoadedConfig, Macro, Reference
from launch.experiment import Experiment
from parallel.planning import candidates
from parallel.planning.candidates import Candidate, Layout


class Writer:
    """Writes candidates of one experiment as gin bindings.

    Attributes:
      remat_home: the constructor whose `remat` is bound, such as `transformer.Transformer`; None if the configuration
        does not build its model with a single constructor.
    """

    def __init__(self, config: LoadedConfig, experiment: Experiment):
        self._experiment = experiment
        home = next((s for s, module in config.imports.items() if module == Experiment.__module__), "")
        self._home = f"{home}.Experiment"
        self._values = {binding.name: binding.value for binding in config.bindings}
        self.remat_home = self._constructor(self._values.get(f"{self._home}.model"), experiment.model)
        self._model_import = config.import_line(self.remat_home.partition(".")[0]) if self.remat_home else ""

    def _constructor(self, value: Any, model: Any) -> str | None:
        """Returns the constructor of the model that has `remat`, inside the wrappers that `value` refers to."""
        path = wrappers.field_path(model, "remat")
        for attribute in (*(path or ()), None):
            while isinstance(value, Macro):
                value = self._values.get(value.name)
            if path is None or not (isinstance(value, Reference) and value.evaluate and not value.scope):
                return None
            if attribute is not None:
                value = self._values.get(f"{value.selector}.{attribute}")
        return value.selector

    def can_write(self, candidate: Candidate) -> bool:
        """Returns whether gin bindings can express the candidate's choice of `remat`."""
        return self.remat_home is not None or candidate.remat in (None, candidates.remat_of(self._experiment.model))

    def bindings(self, candidate: Candidate) -> list[str]:
        """Returns the bindings that change the experiment to the candidate; none if they are equal."""
        statements = _layout(candidate.layout) if candidate.layout else []
        if candidate.remat not in (None, candidates.remat_of(self._experiment.model)):
            statements += [self._model_import, f"{self.remat_home}.remat = {candidate.remat!r}"]
        if candidate.accum_steps != self._experiment.accum_steps:
            statements += self._field("accum_steps", candidate.accum_steps)
        if candidate.batch_size != self._experiment.batch_size:
            statements += self._field("batch_size", candidate.batch_size)
            statements += self._field("total_steps", total_steps(self._experiment, candidate.batch_size))
        return statements

    def _field(self, field: str, value: int) -> list[str]:
        """Binds a field of the experiment, by its macro if it has one: other statements may use the macro too."""
        macro = field.upper()
        if self._values.get(f"{self._home}.{field}") == Macro(macro):
            return [f"{macro} = {value}"]
        return ["from launch import experiment", f"experiment.Experiment.{field} = {value}"]

    def file(self, candidate: Candidate, header: list[str]) -> str:
        """Returns the text of a gin file that the user includes after the other files."""
        statements = self.bindings(candidate)
        imports = sorted({s for s in statements if s.startswith(("from ", "import "))})
        rest = [s for s in statements if s not in imports]
        comment = [f"# {line}" for line in header]
        return "\n".join([*comment, "from __gin__ import dynamic_registration", *imports, "", *rest]) + "\n"


def total_steps(experiment: Experiment, batch_size: int) -> int:
    """Returns the smallest number of steps with `batch_size` rows that train on at least the experiment's tokens."""
    return -(-experiment.total_steps * experiment.batch_size // batch_size)


def apply(experiment: Experiment, candidate: Candidate) -> Experiment:
    """Applies a candidate's choices to a built experiment; returns the changed copy."""
    model = experiment.model
    if candidate.remat not in (None, candidates.remat_of(model)):
        model = wrappers.with_field(model, "remat", candidate.remat)
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
    statements = ["from parallel import strategies", f"STRATEGY = @{home}()"]
    statements += [f"{home}.{axis} = {degree}" for axis, degree in layout.degrees]
    if layout.choice:
        schedule = f"schedules.{layout.choice.constructor}"
        statements += ["from parallel.pipeline import schedules", f"{home}.schedule = @{schedule}()"]
        statements += [f"{schedule}.{name} = {value!r}" for name, value in layout.choice.arguments]
    return statements
