"""A candidate as gin says it: the bindings that make it of an experiment, and the file that a user includes.

The one idea: a candidate is nothing but bindings on the user's own experiment, so that what was planned is what a run
with the same bindings does. Applied directly to the built experiment it gives an equal one, which is how hundreds are
judged without reading gin again.
"""

from __future__ import annotations

import dataclasses
import re

from core.types import ChoosesRemat, can
from launch.config import LoadedConfig
from launch.experiment import Experiment
from launch.plans import records
from parallel.planning import candidates
from parallel.planning.candidates import Candidate, Layout

_IMPORT = re.compile(r"(?:from \S+ )?import (?P<name>\w+)(?: as (?P<alias>\w+))?")


class Writer:
    """Says candidates of one experiment as gin bindings.

    Attributes:
      remat_home: what `remat` is bound on, such as `transformer.Transformer`; None where the file builds its model in
        a way that has no such name.
    """

    def __init__(self, config: LoadedConfig, experiment: Experiment):
        self._experiment = experiment
        lines = config.text.splitlines()
        symbols = {module: symbol for symbol, module in records.imports(config.text).items()}
        self._home = f"{symbols.get(Experiment.__module__, '')}.Experiment"
        self._values = values = dict(line.split(" = ", 1) for line in lines if " = " in line)
        value = values.get(f"{self._home}.model", "")
        while value.startswith("%"):
            value = values.get(value[1:], "")
        called = re.fullmatch(r"@([\w.]+)\(\)", value)
        self.remat_home = called[1] if called and can(experiment.model, ChoosesRemat) else None
        self._model_import = next((line for line in lines if self.remat_home and _imports(line, self.remat_home)), "")

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
        if self._values.get(f"{self._home}.{field}") == f"%{macro}":
            return [f"{macro} = {value}"]
        return ["from launch import experiment", f"experiment.Experiment.{field} = {value}"]

    def file(self, candidate: Candidate, header: list[str]) -> str:
        """A gin file to include behind the others."""
        said = self.bindings(candidate)
        imports = sorted({s for s in said if _IMPORT.fullmatch(s)})
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


def _imports(line: str, selector: str) -> bool:
    """Whether a line of a configuration imports the module that a selector begins with."""
    found = _IMPORT.fullmatch(line)
    return bool(found) and (found["alias"] or found["name"]) == selector.partition(".")[0]


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
