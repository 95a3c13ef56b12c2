"""Log-likelihoods of continuations, with all positions of a row in one pass.

    log p(continuation | context) = sum over t of log softmax(logits[t])[id[t + 1]], t + 1 in the continuation

B rows, T positions, V vocabulary.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from core import stack
from core.batches import row_length
from core.errors import UserError
from core.types import ChoosesKernels, ExtendsCache, Generates, HasVocabulary, LimitsPositions, Params, can, missing
from parallel import strategy
from parallel.generation.decoding import text_batch
from parallel.partitioner import Program

Pair = tuple[Sequence[int], Sequence[int]]  # ids of a context and of its continuation

USUAL_LENGTH = 2048  # of models that do not limit their positions
_SHORTEST = 64  # rows are padded to 64, 96, 128, 192, 256 … positions
_LOGITS_BYTES = 2**28  # per shard of rows
_MOST_LOGITS_BYTES = 2**31  # of one row of a model without a limit, which may have been trained on longer rows
_TILE = 128  # the fewest positions that the splash kernel computes at once


class Likelihood(NamedTuple):
    """The log-likelihood of a continuation, in nats, and whether each id is the most likely one."""

    log_likelihood: float
    is_greedy: bool


class Scorer:
    """Computes log-likelihoods with a model.

    Attributes:
      max_length: largest number of positions of a row: all ids of a pair but the last.
    """

    def __init__(self, program: Program, params: Params):
        """Takes parameters laid out as `program.abstract_state.params`.

        Raises:
          UserError: the model computes no logits.
        """
        model: Any = program.model
        if not can(model, Generates):
            lacks = ", ".join(missing(model, Generates))
            raise UserError(f"{type(model).__name__} lacks the ability Generates: add {lacks}")
        self._program, self._model = program, model
        self._params: Any = params
        self._fixed = None if can(model, ExtendsCache) else row_length(program.spec)
        limit = model.max_positions if can(model, LimitsPositions) else None
        held = _MOST_LOGITS_BYTES // (4 * (model.vocab_size if can(model, HasVocabulary) else 1))
        usual = max(USUAL_LENGTH, min(row_length(program.spec), held))
        self.max_length = self._fixed or limit or usual
        is_tiled = can(model, ChoosesKernels) and model.attention == "splash"
        at = program.partitioner
        self._unit = math.lcm(
            strategy.row_pieces(at.strategy, at.shape) * (_TILE if is_tiled else 1),
            *(strategy.multiple_of(at.strategy, at.slice, name) for name in ("length", "residual_length")),
        )
        everywhere = NamedSharding(program.partitioner.mesh, PartitionSpec())  # each host reads all rows
        self._sums = jax.jit(self._scored_sums, out_shardings=everywhere)

    def update(self, params: Params | None) -> None:
        """Replaces the parameters by others of the same layout; None only drops the last ones."""
        self._params = params

    def score(self, pairs: Sequence[Pair]) -> list[Likelihood]:
        """Returns the likelihood of each continuation.

        If a pair has more than `max_length` positions, the beginning of its context is left out.

        Raises:
          UserError: a context or continuation is empty, or a continuation has more than `max_length` ids.
        """
        for number, (context, continuation) in enumerate(pairs, 1):
            if not context or not 1 <= len(continuation) <= self.max_length:
                raise UserError(
                    f"pair {number} has {len(context)} ids of context and {len(continuation)} of continuation; "
                    f"expected at least 1 of each, and at most {self.max_length} of continuation"
                )
        order = sorted(range(len(pairs)), key=lambda i: -len(pairs[i][0]) - len(pairs[i][1]))
        found: dict[int, Likelihood] = {}
        while order:
            length = self._length(pairs[order[0]])
            rows = self._rows(length)
            batch, order = order[:rows], order[rows:]
            while rows // 2 >= max(len(batch), self._row_shards):  # the last batch may be small
                rows //= 2
            sums, greedy = self._batch([pairs[i] for i in batch], rows, length)
            found |= {i: Likelihood(float(s), bool(g)) for i, s, g in zip(batch, sums, greedy, strict=False)}
        return [found[i] for i in range(len(pairs))]

    @property
    def _row_shards(self) -> int:
        return self._program.partitioner.row_shards

    def _length(self, pair: Pair) -> int:
        if self._fixed:
            return self._fixed
        needed = min(len(pair[0]) + len(pair[1]) - 1, self.max_length)
        length = _SHORTEST
        while length < needed:
            length = length * 3 // 2 if length & (length - 1) == 0 else length * 4 // 3
        return -(-length // self._unit) * self._unit

    def _rows(self, length: int) -> int:
        size = self._model.vocab_size if can(self._model, HasVocabulary) else 1
        most = max(1, _LOGITS_BYTES // (4 * length * size))
        return self._row_shards * 2 ** (most.bit_length() - 1)

    def _batch(self, pairs: Sequence[Pair], rows: int, length: int) -> tuple[np.ndarray, np.ndarray]:
        ids = np.zeros((rows, length + 1), np.int32)
        begin, end = np.zeros((2, rows), np.int32)
        for row, (context, continuation) in enumerate(pairs):
            whole = [*context, *continuation][-self.max_length - 1 :]
            ids[row, : len(whole)] = whole
            begin[row], end[row] = len(whole) - 1 - len(continuation), len(whole) - 1
        with self._program.partitioner.tracing(), stack.use_runner(stack.scan_runner):
            return jax.device_get(self._sums(self._params, jnp.asarray(ids), jnp.asarray(begin), jnp.asarray(end)))

    def _scored_sums(
        self, params: Params, ids: jax.Array, begin: jax.Array, end: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Returns log-likelihoods and whether all ids are greedy, [B]; positions `begin` to `end` - 1 are scored."""
        targets, positions = ids[:, 1:], jnp.arange(ids.shape[1] - 1)
        batch = text_batch(self._program.spec, ids[:, :-1])
        # LongRoPE reads the largest position, which is that of the row's own ids, however many follow as padding.
        batch = {**batch, "positions": jnp.minimum(batch["positions"], end[:, None] - 1)}
        logits = self._model.logits(params, batch).astype(jnp.float32)
        chosen = jnp.take_along_axis(logits, targets[..., None], axis=2)[..., 0]  # [B, T]
        log_p = chosen - jax.nn.logsumexp(logits, axis=2)
        scored = (begin[:, None] <= positions) & (positions < end[:, None])
        greedy = jnp.argmax(logits, axis=2) == targets
        return jnp.sum(log_p, axis=1, where=scored), jnp.all(greedy, axis=1, where=scored)


def windows(ids: Sequence[int], *, prefix: int, length: int) -> list[Pair]:
    """Splits a text into continuations with as much context as fits; each id is scored once.

    The ids 0 … 9 with length 4 give (prefix | 0 1 2 3), (3 | 4 5 6 7) and (5 6 7 | 8 9).

    Args:
      prefix: the id before the first one.
      length: largest number of positions of a row.
    """
    whole = [prefix, *ids]
    found: list[Pair] = []
    for begin in range(1, len(whole), length):
        end = min(begin + length, len(whole))
        found.append((whole[max(0, end - 1 - length) : begin], whole[begin:end]))
    return found
