"""The work of one stage in one tick: its layers on one microbatch, forward or backward.

Everything here runs where `stage` is manual: arrays are local to a stage. Only inputs are saved between the two passes;
every layer is recomputed in the backward pass, so that no parameter is saved per microbatch. Gradients are accumulated
in float32, in place and layer by layer, so that XLA fuses each sum with the product that it adds.

    forward    x[l+1], s[l] = f(W[l], x[l]);    sums += s[l];    saved: x[l] of every layer, or of the first
    backward   dW[l], dx[l] = vjp(f at W[l], x[l])(dx[l+1], dsums);    dW_sum[l] += dW[l]

Summed outputs of layers travel with the microbatch, so nothing is added in a bubble.

If the layers do not divide over the stages, the last ones are padding: copies of the last layer whose results are
discarded. A layer whose kind depends on the stage is selected by `lax.switch`.

b rows of a microbatch, k layers that a stage runs in a tick.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from core import logical
from core.errors import UserError
from core.stack import Kind, Layer, LayerFn, Side, Stream
from parallel.derivative_rules import Trained

STAGE = "stage"


class Turn(NamedTuple):
    """The microbatch and repeat of a stage in one tick.

    Attributes:
      microbatch, repeat: [], int32; in range even in a bubble.
      valid: [], bool; false in a bubble.
    """

    microbatch: jax.Array
    repeat: jax.Array
    valid: jax.Array

    @property
    def first(self) -> jax.Array:
        """[], bool: whether it is the first microbatch of its repeat."""
        return self.valid & (self.microbatch == 0)


def turn(number: jax.Array, *, microbatches: int, repeats: int) -> Turn:
    """Returns the turn with a given number; a bubble outside of 0 … M R - 1."""
    total = microbatches * repeats
    inside = jnp.clip(number, 0, total - 1)
    return Turn(inside % microbatches, inside // microbatches, (number >= 0) & (number < total))


class Travelling(NamedTuple):
    """The arrays that a microbatch carries from stage to stage; in the backward pass their gradients.

    Attributes:
      x: tree of [b, ...].
      sums: tree of [...], outputs of the layers so far, summed.
    """

    x: Stream
    sums: Any


class Stage(NamedTuple):
    """The layers of one stage.

    Attributes:
      fn: one layer.
      layers: in the order in which this stage runs them; leaves [R k, ...].
      sides: arrays that belong to rows, by microbatch; leaves [M, b, ...].
      depth: k.
      save: "layers", "stage", or "nothing" if no backward pass follows.
      bubble: see `Schedule.bubble_input`.
      trained: parameters of a layer that the backward pass computes gradients of; None in a forward pass.
    """

    fn: LayerFn
    layers: Layer
    sides: Side
    depth: int
    save: str
    bubble: float | None
    trained: Trained | None = None

    def input(self, at: Turn, x: Any) -> Any:
        """Returns the tree `x`, or the bubble's value in a bubble."""
        if (bubble := self.bubble) is None:
            return x
        return jax.tree.map(lambda a: jnp.where(at.valid, a, bubble), x)

    def number(self, at: Turn, i: jax.Array | int) -> jax.Array:
        """Returns the index in the model of the i-th layer of a turn."""
        return (at.repeat * jax.lax.axis_size(STAGE) + jax.lax.axis_index(STAGE)) * self.depth + i

    def real(self, at: Turn, i: jax.Array | int) -> jax.Array | bool:
        """Returns whether the i-th layer of a turn is a layer of the model, not padding."""
        layers = len(self.fn.kinds)
        padded = layers < self.repeats * jax.lax.axis_size(STAGE) * self.depth
        return self.number(at, i) < layers if padded else True

    def kinds(self, i: int) -> tuple[Kind, ...]:
        """Returns the kinds of the i-th layers of all stages and repeats."""
        return tuple(dict.fromkeys(self.fn.kinds[i :: self.depth]))

    @property
    def repeats(self) -> int:
        """R, the number of times that a microbatch passes through this stage."""
        return jax.tree.leaves(self.layers.params)[0].shape[0] // self.depth

    def layer(self, at: Turn, i: jax.Array | int) -> Layer:
        """Returns the i-th layer that the stage runs in the turn `at`."""
        return jax.tree.map(lambda a: take(a, at.repeat * self.depth + i), self.layers)

    def side(self, at: Turn) -> Side:
        """Returns the side of this turn's microbatch."""
        return jax.tree.map(lambda a: take(a, at.microbatch), self.sides)

    def allocate(self, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        """Returns an uninitialized array, for entries that are written before they are read."""
        sizes = jax.sharding.get_abstract_mesh().shape
        if self.bubble is None and all(sizes[axis] == 1 for axis in logical.automatic_axes()):
            return jax.lax.empty(shape, dtype)  # along automatic axes it would be replicated
        return jnp.full(shape, self.bubble or 0, dtype)


class Grads(NamedTuple):
    """Float32 gradients of a stage's parameters.

    Each of the k layers has arrays of its own: XLA copies a part of a larger array before adding to it.

    Attributes:
      sums: gradients of the current repeat; k trees, leaves [...].
      repeats: gradients of all repeats; the sums are copied here in every turn, which is cheaper than accumulating
        here; k trees, leaves [R, ...], or () if R = 1.
    """

    sums: tuple
    repeats: tuple

    def layers(self) -> tuple:
        """Returns the gradients of all repeats: k trees, leaves [R, ...]."""
        return self.repeats or jax.tree.map(lambda a: a[None], self.sums)


def check_microbatch(stage: Stage, x: Stream) -> None:
    """Checks that a layer runs on the rows of a microbatch, `x`, with the same summed outputs as on all rows.

    Raises:
      UserError: an entry of `layer_in`, or a summed output, belongs to rows.
    """
    if not jax.tree.leaves((stage.layers.params.inputs, stage.layers.inputs, stage.fn.outputs.summed)):
        return
    layer, side = (jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), t) for t in stage[1:3])

    def one_layer(layer: Layer, x: Stream, side: Side) -> tuple[Stream, Any]:
        return stage.fn.plain(layer, x, side, stage.fn.kinds[0])

    try:
        after, out = jax.eval_shape(one_layer, layer, x, side)
    except (TypeError, ValueError) as error:
        raise UserError(
            "pipeline: a layer runs on all rows, but not on those of a microbatch. layer_in belongs to layers and is "
            f"not split by rows; pass what belongs to rows through side or x. The block says: {error}"
        ) from error
    found, wanted = (
        jax.tree.map(lambda a: a.shape, tree) for tree in ((after, out.summed), (x, stage.fn.outputs.summed))
    )
    if found != wanted:
        raise UserError(
            f"pipeline: on the rows of a microbatch, a layer returns x and summed outputs of shapes {found} instead of "
            f"{wanted}: a summed output is a sum over rows, and layer_in belongs to layers; what belongs to rows is "
            "part of x or side"
        )


