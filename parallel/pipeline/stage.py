"""The work of one stage in one tick: its layers on one microbatch, forward or backward.

Gradients are accumulated in float32, layer by layer: XLA fuses each sum with the product that it adds.

    forward    x[l+1], s[l] = f(W[l], x[l]);    sums += s[l];    saved: x[l] and what `remat` saves, or x[0] alone
    backward   dW[l], dx[l] = vjp(f at W[l], x[l])(dx[l+1], dsums);    dW_sum[l] += dW[l]

If the layers do not divide over stages and repeats, the last ones are padding: copies of the last layer whose results
are discarded.

S stages, M microbatches, R repeats, b rows of a microbatch, k layers that a stage runs in a tick.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import PartitionSpec as P

from core import logical
from core.errors import UserError
from core.stack import Kind, Layer, LayerFn, Side, Stream
from parallel.derivative_rules import Trained
from parallel.pipeline import deferred, residuals
from parallel.pipeline.deferred import Deferred
from parallel.pipeline.residuals import Residuals
from parallel.pipeline.schedules import PLACES_AGAIN, Schedule

STAGE = "stage"


class Turn(NamedTuple):
    """The microbatch and repeat of a stage in one tick; scalars.

    Attributes:
      microbatch, repeat: in range even in a bubble.
      order: the place of this work among the forward passes of a stage.
      valid: false in a bubble.
      first: whether it is the first microbatch of its repeat.
      resumes: whether it is the first of successive turns with the same repeat.
    """

    microbatch: jax.Array
    repeat: jax.Array
    order: jax.Array
    valid: jax.Array
    first: jax.Array
    resumes: jax.Array


def turn(schedule: Schedule, number: jax.Array, *, stages: int, is_backward: bool = False) -> Turn:
    """Returns the turn with a given number; a bubble outside of 0 … M R - 1.

    Args:
      number: [], int32.
      stages: S.
      is_backward: whether the last repeat comes first.
    """
    group, repeats = schedule.group(stages), schedule.repeats
    inside = jnp.clip(number, 0, schedule.turns - 1)
    valid = (number >= 0) & (number < schedule.turns)
    before, rest = inside // (group * repeats), inside % (group * repeats)
    repeat, microbatch = rest // group, before * group + rest % group
    if is_backward:
        repeat = repeats - 1 - repeat
    order = (before * repeats + repeat) * group + rest % group
    return Turn(microbatch, repeat, order, valid, valid & (microbatch == 0), valid & (rest % group == 0))


class Traveling(NamedTuple):
    """What a microbatch carries from stage to stage, or its gradients.

    Attributes:
      x: tree of [b, ...].
      sums: outputs of the layers so far, summed.
    """

    x: Stream
    sums: Any


class Stage(NamedTuple):
    """The layers of one stage.

    Attributes:
      layers: in the order in which this stage runs them; leaves [R k, ...].
      sides: side inputs; leaves [M, b, ...].
      depth: k.
      trained: parameters of a layer that get gradients; None if no backward pass follows.
    """

    fn: LayerFn
    layers: Layer
    sides: Side
    depth: int
    schedule: Schedule
    trained: Trained | None
    spans_slices: bool

    def input(self, at: Turn, x: Any) -> Any:
        """Returns the tree `x`, in a bubble filled with `Schedule.bubble_input` unless that is None."""
        if (bubble := self.schedule.bubble_input) is None:
            return x
        return jax.tree.map(lambda a: jnp.where(at.valid, a, bubble), x)

    def number(self, at: Turn, i: jax.Array | int) -> jax.Array:
        """Returns the index in the model of the i-th layer of a turn."""
        return (at.repeat * jax.lax.axis_size(STAGE) + jax.lax.axis_index(STAGE)) * self.depth + i

    def real(self, at: Turn, i: jax.Array | int) -> jax.Array | bool:
        """Returns whether the i-th layer of a turn is not padding."""
        layers = len(self.fn.kinds)
        padded = layers < self.repeats * jax.lax.axis_size(STAGE) * self.depth
        return self.number(at, i) < layers if padded else True

    def kinds(self, i: int) -> tuple[Kind, ...]:
        """Returns the kinds of the i-th layers of all stages and repeats."""
        return tuple(dict.fromkeys(self.fn.kinds[i :: self.depth]))

    @property
    def repeats(self) -> int:
        """R, the number of times that a microbatch passes through this stage."""
        return self.schedule.repeats

    def residuals(self, x: Stream) -> Residuals:
        """Describes what each layer saves for the backward pass on a microbatch `x`."""
        assert self.trained is not None
        layer, sides = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), (self.layers, self.sides))
        return residuals.of_layers(self.fn, self.trained, layer, x, sides)

    def deferred(self, x: Stream) -> Deferred:
        """Returns the two parts of the backward pass of a layer on a microbatch `x`."""
        layer, sides = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), (self.layers, self.sides))
        return deferred.of_layers(self.residuals(x), layer, sides)

    def layer(self, at: Turn, i: jax.Array | int) -> Layer:
        """Returns the i-th layer of a turn."""
        return jax.tree.map(lambda a: take(a, at.repeat * self.depth + i), self.layers)

    def side(self, at: Turn) -> Side:
        """Returns the side inputs of this turn's microbatch."""
        return jax.tree.map(lambda a: take(a, at.microbatch), self.sides)

    def allocate(self, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        """Returns an array whose entries must be written before they are read."""
        sizes = jax.sharding.get_abstract_mesh().shape
        if self.schedule.bubble_input is None and all(sizes[axis] == 1 for axis in logical.automatic_axes()):
            return jax.lax.empty(shape, dtype)  # along automatic axes it would be replicated
        return jnp.full(shape, self.schedule.bubble_input or 0, dtype)


class Grads(NamedTuple):
    """Float32 gradients of a stage's trained parameters.

    Each of the k layers has arrays of its own: XLA copies a part of a larger array before adding to it.

    Attributes:
      sums: of the current repeat; k trees, leaves [...].
      repeats: of all repeats, k trees, leaves [R, ...]; () if R = 1.
    """

    sums: tuple
    repeats: tuple

    def layers(self) -> tuple:
        """Returns the gradients of all repeats: k trees, leaves [R, ...]."""
        return self.repeats or jax.tree.map(lambda a: a[None], self.sums)


def check_microbatch(stage: Stage, x: Stream) -> None:
    """Raises UserError if an entry of `layer_in`, or a summed output, belongs to rows."""
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


def forward(stage: Stage, at: Turn, y: Traveling, kept: Any, place: jax.Array) -> tuple[Traveling, Any]:
    """Runs the layers of this turn; returns the output with the sums, and the saved values.

    Args:
      at: the turn; a bubble writes only the last place of `kept`.
      y: the input of the first layer, and the sums before it.
      kept: from `empty_saved`; () if no backward pass follows.
      place: [], index of this turn in `kept`.
    """
    if not jax.tree.leaves(kept):
        return _run(stage, at, y, None, kept, place)
    place = jnp.where(at.valid, place, jax.tree.leaves(kept)[0].shape[1] - 1)
    if stage.schedule.save == "stage":
        return _run(stage, at, y, None, (), place)[0], put_tree(kept, y.x, 0, place)
    return _run(stage, at, y, stage.residuals(y.x), kept, place)


def _run(
    stage: Stage, at: Turn, y: Traveling, saving: Residuals | None, kept: Any, place: jax.Array
) -> tuple[Traveling, Any]:
    side = stage.side(at)

    def run(kind: Kind, layer: Layer, x: Stream) -> tuple[Stream, Any, Any]:
        if saving is not None:
            return saving.forward(kind, layer, x, side)
        x, out = stage.fn(layer, x, side, kind)
        return x, out.summed, ()

    def one(carry: tuple[Traveling, Any], i: jax.Array) -> tuple[tuple[Traveling, Any], None]:
        y, kept = carry
        x, new, saved = _switch(stage, at, i, tuple(dict.fromkeys(stage.fn.kinds)), run, stage.layer(at, i), y.x)
        after = Traveling(x, jax.tree.map(jnp.add, y.sums, new))
        return (_if(stage.real(at, i), after, y), put_tree(kept, saved, i, place)), None

    return jax.lax.scan(one, (y, kept), jnp.arange(stage.depth))[0]


def backward(
    stage: Stage, at: Turn, kept: Any, place: jax.Array, dy: Traveling, grads: Grads
) -> tuple[Traveling, Grads]:
    """Runs the backward pass of this turn; returns the gradient of its input, and the new sums.

    Args:
      at: the turn; in a bubble the gradients do not change.
      kept, place: from `forward`, and the index of this turn in it, [].
      dy: the gradient of the output, and of the sums.
      grads: summed so far.
    """
    saving, side = stage.residuals(dy.x), stage.side(at)
    if stage.schedule.save == "stage":  # the layers run again first, and save what `remat` names
        start = Traveling(take_tree(kept, 0, place), stage.fn.zero_sums())
        place = jnp.zeros_like(place)
        kept = _run(stage, at, start, saving, _allocate(stage, saving.shapes, stage.depth, PLACES_AGAIN), place)[1]

    def run(kind: Kind, layer: Layer, saved: Any, dy: Traveling) -> tuple[Any, Stream]:
        return saving.backward(kind, layer, saved, side, tuple(dy))

    for i in reversed(range(stage.depth)):
        layer, saved = stage.layer(at, i), take_tree(kept, i, place)
        dw, dx = _switch(stage, at, i, stage.kinds(i), run, layer, saved, dy)
        dy, grads = dy._replace(x=_if(stage.real(at, i), dx, dy.x)), _add(stage, at, i, grads, dw)
        # Without a barrier the compiler runs several layers forward at once and sums at the end, which needs memory.
        dy, place, sums = jax.lax.optimization_barrier((dy, place, grads.sums[i]))
        grads = grads._replace(sums=(*grads.sums[:i], sums, *grads.sums[i + 1 :]))
    return dy, grads


def empty_deferred(stage: Stage, x: Stream) -> Any:
    """Allocates arrays for values that wait for the gradients of matrices, leaves [k, S, ...].

    Returns () if the schedule computes all gradients in the backward pass.
    """
    if "W" not in stage.schedule.starts(1):
        return ()
    return _allocate(stage, stage.deferred(x).shapes, stage.depth, jax.lax.axis_size(STAGE))


def backward_of_inputs(
    stage: Stage, at: Turn, kept: Any, place: jax.Array, dy: Traveling, grads: Grads, waiting: Any, to: jax.Array
) -> tuple[Traveling, Grads, Any]:
    """Runs `backward` without the gradients of matrices; also returns the values that wait.

    Args:
      stage, at, kept, place, dy, grads: as in `backward`.
      waiting, to: from `empty_deferred`, and the place of this turn in it, [].
    """
    split, side = stage.deferred(dy.x), stage.side(at)

    def run(kind: Kind, layer: Layer, saved: Any, dy: Traveling) -> tuple[list, Stream, Any]:
        return split.first(kind, layer, saved, side, tuple(dy))

    for i in reversed(range(stage.depth)):
        layer, saved = stage.layer(at, i), take_tree(kept, i, place)
        dw, dx, values = _switch(stage, at, i, stage.kinds(i), run, layer, saved, dy)
        dy, grads = dy._replace(x=_if(stage.real(at, i), dx, dy.x)), _add(stage, at, i, grads, dw)
        waiting = put_tree(waiting, values, i, to)
        dy, place, waiting = jax.lax.optimization_barrier((dy, place, waiting))  # as in `backward`
    return dy, grads, waiting


def weights(
    stage: Stage, at: Turn, kept: Any, place: jax.Array, x: Stream, grads: Grads, waiting: Any, to: jax.Array
) -> Grads:
    """Adds the gradients of the matrices of this turn's layers; returns the new sums.

    Args:
      stage, at, kept, place, grads: as in `backward`.
      x: a tree with the shapes of the input of a layer.
      waiting, to: as in `backward_of_inputs`.
    """
    split, side = stage.deferred(x), stage.side(at)

    def run(kind: Kind, layer: Layer, saved: Any, waiting: Any) -> list:
        return split.second(kind, layer, saved, side, waiting)

    for i in range(stage.depth):
        layer, (saved, values) = stage.layer(at, i), _row_major((take_tree(kept, i, place), take_tree(waiting, i, to)))
        dw = _switch(stage, at, i, stage.kinds(i), run, layer, saved, values)
        grads = _add(stage, at, i, grads, dw)
        grads, place = jax.lax.optimization_barrier((grads, place))
    return grads


def _add(stage: Stage, at: Turn, i: int, grads: Grads, dw: list) -> Grads:
    """Adds the gradients of the i-th layer, unless it is padding or the turn a bubble."""
    real, repeats = stage.real(at, i), grads.repeats
    counts = at.valid if real is True else at.valid & real

    def before(so_far: jax.Array, every: jax.Array) -> jax.Array:
        if stage.schedule.group(jax.lax.axis_size(STAGE)) < stage.schedule.num_microbatches:
            so_far = jnp.where(at.resumes, take(every, at.repeat), so_far)
        return jnp.where(at.first, 0, so_far)

    sums, every = list(grads.sums[i]), list(repeats[i]) if repeats else []
    for leaf, new in enumerate(dw):
        if new is not None:
            so_far = before(sums[leaf], every[leaf]) if repeats else sums[leaf]
            sums[leaf] = so_far + jnp.where(counts, new, 0)
            if repeats:
                every[leaf] = put(every[leaf], sums[leaf], at.repeat)
    replaced = (*grads.sums[:i], sums, *grads.sums[i + 1 :])
    return Grads(replaced, (*repeats[:i], every, *repeats[i + 1 :]) if repeats else ())


def _switch(stage: Stage, at: Turn, i: jax.Array | int, kinds: tuple[Kind, ...], run: Callable, *operands: Any) -> Any:
    if len(kinds) == 1:
        return run(kinds[0], *operands)
    places = jnp.asarray([kinds.index(kind) if kind in kinds else 0 for kind in stage.fn.kinds])
    place = places[jnp.minimum(stage.number(at, i), len(stage.fn.kinds) - 1)]
    return jax.lax.switch(place, [functools.partial(run, kind) for kind in kinds], *operands)


def _if(condition: jax.Array | bool, yes: Any, no: Any) -> Any:
    return yes if condition is True else jax.tree.map(functools.partial(jnp.where, condition), yes, no)


def empty_saved(stage: Stage, x: Stream) -> Any:
    """Allocates arrays for what turns save; () if no backward pass follows.

    Leaves are [k, places, ...] with `save="layers"`, and [1, places, b, ...] with `save="stage"`, with the places of
    `Schedule.allocated`.
    """
    if stage.trained is None:
        return ()
    places = stage.schedule.allocated(jax.lax.axis_size(STAGE))
    if stage.schedule.save == "stage":
        return _allocate(stage, x, 1, places)
    return _allocate(stage, stage.residuals(x).shapes, stage.depth, places)


def _allocate(stage: Stage, like: Any, layers: int, places: int) -> Any:
    def allocated(a: Any) -> jax.Array:
        return residuals.in_memory(stage.allocate((layers, places, *a.shape), a.dtype), a)

    return jax.tree.map(allocated, like)


def _row_major(tree: Any) -> Any:
    """Returns arrays in row-major layout; otherwise the compiler copies all that is saved at every tick."""
    return jax.tree.map(lambda a: with_layout_constraint(a, Layout(tuple(range(a.ndim)))), tree)


def zero_grads(stage: Stage) -> Grads:
    """Returns gradients of zero; `Grads.repeats` must be written before it is read."""
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
    """Returns the result of `put_tree` if the condition holds, else `tree`.

    Args:
      condition: [], bool.
      tree, values, *index: as in `put_tree`.
    """
    return jax.tree.map(lambda a, value: put(a, jnp.where(condition, value, take(a, *index)), *index), tree, values)


def send(stage: Stage, tree: Any, *, toward: int) -> Any:
    """Sends a tree to the next (+1) or previous (-1) stage of the ring; returns what arrives."""
    stages = jax.lax.axis_size(STAGE)
    pairs = [(i, (i + toward) % stages) for i in range(stages)]
    return jax.tree.map(functools.partial(_permuted, stage, pairs=pairs), tree)


def broadcast(stage: Stage, tree: Any, *, source: int) -> Any:
    """Returns on every stage the tree of stage `source`."""
    return jax.tree.map(functools.partial(_broadcast, stage, source=source), tree)


def _broadcast(stage: Stage, x: jax.Array, *, source: int) -> jax.Array:
    """The number of stages that have the array doubles in every step."""
    stages, have = jax.lax.axis_size(STAGE), 1
    offset = (jax.lax.axis_index(STAGE) - source) % stages
    while have < stages:
        pairs = [((source + i) % stages, (source + i + have) % stages) for i in range(min(have, stages - have))]
        arrived = _permuted(stage, x, pairs=pairs)
        x = jnp.where((offset >= have) & (offset < 2 * have), arrived, x)
        have *= 2
    return x


def _permuted(stage: Stage, x: jax.Array, *, pairs: list[tuple[int, int]]) -> jax.Array:
    """Between slices, each chip sends a part, which is gathered inside the slice (Narayanan et al. 2021, 4.1)."""
    sizes = jax.sharding.get_abstract_mesh().shape
    axes = tuple(axis for axis in sizes if axis in logical.automatic_axes() and sizes[axis] > 1)
    parts = math.prod(sizes[axis] for axis in axes)
    divided = [dim for dim, size in enumerate(x.shape) if size % parts == 0]

    def sent(x: jax.Array) -> jax.Array:
        return jax.lax.ppermute(x, STAGE, pairs)

    if not (stage.spans_slices and axes and divided):
        return sent(x)
    spec = P(*[None] * divided[0], axes)
    return jax.shard_map(sent, in_specs=spec, out_specs=spec, axis_names=set(axes), check_vma=False)(x)
