"""A stack of layers as one pure function over stacked parameters, executed by a runner.

`layer_stack(block, num_layers)(x, side, layer_in)` has one parameter tree whose leaves start with a `layers` dimension,
in model order. A runner executes the layers: the default one scans over them, and a pipeline distributes them over
chips and splits the rows into microbatches.

    x[0] = x;   x[l+1], out[l] = block(x[l], side, layer_in[l]);   result = x[L]  or  tail(x[L], side, summed out)

    x         tree of [B, ...]: the residual stream and whatever travels with it
    side      tree of [B, ...]: belongs to rows and does not change (segment ids, positions)
    layer_in  tree of [L, ...]: one entry per layer (a key-value cache, a flag); a block without one is `block(x, side)`
    out       tree of outputs of a layer, each stacked [L, ...] (a cache, statistics) or summed over layers (auxiliary
              losses); a block without outputs returns x alone

A block may depend only on its parameters and these arguments: a runner could not split an array that it closes over.

A summed output is a sum over rows, in float32, which pipelines compute per microbatch and add. A product of means over
the batch is not such a sum: compute balancing losses per row. Pipelines do not support the gradient of stacked outputs.

A tail, the head and the loss, returns sums over rows. A pipeline runs it for a microbatch directly after the last
layer.

With `pattern=("local", "local", "global")` layer l has kind `pattern[l % 3]`, the static argument `kind=` of the block.
Kinds have parameters of the same shapes, unless `group=p` makes runners treat p successive layers as one.
Rematerialization applies to each of the p layers separately.

With `first=First(kinds)` the stack begins with layers of other kinds and shapes, such as dense layers before those with
experts.
"""

import contextlib
import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr

from core import logical, stack_checks, stack_dtypes
from core.rematerialization import REMAT_CHOICES, Remat, rematerialized

Stream = Any  # pytree of [B, ...]: the x of a block
Side = Any  # pytree of [B, ...]
Kind = Any  # an entry of a pattern; None without a pattern
Params = Any


class Layer(NamedTuple):
    """Arrays of a layer [...], or of a stack [L, ...]: parameters, key (None: no randomness), entry of `layer_in`."""

    params: Any  # leaves [...]; stacked: [L, ...]
    key: jax.Array | None  # []; stacked: [L]
    inputs: Any = ()  # leaves [...]; stacked: [L, ...]


class Outputs(NamedTuple):
    """Outputs of one layer, or of a whole stack, besides x.

    Attributes:
      summed: sums over rows, [...], float32; for a stack, also over layers. None in place of stacked outputs.
      stacked: arrays [...]; for a stack, [L, ...]. None in place of summed outputs.
    """

    summed: Any = ()
    stacked: Any = ()


class Tail(NamedTuple):
    """The computation after the last layer: head and loss.

    Attributes:
      fn: `fn(params, x, side) -> sums over rows`; with outputs of layers `fn(params, x, side, summed)`.
      params: arrays of the head, because `fn` may not close over arrays.
    """

    fn: Callable[..., Any]
    params: Any


class First(NamedTuple):
    """The layers of a stack before those that repeat.

    Attributes:
      kinds: the kind of each; their block returns () in place of summed outputs.
      group: as in `layer_stack`.
      hands_over: whether their x is a pair: x of later layers, and an entry that is added to their side, a tuple.
    """

    kinds: tuple[Kind, ...]
    group: int = 1
    hands_over: bool = False


def haiku_tail(fn: Callable[..., Any], x: Stream, side: Side = (), *, summed: Any = None, name: str = "tail") -> Tail:
    """Makes a `Tail` from a Haiku function that has its own parameters.

    Args:
      fn: `(x, side) -> sums over rows`, or `(x, side, summed) -> sums over rows`.
      x, side: arrays with the shapes of the result and of the side of the stack.
      summed: arrays with the shapes of `Outputs.summed`; None: no outputs.
      name: module name of the parameters.
    """
    pure = hk.transform(logical.named_within(fn, name))
    shapes = _abstract((x, side) if summed is None else (x, side, summed))

    def init(rng):
        if rng is None:  # hk.lift asks for shapes only
            return None
        with logical.lifted(name):
            return pure.init(rng, *jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes))

    params = hk.lift(init, name=name)(hk.next_rng_key() if hk.running_init() else None)
    return Tail(lambda params, *args: pure.apply(params, None, *args), params)


