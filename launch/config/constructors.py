"""Parameters, annotations and results of a public function or class, read from its signature without calling it.

What cannot be read, such as an annotation that only a type checker can evaluate, is unknown and passes every check.
"""

from __future__ import annotations

import inspect
import sys
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

UNKNOWN = Any


@dataclass(frozen=True, eq=False)
class Constructor:
    """A public function or class that gin may name.

    Attributes:
      module: where it was found: the module that a configuration imports, not always the one that defines it.
    """

    target: Callable[..., Any]
    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module.rpartition('.')[2]}.{self.name}"

    @cached_property
    def parameters(self) -> Mapping[str, inspect.Parameter]:
        """Those that can be given a value, by name."""
        kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        return {name: p for name, p in self._signature.parameters.items() if p.kind in kinds}

    @cached_property
    def takes_any(self) -> bool:
        """Returns whether it has `**kwargs`."""
        return any(p.kind is inspect.Parameter.VAR_KEYWORD for p in self._signature.parameters.values())

    def hint(self, parameter: str) -> Any:
        """Returns the annotation of a parameter."""
        return self._evaluated(self.parameters[parameter].annotation) if parameter in self.parameters else UNKNOWN

    @cached_property
    def returns(self) -> Any:
        """What a call gives: the class itself, or the annotation of a function."""
        return self.target if inspect.isclass(self.target) else self._evaluated(self._signature.return_annotation)

    @cached_property
    def _signature(self) -> inspect.Signature:
        try:
            return inspect.signature(self.target)
        except (TypeError, ValueError):  # a builtin without a signature
            return inspect.signature(lambda **anything: None)

    def _evaluated(self, annotation: Any) -> Any:
        """An annotation as a type; each by itself, so that one that cannot be evaluated does not cost the others."""
        if annotation is inspect.Signature.empty:
            return UNKNOWN
        known = dict(getattr(inspect.unwrap(self.target), "__globals__", {}))
        for home in reversed(inspect.getmro(self.target)) if inspect.isclass(self.target) else [self.target]:
            known |= vars(sys.modules[home.__module__])
        try:
            return typing.get_type_hints(types.SimpleNamespace(__annotations__={"x": annotation}), globalns=known)["x"]
        except Exception:  # an annotation may be any expression, and fail in any way
            return UNKNOWN


def why_not_a_constructor(target: Any) -> str:
    """Returns the reason why gin may not name this, or ''."""
    if inspect.ismodule(target):
        return "is a module, not a constructor"
    if not inspect.isclass(target) and not inspect.isroutine(target):
        return f"is a value ({type(target).__name__}), not a constructor"
    if getattr(target, "_is_protocol", False) or inspect.isabstract(target):
        return "is an interface, which cannot be constructed"
    return ""
