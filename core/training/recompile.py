"""Detects that a step compiles again after its first call, and names the inputs that changed.

Recompiling a large model takes minutes on every host. The usual cause is one array with another shape, dtype, weak type
or sharding. Compilations on this thread are counted, which is free; inputs are compared only if the count changed.
"""

from __future__ import annotations

import inspect
import threading
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax

from core import units

_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"

_compilations = threading.local()


def _count(event: str, duration_secs: float, **_: Any) -> None:
    if event == _COMPILE_EVENT:
        _compilations.count = getattr(_compilations, "count", 0) + 1


jax.monitoring.register_event_duration_secs_listener(_count)


class RecompilationError(RuntimeError):
    """A step compiled again after its first call."""


class OnceCompiled:
    """A jitted function that may compile in its first call only.

    Attributes:
      recompilations: number of later calls that compiled.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        on_recompile: Literal["raise", "warn"] = "raise",
        named_by: Callable[..., Any] | None = None,
    ):
        """Wraps `function`, whose arguments may be donated.

        Args:
          function: jitted, or compiled from a jitted function.
          on_recompile: what to do after a call that compiled. An input that a compiled function refuses always raises.
          named_by: the function whose parameters name the inputs; None: `function`.
        """
        assert on_recompile in ("raise", "warn"), on_recompile
        self.recompilations = 0
        self._function, self._named_by = function, named_by or function
        self._raises = on_recompile == "raise"
        self._expected: Mapping[str, str] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function. Raises RecompilationError, or warns, when it compiled again."""
        if self._expected is None:
            self._expected = self._describe(args, kwargs)
            return self._function(*args, **kwargs)
        before = getattr(_compilations, "count", 0)
        try:
            output = self._function(*args, **kwargs)
        except (TypeError, ValueError) as error:  # how a compiled function refuses other inputs
            changes = _changes(self._expected, self._describe(args, kwargs))
            if not isinstance(self._function, jax.stages.Compiled) or not changes:
                raise
            raise RecompilationError(self._message("would have to be compiled again", changes)) from error
        if getattr(_compilations, "count", 0) != before:
            self._report(self._expected, self._describe(args, kwargs))
        return output

    def _describe(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, str]:
        """Returns the properties of every input leaf that compilation depends on; donated arrays still have them."""
        named = _bind(self._named_by, args, kwargs)
        leaves, _ = jax.tree_util.tree_flatten_with_path(named)
        return {path[0].key + jax.tree_util.keystr(path[1:]): _kind(leaf) for path, leaf in leaves}

    def _report(self, expected: Mapping[str, str], actual: Mapping[str, str]) -> None:
        self.recompilations += 1
        lines = _changes(expected, actual) or ["no input changed: a configuration value or the mesh in scope did"]
        message = self._message("compiled again after its first call", lines)
        if self._raises:
            raise RecompilationError(message)
        warnings.warn(message, stacklevel=3)

    def _message(self, what: str, changes: list[str]) -> str:
        listed = "\n  ".join(units.shortened(changes, most=20))
        name = getattr(self._named_by, "__name__", "the step")
        return f"{name} {what}; what differs from the first call:\n  {listed}"


def _bind(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments by parameter name, or by position where the function tells no signature."""
    try:
        return dict(inspect.signature(function).bind(*args, **kwargs).arguments)
    except (TypeError, ValueError):
        return {f"argument {index}": value for index, value in enumerate(args)} | dict(kwargs)


def _kind(leaf: Any) -> str:
    if not isinstance(leaf, jax.Array):
        return f"{type(leaf).__name__} {getattr(leaf, 'dtype', '')}{list(getattr(leaf, 'shape', ()))}"
    aval = jax.typeof(leaf)
    weak = ", weak type" if aval.weak_type else ""
    committed = "" if leaf.committed else ", not committed to devices"
    return f"{aval.dtype}{list(aval.shape)}{weak}, {_layout(leaf.sharding)}{committed}"


def _layout(sharding: jax.sharding.Sharding) -> str:
    if isinstance(sharding, jax.sharding.NamedSharding):
        return f"{sharding.spec} on mesh {dict(sharding.mesh.shape)} ({sharding.memory_kind})"
    return str(sharding)


def _changes(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    lines = [f"{name}: was {before[name]}, is missing" for name in before if name not in after]
    lines += [f"{name}: is new, {after[name]}" for name in after if name not in before]
    both = [name for name in before if name in after]
    return lines + [f"{name}: was {before[name]}, is {after[name]}" for name in both if before[name] != after[name]]