@dataclasses.dataclass(frozen=True)
class LayerFn:
    """One layer as a pure function, with information about its parameters for runners.

    Attributes:
      plain: `(layer, x, side, kind) -> (x, outputs)` without rematerialization, except inside a group.
      rematerialized: `(kind, in_loop) -> function (layer, x, side) -> (x, outputs)`.
      kinds: the kind of every layer; of a group, a tuple.
      is_small: whether to run it without a loop on CPUs.
      outputs: shapes of one layer's outputs.
      axes: returns the tree of `Axes` of one layer's parameters.
      dtypes: tree of dtypes: that to which a layer casts a parameter, otherwise the stored one.
      undivided: as in `layer_stack`.
      group: number of layers of the model that it runs.
    """

    plain: Callable[[Layer, Stream, Side, Kind], tuple[Stream, Outputs]]
    rematerialized: Callable[[Kind, bool], Callable]
    kinds: tuple[Kind, ...]
    is_small: bool
    outputs: Outputs
    axes: Callable[[], Any]
    dtypes: Any
    is_first: bool = False
    undivided: str = ""
    group: int = 1
    _calls: dict[tuple[Kind, bool], Callable] = dataclasses.field(default_factory=dict, init=False, repr=False)

    def __call__(
        self, layer: Layer, x: Stream, side: Side, kind: Kind = None, *, in_loop: bool = True
    ) -> tuple[Stream, Outputs]:
        """Applies a layer with the model's rematerialization; `in_loop`: whether a loop runs it."""
        if (kind, in_loop) not in self._calls:  # JAX traces the same function once
            self._calls[kind, in_loop] = self.rematerialized(kind, in_loop)
        return self._calls[kind, in_loop](layer, x, side)

    def zero_sums(self) -> Any:
        """Returns zeros for the summed outputs."""
        return jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), self.outputs.summed)


# (one layer, stacked layers, x, side, tail) -> (x or the result of the tail, outputs of all layers)
# A runner calls `tail.fn(tail.params, x, side, summed)`, whatever the signature of the model's tail is.
Runner = Callable[[LayerFn, Layer, Stream, Side, Tail | None], tuple[Any, Outputs]]
UNROLLED = 12  # most layers of a stack that is small (`LayerFn.is_small`)


def scan_runner(fn: LayerFn, stacked: Layer, x: Stream, side: Side, tail: Tail | None) -> tuple[Any, Outputs]:
    """Runs the layers on all rows together, with a scan over repetitions of the pattern.

    Weights are cast before the loop, so that their stacked gradients have the computation dtype.

    Args:
      stacked: leaves [L, ...].
      x, side: leaves [B, ...].
      tail: the computation after the last layer; None: none.
    """
    return _run_in_order(fn, stacked, x, side, tail, unrolls=False)


def unrolled_runner(fn: LayerFn, stacked: Layer, x: Stream, side: Side, tail: Tail | None) -> tuple[Any, Outputs]:
    """Runs the layers without a loop, on all rows together.

    Args:
      fn, stacked, x, side, tail: as in `scan_runner`.
    """
    return _run_in_order(fn, stacked, x, side, tail, unrolls=True)


def _run_in_order(
    fn: LayerFn, stacked: Layer, x: Stream, side: Side, tail: Tail | None, *, unrolls: bool
) -> tuple[Any, Outputs]:
    narrow = jax.tree.map(lambda a, dtype: a.astype(dtype), stacked.params, fn.dtypes)

    def step(carry: tuple[Stream, Any], layer: Layer, kind: Kind, *, in_loop: bool) -> tuple[tuple, Any]:
        x, sums = carry
        x, out = fn(layer, x, side, kind, in_loop=in_loop)
        return (x, jax.tree.map(jnp.add, sums, out.summed)), out.stacked

    carry = (x, fn.zero_sums())
    (x, sums), every = scan_layers(step, fn.kinds, carry, stacked._replace(params=narrow), unrolls=unrolls)
    return x if tail is None else tail.fn(tail.params, x, side, sums), Outputs(sums, every)


