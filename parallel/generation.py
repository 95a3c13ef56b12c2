"""Continues prompts with a model: prefill in chunks, then one token for each row at a time, from a cache.

Rows may have prompts of different lengths and end independently. A token is drawn with a key of (seed, row, position),
so that it does not depend on the layout, on the other rows, or on the chunks. Layers run in a scan, also under a
pipeline strategy, whose weights stay on their stages.

B rows, S positions of the cache, C positions of a chunk, V vocabulary.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from core import logical, stack, units
from core.batches import batch_shapes, row_length
from core.errors import UserError
from core.types import ChoosesDtype, ExtendsCache, HasVocabulary, LimitsPositions, Params, can
from parallel.partitioner import Program

CHUNK = 256  # positions of a prompt that are processed together
_REPLICATED_BYTES = 2**30  # smaller parameters are copied to every chip, instead of gathered for every token
_IN_FLIGHT = 2  # steps that are dispatched before the result of the first is read
_MASKED = -1e30


class Sampling(NamedTuple):
    """The parameters with which tokens are drawn.

    Attributes:
      temperature: divides the logits; 0 takes the most likely token.
      top_k: draws from this many of the most likely tokens; 0: from all.
      top_p: draws from the most likely tokens that together have this probability (Holtzman et al. 2020).
      min_p: draws from tokens with at least this fraction of the largest probability (Nguyen et al. 2024).
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


GREEDY = Sampling(temperature=0.0)


class Continuation(NamedTuple):
    """The continuation of a prompt.

    Attributes:
      ids: the new ids, without the one that ended it.
      log_probabilities: log-probability of each id, by the model itself (at temperature 1, with all tokens).
      ended: whether a stop id ended it, rather than the limit.
    """

    ids: list[int]
    log_probabilities: list[float]
    ended: bool


class _State(NamedTuple):
    """The state between steps: cache, next-token logits [B, V], its position [B], and whether rows have ended [B]."""

    cache: Any
    logits: jax.Array
    position: jax.Array
    ended: jax.Array


