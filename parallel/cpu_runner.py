"""Runs layer stacks (`core.stack`) on slices of CPUs."""

import dataclasses
from typing import Any

import jax

from core import logical, stack


def cpu_runner(
    fn: stack.LayerFn, stacked: stack.Layer, x: stack.Stream, side: stack.Side, tail: stack.Tail | None
) -> tuple[Any, stack.Outputs]:
    """Runs a small stack (`LayerFn.is_small`) without a loop, and others with a scan.

    On CPUs a loop copies what each layer saves for the backward pass.

    Args:
      fn, stacked, x, side, tail: as in `core.stack.scan_runner`.
    """
    if not fn.is_small:
        return stack.scan_runner(fn, stacked, x, side, tail)
    if jax.sharding.get_abstract_mesh().size > 1:
        fn = _with_weights_as_stored(fn)
    return stack.unrolled_runner(fn, stacked, x, side, tail)


def _with_weights_as_stored(fn: stack.LayerFn) -> stack.LayerFn:
    """Without this, XLA gathers slices of the stack, [1, ...], and copies every gathered matrix once more."""
    axes = fn.axes()

    def rematerialized(kind: stack.Kind, in_loop: bool) -> Any:
        call = fn.rematerialized(kind, in_loop)

        def one_layer(layer: stack.Layer, x: stack.Stream, side: stack.Side) -> tuple[stack.Stream, stack.Outputs]:
            return call(layer._replace(params=jax.tree.map(logical.constrain_stored, layer.params, axes)), x, side)

        return one_layer

    return dataclasses.replace(fn, rematerialized=rematerialized)