def scan_layers(
    step: Callable, kinds: Sequence[Kind], carry: Any, stacked: Any, *, unrolls: bool = False
) -> tuple[Any, Any]:
    """Runs `step(carry, layer, kind, in_loop=...) -> (carry, out)` for every layer.

    Returns the carry after the last layer, and the outputs [L, ...].

    Args:
      kinds: kinds of the L layers.
      carry: the carry before the first layer.
      stacked: leaves [L, ...].
      unrolls: whether no layer runs in a loop.
    """
    period = len(kinds) if unrolls else _period(kinds)
    if period == 1 and not unrolls:
        return jax.lax.scan(lambda carry, layer: step(carry, layer, kinds[0], in_loop=True), carry, stacked)
    repetitions = len(kinds) // period
    looped = repetitions * period if repetitions > 1 else 0  # the compiler unrolls a loop with one iteration

    def unrolled(carry: Any, layers: Any, kinds: Sequence[Kind], *, in_loop: bool) -> tuple[Any, Any]:
        outs = []
        for i, kind in enumerate(kinds):
            # Traced faster than a[i].
            layer = jax.tree.map(lambda a, i=i: jax.lax.index_in_dim(a, i, keepdims=False), layers)
            carry, out = step(carry, layer, kind, in_loop=in_loop)
            outs.append(out)
        return carry, jax.tree.map(lambda *each: jnp.stack(each), *outs)

    parts = []
    if looped:
        head = jax.tree.map(lambda a: a[:looped].reshape(repetitions, period, *a.shape[1:]), stacked)
        one = functools.partial(unrolled, kinds=kinds[:period], in_loop=True)
        carry, out = jax.lax.scan(one, carry, head)
        parts.append(jax.tree.map(lambda a: a.reshape(looped, *a.shape[2:]), out))
    if looped < len(kinds):
        rest = jax.tree.map(lambda a: a[looped:], stacked)
        carry, out = unrolled(carry, rest, kinds[looped:], in_loop=False)
        parts.append(out)
    return carry, jax.tree.map(lambda *each: jnp.concatenate(each), *parts)


def _period(kinds: Sequence[Kind]) -> int:
    """Returns the smallest p with kinds[l] == kinds[l % p] for all l."""
    return next(p for p in range(1, len(kinds) + 1) if all(k == kinds[i % p] for i, k in enumerate(kinds)))


_runner = jax.make_user_context(scan_runner)  # part of the key of every trace


def use_runner(runner: Runner) -> contextlib.AbstractContextManager:
    """Context in which layer stacks are executed by `runner`.

    Pass the same object every time, because another one makes JAX trace again.
    """
    return _runner(runner)


@dataclasses.dataclass(frozen=True, eq=False)
class _Block:
    """A model's block as pure functions."""

    transformed: hk.Transformed
    outputs: Any
    has_kind: bool

    def init(self, kind: Kind) -> Callable[..., Params]:
        """Returns `(key, x, side[, entry of layer_in]) -> parameters`."""
        return functools.partial(self.transformed.init, **self._keywords(kind))

    def apply(self, layer: Layer, x: Stream, side: Side, kind: Kind) -> tuple[Stream, Outputs]:
        inputs = (layer.inputs,) if jax.tree.leaves(layer.inputs) else ()
        out = self.transformed.apply(layer.params, layer.key, x, side, *inputs, **self._keywords(kind))
        return (out, Outputs()) if self.outputs is None else _split(out, self.outputs)

    def rematerialized(self, remat: Remat, kind: Kind, *, in_loop: bool) -> Callable:
        def one_layer(layer: Layer, x: Stream, side: Side) -> tuple[Stream, Outputs]:
            return self.apply(layer, x, side, kind)

        return rematerialized(one_layer, remat, in_loop=in_loop)

    def plain(self, layer: Layer, x: Stream, side: Side, kind: Kind) -> tuple[Stream, Outputs]:
        return self.apply(layer, x, side, kind)

    def _keywords(self, kind: Kind) -> dict[str, Kind]:
        return {"kind": kind} if self.has_kind else {}


