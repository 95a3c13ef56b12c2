"""Compiled programs are kept in a folder, so that a run that starts again compiles nothing; what it took is counted.

JAX's own cache does the work: host 0 writes, all hosts read, on a disk or in a bucket. What a program is (its text, the
compiler's version and options, the kind of chip) is its name there, so an old one is never taken for a new one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
from jax.experimental.compilation_cache import compilation_cache

from core import paths

_COMPILED = "/jax/core/compile/backend_compile_duration"  # reading from the cache included
_FOUND = "/jax/compilation_cache/cache_hits"


class Totals(NamedTuple):
    """What this process has compiled since it started.

    Attributes:
      programs: how many, found ones included.
      found: how many of them were kept from before.
      seconds: spent in the compiler and in reading what was kept.
    """

    programs: int = 0
    found: int = 0
    seconds: float = 0.0


_totals = Totals()


def _count_compiled(event: str, duration_secs: float, **_: Any) -> None:
    global _totals
    if event == _COMPILED:
        programs, seconds = _totals.programs + 1, _totals.seconds + duration_secs
        _totals = _totals._replace(programs=programs, seconds=seconds)


def _count_found(event: str, **_: Any) -> None:
    global _totals
    if event == _FOUND:
        _totals = _totals._replace(found=_totals.found + 1)


jax.monitoring.register_event_duration_secs_listener(_count_compiled)
jax.monitoring.register_event_listener(_count_found)


def use(folder: str | None) -> None:
    """Keeps every program compiled from now on in `folder` (local or gs://), and takes from there; None for neither.

    Raises:
      ValueError: `folder` is no path that can be.
    """
    compilation_cache.reset_cache()
    jax.config.update("jax_compilation_cache_dir", None if folder is None else str(paths.resolve(folder)))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)


def totals() -> Totals:
    """What has been compiled so far."""
    return _totals
