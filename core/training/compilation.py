"""Counts compilations, caches compiled programs, and detects a step that compiles again."""

import functools
import inspect
import os
import tempfile
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.experimental.compilation_cache import compilation_cache

from core import units
from core.files import paths

_COMPILED = "/jax/core/compile/backend_compile_duration"  # reading from the cache included
_FOUND = "/jax/compilation_cache/cache_hits"
_USER_BYTES = 2**30  # limit on the programs in the user's cache


class Totals(NamedTuple):
    """The compilations of this process since it started.

    Attributes:
      programs: number of programs, including those found in the cache.
      found: number of programs found in the cache.
      seconds: time spent compiling and reading the cache.
    """

    programs: int = 0
    found: int = 0
    seconds: float = 0.0


_totals = Totals()
_is_cached = False
_of_thread = threading.local()


def _count_compiled(event: str, duration_secs: float, **_: Any) -> None:
    global _totals
    if event == _COMPILED:
        _of_thread.compilations = getattr(_of_thread, "compilations", 0) + 1
        _totals = _totals._replace(programs=_totals.programs + 1, seconds=_totals.seconds + duration_secs)


def _count_found(event: str, **_: Any) -> None:
    global _totals
    if event == _FOUND:
        _totals = _totals._replace(found=_totals.found + 1)


jax.monitoring.register_event_duration_secs_listener(_count_compiled)
jax.monitoring.register_event_listener(_count_found)


def totals() -> Totals:
    """Returns the compilations of this process so far."""
    return _totals


def cached_programs(folder: str) -> int:
    """Returns the number of compiled programs in a cache folder."""
    place = paths.resolve(folder)
    return sum(name.endswith("-cache") for name in paths.sizes(place)) if place.exists() else 0


@functools.cache
def found_at_start(folder: str) -> int:
    """Returns how many compiled programs a folder had when this was first called for it."""
    return cached_programs(folder)


def use_cache(folder: str) -> None:
    """Caches compiled programs in `folder` (local or gs://) from now on."""
    global _is_cached
    _is_cached = True
    found_at_start(folder)
    compilation_cache.reset_cache()
    jax.config.update("jax_compilation_cache_dir", str(paths.resolve(folder)))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)


def use_cache_of_user() -> None:
    """Caches compiled programs in the user's cache folder, up to 1 GiB.

    A folder that JAX_COMPILATION_CACHE_DIR or `use_cache` has named stays in use.
    """
    if _is_cached or os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        return
    try:
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        folder = Path(home) / "renga" / "programs"
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except (OSError, RuntimeError):  # RuntimeError: there is no home
        return
    jax.config.update("jax_compilation_cache_max_size", _USER_BYTES)
    use_cache(str(folder))


class RecompilationError(RuntimeError):
    """A step compiled again after its first call, or would have to."""


class OnceCompiled:
    """A jitted function that raises RecompilationError if it compiles again after its first call."""

    def __init__(self, function: Callable[..., Any], *, named_by: Callable[..., Any] | None = None):
        """`named_by` is the function whose parameters name the inputs in errors; None: `function`."""
        self._function, self._named_by = function, named_by or function
        self._expected: Mapping[str, str] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._expected is None:
            self._expected = self._describe(args, kwargs)
            return self._function(*args, **kwargs)
        before = getattr(_of_thread, "compilations", 0)
        try:
            output = self._function(*args, **kwargs)
        except (TypeError, ValueError) as error:  # how a compiled function refuses other inputs
            changes = _changes(self._expected, self._describe(args, kwargs))
            if not isinstance(self._function, jax.stages.Compiled) or not changes:
                raise
            raise RecompilationError(self._message("would have to be compiled again", changes)) from error
        if getattr(_of_thread, "compilations", 0) != before:
            changes = _changes(self._expected, self._describe(args, kwargs))
            changes = changes or ["no input changed: a configuration value or the mesh in scope did"]
            raise RecompilationError(self._message("compiled again after its first call", changes))
        return output

    def _describe(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, str]:
        named = _bind(self._named_by, args, kwargs)
        leaves, _ = jax.tree_util.tree_flatten_with_path(named)
        return {path[0].key + jax.tree_util.keystr(path[1:]): _kind(leaf) for path, leaf in leaves}

    def _message(self, what: str, changes: list[str]) -> str:
        listed = "\n  ".join(units.shortened(changes, most=20))
        name = getattr(self._named_by, "__name__", "the step")
        return f"{name} {what}; what differs from the first call:\n  {listed}"


def _bind(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
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