@dataclasses.dataclass(frozen=True, eq=False)
class _Group:
    """Successive layers of `one` as one layer; keys, `layer_in` and stacked outputs gain a leading dimension."""

    one: _Block

    def init(self, kinds: tuple[Kind, ...]) -> Callable[..., Params]:
        """Returns `(keys, x, side[, entries of layer_in]) -> parameters of all layers`."""

        def init_each(keys: jax.Array, x: Stream, side: Side, *entries: Any) -> Params:
            arguments = [(keys[i], x, side, *jax.tree.map(lambda a, i=i: a[i], entries)) for i in range(len(kinds))]
            made = [self.one.init(kind)(*given) for kind, given in zip(kinds, arguments, strict=True)]
            return stack_checks.joined(made)

        return init_each

    def apply(self, layer: Layer, x: Stream, side: Side, kinds: tuple[Kind, ...]) -> tuple[Stream, Outputs]:
        return self._run([functools.partial(self.one.apply, kind=kind) for kind in kinds], layer, x, side)

    def rematerialized(self, remat: Remat, kinds: tuple[Kind, ...], *, in_loop: bool) -> Callable:
        return functools.partial(self._run, [self.one.rematerialized(remat, kind, in_loop=in_loop) for kind in kinds])

    def plain(self, layer: Layer, x: Stream, side: Side, kinds: tuple[Kind, ...]) -> tuple[Stream, Outputs]:
        """Without rematerialization, the backward pass would save what all layers of the group compute."""
        return self.rematerialized("full", kinds, in_loop=False)(layer, x, side)

    @staticmethod
    def _run(calls: Sequence[Callable], layer: Layer, x: Stream, side: Side) -> tuple[Stream, Outputs]:
        every = []
        for i, call in enumerate(calls):
            key, inputs = jax.tree.map(lambda a, i=i: a[i], (layer.key, layer.inputs))
            after, out = call(Layer(layer.params, key, inputs), x, side)
            stack_checks.check_stream(x, after)
            x = after
            every.append(out)
        stack_checks.check_equal_outputs(every)
        sums = jax.tree.map(lambda *each: sum(each[1:], each[0]), *[out.summed for out in every])
        return x, Outputs(sums, jax.tree.map(lambda *each: jnp.stack(each), *[out.stacked for out in every]))


def layer_stack(
    block: Callable[..., Any],
    num_layers: int,
    *,
    name: str = "layers",
    remat: Remat = "none",
    tail: Tail | None = None,
    outputs: Any = None,
    pattern: Sequence[Kind] | None = None,
    group: int = 1,
    first: First | None = None,
    undivided: str = "",
) -> Callable[..., Any]:
    """Stacks `num_layers` copies of a Haiku block; call the result inside `hk.transform`.

    Args:
      block: a Haiku function `(x, side) -> x` with leaves [B, ...] that keep their shapes; `(x, side, entry)` with
        `layer_in`; returns `(x, out)` with `outputs`; takes `kind=` with `pattern`. It may call `hk.next_rng_key()`:
        each layer has its own key, equal under every runner.
      num_layers: L, with the layers of `first`.
      name: module name of the stacked parameters.
      remat: what the backward pass recomputes: "none" (at most sharding constraints), "dots" (all but matrix products
        without batch dimensions), "full", or all but the values with these checkpoint names or of an `OnHost`.
      tail: runs after the last layer; None: none.
      outputs: "stacked", "summed" or a tree of these, such as `{"cache": "stacked"}`; None: x alone.
      pattern: hashable kinds of successive layers, repeated; None: all layers are equal.
      group: number of successive layers, with parameters in different modules, that runners treat as one.
      first: layers before those of the pattern, in a module `first_{name}`; None: none.
      undivided: why runners may not divide the rows, as an error message; "": they may.

    Returns:
      `(x, side=(), layer_in=()) -> x`, or the tail's result; with `outputs` a pair of that and the outputs.
    """
    stack_checks.check_arguments(remat, outputs, pattern, choices=REMAT_CHOICES)
    how: Any = dict(remat=remat, outputs=outputs, pattern=pattern, group=group, undivided=undivided)
    if first is None:
        return _one_stack(block, num_layers, name, tail, **how)
    stack_checks.check_first(num_layers, len(first.kinds), has_pattern=pattern is not None)
    kept = None if outputs is None else jax.tree.map(lambda word: word if word == "stacked" else (), outputs)
    own, count = {**how, "outputs": kept, "pattern": first.kinds, "group": first.group}, len(first.kinds)
    before = _one_stack(block, count, f"{logical.FIRST}{name}", None, **own, is_first=True)
    others, parts = _one_stack(block, num_layers - count, name, tail, **how), (slice(count), slice(count, None))

    def apply(x: Stream, side: Side = (), layer_in: Any = ()) -> Any:
        stack_checks.check_shapes(x, side, layer_in, num_layers)
        ours, theirs = (jax.tree.map(operator.itemgetter(part), layer_in) for part in parts)
        found = before(x, side, ours)
        x, early = (found, ()) if outputs is None else found
        x, side = (x[0], (*side, x[1])) if first.hands_over else (x, side)
        found = others(x, side, theirs)
        return found if outputs is None else (found[0], jax.tree.map(_joined, outputs, early, found[1]))

    return apply


