"""The compiled programs of generation: one runs a chunk of the prompts, one adds several tokens to every row.

Prompts end in the same slot of the cache; shorter ones begin with empty slots (`padding`). Most stacked parameters are
held as one array per layer, which a loop over layers would first copy out of the stack.

B rows, S slots of the cache, C slots of a chunk, V vocabulary.
"""

import contextlib
import functools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from core import logical, stack, wrappers
from core.batches import BatchSpec, batch_shapes, row_length
from core.types import ChoosesDtype, ExtendsCache, Params, can
from parallel.generation.sampling import GREEDY, MASKED, Sampling, draw
from parallel.partitioner import Program

STEPS = 32  # the largest number of tokens of a row that a call can add
_REPLICATED_BYTES = 2**30  # smaller parameters are copied to every chip, instead of gathered for every token
_POSITIONS = ("length", "residual_length", "kv_length")  # of one token, which is not sharded


class State(NamedTuple):
    """The state of all rows between two calls.

    Attributes:
      logits: of the next token, [B, V].
      slot: the next slot to fill, [].
      padding: number of empty slots before each row, [B].
      ended: [B], bool.
    """

    cache: Any
    logits: jax.Array
    slot: jax.Array
    padding: jax.Array
    ended: jax.Array


NEW, STOP, NONE = range(3)  # an id was added; a stop id ended the row; the row had ended before


class Drawn(NamedTuple):
    """The ids that a call drew; all fields have the same shape.

    Attributes:
      ids: [N, B] from `decode`, for N tokens of each row; [B] from `next_ids`.
      log_probabilities: at temperature 1.
      fate: NEW for an id that was added, STOP for a stop id, NONE if there is no id.
    """

    ids: jax.Array
    log_probabilities: jax.Array
    fate: jax.Array