class Generator:
    """Continues prompts with a model; its programs are compiled once for each shape."""

    def __init__(self, program: Program, params: Params):
        """Casts matrices to the compute dtype, and copies small models to every chip.

        Args:
          program: model and layout; its optimizer is not used.
          params: laid out as `program.abstract_state.params`.
        """
        self._program = program
        self._model = program.model if can(program.model, ExtendsCache) else _Recomputing(program)
        self._replicated = NamedSharding(program.partitioner.mesh, PartitionSpec())
        dtype = program.model.dtype if can(program.model, ChoosesDtype) else "float32"
        layouts: Any = program.state_shardings.params
        if sum(leaf.nbytes for leaf in jax.tree.leaves(params)) <= _REPLICATED_BYTES:
            layouts = self._replicated

        def cast(params: Params) -> Params:
            products = ("matrix", "embedding")
            return jax.tree.map(
                lambda a, spec: a.astype(dtype) if spec.kind in products else a, params, program.param_specs
            )

        with self._tracing():
            self._params = jax.jit(cast, out_shardings=layouts)(params)
        self._prefill = jax.jit(self._prefill_chunk, donate_argnums=1)
        self._step = jax.jit(self._one_step, static_argnames=("sampling", "stop_ids", "num_ids"), donate_argnums=1)

    @contextlib.contextmanager
    def _tracing(self) -> Iterator[None]:
        with self._program.partitioner.tracing(), stack.use_runner(stack.scan_runner):
            yield

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_tokens: int,
        sampling: Sampling = GREEDY,
        seed: int = 0,
        stop_ids: Sequence[int] = (),
        num_ids: int | None = None,
        on_tokens: Callable[[list[int | None]], None] = lambda ids: None,
    ) -> list[Continuation]:
        """Continues every prompt; the result is the same on all hosts.

        Args:
          prompts: ids of each prompt, at least one.
          max_tokens: largest number of new ids per row.
          sampling: how tokens are drawn.
          seed: seed of the draws.
          stop_ids: ids that end a row.
          num_ids: size of the vocabulary; a model may have larger ids, which are never drawn. None: all may be drawn.
          on_tokens: called after each step with the new id of every row, None for rows that have ended.

        Raises:
          UserError: an empty prompt, an id that the model does not have, or more positions than it has.
        """
        longest = max(map(len, prompts), default=0)
        if not prompts or min(map(len, prompts)) == 0:
            raise UserError("generation needs prompts of at least one id each")
        self._check_ids(prompts)
        self._check_positions(longest, max_tokens)
        static = {"sampling": sampling, "stop_ids": tuple(stop_ids), "num_ids": num_ids}
        with self._tracing():
            state = self._after_prompts(prompts, length=longest + max_tokens)
            found = [Continuation([], [], False) for _ in prompts]
            key, waiting = jax.random.key(seed), []
            for _ in range(max_tokens):
                state, drawn = self._step(self._params, state, key, **static)
                waiting.append(drawn)
                if len(waiting) > _IN_FLIGHT and _collect(waiting.pop(0), found, on_tokens):
                    break
            for drawn in waiting:
                _collect(drawn, found, on_tokens)
        return found

    def _check_ids(self, prompts: Sequence[Sequence[int]]) -> None:
        model = self._program.model
        size = model.vocab_size if can(model, HasVocabulary) else None
        wrong = [i for prompt in prompts for i in prompt if i < 0 or (size is not None and i >= size)]
        if wrong:
            last = size - 1 if size else "…"
            raise UserError(f"the prompt contains id {wrong[0]}; expected ids of the model, 0 to {last}")

    @property
    def max_positions(self) -> int | None:
        """The largest number of positions of a prompt and its continuation; None: no limit."""
        if isinstance(self._model, _Recomputing):
            return self._model.length
        model = self._program.model
        return model.max_positions if can(model, LimitsPositions) else None

    def _check_positions(self, prompt: int, new: int) -> None:
        most = self.max_positions
        if most is not None and prompt + new > most:
            raise UserError(
                f"a prompt of {units.counted(prompt, 'id')} and {new} new ones need {prompt + new} positions, and the "
                f"model has {most}: shorten the prompt, or generate at most {max(most - prompt, 0)}"
            )

    def _after_prompts(self, prompts: Sequence[Sequence[int]], *, length: int) -> _State:
        """Processes the prompts in chunks, padded at their ends to one length."""
        rows = self._program.partitioner.row_shards
        rows *= -(-len(prompts) // rows)
        padded = [*prompts, *([prompts[0]] * (rows - len(prompts)))]
        lengths = np.array([len(p) for p in padded], np.int32)
        fixed = self._model.length if isinstance(self._model, _Recomputing) else None
        chunk = fixed or min(CHUNK, -(-int(lengths.max()) // 32) * 32)
        chunks = -(-int(lengths.max()) // chunk)
        ids = np.zeros((rows, chunks * chunk), np.int32)
        for row, prompt in enumerate(padded):
            ids[row, : len(prompt)] = prompt
        size = fixed or max(-(-length // CHUNK) * CHUNK, chunks * chunk)
        vocab = jax.eval_shape(functools.partial(self._extended, rows=rows, size=size), self._params)
        state = _State(
            jax.jit(self._model.empty_cache, static_argnums=(0, 1))(rows, size),
            jnp.zeros(vocab.shape, vocab.dtype),
            jnp.asarray(lengths),
            jnp.arange(rows) >= len(prompts),
        )
        for start in range(0, chunks * chunk, chunk):
            state = self._prefill(self._params, state, jnp.asarray(ids[:, start : start + chunk]), jnp.int32(start))
        return state

    def _extended(self, params: Params, *, rows: int, size: int) -> jax.Array:
        zero = jnp.zeros((rows,), jnp.int32)
        return self._model.extend(params, self._model.empty_cache(rows, size), zero[:, None], zero, zero)[0]

    def _prefill_chunk(self, params: Params, state: _State, ids: jax.Array, start: jax.Array) -> _State:
        last = state.position - 1 - start  # of each prompt, in this chunk if it is inside
        inside = (last >= 0) & (last < ids.shape[1])
        logits, cache = self._model.extend(params, state.cache, ids, start, jnp.clip(last, 0, ids.shape[1] - 1))
        return state._replace(cache=cache, logits=jnp.where(inside[:, None], logits, state.logits))

    def _one_step(
        self,
        params: Params,
        state: _State,
        key: jax.Array,
        *,
        sampling: Sampling,
        stop_ids: tuple[int, ...],
        num_ids: int | None,
    ) -> tuple[_State, tuple[jax.Array, jax.Array, jax.Array]]:
        rows = jnp.arange(state.position.shape[0])
        possible = state.logits
        if num_ids is not None:
            possible = jnp.where(jnp.arange(possible.shape[1]) < num_ids, possible, _MASKED)
        ids = draw(possible, key, rows, state.position, sampling)
        log_p = jnp.take_along_axis(jax.nn.log_softmax(state.logits), ids[:, None], axis=1)[:, 0]
        stops = jnp.isin(ids, jnp.asarray(stop_ids or (-1,)))
        logits, cache = self._model.extend(params, state.cache, ids[:, None], state.position, jnp.zeros_like(ids))
        after = _State(cache, logits, state.position + 1, state.ended | stops)
        # 0: a new id; 1: the id ends the row; 2: the row had ended before.
        fate = jnp.where(state.ended, 2, stops.astype(jnp.int32))
        drawn = jax.tree.map(lambda a: jax.lax.with_sharding_constraint(a, PartitionSpec()), (ids, log_p, fate))
        return after, drawn


def draw(logits: jax.Array, key: jax.Array, rows: jax.Array, positions: jax.Array, sampling: Sampling) -> jax.Array:
    """Draws a token for each row.

    Args:
      logits: [B, V], float32.
      key: random key of the seed.
      rows, positions: [B], int32; a draw depends only on these, the key and the row's logits.
      sampling: how to draw.

    Returns:
      [B], int32.
    """
    if sampling.temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    keys = jax.vmap(lambda row, at: jax.random.fold_in(jax.random.fold_in(key, row), at))(rows, positions)
    logits = _kept(logits / sampling.temperature, sampling)
    return jax.vmap(jax.random.categorical)(keys, logits).astype(jnp.int32)


def _kept(logits: jax.Array, sampling: Sampling) -> jax.Array:
    """Masks the tokens that may not be drawn; the most likely one always may."""
    least = jnp.full(logits.shape[:1], -jnp.inf)
    ordered = jnp.sort(logits, axis=-1, descending=True)  # [B, V]
    if sampling.top_k:
        least = jnp.maximum(least, ordered[:, min(sampling.top_k, logits.shape[1]) - 1])
        ordered = jnp.where(ordered >= least[:, None], ordered, _MASKED)
    if sampling.top_p < 1:
        before = jnp.cumsum(jax.nn.softmax(ordered), axis=-1) - jax.nn.softmax(ordered)  # of more likely tokens
        last = jnp.sum(before < sampling.top_p, axis=-1) - 1
        least = jnp.maximum(least, jnp.take_along_axis(ordered, last[:, None], axis=1)[:, 0])
    if sampling.min_p > 0:
        least = jnp.maximum(least, ordered[:, 0] + jnp.log(sampling.min_p))
    return jnp.where(logits >= least[:, None], logits, _MASKED)


def _collect(drawn: Any, found: list[Continuation], on_tokens: Callable[[list[int | None]], None]) -> bool:
    """Adds the results of a step to the continuations; returns whether all rows have ended."""
    ids, log_p, fate = (np.asarray(a) for a in jax.device_get(drawn))
    for row, so_far in enumerate(found):
        if fate[row] == 0:
            so_far.ids.append(int(ids[row]))
            so_far.log_probabilities.append(float(log_p[row]))
        elif fate[row] == 1:
            found[row] = so_far._replace(ended=True)
    on_tokens([int(ids[row]) if fate[row] == 0 else None for row in range(len(found))])
    return all(so_far.ended for so_far in found)


class _Recomputing:
    """A model that has only `logits`, in the form of one with a cache: the cache holds ids, and all are run again.

    Attributes:
      length: positions of a training row, of which it takes no more.
    """

    def __init__(self, program: Program):
        self._program = program
        self.length = row_length(program.spec)

    def empty_cache(self, rows: int, length: int) -> jax.Array:
        return jnp.zeros((rows, length), jnp.int32)

    def extend(
        self, params: Params, cache: jax.Array, ids: jax.Array, start: jax.Array, last: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        rows = cache.shape[0]
        starts = jnp.broadcast_to(start, (rows,))
        cache = jax.vmap(functools.partial(jax.lax.dynamic_update_slice))(cache, ids, starts[:, None])
        model: Any = self._program.model
        logits = model.logits(params, self._batch(cache))
        return jnp.take_along_axis(logits, (starts + last)[:, None, None], axis=1)[:, 0], cache

    def _batch(self, ids: jax.Array) -> Mapping[str, jax.Array]:
        """Returns a batch of one segment per row; fields other than those of text, such as images, are zero."""
        shapes = batch_shapes(self._program.spec, rows=ids.shape[0])
        others = {name: jnp.zeros(shape.shape, shape.dtype) for name, shape in shapes.items()}
        text = {
            "inputs": ids,
            "targets": jnp.zeros_like(ids),
            "weights": jnp.ones(ids.shape, jnp.float32),
            "segment_ids": jnp.ones_like(ids),
            "positions": jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape),
        }
        return {**others, **{k: logical.constrain(a, "batch", "length") for k, a in text.items()}}
