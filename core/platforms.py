"""Chooses an implementation by the platform of the devices that compute."""

import contextlib
from collections.abc import Callable
from typing import Any

import jax

_platform = jax.make_user_context(None)  # the platform if it is known; part of the key of every trace


def use(platform: str | None) -> contextlib.AbstractContextManager:
    """Context in which `by_platform` traces the implementation for one platform alone.

    Args:
      platform: `tpu`, `cuda` or `cpu`; None: all.
    """
    return _platform(platform)


def by_platform(*operands: Any, default: Callable[..., Any], **implementations: Callable[..., Any]) -> Any:
    """Calls the implementation for the platform set by `use`, or `default`."""
    if _platform.value is None:
        return jax.lax.platform_dependent(*operands, **implementations, default=default)
    return implementations.get(_platform.value, default)(*operands)