class Decoder:
    """Compiled programs of one model and layout.

    Attributes:
      model: the model, or `Recomputing` around it.
      fixed_length: number of slots that a cache must have; None: any.
      most_tokens: largest number of tokens that a call of `decode` adds to a row.
    """

    most_tokens = STEPS

    def __init__(self, program: Program):
        self._program = program
        outer = extends_cache(program.model)
        self.model: Any = program.model if outer else Recomputing(program)
        self.fixed_length = None if outer else row_length(program.spec)
        at = program.partitioner
        replicated = NamedSharding(at.mesh, PartitionSpec())
        params = program.abstract_state.params
        is_small = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(params)) <= _REPLICATED_BYTES
        layouts: Any = program.state_shardings.params
        self._layouts = jax.tree.map(lambda _: replicated, layouts) if is_small else layouts
        is_apart = outer and (is_small or logical.shards(at.strategy.param_rules["layers"], at.shape) == 1)
        self._apart = jax.tree.map(lambda spec: is_apart and logical.is_stacked(spec.axes), program.param_specs)
        self._laid_out = jax.jit(self._cast, out_shardings=self.layouts)
        self._prefill = jax.jit(self._prefill_chunk, donate_argnums=1)
        self._decode = jax.jit(
            self._decode_tokens, static_argnames=("sampling", "stop_ids", "num_ids"), donate_argnums=1
        )

    @contextlib.contextmanager
    def tracing(self) -> Iterator[None]:
        """Context in which the programs are traced and called."""
        at = self._program.partitioner
        whole = {**at.strategy.activation_rules, **dict.fromkeys(_POSITIONS)}
        runner = stack.unrolled_runner if self.fixed_length is None else stack.scan_runner
        with at.tracing(), logical.sharding_rules(whole, at.strategy.param_rules), stack.use_runner(runner):
            yield

    @property
    def layouts(self) -> Any:
        """Tree of the shardings of the parameters that `laid_out` returns."""

        def of_each(apart: bool, layout: NamedSharding, leaf: jax.ShapeDtypeStruct) -> Any:
            if not apart:
                return layout
            return (NamedSharding(layout.mesh, PartitionSpec(*layout.spec[1:])),) * leaf.shape[0]

        return jax.tree.map(of_each, self._apart, self._layouts, self._program.abstract_state.params)

    def laid_out(self, params: Params) -> Params:
        """Returns the parameters for generation, cast to `dtypes` and sharded as `layouts`.

        A stacked parameter may become a tuple of one array per layer.
        """
        with self.tracing():
            return self._laid_out(params)

    def _cast(self, params: Params) -> Params:
        def cast(dtype: Any, a: jax.Array, apart: bool) -> Any:
            a = a.astype(dtype)
            return tuple(a) if apart else a

        return jax.tree.map(cast, dtypes(self._program), params, self._apart)

    def _stacked(self, params: Params) -> Params:
        """Stacks the layers again; the compiler removes stacks that are only indexed."""
        return jax.tree.map(lambda apart, a: jnp.stack(a) if apart else a, self._apart, params)

    def empty_cache(self, rows: int, slots: int) -> Any:
        """Returns an empty cache of B rows and S slots."""
        with self.tracing():
            return self._empty_cache(rows, slots)

    @functools.cached_property
    def _empty_cache(self) -> Any:
        return jax.jit(self.model.empty_cache, static_argnums=(0, 1))

    def prefill(
        self, params: Params, cache: Any, ids: jax.Array, start: jax.Array, padding: jax.Array, *inserted: Any
    ) -> tuple[jax.Array, Any]:
        """Runs a chunk of the prompts; the cache is donated.

        Returns the logits after it, [B, V], and the cache.

        Args:
          params: from `laid_out`.
          ids: [B, C], int32.
          start: slot of the first id, [].
          padding: number of empty slots before each row, [B].
          *inserted: nothing, or one pair: vectors [B, C, D], and booleans [B, C], true where a vector replaces an
            embedded id.
        """
        with self.tracing():
            return self._prefill(params, cache, ids, start, padding, *inserted)

    def abstract(self, rows: int, slots: int) -> tuple[Params, Any]:
        """Returns shapes and shardings of the result of `laid_out`, and of a cache."""
        with self.tracing():
            params = jax.eval_shape(self._cast, self._program.abstract_state.params)
            empty = functools.partial(self.model.empty_cache, rows, slots)
            return _sharded(params, self.layouts), _sharded(jax.eval_shape(empty), _layouts(jax.jit(empty).lower()))

    def lower_prefill(self, params: Params, cache: Any, *, rows: int, chunk: int) -> Any:
        """Lowers the program for one chunk of the prompts, from shapes alone.

        Args:
          params, cache: from `abstract`.
          rows, chunk: B and C.
        """
        with self.tracing():
            return self._prefill.lower(params, cache, *self._integers((rows, chunk), (), (rows,)))

    def lower_decode(self, params: Params, cache: Any, *, rows: int, vocab_size: int) -> Any:
        """Lowers the program that adds greedy tokens, from shapes alone.

        Args:
          params, cache: from `abstract`.
          rows, vocab_size: B and V.
        """
        shapes: Any = self._integers((), (rows,), (rows,), ())
        slot, padding, numbers, count = shapes
        logits: Any = jax.ShapeDtypeStruct((rows, vocab_size), jnp.float32, sharding=slot.sharding)
        ended: Any = jax.ShapeDtypeStruct((rows,), jnp.bool_, sharding=slot.sharding)
        key = jax.ShapeDtypeStruct((), jax.eval_shape(lambda: jax.random.key(0)).dtype, sharding=slot.sharding)
        state = State(cache, logits, slot, padding, ended)
        with self.tracing():
            static = {"sampling": GREEDY, "stop_ids": (), "num_ids": None}
            return self._decode.lower(params, state, key, numbers, count, **static)

    def _integers(self, *shapes: tuple[int, ...]) -> list[jax.ShapeDtypeStruct]:
        whole = NamedSharding(self._program.partitioner.mesh, PartitionSpec())
        return [jax.ShapeDtypeStruct(shape, jnp.int32, sharding=whole) for shape in shapes]

    def _prefill_chunk(
        self, params: Params, cache: Any, ids: jax.Array, start: jax.Array, padding: jax.Array, *inserted: Any
    ) -> tuple[jax.Array, Any]:
        return self.model.extend(self._stacked(params), cache, ids, start, padding, *inserted)

    def decode(self, params: Params, state: State, key: jax.Array, rows: jax.Array, count: jax.Array, **static: Any):
        """Adds up to `count` tokens to every row; the state is donated.

        Args:
          params: from `laid_out`.
          state: from the last call, or after the prompts.
          rows: number of each row, [B], part of the random key of its draws.
          count: at most STEPS, [].
          **static: `sampling`, `stop_ids` and `num_ids` of `next_ids`.

        Returns:
          `(State, Drawn)`.
        """
        with self.tracing():
            return self._decode(params, state, key, rows, count, **static)

    def _decode_tokens(
        self,
        params: Params,
        state: State,
        key: jax.Array,
        rows: jax.Array,
        count: jax.Array,
        *,
        sampling: Sampling,
        stop_ids: tuple[int, ...],
        num_ids: int | None,
    ) -> tuple[State, Drawn]:
        def is_unfinished(carry: tuple[jax.Array, State, Drawn]) -> jax.Array:
            step, state, _ = carry
            return (step < count) & ~jnp.all(state.ended)

        def add_token(carry: tuple[jax.Array, State, Drawn]) -> tuple[jax.Array, State, Drawn]:
            step, state, drawn = carry
            new, ended = next_ids(state, key, rows, sampling=sampling, stop_ids=stop_ids, num_ids=num_ids)
            drawn = Drawn(*(a.at[step].set(one) for a, one in zip(drawn, new, strict=True)))
            whole = self._stacked(params)
            logits, cache = self.model.extend(whole, state.cache, new.ids[:, None], state.slot, state.padding)
            return step + 1, State(cache, logits, state.slot + 1, state.padding, ended), drawn

        shape = (STEPS, *state.ended.shape)
        nothing = Drawn(jnp.zeros(shape, jnp.int32), jnp.zeros(shape), jnp.full(shape, NONE))
        _, state, drawn = jax.lax.while_loop(is_unfinished, add_token, (jnp.int32(0), state, nothing))
        return state, jax.tree.map(lambda a: jax.lax.with_sharding_constraint(a, PartitionSpec()), drawn)


