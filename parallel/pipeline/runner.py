"""Runs layer stacks with a pipeline schedule: the interface to `core.stack`, with custom derivatives.

gpipe and circular run the whole forward pass, then what follows the layers (norm, logits, loss). 1F1B and the schedules
derived from it compute gradients as soon as a microbatch has its loss.
"""

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from core import logical, stack
from core.errors import UserError
from core.logical import Rules
from core.stack import Layer, LayerFn, Outputs, Side, Stream, Tail
from core.types import LossOutput
from parallel import derivative_rules
from parallel.pipeline import region
from parallel.pipeline.passes import Passes
from parallel.pipeline.schedules import OneFOneB, Schedule
from parallel.pipeline.stage import STAGE, Traveling


def runner(
    schedule: Schedule, param_rules: Rules, activation_rules: Rules, *, spans_slices: bool = False
) -> stack.Runner:
    """Returns a runner of layer stacks over `stage`; models must be traced inside `jax.set_mesh`.

    Args:
      param_rules, activation_rules: the strategy's tables.
      spans_slices: whether stages are on several slices.
    """

    def run(fn: LayerFn, stacked: Layer, x: Stream, side: Side, tail: Tail | None) -> tuple[Any, Outputs]:
        if fn.is_first:
            with _rows_over_stages(param_rules, activation_rules, jax.tree.leaves(x)[0].shape[0]):
                return stack.scan_runner(fn, stacked, x, side, tail)
        fn, weights, fixed = derivative_rules.differentiated(fn, stacked)
        sizes = jax.sharding.get_abstract_mesh().shape
        at = region.region(fn, weights, schedule, param_rules, activation_rules, spans_slices)
        rows, unit = (
            jax.tree.leaves(x)[0].shape[0],
            math.prod(sizes[axis] for axis in at.rows) * schedule.num_microbatches,
        )
        undivided = f"pipeline: {fn.undivided}" if fn.undivided else ""
        why_not = _stacked_outputs(fn) or undivided or _undivided_rows(rows, unit)
        if why_not:
            head = () if tail is None else tail.params
            return _without_pipeline(fn, tail, why_not)(weights, fixed, head, x, side)
        _check_stream(x)
        passes = Passes(schedule, at, fn, sizes["stage"])
        if isinstance(schedule, OneFOneB):
            if tail is not None and _gives_loss(fn, tail, x, side):
                result, sums = _loss_and_gradients(passes, tail)(weights, tail.params, x, fixed, side)
                return result, Outputs(sums, fn.outputs.stacked)
            y, sums = _forward_alone(passes)(weights, x, fixed, side)
        else:
            y, sums = _two_passes(passes)(weights, x, fixed, side)
        return y if tail is None else tail.fn(tail.params, y, side, sums), Outputs(sums, fn.outputs.stacked)

    return run


@contextlib.contextmanager
def _rows_over_stages(param_rules: Rules, activation_rules: Rules, rows: int) -> Iterator[None]:
    """Context in which rows of the layers before the first stage are sharded over stages too, if they divide."""
    sizes = jax.sharding.get_abstract_mesh().shape
    over = (*logical.mesh_axes(activation_rules["batch"]), STAGE)
    automatic = tuple(axis for axis in over if axis in logical.automatic_axes())  # accumulation divided by the others
    if rows % logical.shards(automatic, sizes) == 0:
        with logical.sharding_rules({**activation_rules, "batch": over}, param_rules):
            yield
    else:
        yield


def _check_stream(x: Stream) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(x):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise UserError(
                f"pipeline: x{jax.tree_util.keystr(path)} of the layer stack is {leaf.dtype}{list(leaf.shape)}, and "
                "stages exchange gradients of x: pass arrays that do not change through side, or convert to a "
                "floating-point dtype"
            )


def _stacked_outputs(fn: LayerFn) -> str:
    if not jax.tree.leaves(fn.outputs.stacked):
        return ""
    return (
        "pipeline: a layer stack with stacked outputs runs without a pipeline, and has no gradient then: every "
        "microbatch would leave its outputs on the stage of the layer. For training, declare them 'summed' (statistics "
        "of each layer: multiply by a row of the identity matrix, as layer_in), put what belongs to rows into x, or "
        "use a strategy without a pipeline"
    )


