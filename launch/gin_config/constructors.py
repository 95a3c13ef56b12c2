"""What a public function or class says of itself: its parameters, their annotations, and what calling it gives.

The one idea: nothing is called to find out. What cannot be read off, such as an annotation that only a type checker can
evaluate, is unknown and is left alone by every check.
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from launch.gin_config.types import UNKNOWN


@dataclass(frozen=True, eq=False)
class Constructor:
    """A public function or class that gin may name.

    Attributes:
      module: where it was found: the module that a configuration imports, not always the one that defines it.
      parameters: by name, those that can be given a value.
      takes_any: it has `**kwargs`.
      hints: the annotation of each parameter that has one that can be evaluated.
      returns: what a call gives: the class itself, or the annotation of a function.
    """

    target: Callable[..., Any]
    module: str
    name: str
    parameters: Mapping[str, inspect.Parameter]
    takes_any: bool
    hints: Mapping[str, Any]
    returns: Any

    def __str__(self) -> str:
        return f"{self.module.rpartition('.')[2]}.{self.name}"

    @property
    def required(self) -> list[str]:
        """The parameters without a default."""
        return [name for name, parameter in self.parameters.items() if parameter.default is inspect.Parameter.empty]


def constructor(target: Callable[..., Any], *, module: str, name: str) -> Constructor:
    """What its signature and annotations say of a function or class."""
    try:
        signature = inspect.signature(target)
    except (TypeError, ValueError):  # a builtin without a signature
        return Constructor(target, module, name, parameters={}, takes_any=True, hints={}, returns=UNKNOWN)
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    hints = _hints(target)
    return Constructor(
        target,
        module,
        name,
        parameters={key: p for key, p in signature.parameters.items() if p.kind in kinds},
        takes_any=any(p.kind is inspect.Parameter.VAR_KEYWORD for p in signature.parameters.values()),
        hints=hints,
        returns=target if inspect.isclass(target) else hints.get("return", UNKNOWN),
    )


def _hints(target: Callable[..., Any]) -> dict[str, Any]:
    """The annotations that can be evaluated; a name that exists for type checkers alone costs only its own."""
    written = target if dataclasses.is_dataclass(target) or not inspect.isclass(target) else target.__init__
    try:
        return typing.get_type_hints(written)
    except Exception:  # an annotation may be any expression, and fail in any way
        module = vars(sys.modules[target.__module__])
        annotations = getattr(written, "__annotations__", {})
        return {name: _hint(annotation, module) for name, annotation in annotations.items()}


def _hint(annotation: Any, module: dict[str, Any]) -> Any:
    try:
        return typing.get_type_hints(types.SimpleNamespace(__annotations__={"x": annotation}), globalns=module)["x"]
    except Exception:
        return UNKNOWN