def extends_cache(model: Any) -> bool:
    """Returns whether generation uses the model's own cache."""
    return can(model, ExtendsCache) and not wrappers.is_outside(model, "logits", "extend")


def next_ids(
    state: State,
    key: jax.Array,
    rows: jax.Array,
    *,
    sampling: Sampling,
    stop_ids: tuple[int, ...],
    num_ids: int | None,
) -> tuple[Drawn, jax.Array]:
    """Draws the next id of every row; also returns whether each row has ended, [B].

    Args:
      rows: number of each row, [B], part of the random key of its draws.
      num_ids: only ids below this are drawn; None: all.
    """
    possible = state.logits
    if num_ids is not None:
        possible = jnp.where(jnp.arange(possible.shape[1]) < num_ids, possible, MASKED)
    ids = draw(possible, key, rows, state.slot - state.padding, sampling)
    chosen = jnp.take_along_axis(state.logits, ids[:, None], axis=1)[:, 0]
    log_p = chosen - jax.nn.logsumexp(state.logits, axis=1)
    stops = jnp.isin(ids, jnp.asarray(stop_ids or (-1,)))
    fate = jnp.where(state.ended, NONE, jnp.where(stops, STOP, NEW))
    return Drawn(ids, log_p, fate), state.ended | stops


def dtypes(program: Program) -> Params:
    """Returns the dtype of each parameter in generation.

    Matrices and embeddings have the dtype in which layers use them (`ParamSpec.computed`) or else that of the model
    (float32 without `ChoosesDtype`), others the stored one.
    """
    computed = program.model.dtype if can(program.model, ChoosesDtype) else "float32"
    narrowed = ("matrix", "embedding")
    return jax.tree.map(
        lambda spec, leaf: jnp.dtype(spec.computed or computed if spec.kind in narrowed else leaf.dtype),
        program.param_specs,
        program.abstract_state.params,
    )


def _sharded(shapes: Any, layouts: Any) -> Any:
    return jax.tree.map(lambda s, at: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=at), shapes, layouts)


def _layouts(lowered: Any) -> Any:
    return lowered.compile().output_shardings


class Recomputing:
    """A model without a KV cache, with `empty_cache` and `extend`: each call runs it on all ids."""

    def __init__(self, program: Program):
        self._program = program

    def empty_cache(self, rows: int, length: int) -> jax.Array:
        """Returns empty slots for ids, [B, S], int32."""
        return jnp.zeros((rows, length), jnp.int32)

    def extend(
        self, params: Params, cache: jax.Array, ids: jax.Array, start: jax.Array, padding: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Adds ids to the cache and runs all of its ids.

        Returns the logits after the last, [B, V], and the cache. Empty slots are moved behind the ids of a row: they
        then do not affect a causal model.

        Args:
          cache: ids, [B, S].
          ids: the new ids, [B, C].
          start: slot of the first new id, [].
          padding: number of empty slots before each row, [B].
        """
        cache = jax.lax.dynamic_update_slice_in_dim(cache, ids, start, axis=1)
        places = (jnp.arange(cache.shape[1]) + padding[:, None]) % cache.shape[1]
        model: Any = self._program.model
        batch = text_batch(self._program.spec, jnp.take_along_axis(cache, places, axis=1))
        last = start + ids.shape[1] - 1 - padding
        # LongRoPE reads the largest position, which is that of the row's last id.
        batch = {**batch, "positions": jnp.minimum(batch["positions"], last[:, None])}
        logits = model.logits(params, batch)
        return jnp.take_along_axis(logits, last[:, None, None], axis=1)[:, 0], cache


TEXT_FIELDS = ("inputs", "targets", "weights", "segment_ids", "positions")


def text_batch(spec: BatchSpec, ids: jax.Array) -> Mapping[str, jax.Array]:
    """Returns a batch of text with the inputs `ids`, [B, T], one segment per row and weights of 1.

    Other fields of `spec` are 0.
    """
    shapes = batch_shapes(spec, rows=ids.shape[0])
    others = {name: jnp.zeros(shape.shape, shape.dtype) for name, shape in shapes.items()}
    text = {
        "inputs": ids,
        "targets": jnp.zeros_like(ids),
        "weights": jnp.ones(ids.shape, jnp.float32),
        "segment_ids": jnp.ones_like(ids),
        "positions": jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape),
    }
    return {**others, **{k: logical.constrain(a, "batch", "length") for k, a in text.items()}}
