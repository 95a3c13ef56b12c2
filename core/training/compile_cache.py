"""Enables JAX's persistent compilation cache, so that a restarted run need not compile, and counts compilations.

Host 0 writes the cache and all hosts read it, on a disk or in a bucket. Entries are keyed by the program, the
compiler's version and options, and the kind of chip, so an outdated entry is never used.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
from jax.experimental.compilation_cache import compilation_cache

from core import paths

_COMPILED = "/jax/core/compile/backend_compile_duration"  # reading from the cache included
_FOUND = "/jax/compilation_cache/cache_hits"


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
    """Caches compiled programs in `folder` (local or gs://) from now on; None disables the cache.

    Raises:
      UserError: `folder` is not a valid path.
    """
    compilation_cache.reset_cache()
    jax.config.update("jax_compilation_cache_dir", None if folder is None else str(paths.resolve(folder)))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)


def totals() -> Totals:
    """Returns the compilations so far."""
    return _totals