def forward(stage: Stage, at: Turn, y: Travelling, kept: Any, place: jax.Array) -> tuple[Travelling, Any]:
    """Runs the layers of this turn.

    Args:
      stage: the layers.
      at: the turn; in a bubble saved inputs do not change.
      y: the input of the first layer, and the sums before it.
      kept: from `empty_saved`.
      place: [], index of this turn in `kept`.

    Returns:
      The output of the last layer with the sums, and the saved inputs.
    """
    side = stage.side(at)
    if stage.save != "nothing":
        place = jnp.where(at.valid, place, jax.tree.leaves(kept)[0].shape[1] - 1)
    if stage.save == "stage":
        kept = put_tree(kept, y.x, 0, place)

    def run(kind: Kind, layer: Layer, x: Stream) -> tuple[Stream, Any]:
        x, out = stage.fn(layer, x, side, kind)
        return x, out.summed

    def one(carry: tuple[Travelling, Any], i: jax.Array) -> tuple[tuple[Travelling, Any], None]:
        y, kept = carry
        if stage.save == "layers":
            kept = put_tree(kept, y.x, i, place)
        x, new = _switch(stage, at, i, tuple(dict.fromkeys(stage.fn.kinds)), run, stage.layer(at, i), y.x)
        after = Travelling(x, jax.tree.map(jnp.add, y.sums, new))
        return (_if(stage.real(at, i), after, y), kept), None

    return jax.lax.scan(one, (y, kept), jnp.arange(stage.depth))[0]


