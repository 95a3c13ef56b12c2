"""Records the main arrays that a short training run computes, named and in causal order.

    step 1   forward      embedding, layer 0 … L-1: the residual stream after each; head: logits
             loss         of the step
             gradients    head, layer L-1 … 0, embedding: of every parameter, as passed to the optimizer
             update       optimizer state, parameters
    step 2   …

The residual stream is the value that `core.stack` passes from layer to layer. A group of layers that it runs as one
has one entry, such as `layers 4-5`.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Var

from core import logical, parameters, random_bits, stack
from core.batches import batch_shapes, batch_size
from core.errors import UserError
from core.step import TrainState
from core.types import Generates, can
from parallel.partitioner import Program
from parallel.verify import agreement
from parallel.verify.agreement import Batch

Recording = Mapping[str, np.ndarray]  # "step|phase|place|tensor" -> array, in causal order

START = "start"  # the phase of the state before step 1


def key(step: int, phase: str, place: str, tensor: str = "") -> str:
    """Returns the name of an array in a recording.

    Args:
      phase: the part of the step, such as `forward`.
      place: a place in the model, such as `layer 0`.
      tensor: what was recorded there.
    """
    return f"{step}|{phase}|{place}|{tensor}"


def record(program: Program, state: TrainState, batches: Sequence[Batch]) -> dict[str, np.ndarray]:
    """Trains on global batches, one step each, and records arrays. All hosts must call it.

    The recording begins with the initial state `state`, which is donated, as phase `START` of step 0.

    Raises:
      UserError: the strategy shards keys by position (`kv_length`).
    """
    strategy, shape = program.partitioner.strategy, program.partitioner.shape
    if logical.shards(strategy.activation_rules["kv_length"], shape) > 1:
        raise UserError(
            f"strategy {strategy.name!r}: with keys sharded by position (kv_length), layers have the positions of a "
            "row in another order, and cannot be compared position by position. Set strategies.context.ring = False "
            "here, or compare training steps: launch/run agreement"
        )
    recording = dataclasses.replace(program, optimizer=agreement.record_gradients(program.optimizer))
    rows = np.asarray(program.partitioner.data_layout(batch_size(batches[0])).rows)
    layers = _Layers(program)
    order, forward = _Order(program, layers), _Forward(program, layers)
    kept = {key(0, START, "parameters", name): a for name, a in _named(program, state.params)}
    kept |= {key(0, START, "optimizer state", name): a for name, a in _named(program, state.opt_state)}
    state = _with_gradients(recording, state)
    for step, batch in enumerate(batches, 1):
        on_device = program.put({name: a[rows] for name, a in batch.items()})
        kept |= {key(step, "forward", *where): a for where, a in forward(state, on_device).items()}
        state, metrics = recording.train_step(state, on_device)
        kept[key(step, "loss", "")] = np.asarray(metrics["loss"])
        gradients = agreement.gather_to_hosts(program, state.opt_state.gradients)
        kept |= {key(step, "gradients", place, name): a for place, name, a in order.gradients(gradients)}
        parts = {"optimizer state": state.opt_state.inner, "parameters": state.params}
        for place, tree in parts.items():
            axes = program.axes.opt_state if place == "optimizer state" else program.axes.params
            named = _by_layer(_named(program, tree), axes, layers)
            kept |= {key(step, "update", place, name): a for name, a in named}
    return kept


def _with_gradients(recording: Program, state: TrainState) -> TrainState:
    layout = recording.state_shardings.opt_state.gradients
    zeros = jax.jit(lambda p: jax.tree.map(jnp.zeros_like, p), out_shardings=layout)(state.params)
    return state._replace(opt_state=agreement.RecordedGradients(state.opt_state, zeros))


class _Layers:
    """Names layers; one entry of stacked arrays belongs to a group of successive layers (`core.stack`).

    Attributes:
      feeding: names of the parameters that the input of the first layer stack depends on.
    """

    def __init__(self, program: Program):
        groups: dict[bool, int] = {}
        self.feeding = _feeding(program, groups)
        self._first, self._others = (groups.get(is_first, 1) for is_first in (True, False))
        shapes = jax.tree.leaves(program.abstract_state.params)
        both = zip(shapes, _axes_leaves(program.axes.params), strict=True)
        firsts = (shape.shape[0] for shape, axes in both if axes[:1] == (logical.FIRST_LAYERS,))
        self._first_entries = max(firsts, default=0)

    def start(self, axis: str | None) -> int:
        """Returns the number of entries before those of a stacked array with this first axis."""
        return self._first_entries if axis == logical.LAYERS else 0

    def place(self, entry: int) -> str:
        """Returns, for example, `layer 3`, or `layers 4-5` for a group of two."""
        before = min(entry, self._first_entries)
        begin = before * self._first + (entry - before) * self._others
        group = self._first if entry < self._first_entries else self._others
        return f"layer {begin}" if group == 1 else f"layers {begin}-{begin + group - 1}"


class _Forward:
    def __init__(self, program: Program, layers: _Layers):
        self._program, self._layers = program, layers
        self._jitted = jax.jit(lambda state, batch: residuals(program, state.params, state, batch))

    def __call__(self, state: TrainState, batch: Any) -> dict[tuple[str, str], np.ndarray]:
        """Returns arrays by (place, tensor); {} if the model's layer stack runs inside another transformation."""
        with self._program.partitioner.tracing():
            try:
                seen, logits = self._jitted(state, batch)
            except jax.errors.UnexpectedTracerError:  # the stack runs inside another transformation
                return {}
        found: dict[tuple[str, str], np.ndarray] = {}
        count = 0
        for before, layers in agreement.gather_to_hosts(self._program, seen):
            for path, x in jax.tree_util.tree_leaves_with_path(before):
                found.setdefault(("embedding", _residual(path)), storable(x))
            streams = jax.tree_util.tree_leaves_with_path(layers)
            for layer in zip(*(every for _, every in streams), strict=True):
                found |= {
                    (self._layers.place(count), _residual(path)): storable(x)
                    for (path, _), x in zip(streams, layer, strict=True)
                }
                count += 1
        if logits is not None:
            found["head", "logits"] = storable(agreement.gather_to_hosts(self._program, logits))
        return found


