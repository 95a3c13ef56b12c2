"""A schedule as a runner of layer stacks: the seam to `core.stack`, and the rules for gradients.

gpipe and circular run the whole forward pass, then the tail on all rows, as the scan does; what they keep for the
backward pass is what their rule says: weights as gathered, and inputs. 1F1B has gradients as soon as it has the loss,
so its rule computes both at once and keeps gradients.
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
from core.stack import Layer, LayerFn, Side, Tail
from core.types import LossOutput
from parallel.pipeline import region
from parallel.pipeline.passes import Passes
from parallel.pipeline.schedules import OneFOneB, Schedule


def runner(schedule: Schedule, param_rules: Rules, activation_rules: Rules) -> stack.Runner:
    """A runner of layer stacks over the mesh axis `stage`; for traces inside `jax.set_mesh`.

    Args:
      schedule: when a stage does what.
      param_rules, activation_rules: the strategy's tables.
    """

    def run(fn: LayerFn, stacked: Layer, x: jax.Array, side: Side, tail: Tail | None) -> Any:
        sizes = jax.sharding.get_abstract_mesh().shape
        at = region.region(fn, param_rules, activation_rules)
        unit = math.prod(sizes[axis] for axis in at.rows) * schedule.num_microbatches
        if x.shape[0] % unit:  # of a prompt; the rows of a step are held to divide
            return _one_by_one(fn, tail, unit)(stacked, () if tail is None else tail.params, x, side)
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
    """The layers as a function of (params, x, keys, side), with a backward pass of its own."""

    @jax.custom_vjp
    def call(params: Any, x: jax.Array, keys: Any, side: Side) -> jax.Array:
        return passes.forward(params, x, keys, side, save="nothing")[0]

    def forward(*args: Any) -> tuple[jax.Array, tuple]:
        params, x, keys, side = _values(args)
        y, whole, kept = passes.forward(params, x, keys, side, save=passes.schedule.save)
        return y, (whole, keys, kept, side)

    def backward(saved: tuple, dy: Any) -> tuple:
        whole, keys, kept, side = saved
        return *passes.backward(whole, keys, kept, side, _dense(dy)), None, None

    call.defvjp(forward, backward, symbolic_zeros=True)
    return call


def _loss_and_gradients(passes: Passes, tail: Tail) -> Any:
    """Layers and tail as a function of (params, tail.params, x, keys, side), whose forward rule has the gradients."""

    @jax.custom_vjp
    def call(params: Any, head: Any, x: jax.Array, keys: Any, side: Side) -> LossOutput:
        return tail.fn(head, passes.forward(params, x, keys, side, save="nothing")[0], side)

    def forward(*args: Any) -> tuple[LossOutput, tuple]:
        params, head, x, keys, side = _values(args)
        return passes.both(params, Tail(tail.fn, head), x, keys, side)

    def backward(grads: tuple, by: LossOutput) -> tuple:
        if any(not isinstance(a, SymbolicZero) for a in jax.tree.leaves((by.metrics, by.extras))):
            raise UserError(
                "1F1B: of what a tail returns, loss_sum alone has a gradient; add the others to it, or gpipe"
            )
        scale = _dense(by.loss_sum)
        return *jax.tree.map(lambda g: (g * scale).astype(g.dtype), grads), None, None

    call.defvjp(forward, backward, symbolic_zeros=True)
    return call


def _gives_loss(tail: Tail, x: jax.Array, side: Side) -> bool:
    """Whether the tail gives what 1F1B differentiates; refuses what it could not add up over microbatches."""
    out = jax.eval_shape(tail.fn, tail.params, x, side)
    if not isinstance(out, LossOutput):
        return False
    if jax.tree.leaves(out.extras):
        raise UserError(
            "1F1B: the tail gives a LossOutput with extras, which belong to rows and have no sum over microbatches: "
            "add them to what the stack returns, or take schedules.gpipe or schedules.circular"
        )
    fixed = [
        f"{jax.tree_util.keystr(path)} {a.dtype}{list(a.shape)}".strip()
        for path, a in jax.tree_util.tree_leaves_with_path(tail.params)
        if not jnp.issubdtype(a.dtype, jnp.floating)
    ]
    if fixed:
        raise UserError(
            f"1F1B: tail.params has arrays without a gradient ({', '.join(fixed)}): pass what belongs to rows through "
            "side, and make constants inside the tail"
        )
    return True


def _forward_alone(passes: Passes) -> Any:
    """The layers where 1F1B cannot find a loss behind them: fine, as long as nobody wants a gradient."""
    return _without_gradient(
        lambda params, x, keys, side: passes.forward(params, x, keys, side, save="nothing")[0],
        "1F1B: a microbatch's backward pass starts before the next one's forward pass, so the head and the loss "
        "must be the stack's tail and give a LossOutput: core.stack.layer_stack(..., tail=Tail(fn, params)). Or "
        "take schedules.gpipe or schedules.circular",
    )


def _one_by_one(fn: LayerFn, tail: Tail | None, unit: int) -> Any:
    """The layers on rows that are no microbatches, without a pipeline: slow, and only to look at a prompt."""
    return _without_gradient(
        lambda stacked, head, x, side: stack.scan_runner(fn, stacked, x, side, tail and Tail(tail.fn, head)),
        f"pipeline: the layer stack is to be trained on rows that do not divide into microbatches on every chip; give "
        f"it a multiple of {unit} rows",
    )


def _without_gradient(fn: Any, why_not: str) -> Any:
    call = jax.custom_vjp(fn)

    def forward(*args: Any) -> Any:
        raise UserError(why_not)

    call.defvjp(forward, lambda saved, dy: saved, symbolic_zeros=True)
    return call


def _values(args: tuple) -> tuple:
    """Arguments of a rule as arrays; refuses a side, the last of them, that depends on parameters."""
    leaves = jax.tree_util.tree_leaves_with_path(args[-1])
    found = [jax.tree_util.keystr(path) for path, leaf in leaves if leaf.perturbed]
    if found:
        raise UserError(
            f"pipeline: the side of the layer stack depends on parameters ({', '.join(found)}), and a pipeline has no "
            "gradient for it: let it depend on the batch alone, or add it to x"
        )
    return jax.tree.map(lambda a: a.value, args)


def _dense(cotangent: Any) -> Any:
    return jnp.zeros(cotangent.shape, cotangent.dtype) if isinstance(cotangent, SymbolicZero) else cotangent