def _joined(word: str, early: Any, late: Any) -> Any:
    return late if word == "summed" else jax.tree.map(lambda *parts: jnp.concatenate(parts), early, late)


def _one_stack(
    block: Callable[..., Any],
    num_layers: int,
    name: str,
    tail: Tail | None,
    *,
    remat: Remat,
    outputs: Any,
    pattern: Sequence[Kind] | None,
    group: int,
    undivided: str,
    is_first: bool = False,
) -> Callable[..., Any]:
    stack_checks.check_groups(num_layers, group)
    single = _Block(hk.transform(logical.named_within(block, name)), outputs, pattern is not None)
    one: _Block | _Group = single if group == 1 else _Group(single)
    kinds = _kinds(pattern, num_layers, group)

    def apply(x: Stream, side: Side = (), layer_in: Any = ()) -> Any:
        stack_checks.check_shapes(x, side, layer_in, num_layers)
        layer_in = _grouped(layer_in, group)
        like_x, like_side, entry = _abstract(x), _abstract(side), _abstract(layer_in, of_one_layer=True)
        arguments = (like_x, like_side, *([entry] if jax.tree.leaves(entry) else []))
        axis = logical.FIRST_LAYERS if is_first else logical.LAYERS
        params = _stacked_params(one.init, name, kinds, arguments, group, axis)
        stacked = Layer(params, _grouped(_layer_keys(num_layers), group), layer_in)
        fn = _layer_fn(one, remat, kinds, stacked, arguments, group)
        fn = dataclasses.replace(fn, is_first=is_first, undivided=undivided)
        run = scan_runner if hk.running_init() else _runner.value  # a runner may need a mesh; init has none
        last = tail and _checked_tail(tail, like_x, like_side, fn.outputs.summed, outputs)
        result, out = run(fn, stacked, x, side, last)
        return result if outputs is None else (result, _join(_ungrouped(out, group), outputs))

    return apply


def _layer_fn(
    one: _Block | _Group, remat: Any, kinds: tuple[Kind, ...], stacked: Layer, arguments: tuple, group: int
) -> LayerFn:
    """`arguments` are the shapes of x, side and, if there is one, an entry of `layer_in`."""
    traced, out = _trace(one.apply, _abstract(stacked, of_one_layer=True), arguments[0], arguments[1], kinds)
    return LayerFn(
        plain=one.plain,
        rematerialized=lambda kind, in_loop: one.rematerialized(remat, kind, in_loop=in_loop),
        kinds=kinds,
        is_small=remat == "none" and len(kinds) * group <= UNROLLED,
        outputs=out,
        axes=lambda: _axes(one.init(kinds[0]), group, arguments),
        dtypes=stack_dtypes.computed(traced, stacked.params),
        group=group,
    )


def _grouped(tree: Any, group: int) -> Any:
    """Reshapes leaves [L, ...] to [L / group, group, ...]."""
    return tree if group == 1 else jax.tree.map(lambda a: a.reshape(-1, group, *a.shape[1:]), tree)


def _ungrouped(out: Outputs, group: int) -> Outputs:
    """Reshapes stacked outputs [L / group, group, ...] to [L, ...]."""
    if group == 1:
        return out
    return out._replace(stacked=jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), out.stacked))


