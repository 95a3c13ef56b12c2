"""A schedule as a runner of layer stacks: the seam to `core.stack`, and the rules for gradients.

gpipe and circular run the whole forward pass, then the tail on all rows, as the scan does. What they keep for the
backward pass is what their custom rule says: weights as gathered, and inputs.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.sharding import PartitionSpec as P

from core import stack
from core.logical import Rules
from core.stack import Layer, LayerFn, Side, Tail
from parallel.pipeline import region, sweep
from parallel.pipeline.region import Region, merge_rows, over_stages, split_rows
from parallel.pipeline.schedules import Schedule
from parallel.pipeline.stage import STAGE, Stage


def runner(schedule: Schedule, param_rules: Rules, activation_rules: Rules) -> stack.Runner:
    """A runner of layer stacks over the mesh axis `stage`; for traces inside `jax.set_mesh`.

    Args:
      schedule: when a stage does what.
      param_rules, activation_rules: the strategy's tables.
    """

    def run(fn: LayerFn, stacked: Layer, x: jax.Array, side: Side, tail: Tail | None) -> Any:
        at = region.region(fn, param_rules, activation_rules)
        y = _differentiable(_Passes(schedule, at, fn))(stacked.params, x, stacked.key, side)
        return y if tail is None else tail.fn(tail.params, y, side)

    return run


def _differentiable(passes: _Passes) -> Any:
    @jax.custom_vjp
    def call(params: Any, x: jax.Array, keys: Any, side: Side) -> jax.Array:
        return passes.forward(params, x, keys, side, save="nothing")[0]

    def forward(params: Any, x: Any, keys: Any, side: Side) -> tuple[jax.Array, tuple]:
        refuse_differentiated(side)
        params, x, keys, side = jax.tree.map(lambda a: a.value, (params, x, keys, side))
        y, whole, kept = passes.forward(params, x, keys, side, save=passes.schedule.save)
        return y, (whole, keys, kept, side)

    def backward(saved: tuple, dy: Any) -> tuple:
        return *passes.backward(*saved, dense(dy)), None, None

    call.defvjp(forward, backward, symbolic_zeros=True)
    return call


class _Passes:
    """The two passes over a stack of layers."""

    def __init__(self, schedule: Schedule, at: Region, fn: LayerFn):
        self.schedule, self._at, self._fn = schedule, at, fn

    def forward(self, params: Any, x: jax.Array, keys: Any, side: Side, *, save: str) -> tuple[jax.Array, Any, Any]:
        """What leaves the last layer, [B, ...]; weights as gathered; what is kept, [S, M R, k, rows, ...]."""

        def local(params: Any, keys: Any, x: jax.Array, side: Side) -> tuple[jax.Array, Any, Any]:
            whole = self._at.gather(params)
            y, kept = over_stages(
                functools.partial(self._forward, save=save),
                in_specs=(P(STAGE), P(STAGE), P(), P()),
                out_specs=(P(), P(STAGE)),
            )(whole, keys, self._split(x), self._split(side))
            return merge_rows(y), whole, kept

        rows = self._at.by_rows
        return self._at.run(local, in_specs=(self._at.stored, P(), rows, rows), out_specs=(rows, P(), _kept(rows)))(
            params, keys, x, side
        )

    def backward(self, whole: Any, keys: Any, kept: Any, side: Side, dy: jax.Array) -> tuple[Any, jax.Array]:
        """Gradients of the parameters as they are stored, and of what entered the first layer, [B, ...]."""

        def local(whole: Any, keys: Any, kept: Any, side: Side, dy: jax.Array) -> tuple[Any, jax.Array]:
            dx, grads = over_stages(
                self._backward,
                in_specs=(P(STAGE), P(STAGE), P(STAGE), P(), P()),
                out_specs=(P(), P(STAGE)),
            )(whole, keys, kept, self._split(side), self._split(dy))
            return self._at.reduce(grads), merge_rows(dx)

        rows = self._at.by_rows
        return self._at.run(local, in_specs=(P(), P(), _kept(rows), rows, rows), out_specs=(self._at.stored, rows))(
            whole, keys, kept, side, dy
        )

    def _forward(self, whole: Any, keys: Any, xs: jax.Array, sides: Side, *, save: str) -> tuple[jax.Array, Any]:
        y, kept = sweep.forward(self.schedule, self._stage(whole, keys, sides, save), xs)
        return y, jax.tree.map(lambda a: a[None], kept)

    def _backward(self, whole: Any, keys: Any, kept: Any, sides: Side, dys: jax.Array) -> tuple[jax.Array, Any]:
        stage = self._stage(whole, keys, sides, self.schedule.save)
        return sweep.backward(self.schedule, stage, jax.tree.map(lambda a: a[0], kept), dys)

    def _stage(self, whole: Any, keys: Any, sides: Side, save: str) -> Stage:
        depth = jax.tree.leaves(whole)[0].shape[0] // self.schedule.repeats
        return Stage(self._fn, Layer(whole, keys), sides, depth, save)

    def _split(self, tree: Any) -> Any:
        return jax.tree.map(lambda a: split_rows(a, self.schedule.num_microbatches), tree)


def _kept(rows: P) -> P:
    """Spec of what is kept, [S, M R, k, rows, ...]."""
    return P(None, None, None, *rows)


def dense(cotangent: Any) -> Any:
    """Zeros as arrays."""
    return jnp.zeros(cotangent.shape, cotangent.dtype) if isinstance(cotangent, SymbolicZero) else cotangent


def refuse_differentiated(side: Side) -> None:
    """Raises ValueError where something that travels with the rows depends on parameters."""
    found = [jax.tree_util.keystr(path) for path, leaf in jax.tree_util.tree_leaves_with_path(side) if leaf.perturbed]
    if found:
        raise ValueError(
            f"pipeline: the side of the layer stack depends on parameters ({', '.join(found)}), and a pipeline has no "
            "gradient for it: let it depend on the batch alone, or add it to x"
        )