def _residual(path: Sequence[Any]) -> str:
    return "residual" + jax.tree_util.keystr(tuple(path))


def residuals(
    program: Program, params: Any, state: TrainState, batch: Any, groups: dict[bool, int] | None = None
) -> tuple[list, jax.Array | None]:
    """Records a forward pass of the program's model.

    Args:
      params: the parameters.
      state: gives the carry, and the step that the random bits depend on.
      batch: the global batch.
      groups: receives the number of layers of an entry of the first layers (True) and of the others (False).

    Returns:
      For every layer stack, a pair of its input and its layers' outputs [L, ...]; and the logits or None.
    """
    model, seen = program.model, []
    rng = jax.random.fold_in(jax.random.key(program.seed), state.step)

    def runner(fn, stacked, x, side, tail):
        def recorded(kind, in_loop):
            del in_loop  # without a backward pass, nothing is rematerialized

            def recording(layer, x, side):
                after, out = fn.plain(layer, x, side, kind)
                return after, out._replace(stacked=(out.stacked, after))

            return recording

        result, out = stack.scan_runner(dataclasses.replace(fn, rematerialized=recorded), stacked, x, side, tail)
        outputs, every = out.stacked
        seen.append((x, every))
        if groups is not None:
            groups[fn.is_first] = fn.group
        return result, out._replace(stacked=outputs)

    with stack.use_runner(runner):
        model.loss(params, state.carry, rng, random_bits.with_row_ids(batch), is_training=True)
    return list(seen), model.logits(params, batch) if can(model, Generates) else None


class _Order:
    """Sorts gradients in the order of a backward pass: head, layers from the last to the first, embedding."""

    def __init__(self, program: Program, layers: _Layers):
        self._axes, self._layers = program.axes.params, layers

    def gradients(self, tree: Any) -> Iterator[tuple[str, str, np.ndarray]]:
        """Yields (place, name, array) of the gradients in `tree`; stacked gradients layer by layer."""
        others: list[tuple[str, np.ndarray]] = []
        stacked: dict[str, list[tuple[str, np.ndarray]]] = {axis: [] for axis in logical.STACKED}
        leaves = jax.tree_util.tree_leaves_with_path(tree)
        for (path, a), axes in zip(leaves, _axes_leaves(self._axes), strict=True):
            of_axis = stacked[str(axes[0])] if logical.is_stacked(axes) else others
            of_axis.append((parameters.path_name(path), storable(a)))
        yield from (("head", name, a) for name, a in others if name not in self._layers.feeding)
        for axis, named in stacked.items():  # the layers that repeat, and then those before them
            start = self._layers.start(axis)
            for entry in reversed(range(max((len(a) for _, a in named), default=0))):
                place = self._layers.place(start + entry)
                yield from ((place, name, a[entry]) for name, a in named if entry < len(a))
        yield from (("embedding", name, a) for name, a in others if name in self._layers.feeding)


def _feeding(program: Program, groups: dict[bool, int]) -> set[str]:
    state = program.abstract_state
    batch = batch_shapes(program.spec)

    def entering(params, state, batch):
        seen, _ = residuals(program, params, state, batch, groups)
        return seen[0][0] if seen else ()

    with program.partitioner.tracing():
        try:
            traced = jax.make_jaxpr(entering)(state.params, state, batch).jaxpr
        except jax.errors.UnexpectedTracerError:
            return set()
    needed, names = _dependencies(traced), parameters.names(state.params)
    return {name for name, var in zip(names, traced.invars, strict=False) if var in needed}  # parameters come first


def _dependencies(jaxpr: Any) -> set[Var]:
    needed = {v for v in jaxpr.outvars if isinstance(v, Var)}
    for equation in reversed(jaxpr.eqns):
        if needed.intersection(equation.outvars):
            needed.update(v for v in equation.invars if isinstance(v, Var))
    return needed


def _named(program: Program, tree: Any) -> Iterator[tuple[str, np.ndarray]]:
    for path, leaf in jax.tree_util.tree_leaves_with_path(agreement.gather_to_hosts(program, tree)):
        yield parameters.path_name(path), storable(leaf)


def _by_layer(named: Iterator[tuple[str, np.ndarray]], axes: Any, layers: _Layers) -> Iterator[tuple[str, np.ndarray]]:
    for (name, a), of in zip(named, _axes_leaves(axes), strict=True):
        if logical.is_stacked(of):
            yield from ((f"{name}, {layers.place(layers.start(of[0]) + i)}", a[i]) for i in range(len(a)))
        else:
            yield name, a


def _axes_leaves(axes: Any) -> list[tuple[str | None, ...]]:
    return [leaf.names for leaf in jax.tree.leaves(axes)]


def storable(a: Any) -> np.ndarray:
    """Converts to an array that numpy can save: floating-point types of less than 4 bytes become float32."""
    a = np.asarray(a)
    return a.astype(np.float32) if a.dtype.itemsize < 4 and jnp.issubdtype(a.dtype, jnp.floating) else a
