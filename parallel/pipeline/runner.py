"""Runs layer stacks with a pipeline schedule: the interface to `core.stack`, with custom derivatives.

gpipe and circular run the whole forward pass, then the tail on all rows, as the scan does. They save the gathered
weights and inputs of layers for the backward pass. 1F1B computes gradients as soon as a microbatch has its loss, so its
forward rule computes both at once and saves the gradients.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from core import stack
from core.errors import UserError
from core.logical import Rules
from core.stack import Layer, LayerFn, Outputs, Side, Tail
from core.types import LossOutput
from parallel.pipeline import region
from parallel.pipeline.passes import Passes
from parallel.pipeline.schedules import OneFOneB, Schedule


def runner(schedule: Schedule, param_rules: Rules, activation_rules: Rules) -> stack.Runner:
    """Returns a runner of layer stacks over the mesh axis `stage`, for traces inside `jax.set_mesh`.

    Args:
      schedule: the schedule.
      param_rules, activation_rules: the strategy's tables.
    """

    def run(fn: LayerFn, stacked: Layer, x: Any, side: Side, tail: Tail | None) -> tuple[Any, Outputs]:
        sizes = jax.sharding.get_abstract_mesh().shape
        at = region.region(fn, param_rules, activation_rules)
        unit = math.prod(sizes[axis] for axis in at.rows) * schedule.num_microbatches
        if jax.tree.leaves(x)[0].shape[0] % unit:  # e.g. a prompt; rows of a training step have been checked
            return _without_pipeline(fn, tail, unit)(stacked, () if tail is None else tail.params, x, side)
        if len(jax.tree.leaves(x)) > 1 or jax.tree.leaves((stacked.inputs, fn.outputs)) or len({*fn.kinds}) > 1:
            raise UserError(
                "pipeline: layers with a tree as x, with layer_in, outputs or a pattern need a strategy without a "
                "pipeline"
            )
        return whole(fn, stacked, x, side, tail and Tail(lambda *args: tail.fn(*args, ()), tail.params)), Outputs()

    def whole(fn: LayerFn, stacked: Layer, x: jax.Array, side: Side, tail: Tail | None) -> Any:
        sizes = jax.sharding.get_abstract_mesh().shape
        at = region.region(fn, param_rules, activation_rules)
        passes = Passes(schedule, at, fn, sizes["stage"])
        if isinstance(schedule, OneFOneB):
            if tail is not None and _gives_loss(tail, x, side):
                return _loss_and_gradients(passes, tail)(stacked.params, tail.params, x, stacked.key, side)
            y = _forward_alone(passes)(stacked.params, x, stacked.key, side)
        else:
            y = _two_passes(passes)(stacked.params, x, stacked.key, side)
        return y if tail is None else tail.fn(tail.params, y, side)

    return run


def _two_passes(passes: Passes) -> Any:
    """Returns the layers as a function of (params, x, keys, side) with a custom backward pass."""

    @jax.custom_vjp
    def call(params: Any, x: jax.Array, keys: Any, side: Side) -> jax.Array:
        return passes.forward(params, x, keys, side, save="nothing")[0]

    def forward(*args: Any) -> tuple[jax.Array, tuple]:
        params, x, keys, side = _values(args)
        y, gathered, kept = passes.forward(params, x, keys, side, save=passes.schedule.save)
        return y, (gathered, keys, kept, side)

    def backward(saved: tuple, dy: Any) -> tuple:
        whole, keys, kept, side = saved
        return *passes.backward(whole, keys, kept, side, _dense(dy)), None, None

    call.defvjp(forward, backward, symbolic_zeros=True)
    return call


def _loss_and_gradients(passes: Passes, tail: Tail) -> Any:
    """Returns layers and tail as a function of (params, tail.params, x, keys, side).

    The forward rule of the derivative computes them, because 1F1B interleaves forward and backward passes.
    """

    @jax.custom_vjp
    def call(params: Any, head: Any, x: jax.Array, keys: Any, side: Side) -> LossOutput:
        return tail.fn(head, passes.forward(params, x, keys, side, save="nothing")[0], side)

    def forward(*args: Any) -> tuple[LossOutput, tuple]:
        params, head, x, keys, side = _values(args)
        return passes.loss_and_gradients(params, Tail(tail.fn, head), x, keys, side)

    def backward(grads: tuple, by: LossOutput) -> tuple:
        if any(not isinstance(a, SymbolicZero) for a in jax.tree.leaves((by.metrics, by.extras))):
            raise UserError(
                "1F1B: only loss_sum of the tail's result can be differentiated; add the other terms to it, or use "
                "schedules.gpipe"
            )
        scale = _dense(by.loss_sum)
        return *jax.tree.map(lambda g: (g * scale).astype(g.dtype), grads), None, None

    call.defvjp(forward, backward, symbolic_zeros=True)
    return call


def _gives_loss(tail: Tail, x: jax.Array, side: Side) -> bool:
    """Returns whether the tail returns a LossOutput.

    Raises:
      UserError: it cannot be summed over microbatches, or its parameters cannot be differentiated.
    """
    out = jax.eval_shape(tail.fn, tail.params, x, side)
    if not isinstance(out, LossOutput):
        return False
    if jax.tree.leaves(out.extras):
        raise UserError(
            "1F1B: the tail returns a LossOutput with extras, which are per row and cannot be summed over "
            "microbatches: add them to the result of the stack, or use schedules.gpipe or schedules.circular"
        )
    fixed = [
        f"{jax.tree_util.keystr(path)} {a.dtype}{list(a.shape)}".strip()
        for path, a in jax.tree_util.tree_leaves_with_path(tail.params)
        if not jnp.issubdtype(a.dtype, jnp.floating)
    ]
    if fixed:
        raise UserError(
            f"1F1B: tail.params has arrays without a gradient ({', '.join(fixed)}): pass per-row arrays through side, "
            "and create constants inside the tail"
        )
    return True


def _forward_alone(passes: Passes) -> Any:
    """Returns the layers without a gradient, for stacks where 1F1B has no loss as the tail."""
    return _without_gradient(
        lambda params, x, keys, side: passes.forward(params, x, keys, side, save="nothing")[0],
        "1F1B: the backward pass of a microbatch starts before the forward pass of the next one, so the head and the "
        "loss must be the stack's tail and return a LossOutput: core.stack.layer_stack(..., tail=Tail(fn, params)). "
        "Or use schedules.gpipe or schedules.circular",
    )


def _without_pipeline(fn: LayerFn, tail: Tail | None, unit: int) -> Any:
    """Returns the layers without a pipeline and without a gradient, for rows that do not divide into microbatches."""
    return _without_gradient(
        lambda stacked, head, x, side: stack.scan_runner(fn, stacked, x, side, tail and Tail(tail.fn, head)),
        f"pipeline: the rows of the layer stack do not divide into microbatches on every chip; train on a multiple of "
        f"{unit} rows",
    )


def _without_gradient(fn: Any, why_not: str) -> Any:
    call = jax.custom_vjp(fn)

    def forward(*args: Any) -> Any:
        raise UserError(why_not)

    call.defvjp(forward, lambda saved, dy: saved, symbolic_zeros=True)
    return call


def _values(args: tuple) -> tuple:
    """Returns the arguments of a derivative rule as arrays.

    Raises:
      UserError: the side, which is the last argument, depends on parameters.
    """
    leaves = jax.tree_util.tree_leaves_with_path(args[-1])
    found = [jax.tree_util.keystr(path) for path, leaf in leaves if leaf.perturbed]
    if found:
        raise UserError(
            f"pipeline: the side of the layer stack depends on parameters ({', '.join(found)}), and a pipeline does "
            "not compute its gradient: make it depend on the batch only, or add it to x"
        )
    return jax.tree.map(lambda a: a.value, args)


def _dense(cotangent: Any) -> Any:
    return jnp.zeros(cotangent.shape, cotangent.dtype) if isinstance(cotangent, SymbolicZero) else cotangent
