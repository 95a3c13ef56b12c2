"""Checks the arguments of a layer stack (`core.stack`)."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr

from core import units
from core.errors import UserError, check_integer

_WORDS = ("summed", "stacked")


def check_arguments(remat: Any, outputs: Any, pattern: Any, *, choices: Collection[str]) -> None:
    """Raises UserError for malformed arguments of `core.stack.layer_stack`.

    Args:
      choices: the named policies for `remat`.
    """
    if isinstance(remat, str) and remat not in choices:
        raise UserError(f"remat = {remat!r}: expected one of {', '.join(choices)}, a tuple of names, or an OnHost")
    if wrong := [word for word in jax.tree.leaves(outputs) if word not in _WORDS]:
        raise UserError(
            f"layer_stack: outputs has {wrong[0]!r}; expected 'stacked' or 'summed', or a tree of these words"
        )
    if pattern is not None and (isinstance(pattern, str) or not len(pattern)):
        raise UserError(
            f"layer_stack: pattern = {pattern!r}; expected a tuple of kinds, such as ('local',) * 5 + ('global',)"
        )


def check_groups(num_layers: int, group: int) -> None:
    """Raises UserError unless the layers divide into groups of `group` layers."""
    check_integer(group, where="layer_stack: group", least=1)
    if num_layers % group:
        raise UserError(
            f"layer_stack: {units.counted(num_layers, 'layer')} do not divide into groups of {group} layers with "
            f"different parameters; nearest numbers that do: {max(num_layers // group, 1) * group}, "
            f"{(num_layers // group + 1) * group}"
        )


def check_first(num_layers: int, first: int, *, has_pattern: bool) -> None:
    """Raises UserError for a malformed argument `first` of `core.stack.layer_stack`."""
    if not 0 < first < num_layers:
        raise UserError(
            f"layer_stack: first has {units.counted(first, 'layer')}, and num_layers = {num_layers} with these: "
            "expected at least one of both, the first ones and those after them"
        )
    if not has_pattern:
        raise UserError("layer_stack: first = First(...) needs a pattern, the kinds of the layers after the first ones")


def joined(params: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the parameters of a group of layers; raises UserError if module names are equal."""
    result: dict[str, Any] = {}
    for one in params:
        if both := sorted(set(result) & set(one)):
            raise UserError(
                f"layer_stack: two layers of a group have parameters of a module {both[0]!r}; name modules by the kind "
                "of the layer, and give the layers of a group different kinds"
            )
        result |= one
    return result


def check_shapes(x: Any, side: Any, layer_in: Any, num_layers: int) -> None:
    """Raises UserError unless x and side have one entry for each row, and layer_in for each layer.

    Args:
      x: its first array gives the number of rows.
    """
    leaves = jax.tree.leaves(x)
    if not leaves or not leaves[0].shape:
        raise UserError(f"layer_stack: x is {shapes(x)}; expected arrays [B, ...], one entry for each row")
    rows = leaves[0].shape[0]
    for where, tree in (("x", x), ("side", side)):
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            if leaf.shape[:1] != (rows,):
                raise UserError(
                    f"layer_stack: {where}{jax.tree_util.keystr(path)} is {shapes(leaf)}, but x has {rows} rows: a "
                    f"{where} belongs to rows, one entry for each. Make what all rows share inside the block, or "
                    "repeat it for each row"
                )
    for path, leaf in jax.tree_util.tree_leaves_with_path(layer_in):
        if leaf.shape[:1] != (num_layers,):
            raise UserError(
                f"layer_stack: layer_in{jax.tree_util.keystr(path)} is {shapes(leaf)}, but the stack has "
                f"{units.counted(num_layers, 'layer')}: layer_in has one entry for each"
            )


def pair(out: Any, outputs: Any) -> tuple[Any, Any]:
    """Splits a block's result into x and outputs; raises UserError for another structure than `outputs`."""
    if not isinstance(out, tuple) or len(out) != 2:
        raise UserError(
            f"layer_stack: the block returns {shapes(out)}; with outputs = {outputs!r} a block returns a pair, x of "
            "the next layer and its outputs"
        )
    try:
        jax.tree.broadcast(outputs, out[1])
    except ValueError as error:
        raise UserError(
            f"layer_stack: outputs = {outputs!r} is not a prefix of the outputs of the block, {shapes(out[1])}"
        ) from error
    return out


def check_stream(x: Any, after: Any) -> None:
    """Raises UserError unless the x that a block returns has the structure, shapes and dtypes of its input."""
    before: Any = jax.tree.structure(x)
    if jax.tree.structure(after) != before:
        raise UserError(
            f"layer_stack: the block returns {shapes(after)}; a block returns x of the next layer, here {shapes(x)}, "
            "and declares everything else: layer_stack(..., outputs='stacked' or 'summed')"
        )
    if _described(after) != _described(x):
        raise UserError(
            f"layer_stack: the block maps {shapes(x)} to {shapes(after)}; a stack needs blocks that keep shape and "
            "dtype"
        )


def check_summed(summed: Any) -> None:
    """Raises UserError if a sum over rows and layers is not float32."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(summed):
        if leaf.dtype != jnp.float32:
            raise UserError(
                f"layer_stack: summed output{jax.tree_util.keystr(path)} is {shapes(leaf)}; sums over rows and layers "
                "are float32: jnp.sum(..., dtype=jnp.float32)"
            )


def check_equal_outputs(outputs: Sequence[Any]) -> None:
    """Raises UserError if kinds of layers have different outputs."""
    if any(_described(out) != _described(outputs[0]) for out in outputs):
        raise UserError(f"layer_stack: kinds of layers have different outputs: {'; '.join(map(shapes, outputs))}")


def check_equal_parameters(params: Mapping[Any, Any]) -> None:
    """Raises UserError unless all kinds of layers have the same parameters."""
    (first, wanted), *others = params.items()
    for kind, found in others:
        if found != wanted:
            raise UserError(
                f"layer_stack: a layer of kind {first!r} has the parameters {shapes(wanted)}, one of kind {kind!r} "
                f"{shapes(found)}: layers of a stack have equal parameters; create them in both kinds, or "
                "set group = the number of layers after which the kinds repeat"
            )


def refuse_closure(traced: ClosedJaxpr, what: str, allowed: str) -> None:
    """Raises UserError for a block or a tail that closes over arrays; `allowed` names its arguments."""
    foreign = [c for c in traced.consts if isinstance(c, jax.Array)]
    if foreign:
        found = ", ".join(f"{c.dtype}{list(c.shape)}" for c in foreign)
        raise UserError(
            f"layer_stack: the {what} closes over {units.counted(len(foreign), 'array')} ({found}). A {what} "
            f"may use only {allowed}: "
            f"pass arrays that belong to rows through side, and make constants inside the {what}."
        )


def shapes(out: Any) -> str:
    """Formats shapes and dtypes, for example `a tuple, (float32[2, 3], None)`."""
    leaf = jax.tree.map(lambda a: f"{a.dtype}{list(a.shape)}", out)
    kind = "" if out is None or isinstance(leaf, str) else f"a {type(out).__name__}, "
    return f"{kind}{leaf}".replace("'", "")


def _described(tree: Any) -> Any:
    return jax.tree.map(lambda a: (a.shape, a.dtype), tree)
