"""Chooses what layers save for the backward pass and what they recompute (Chen et al. 2016, `jax.checkpoint`)."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core.primitives import sharding_constraint_p

from core.errors import UserError


def _all_but_layouts(primitive: Any, *_: Any, **__: Any) -> bool:
    """Results of sharding constraints differ from a saved array by their layout alone."""
    return primitive is not sharding_constraint_p


REMAT_POLICIES = {
    "none": _all_but_layouts,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "full": jax.checkpoint_policies.nothing_saveable,
}
REMAT_CHOICES = tuple(REMAT_POLICIES)


@dataclasses.dataclass(frozen=True)
class OnHost:
    """Names the arrays that each layer saves for its backward pass besides its input.

    Attributes:
      on_host: arrays kept in host memory until the backward pass; "input" is the layer's input.
      on_device: arrays that stay on the device.
    """

    on_host: tuple[str, ...]
    on_device: tuple[str, ...] = ()

    def __post_init__(self):
        for field in ("on_host", "on_device"):
            names = getattr(self, field)
            if not isinstance(names, tuple) or not all(isinstance(name, str) for name in names):
                raise UserError(f"OnHost.{field} = {names!r}: expected a tuple of checkpoint names, such as ('query',)")
        if both := set(self.on_host) & set(self.on_device):
            raise UserError(f"OnHost: {sorted(both)} are on the host and on the device: name each once")


_INPUT = "input"
Remat = str | tuple[str, ...] | OnHost  # a policy by name; names of what is saved, on the device or also on the host


def rematerialized(fn: Callable, remat: Remat, *, in_loop: bool) -> Callable:
    """Returns the layer `fn` with rematerialization (`jax.checkpoint`).

    Even with "none", a layer in a loop recomputes sharding constraints; otherwise the loop would save gathered weights.

    Args:
      remat: a name in `REMAT_POLICIES`, the checkpoint names of arrays to save, or an `OnHost`.
      in_loop: whether a loop runs the layer, so that `prevent_cse` is not needed.
    """
    if remat == "none" and not in_loop:
        return jax.jit(fn)
    if isinstance(remat, OnHost) and _INPUT in remat.on_host:
        return jax.checkpoint(_with_named_input(fn), policy=_policy(remat), prevent_cse=not in_loop)
    return jax.checkpoint(fn, policy=_policy(remat), prevent_cse=not in_loop)


def _with_named_input(fn: Callable) -> Callable:
    def named(layer: Any, x: Any, side: Any) -> Any:
        return fn(layer, jax.tree.map(lambda a: checkpoint_name(a, _INPUT), x), side)

    return named


def _policy(remat: Remat) -> Callable:
    if isinstance(remat, OnHost):
        return jax.checkpoint_policies.save_and_offload_only_these_names(
            names_which_can_be_saved=list(remat.on_device),
            names_which_can_be_offloaded=list(remat.on_host),
            offload_src="device",
            offload_dst="pinned_host",
        )
    return REMAT_POLICIES[remat] if isinstance(remat, str) else jax.checkpoint_policies.save_only_these_names(*remat)
