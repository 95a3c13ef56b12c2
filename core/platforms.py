"""Chooses an implementation by the platform of the devices that compute."""

import contextlib
from collections.abc import Callable
from typing import Any

import jax

_platform = jax.make_user_context(None)  # the platform if it is known; part of the key of every trace


def use(platform: str | None) -> contextlib.AbstractContextManager:
    """Context in which `by_platform` traces the implementation for one platform alone.

    Args:
      platform: as in `core.slices.Chip.platform`: `tpu`, `cuda` or `cpu`. None: implementations for every platform
        are traced. Simulated TPU slices need a platform, so that what cannot be traced for TPUs is found on a CPU.
    """
    return _platform(platform)


def by_platform(*operands: Any, default: Callable[..., Any], **implementations: Callable[..., Any]) -> Any:
    """Calls the implementation for the platform set by `use`, or `default`; returns its result.

    If no platform is set, calls `jax.lax.platform_dependent`, which traces every implementation and so takes longer.
    """
    if _platform.value is None:
        return jax.lax.platform_dependent(*operands, **implementations, default=default)
    return implementations.get(_platform.value, default)(*operands)