def _axes(init: Callable, group: int, arguments: tuple) -> Any:
    key = jax.random.key(0)
    return logical.axes_of(logical.abstract_init(init, _grouped(jax.random.split(key, group), group)[0], *arguments)[1])


def _kinds(pattern: Sequence[Kind] | None, num_layers: int, group: int) -> tuple[Kind, ...]:
    kinds = tuple(pattern[i % len(pattern)] if pattern else None for i in range(num_layers))
    return kinds if group == 1 else tuple(kinds[i : i + group] for i in range(0, num_layers, group))


def _checked_tail(tail: Tail, x: Stream, side: Side, summed: Any, outputs: Any) -> Tail:
    allowed, arguments = "tail.params, x and side", [tail.params, x, side]
    if outputs is not None:
        allowed, arguments = "tail.params, x, side and summed outputs", [*arguments, summed]
    stack_checks.refuse_closure(jax.make_jaxpr(tail.fn)(*arguments), "tail", allowed)
    return Tail(lambda *args: tail.fn(*args[: len(arguments)]), tail.params)


def _split(out: Any, outputs: Any) -> tuple[Stream, Outputs]:
    x, results = stack_checks.pair(out, outputs)

    def parts(wanted: str) -> Any:
        return jax.tree.map(lambda word, part: part if word == wanted else None, outputs, results)

    return x, Outputs(parts("summed"), parts("stacked"))


def _join(out: Outputs, outputs: Any) -> Any:
    return jax.tree.map(lambda word, *parts: parts[Outputs._fields.index(word)], outputs, *out)


def _abstract(tree: Any, *, of_one_layer: bool = False) -> Any:
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[of_one_layer:], a.dtype), tree)


def _stacked_params(
    init: Callable, name: str, kinds: Sequence[Kind], arguments: tuple, group: int, axis: str
) -> Params:
    def init_all(rng):
        if rng is None:  # hk.lift asks for shapes only
            return None
        zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), arguments)
        keys = _grouped(jax.random.split(rng, len(kinds) * group), group)
        with logical.lifted(name, layers=axis):
            return _by_kind(lambda kind, keys: jax.vmap(lambda key: init(kind)(key, *zeros))(keys), kinds, keys)

    return hk.lift(init_all, name=name)(hk.next_rng_key() if hk.running_init() else None)


def _by_kind(make: Callable[[Kind, jax.Array], Params], kinds: Sequence[Kind], keys: jax.Array) -> Params:
    """Returns `make(kind, keys of its layers)` for all kinds, in model order."""
    places = {kind: [i for i, k in enumerate(kinds) if k == kind] for kind in dict.fromkeys(kinds)}
    if len(places) == 1:
        return make(kinds[0], keys)
    made = {kind: make(kind, keys[jnp.asarray(at)]) for kind, at in places.items()}
    stack_checks.check_equal_parameters({k: _abstract(params, of_one_layer=True) for k, params in made.items()})
    order = jnp.argsort(jnp.asarray([i for at in places.values() for i in at]))
    return jax.tree.map(lambda *parts: jnp.concatenate(parts)[order], *made.values())


def _layer_keys(num_layers: int) -> jax.Array | None:
    key = hk.maybe_next_rng_key()
    return None if key is None else jax.vmap(lambda layer: jax.random.fold_in(key, layer))(jnp.arange(num_layers))


def _trace(
    fn: Callable, layer: Layer, x: Stream, side: Side, kinds: Sequence[Kind]
) -> tuple[list[ClosedJaxpr], Outputs]:
    """Returns traces of one layer of each kind, and shapes of its outputs."""
    traced, results = [], []
    for kind in dict.fromkeys(kinds):
        one, (after, out) = jax.make_jaxpr(lambda *args, k=kind: fn(*args, k), return_shape=True)(layer, x, side)
        stack_checks.refuse_closure(one, "block", "its parameters, x, side and layer_in")
        stack_checks.check_stream(x, after)
        stack_checks.check_summed(out.summed)
        traced.append(one)
        results.append(out)
    stack_checks.check_equal_outputs(results)
    return traced, results[0]
