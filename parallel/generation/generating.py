"""Continues prompts with a model: prefill in chunks, then tokens for all rows at a time.

Under a strategy with a pipeline, every chip runs all layers.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from core import units, wrappers
from core.batches import row_length
from core.errors import UserError
from core.types import HasVocabulary, LimitsCache, LimitsPositions, Params, can
from parallel.generation import decoding, layerwise
from parallel.generation.decoding import NEW, NONE, STOP, Decoder, Drawn, State
from parallel.generation.layerwise import LayerwiseDecoder
from parallel.generation.sampling import GREEDY, Sampling
from parallel.partitioner import Program

CHUNK = 256  # the largest number of positions of a prompt that are processed together
_MULTIPLE = 32  # of positions of a chunk
_IN_FLIGHT = 2  # calls that are dispatched before the result of the first is read
_BYTES_PER_CALL = 2**30  # of parameters that a call reads: several tokens of a small model, one of a large one


class Continuation(NamedTuple):
    """The continuation of a prompt.

    Attributes:
      ids: the new ids, without the stop id.
      log_probabilities: at temperature 1.
    """

    ids: list[int]
    log_probabilities: list[float]
    ended: bool


class Vectors(NamedTuple):
    """Vectors that replace embedded ids in a prompt, such as those of an image.

    Attributes:
      places: [N], int, positions in the prompt.
      values: [N, D].
    """

    places: np.ndarray
    values: np.ndarray


class Generator:
    """Continues prompts with a model."""

    def __init__(self, program: Program, params: Params):
        """Takes parameters laid out as `program.abstract_state.params`."""
        self._program = program
        self._decoder = _decoder(program)
        self.update(params)
        size = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(self._params))
        self._steps = max(1, min(self._decoder.most_tokens, _BYTES_PER_CALL // size))

    def update(self, params: Params | None) -> None:
        """Replaces the parameters by others of the same layout; None only drops the last ones."""
        self._params: Any = None if params is None else self._decoder.laid_out(params)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_tokens: int,
        sampling: Sampling = GREEDY,
        seed: int = 0,
        first_row: int = 0,
        stop_ids: Sequence[int] = (),
        num_ids: int | None = None,
        slots: int | None = None,
        vectors: Sequence[Vectors | None] = (),
        on_tokens: Callable[[list[int | None]], bool | None] = lambda ids: None,
    ) -> list[Continuation]:
        """Continues every prompt; the result is the same on all hosts.

        Args:
          first_row: number of the first prompt, on which its draws depend; the next prompts count on from it.
          num_ids: only ids below this are drawn; None: all.
          slots: least number of slots of the cache; None: as many as needed.
          vectors: for each prompt, what replaces embedded ids, or None; empty: nothing. The model's `extend` must take
            them.
          on_tokens: gets the new id of every row, position by position, None where a row has ended or does not run;
            True ends generation soon.

        Raises:
          UserError: the model cannot continue a prompt.
        """
        self.check(prompts, max_tokens=max_tokens)
        static: dict[str, Any] = {"sampling": sampling, "stop_ids": tuple(stop_ids), "num_ids": num_ids}
        found = [Continuation([], [], False) for _ in prompts]
        for part in _parts([len(prompt) for prompt in prompts], max_tokens, limit=_max_cached(self._program)):
            rows = [row for row in part.rows if not found[row].ended]
            if not rows:
                continue
            asked = [[*prompts[row], *found[row].ids] for row in rows]
            own = [vectors[row] for row in rows] if vectors else ()
            decoder = self._longer if part.is_long else self._decoder
            state = self._after_prompts(decoder, asked, max_tokens=part.tokens, slots=slots, vectors=own)
            numbers = np.resize(np.asarray(rows, np.int32), state.ended.shape) + first_row
            draw = functools.partial(decoder.decode, key=jax.random.key(seed), rows=jnp.asarray(numbers), **static)
            if self._continue(draw, state, part.tokens, found, rows, on_tokens):
                break
        return found

    def _continue(
        self,
        draw: Callable[..., tuple[State, Drawn]],
        state: State,
        count: int,
        found: list[Continuation],
        rows: Sequence[int],
        on_tokens: Callable[[list[int | None]], bool | None],
    ) -> bool:
        """Adds `count` tokens to `found[row]` for each of the rows; returns whether `on_tokens` ended it."""
        is_enough, waiting = False, []
        for begin in range(0, count, self._steps):
            state, drawn = draw(self._params, state, count=jnp.int32(min(self._steps, count - begin)))
            waiting.append(drawn)
            if len(waiting) > _IN_FLIGHT:
                is_enough |= _collect(waiting.pop(0), found, rows, on_tokens)
                if is_enough or all(found[row].ended for row in rows):
                    break
        for drawn in waiting:
            is_enough |= _collect(drawn, found, rows, on_tokens)
        return is_enough

    @functools.cached_property
    def _longer(self) -> Decoder | LayerwiseDecoder:
        """For rows of more positions than `max_cached_positions`."""
        program, model = self._program, self._program.model
        assert can(model, LimitsCache)
        longer = wrappers.for_longer_rows(model)
        return _decoder(program.partitioner.program(longer, program.optimizer, program.spec, seed=program.seed))

    def check(self, prompts: Sequence[Sequence[int]], *, max_tokens: int) -> None:
        """Checks the prompts as `check_prompts` does."""
        check_prompts(self._program, prompts, max_tokens=max_tokens)

    @property
    def max_positions(self) -> int | None:
        """The most positions of a prompt and its continuation; None: no limit."""
        return max_positions(self._program)

    def _after_prompts(
        self,
        decoder: Decoder | LayerwiseDecoder,
        prompts: Sequence[Sequence[int]],
        *,
        max_tokens: int,
        slots: int | None = None,
        vectors: Sequence[Vectors | None] = (),
    ) -> State:
        rows = self._program.partitioner.row_shards
        rows *= -(-len(prompts) // rows)
        padded = [*prompts, *([prompts[0]] * (rows - len(prompts)))]
        longest, fixed = max(map(len, prompts)), decoder.fixed_length
        chunks = 1 if fixed else -(-longest // CHUNK)
        chunk = longest if fixed else -(-longest // (chunks * _MULTIPLE)) * _MULTIPLE
        ids = np.zeros((rows, chunks * chunk), np.int32)
        for row, prompt in enumerate(padded):
            ids[row, -len(prompt) :] = prompt
        padding = jnp.asarray([ids.shape[1] - len(p) for p in padded], jnp.int32)
        needed = -(-(ids.shape[1] + max_tokens) // CHUNK) * CHUNK
        slots = fixed or max(slots or 0, needed)
        cache = decoder.empty_cache(rows, slots)
        for start in range(0, ids.shape[1], chunk):
            part = jnp.asarray(ids[:, start : start + chunk])
            inserted = _inserted(vectors, np.asarray(padding), start, chunk)
            logits, cache = decoder.prefill(self._params, cache, part, jnp.int32(start), padding, *inserted)
        ended = np.arange(rows) >= len(prompts)
        return State(cache, logits, *_laid_out(logits.sharding, np.int32(ids.shape[1]), np.asarray(padding), ended))


def _inserted(
    vectors: Sequence[Vectors | None], padding: np.ndarray, start: int, chunk: int
) -> tuple[tuple[jax.Array, jax.Array], ...]:
    if not (width := next((one.values.shape[1] for one in vectors if one is not None), 0)):
        return ()
    values, places = np.zeros((len(padding), chunk, width), np.float32), np.zeros((len(padding), chunk), bool)
    for row, one in enumerate(vectors):
        if one is not None:
            at = one.places + padding[row] - start
            here = (at >= 0) & (at < chunk)
            values[row, at[here]], places[row, at[here]] = one.values[here], True
    return ((jnp.asarray(values), jnp.asarray(places)),)


def _laid_out(rows: jax.sharding.Sharding, *arrays: np.ndarray | np.int32) -> list[jax.Array]:
    """Shards arrays as `decode` returns them; otherwise its second call would compile again."""
    if not isinstance(rows, NamedSharding):
        return [jnp.asarray(array) for array in arrays]
    axes = rows.spec[:1]
    layouts = [NamedSharding(rows.mesh, PartitionSpec(*axes[: np.ndim(array)])) for array in arrays]
    return [
        jax.make_array_from_callback(np.shape(array), layout, np.asarray(array).__getitem__)
        for array, layout in zip(arrays, layouts, strict=True)
    ]


def max_positions(program: Program) -> int | None:
    """Returns the most positions of a prompt and its continuation; None: no limit."""
    if not decoding.extends_cache(program.model):
        return row_length(program.spec)
    return program.model.max_positions if can(program.model, LimitsPositions) else None


def _max_cached(program: Program) -> int | None:
    model = program.model
    return model.max_cached_positions if decoding.extends_cache(model) and can(model, LimitsCache) else None


def check_prompts(program: Program, prompts: Sequence[Sequence[int]], *, max_tokens: int) -> None:
    """Checks that a model can continue the prompts by `max_tokens` ids, without running it.

    Raises:
      UserError: there is no prompt, or one is empty, too long, or has an unknown id.
    """
    if not prompts:
        raise UserError("generation needs prompts of at least one id each")
    size = program.model.vocab_size if can(program.model, HasVocabulary) else None
    most = max_positions(program)
    for number, prompt in enumerate(prompts, 1):
        where = "the prompt" if len(prompts) == 1 else f"prompt {number} of {len(prompts)}"
        if not prompt:
            raise UserError(f"{where} is empty: generation needs prompts of at least one id each")
        if wrong := [i for i in prompt if i < 0 or (size is not None and i >= size)]:
            raise UserError(f"{where} has the id {wrong[0]}, and the model's are 0 to {size - 1 if size else '…'}")
        if most is not None and len(prompt) + max_tokens > most:
            raise UserError(
                f"{where}, of {units.counted(len(prompt), 'id')}, and {max_tokens} new ones need "
                f"{len(prompt) + max_tokens} positions, and the model has {most}: shorten the prompt, or generate "
                f"at most {max(most - len(prompt), 0)}"
            )


def _collect(
    drawn: Drawn,
    found: list[Continuation],
    rows: Sequence[int],
    on_tokens: Callable[[list[int | None]], bool | None],
) -> bool:
    is_enough = False
    for ids, log_p, fate in zip(*map(np.asarray, jax.device_get(drawn)), strict=True):
        if all(fate[: len(rows)] == NONE):
            break
        new: list[int | None] = [None] * len(found)
        for place, row in enumerate(rows):
            if fate[place] == NEW:
                new[row] = int(ids[place])
                found[row].ids.append(int(ids[place]))
                found[row].log_probabilities.append(float(log_p[place]))
            elif fate[place] == STOP:
                found[row] = found[row]._replace(ended=True)
        is_enough |= bool(on_tokens(new))
    return is_enough


class _Part(NamedTuple):
    """Rows that are continued together; long ones have more positions than the cache's limit."""

    rows: Sequence[int]
    tokens: int
    is_long: bool


def _parts(lengths: Sequence[int], max_tokens: int, *, limit: int | None) -> list[_Part]:
    """Divides rows so that no cached key has to change; rows that cross the limit are run again from their start."""
    if limit is None:
        return [_Part(range(len(lengths)), max_tokens, is_long=False)]
    long = [row for row, length in enumerate(lengths) if length > limit]
    # The key of the last token is not read, so it may be one beyond the limit.
    short = [row for row, length in enumerate(lengths) if length + max_tokens <= limit + 1]
    found = [_Part(short, max_tokens, is_long=False), _Part(long, max_tokens, is_long=True)]
    crossing: dict[int, list[int]] = {}
    for row in sorted({*range(len(lengths))} - {*short, *long}):
        crossing.setdefault(limit + 1 - lengths[row], []).append(row)
    for before, rows in crossing.items():
        found += [_Part(rows, before, is_long=False), _Part(rows, max_tokens - before, is_long=True)]
    return [part for part in found if part.rows]


def _decoder(program: Program) -> Decoder | LayerwiseDecoder:
    return LayerwiseDecoder(program) if layerwise.suits(program) else Decoder(program)
