"""A stack of equal layers as one pure function over stacked parameters, executed by a runner.

`layer_stack(block, num_layers)(x, side)` has one parameter tree whose leaves start with a `layers` dimension. The model
does not decide how layers are executed: the default runner scans over them; a pipeline distributes them over chips and
splits the rows into microbatches. A block may therefore depend only on its parameters, on `x` and on `side`, arrays
that belong to the same rows (segment ids, positions). A block that closes over another array is refused, because a
runner could not split that array.

    x[0] = x;   x[l+1] = block(params[l], x[l], side);   result = tail(x[L], side)  or  x[L]

With `tail=` the head and the loss of a microbatch run directly after the last layer, as needed by schedules that start
the backward pass of one microbatch before the forward pass of the next. A tail returns sums over rows, which are added
over microbatches.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr

from core import logical, units
from core.errors import UserError

Side = Any  # pytree of [B, ...]


class Layer(NamedTuple):
    """The parameters of one layer and, if the model uses randomness, its random key."""

    params: Any  # leaves [...]; stacked: [L, ...]
    key: jax.Array | None  # []; stacked: [L]


class Tail(NamedTuple):
    """The computation after the last layer: head and loss.

    Attributes:
      fn: `fn(params, x, side) -> sums over rows`.
      params: arrays of the head; passed as an argument, because `fn` may not close over arrays.
    """

    fn: Callable[[Any, jax.Array, Side], Any]
    params: Any


@dataclasses.dataclass(frozen=True)
class LayerFn:
    """One layer as a pure function, with information about its parameters for runners.

    Attributes:
      call: `(layer, x, side) -> x`, with the rematerialisation that the model chose.
      plain: the same without rematerialisation, for runners that recompute layers themselves.
      axes: returns the tree of `Axes` of one layer's parameters; a function because this takes a trace.
      dtypes: tree of the dtypes that one layer computes with: if the layer only uses a parameter cast to one dtype,
        that dtype, so that a runner can transfer weights in it; otherwise the stored dtype.
    """

    call: Callable[[Layer, jax.Array, Side], jax.Array]
    plain: Callable[[Layer, jax.Array, Side], jax.Array]
    axes: Callable[[], Any]
    dtypes: Any

    def __call__(self, layer: Layer, x: jax.Array, side: Side) -> jax.Array:
        """Applies the layer to the residual stream `x`."""
        return self.call(layer, x, side)


Runner = Callable[[LayerFn, Layer, jax.Array, Side, Tail | None], Any]

REMAT_POLICIES = {
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "full": jax.checkpoint_policies.nothing_saveable,
}
REMAT_CHOICES = ("none", *REMAT_POLICIES)


def scan_runner(fn: LayerFn, stacked: Layer, x: jax.Array, side: Side, tail: Tail | None) -> Any:
    """Scans over the layers, all rows at once.

    Weights are cast before the loop, so that their stacked gradients have the computation dtype.
    """
    narrow = jax.tree.map(lambda a, dtype: a.astype(dtype), stacked.params, fn.dtypes)
    x, _ = jax.lax.scan(lambda x, layer: (fn(layer, x, side), None), x, stacked._replace(params=narrow))
    return x if tail is None else tail.fn(tail.params, x, side)


_runner = jax.make_user_context(scan_runner)  # part of the key of every trace


def use_runner(runner: Runner) -> contextlib.AbstractContextManager:
    """Context in which layer stacks are executed by `runner`.

    A jitted function is traced once for each runner under which it is called: pass the same object every time.
    """
    return _runner(runner)


def layer_stack(
    block: Callable[[jax.Array, Side], jax.Array],
    num_layers: int,
    *,
    name: str = "layers",
    remat: str | tuple[str, ...] = "none",
    tail: Tail | None = None,
) -> Callable[[jax.Array, Side], Any]:
    """Stacks `num_layers` copies of a Haiku block, each with its own parameters.

    Args:
      block: a Haiku function `(x [B, ...], side) -> [B, ...]` of the same shape. It may call `hk.next_rng_key()`: each
        layer then has its own key, equal under every runner.
      num_layers: L.
      name: module name of the stacked parameters.
      remat: what the backward pass recomputes: "none", "dots" (all but matrix products), "full"; or the names of the
        values that are saved, given in the block with `jax.ad_checkpoint.checkpoint_name`; all others are recomputed.
      tail: runs after the last layer.

    Returns:
      `(x, side) -> x [B, ...]`, or the tail's result. Call it inside `hk.transform`.

    Raises:
      UserError: `remat` is unknown, the block changes the shape, the block or the tail closes over an array, or an
        array of `side` has another number of rows than x.
    """
    if isinstance(remat, str) and remat not in REMAT_CHOICES:
        raise UserError(f"remat = {remat!r}: expected one of {', '.join(REMAT_CHOICES)}, or a tuple of names")
    pure = hk.transform(block)

    def one_layer(layer: Layer, x: jax.Array, side: Side) -> jax.Array:
        return pure.apply(layer.params, layer.key, x, side)

    def apply(x: jax.Array, side: Side = ()) -> Any:
        _check_rows(x, side)
        stacked = Layer(_stacked_params(pure.init, name, num_layers, x, side), _layer_keys(num_layers))
        abstract = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), (x, side))
        traced = _trace(one_layer, stacked, *abstract)
        if tail is not None:
            _refuse_closure(jax.make_jaxpr(tail.fn)(tail.params, *abstract), "tail", "tail.params, x and side")
        fn = LayerFn(
            call=_rematerialized(one_layer, remat),
            plain=one_layer,
            axes=lambda: logical.abstract_init(pure.init, jax.random.key(0), *abstract)[1],
            dtypes=_computed_dtypes(traced, stacked.params),
        )
        if hk.running_init():  # a runner may need a mesh; init has none
            return scan_runner(fn, stacked, x, side, tail)
        return _runner.value(fn, stacked, x, side, tail)

    return apply


def _rematerialized(fn: Callable, remat: str | tuple[str, ...]) -> Callable:
    """Wraps a layer in `jax.checkpoint` with the policy that `remat` names.

    Without `prevent_cse=False` every weight would be copied first. It is safe because the forward and backward passes
    of the layers run in different loops, so the compiler cannot merge the recomputation with the forward pass.
    """
    if remat == "none":
        return fn
    policy = REMAT_POLICIES[remat] if isinstance(remat, str) else jax.checkpoint_policies.save_only_these_names(*remat)
    return jax.checkpoint(fn, policy=policy, prevent_cse=False)


def _stacked_params(init: Callable, name: str, num_layers: int, x: jax.Array, side: Side) -> Any:
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), (x, side))

    def init_all(rng):
        if rng is None:  # hk.lift asks for shapes only
            return None
        zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
        with logical.stacked(name):
            return jax.vmap(lambda key: init(key, *zeros))(jax.random.split(rng, num_layers))

    return hk.lift(init_all, name=name)(hk.next_rng_key() if hk.running_init() else None)


def _layer_keys(num_layers: int) -> jax.Array | None:
    key = hk.maybe_next_rng_key()
    return None if key is None else jax.vmap(lambda layer: jax.random.fold_in(key, layer))(jnp.arange(num_layers))


def _trace(fn: Callable, stacked: Layer, x: Any, side: Any) -> ClosedJaxpr:
    """Traces one layer; refuses a block that a runner could not split or repeat."""
    layer = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), stacked)
    traced, out = jax.make_jaxpr(fn, return_shape=True)(layer, x, side)
    _refuse_closure(traced, "block", "its parameters, x and side")
    if not isinstance(out, jax.ShapeDtypeStruct):
        raise UserError(
            f"layer_stack: the block returns {_shapes(out)}; a block returns one array, x of the next layer: "
            f"{x.dtype}{list(x.shape)}. Other results of a layer have no place in a stack"
        )
    if (out.shape, out.dtype) != (x.shape, x.dtype):
        raise UserError(
            f"layer_stack: the block maps {x.dtype}{list(x.shape)} to {out.dtype}{list(out.shape)}; "
            "a stack needs blocks that keep shape and dtype"
        )
    return traced


def _shapes(out: Any) -> str:
    """Formats shapes and dtypes, for example `a tuple, (float32[2, 3], None)`."""
    leaf = jax.tree.map(lambda a: f"{a.dtype}{list(a.shape)}", out)
    kind = "" if out is None else f"a {type(out).__name__}, "
    return f"{kind}{leaf}".replace("'", "")


def _check_rows(x: jax.Array, side: Side) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(side):
        if leaf.shape[:1] != x.shape[:1]:
            raise UserError(
                f"layer_stack: side{jax.tree_util.keystr(path)} is {leaf.dtype}{list(leaf.shape)}, but x has "
                f"{x.shape[0]} rows: a side belongs to rows, one entry for each. Make what all rows share inside the "
                "block, or repeat it for each row"
            )


def _refuse_closure(traced: ClosedJaxpr, what: str, allowed: str) -> None:
    foreign = [c for c in traced.consts if isinstance(c, jax.Array)]
    if foreign:
        found = ", ".join(f"{c.dtype}{list(c.shape)}" for c in foreign)
        raise UserError(
            f"layer_stack: the {what} closes over {units.counted(len(foreign), 'array')} ({found}). A {what} "
            f"may use only {allowed}: "
            f"pass arrays that belong to rows through side, and make constants inside the {what}."
        )


def _computed_dtypes(traced: ClosedJaxpr, params: Any) -> Any:
    leaves, structure = jax.tree.flatten(params)  # parameters come first among a layer's inputs
    inputs = zip(traced.jaxpr.invars, leaves, strict=False)
    return jax.tree.unflatten(structure, [_only_cast(traced.jaxpr, var) or a.dtype for var, a in inputs])


def _only_cast(jaxpr: Jaxpr, var: Any) -> Any:
    """Returns the dtype to which all uses of `var` cast it; None if one uses it without a cast."""
    readers = [equation for equation in jaxpr.eqns if any(v is var for v in equation.invars)]
    casts = {e.params["new_dtype"] if e.primitive.name == "convert_element_type" else None for e in readers}
    return casts.pop() if len(casts) == 1 else None
