"""Writes gin statements that change fields of an experiment or of its model."""

from collections.abc import Sequence
from typing import Any

from core import wrappers
from launch import environment
from launch.config import loader
from launch.config.loader import LoadedConfig, Settings
from launch.config.statements import Macro, Reference

_INNER = "model"  # the parameter by which functions such as `lora.adapted` get a model
_EXPERIMENT = f"{environment.PACKAGE}launch.experiment"


class Changes:
    """Writes statements that change one configuration's model or experiment.

    Args:
      config: the configuration.
      model: the model that it builds.
    """

    def __init__(self, config: Settings, model: Any):
        self._config, self._model = config, model
        home = next((s for s, module in config.imports.items() if module == _EXPERIMENT), "")
        self._home = f"{home}.Experiment"
        self._values = {binding.name: binding.value for binding in config.bindings}

    def constructor(self, field: str) -> str | None:
        """Returns the constructor that takes a field of the model, such as `transformer.Transformer`.

        The result is None if it was not found.
        """
        path = wrappers.field_path(self._model, field)
        if path is None:
            return None
        value = self._values.get(f"{self._home}.model")
        for attribute in path:
            if (wrapper := self._called(value)) is None:
                return None
            value = self._values.get(f"{wrapper.selector}.{attribute}")
        while (found := self._called(value)) is not None:
            if found.target.takes_any or field in found.target.parameters:
                return found.selector
            value = self._values.get(f"{found.selector}.{_INNER}")  # a function that changes a model
        return None

    def _called(self, value: Any) -> Reference | None:
        while isinstance(value, Macro):
            value = self._values.get(value.name)
        return value if isinstance(value, Reference) and value.evaluate and not value.scope else None

    def of_model(self, field: str, value: str) -> list[str]:
        """Returns the gin statements that bind a field of the model; `value` is gin text.

        `constructor(field)` must not be None.
        """
        home = self.constructor(field)
        assert home is not None, field
        return [self._config.import_line(home.partition(".")[0]), f"{home}.{field} = {value}"]

    def of_experiment(self, field: str, value: str) -> list[str]:
        """Returns the gin statements that bind a field of the experiment; `value` is gin text."""
        macro = field.upper()
        if self._values.get(f"{self._home}.{field}") == Macro(macro):
            return [f"{macro} = {value}"]
        return ["from launch import experiment", f"experiment.Experiment.{field} = {value}"]


def load(path: str, statements: Sequence[str], *, bindings: Sequence[str], slice_name: str) -> LoadedConfig:
    """Loads an experiment with the user's bindings, then with statements that override them.

    Bindings that the statements leave without effect, such as those of another strategy, are left out.

    Args:
      path: the experiment file.
      statements: gin statements, as `Changes` writes them.
      bindings: the user's.
      slice_name: value for the macro SLICE.

    Raises:
      UserError: there is no such file, or there are mistakes.
    """
    changed = {"the change": file(statements, header=())}
    return loader.load(path, bindings=bindings, slice_name=slice_name, after=changed)


def file(statements: Sequence[str], *, header: Sequence[str]) -> str:
    """Returns the text of a gin file with these statements."""
    imports = sorted({s for s in statements if s.startswith(("from ", "import "))})
    rest = [s for s in statements if s not in imports]
    comment = [f"# {line}" for line in header]
    return "\n".join([*comment, "from __gin__ import dynamic_registration", *imports, "", *rest]) + "\n"