def backward(
    stage: Stage, at: Turn, kept: Any, place: jax.Array, dy: Travelling, grads: Grads
) -> tuple[Travelling, Grads]:
    """Runs the backward pass of the layers of this turn.

    Args:
      stage: the layers.
      at: the turn; in a bubble the gradients do not change.
      kept: inputs saved by `forward`.
      place: [], index of this turn in `kept`.
      dy: the gradient of the output of the last layer, and of the sums.
      grads: gradients summed so far.

    Returns:
      The gradient of the input of the first layer with that of the sums, and the sums of gradients.
    """
    if stage.save == "stage":
        kept, place = _inputs_again(stage, at, take_tree(kept, 0, place)), jnp.zeros_like(place)
    dx, dsums = dy
    sums, repeats = list(grads.sums), list(grads.repeats)

    def add(counts: jax.Array, so_far: jax.Array, new: jax.Array) -> jax.Array:
        before = jnp.where(at.first, 0, so_far) if repeats else so_far
        return before + jnp.where(counts, new, 0)

    for i in reversed(range(stage.depth)):
        real = stage.real(at, i)
        dw, before = _layer_backward(stage, at, i, take_tree(kept, i, place), Travelling(dx, dsums))
        dx = _if(real, before, dx)
        sums[i] = jax.tree.map(functools.partial(add, at.valid if real is True else at.valid & real), sums[i], dw)
        if repeats:
            repeats[i] = jax.tree.map(lambda all_, new: put(all_, new, at.repeat), repeats[i], sums[i])
        # Without a barrier the compiler runs several layers forward at once and sums at the end, which needs memory.
        dx, place, sums[i] = jax.lax.optimization_barrier((dx, place, sums[i]))
    return Travelling(dx, dsums), Grads(tuple(sums), tuple(repeats))


def _layer_backward(stage: Stage, at: Turn, i: int, x: Stream, dy: Travelling) -> tuple[Any, Stream]:
    layer, side, mask = stage.layer(at, i), stage.side(at), stage.trained
    assert mask is not None

    def run(kind: Kind, layer: Layer, x: Stream, dy: Travelling) -> tuple[Any, Stream]:
        def one_layer(trained: list, x: Stream) -> Travelling:
            params = mask.fill(trained, layer.params)
            after, out = stage.fn.plain(layer._replace(params=params), x, side, kind)
            return Travelling(after, out.summed)

        _, vjp = jax.vjp(one_layer, mask.pick(layer.params), x)
        return vjp(dy)

    return _switch(stage, at, i, stage.kinds(i), run, layer, x, dy)


def _switch(stage: Stage, at: Turn, i: jax.Array | int, kinds: tuple[Kind, ...], run: Callable, *operands: Any) -> Any:
    """Returns `run(kind, *operands)` with the kind of the i-th layer of this turn, which is one of `kinds`."""
    if len(kinds) == 1:
        return run(kinds[0], *operands)
    places = jnp.asarray([kinds.index(kind) if kind in kinds else 0 for kind in stage.fn.kinds])
    place = places[jnp.minimum(stage.number(at, i), len(stage.fn.kinds) - 1)]
    return jax.lax.switch(place, [functools.partial(run, kind) for kind in kinds], *operands)


def _if(condition: jax.Array | bool, yes: Any, no: Any) -> Any:
    return yes if condition is True else jax.tree.map(functools.partial(jnp.where, condition), yes, no)