def _undivided_rows(rows: int, unit: int) -> str:
    if rows % unit == 0:  # the rows of a training step have been checked to divide; those of a prompt may not
        return ""
    return (
        "pipeline: the rows of the layer stack do not divide into microbatches on every chip; train on a multiple of "
        f"{unit} rows"
    )


def _two_passes(passes: Passes) -> Any:
    @jax.custom_vjp
    def call(weights: Any, x: Stream, fixed: Layer, side: Side) -> tuple[Stream, Any]:
        return tuple(passes.forward(weights, x, fixed, side, None)[0])

    def forward(*args: Any) -> tuple[tuple[Stream, Any], tuple]:
        trained = derivative_rules.trained(args[0])
        weights, x, fixed, side = derivative_rules.values(args, what="pipeline")
        y, gathered, kept = passes.forward(weights, x, fixed, side, trained)
        return tuple(y), (gathered, fixed, kept, side, trained)

    def backward(saved: tuple, dy: Any) -> tuple:
        gathered, fixed, kept, side, trained = saved
        dy = Traveling(*jax.tree.map(derivative_rules.dense, dy))
        grads, dx = passes.backward(gathered, fixed, kept, side, dy, trained)
        return trained.fill(grads), dx, None, None

    call.defvjp(forward, backward, symbolic_zeros=True)
    return call


def _loss_and_gradients(passes: Passes, tail: Tail) -> Any:
    """The forward rule computes the gradients too, because 1F1B interleaves forward and backward passes."""

    @jax.custom_vjp
    def call(weights: Any, head: Any, x: Stream, fixed: Layer, side: Side) -> tuple[LossOutput, Any]:
        y, sums = passes.forward(weights, x, fixed, side, None)[0]
        return tail.fn(head, y, side, sums), sums

    def forward(*args: Any) -> tuple[tuple[LossOutput, Any], tuple]:
        masks = derivative_rules.trained(args[0]), derivative_rules.trained(args[1])
        weights, head, x, fixed, side = derivative_rules.values(args, what="pipeline")
        out, grads = passes.loss_and_gradients(weights, Tail(tail.fn, head), x, fixed, side, *masks)
        return out, (grads, masks)

    def backward(saved: tuple, cotangents: tuple[LossOutput, Any]) -> tuple:
        (grads, (trained, of_tail)), (by, sums) = saved, cotangents
        if any(not isinstance(a, SymbolicZero) for a in jax.tree.leaves((by.metrics, by.extras, sums))):
            raise UserError(
                "1F1B: only loss_sum of the tail's result can be differentiated; add the other terms to it (the tail "
                "has the summed outputs of the layers as its fourth argument), or use schedules.gpipe"
            )
        scale = derivative_rules.dense(by.loss_sum)
        dw, dhead, dx = jax.tree.map(lambda g: (g * scale).astype(g.dtype), grads)
        return trained.fill(dw), of_tail.fill(dhead), dx, None, None

    call.defvjp(forward, backward, symbolic_zeros=True)
    return call


def _gives_loss(fn: LayerFn, tail: Tail, x: Stream, side: Side) -> bool:
    out = jax.eval_shape(tail.fn, tail.params, x, side, fn.outputs.summed)
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
    return derivative_rules.without_gradient(
        lambda weights, x, fixed, side: tuple(passes.forward(weights, x, fixed, side, None)[0]),
        "1F1B: the backward pass of a microbatch starts before the forward pass of the next one, so the head and the "
        "loss must be the stack's tail and return a LossOutput: core.stack.layer_stack(..., tail=Tail(fn, params)). "
        "Or use schedules.gpipe or schedules.circular",
    )


def _without_pipeline(fn: LayerFn, tail: Tail | None, why_not: str) -> Any:
    def call(weights: Any, fixed: Layer, head: Any, x: Stream, side: Side) -> tuple[Any, Outputs]:
        return stack.scan_runner(fn, fixed._replace(params=weights), x, side, tail and Tail(tail.fn, head))

    return derivative_rules.without_gradient(call, why_not)
