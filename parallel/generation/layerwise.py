"""Generation on one CPU: the layers run in several calls, and calls of equal layers share one compiled program."""

import contextlib
import functools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from core import logical, platforms, stack, wrappers
from core.types import ExtendsCache, ExtendsLayers, Params, can
from parallel.generation import decoding
from parallel.generation.decoding import Drawn, State
from parallel.partitioner import Program

CALL_BYTES = 2**25  # of parameters that a call reads, at least: some milliseconds


class Held(NamedTuple):
    """Parameters for generation, in trees with the structure of the model's parameters.

    Attributes:
      layers: one tree for each call: tuples of the arrays of its layers; None elsewhere.
      others: parameters that belong to no layer; None elsewhere.
    """

    layers: tuple[Params, ...]
    others: Params


class LayerwiseDecoder:
    """Compiled programs of one model on one CPU, with the interface of `Decoder`.

    Attributes:
      model: implements ExtendsCache and ExtendsLayers.
      fixed_length: None: a cache may have any number of slots.
      most_tokens: number of tokens that a call of `decode` adds to a row.
    """

    fixed_length = None
    most_tokens = 1

    def __init__(self, program: Program):
        self.model: Any
        self.model = program.model
        self._program = program
        self._calls = _calls(program)
        self._is_of_layers = jax.tree.map(lambda spec: logical.is_stacked(spec.axes), program.param_specs)
        self._before = jax.jit(self.model.before_layers)
        self._layers = jax.jit(self._extend_layers, static_argnames="kinds", donate_argnums=3)
        self._after = jax.jit(self.model.after_layers)
        self._next = jax.jit(self._next_ids, static_argnames=("sampling", "stop_ids", "num_ids"))

    @contextlib.contextmanager
    def tracing(self) -> Iterator[None]:
        """Context in which the programs are traced and called."""
        with self._program.partitioner.tracing(), platforms.use("cpu"), stack.use_runner(stack.unrolled_runner):
            yield

    def laid_out(self, params: Params) -> Held:
        """Returns the parameters in the dtypes of `decoding.dtypes`, separated by layer."""
        dtypes = decoding.dtypes(self._program)

        def of_call(first: int, last: int) -> Params:
            def taken(spec: Any, a: jax.Array, dtype: Any) -> Any:
                begin, end = _range(spec, self.model)
                if not begin <= first < end:
                    return None
                repeated = (end - begin) // a.shape[0]
                places = range((first - begin) // repeated, (last - begin) // repeated)
                return tuple(_taken(a, i, dtype=dtype) for i in places)

            return jax.tree.map(taken, self._program.param_specs, params, dtypes)

        def other(is_of_layers: bool, a: jax.Array, dtype: Any) -> Any:
            return None if is_of_layers else a.astype(dtype)

        with self.tracing():
            others = jax.tree.map(other, self._is_of_layers, params, dtypes)
            return Held(tuple(of_call(first, last) for first, last in self._calls), others)

    def empty_cache(self, rows: int, slots: int) -> Any:
        """Returns an empty cache of B rows and S slots."""
        with self.tracing():
            return self.model.empty_cache(rows, slots)

    def prefill(
        self, params: Held, cache: Any, ids: jax.Array, start: jax.Array, padding: jax.Array, *inserted: Any
    ) -> tuple[jax.Array, Any]:
        """Runs a chunk of the prompts; the cache is donated.

        Args:
          params: from `laid_out`; others as in `Decoder.prefill`.
        """
        with self.tracing():
            before = self._before(params.others, cache[self.model.num_layers :], ids, start, padding, *inserted)
            return self._through_layers(params, cache, start, *before)

    def decode(
        self, params: Held, state: State, key: jax.Array, rows: jax.Array, count: jax.Array, **static: Any
    ) -> tuple[State, Drawn]:
        """Draws one token for every row; the cache is donated.

        Args:
          params: from `laid_out`; others as in `Decoder.decode`.
          count: not used.
        """
        del count
        others = state.cache[self.model.num_layers :]
        with self.tracing():
            drawn, ended, slot, before = self._next(
                params.others, state._replace(cache=()), others, key, rows, **static
            )
            logits, cache = self._through_layers(params, state.cache, state.slot, *before)
        return State(cache, logits, slot, state.padding, ended), drawn

    def _through_layers(
        self, params: Held, cache: Any, start: jax.Array, x: Any, side: Any, others: Any
    ) -> tuple[jax.Array, Any]:
        states: tuple[Any, ...] = ()
        for (first, last), of_call in zip(self._calls, params.layers, strict=True):
            kinds = tuple(map(self.model.layer_kind, range(first, last)))
            x, after = self._layers(of_call, x, side, cache[first:last], start, kinds=kinds)
            states += after
        return self._after(params.others, x), (*states, *others)

    def _extend_layers(
        self, params: Params, x: Any, side: Any, states: Any, start: jax.Array, *, kinds: tuple[Any, ...]
    ) -> tuple[Any, Any]:
        stacked = jax.tree.map(lambda own, a: jnp.stack(a) if own and a else None, self._is_of_layers, params)
        return self.model.extend_layers(stacked, x, side, states, start, kinds=kinds)

    def _next_ids(
        self, params: Params, state: State, others: Any, key: jax.Array, rows: jax.Array, **static: Any
    ) -> tuple[Drawn, jax.Array, jax.Array, tuple[Any, Any, Any]]:
        drawn, ended = decoding.next_ids(state, key, rows, **static)
        before = self.model.before_layers(params, others, drawn.ids[:, None], state.slot, state.padding)
        return jax.tree.map(lambda a: a[None], drawn), ended, state.slot + 1, before


def suits(program: Program) -> bool:
    """Returns whether to use `LayerwiseDecoder`, which runs on a single CPU device."""
    devices, model = program.partitioner.mesh.devices.flat, program.model
    if len(devices) > 1 or devices[0].platform != "cpu" or not (can(model, ExtendsCache) and can(model, ExtendsLayers)):
        return False
    parts = ("before_layers", "extend_layers", "after_layers")
    if any(wrappers.is_outside(model, whole, part) for whole in ("logits", "extend") for part in parts):
        return False
    return len(_calls(program)) > 1


def _calls(program: Program) -> list[tuple[int, int]]:
    """Returns the first layer of each call, and its last layer plus 1."""
    model: Any = program.model
    specs, shapes = map(jax.tree.leaves, (program.param_specs, program.abstract_state.params))
    stacked = [pair for pair in zip(specs, shapes, strict=True) if logical.is_stacked(pair[0].axes)]
    if not stacked:
        return [(0, model.num_layers)]
    found = []
    for begin, end in sorted({_range(spec, model) for spec, _ in stacked}):
        own, layers = [shape for spec, shape in stacked if _range(spec, model) == (begin, end)], end - begin
        kinds = tuple(map(model.layer_kind, range(begin, end)))
        together = layers // own[0].shape[0]  # layers whose parameters differ
        period = next(p for p in range(1, layers + 1) if all(k == kinds[i % p] for i, k in enumerate(kinds)))
        period = math.lcm(period, together)
        of_layer = max(1, sum(shape.size * shape.dtype.itemsize for shape in own) // layers)
        size = min(-(-CALL_BYTES // of_layer), stack.UNROLLED)
        size = -(-size // period) * period
        found += [(first, min(first + size, end)) for first in range(begin, end, size)]
    return found


def _range(spec: Any, model: Any) -> tuple[int, int]:
    """Returns the first layer of a stacked parameter, and its last plus 1; else (0, 0)."""
    if not logical.is_stacked(spec.axes):
        return 0, 0
    first = model.num_first_layers
    return (0, first) if spec.axes[0] == logical.FIRST_LAYERS else (first, model.num_layers)


@functools.partial(jax.jit, static_argnames="dtype")
def _taken(stacked: jax.Array, layer: int, *, dtype: Any) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(stacked, layer, keepdims=False).astype(dtype)