def _inputs_again(stage: Stage, at: Turn, x: Stream) -> Any:
    """Recomputes the inputs of the layers of this turn, in place 0 of [k, 2, b, ...]."""
    again = stage._replace(save="layers")
    start = Travelling(x, stage.fn.zero_sums())
    return forward(again, at, start, empty_saved(again, x, places=1), jnp.asarray(0))[1]


def empty_saved(stage: Stage, x: Stream, *, places: int) -> Any:
    """Allocates saved inputs of `places` turns, [k, places + 1, b, ...] or [1, places + 1, b, ...].

    The last place is written in bubbles, which is cheaper than restoring the previous value of another place.
    """
    layers = {"layers": stage.depth, "stage": 1, "nothing": 0}[stage.save]
    return jax.tree.map(lambda a: stage.allocate((layers, places + 1, *a.shape), a.dtype), x) if layers else ()


def zero_grads(stage: Stage) -> Grads:
    """Returns zero gradients."""
    assert stage.trained is not None
    one = [a[0] for a in stage.trained.pick(stage.layers.params)]
    sums = jax.tree.map(lambda a: jnp.zeros(a.shape, jnp.float32), (one,) * stage.depth)
    if stage.repeats == 1:
        return Grads(sums, ())
    return Grads(sums, jax.tree.map(lambda a: stage.allocate((stage.repeats, *a.shape), jnp.float32), sums))


def take(a: jax.Array, *index: jax.Array | int) -> jax.Array:
    """Returns a[index]."""
    n = len(index)
    starts = (*index, *[0] * (a.ndim - n))
    return jax.lax.dynamic_slice(a, starts, (*[1] * n, *a.shape[n:])).reshape(a.shape[n:])


def put(a: jax.Array, value: jax.Array, *index: jax.Array | int) -> jax.Array:
    """Returns `a` with a[index] = value."""
    n = len(index)
    starts = (*index, *[0] * (a.ndim - n))
    return jax.lax.dynamic_update_slice(a, value.astype(a.dtype).reshape(*[1] * n, *a.shape[n:]), starts)


def take_tree(tree: Any, *index: jax.Array | int) -> Any:
    """Returns a[index] of every array a."""
    return jax.tree.map(lambda a: take(a, *index), tree)


def put_tree(tree: Any, values: Any, *index: jax.Array | int) -> Any:
    """Returns every array a with a[index] = its value."""
    return jax.tree.map(lambda a, value: put(a, value, *index), tree, values)


def put_if(condition: jax.Array, tree: Any, values: Any, *index: jax.Array | int) -> Any:
    """Returns the result of `put_tree` if the condition holds, else `tree`; only the entry is selected, in place."""
    return jax.tree.map(lambda a, value: put(a, jnp.where(condition, value, take(a, *index)), *index), tree, values)


def send(tree: Any, *, toward: int) -> Any:
    """Sends a tree to the next (+1) or previous (-1) stage of the ring; returns the tree from the other neighbour."""
    stages = jax.lax.axis_size(STAGE)
    pairs = [(i, (i + toward) % stages) for i in range(stages)]
    return jax.tree.map(lambda a: jax.lax.ppermute(a, STAGE, pairs), tree)


def broadcast(tree: Any, *, source: int) -> Any:
    """Returns on every stage the tree of stage `source`."""
    return jax.tree.map(functools.partial(_broadcast, source=source), tree)


def _broadcast(x: jax.Array, *, source: int) -> jax.Array:
    """Broadcasts one array; the number of stages that have it doubles in every step.

    A sum with zeros elsewhere would cost arithmetic, and XLA cannot compile it for CPUs in bfloat16.
    """
    stages, have = jax.lax.axis_size(STAGE), 1
    offset = (jax.lax.axis_index(STAGE) - source) % stages
    while have < stages:
        pairs = [((source + i) % stages, (source + i + have) % stages) for i in range(min(have, stages - have))]
        arrived = jax.lax.ppermute(x, STAGE, pairs)
        x = jnp.where((offset >= have) & (offset < 2 * have), arrived, x)
        have *= 2
    return x
