"""Parameters, annotations and results of a public function or class, read from its signature without calling it.

What cannot be read, such as an annotation that only a type checker can evaluate, is unknown and passes every check.
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

UNKNOWN = Any


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
    """Returns what the signature and the annotations of a function or class say."""
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


def why_not_a_constructor(target: Any) -> str:
    """Returns the reason why gin may not name this, or ''."""
    if inspect.ismodule(target):
        return "is a module, not a constructor"
    if not inspect.isclass(target) and not inspect.isroutine(target):
        return f"is a value ({type(target).__name__}), not a constructor"
    if getattr(target, "_is_protocol", False) or inspect.isabstract(target):
        return "is an interface, which cannot be constructed"
    return ""


def _hints(target: Callable[..., Any]) -> dict[str, Any]:
    """The annotations that can be evaluated; one that only a type checker can evaluate does not cost the others."""
    written = target if dataclasses.is_dataclass(target) or not inspect.isclass(target) else target.__init__
    try:
        return typing.get_type_hints(written)
    except Exception:  # an annotation may be any expression, and fail in any way
        module = vars(sys.modules[target.__module__])
        return {name: _hint(text, module) for name, text in getattr(written, "__annotations__", {}).items()}


def _hint(annotation: Any, module: dict[str, Any]) -> Any:
    try:
        return typing.get_type_hints(types.SimpleNamespace(__annotations__={"x": annotation}), globalns=module)["x"]
    except Exception:
        return UNKNOWN
