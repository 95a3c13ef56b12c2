"""A decoder-only language model; its fields express the published families (`models.families`).

The dataclass is both configuration and model: it satisfies `core.types.Model`. Its defaults are Llama's: RMSNorm,
rotary embedding, grouped-query attention, SwiGLU. It names the axes of its arrays and does not refer to a mesh. Packed
rows attend within their segment, and positions restart in each segment.

    x = E[inputs];   x += Attention(norm(x));   x += MLP(norm(x));   logits = norm(x) U

Touvron et al. 2023 (Llama), section 2.2; Ainslie et al. 2023 (GQA); Shazeer 2020 (SwiGLU).
B batch, T length, D embed, F mlp, H heads, N key/value heads, K head_dim, V vocab as stored, L layers.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
from typing import TYPE_CHECKING, Any, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp

from core import logical, random_bits, stack
from core.errors import UserError
from core.types import Batch, LossOutput, Params
from models import decoder_block, derivatives, losses, presets, rotary
from models.decoder_block import Block, KeysAndValues, Side
from models.decoder_config import GLOBAL, LOCAL, REMAT, DecoderConfig

if TYPE_CHECKING:
    from core.checkpoints.published import PublishedFolder


class Head(NamedTuple):
    """Arrays of the head: parameters of the final norm, and the output matrix [D, V] in the compute dtype."""

    norm: tuple[jax.Array, ...]
    unembed: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Transformer(DecoderConfig):
    """A decoder-only language model; its fields are described in `models.decoder_config`.

    Batches have `inputs`, `targets`, `segment_ids`, `positions` [B, T] int32 and `weights` [B, T] float32.
    """

    def init(self, rng: jax.Array, batch: Batch) -> Params:
        """Initializes the parameters in float32; they depend only on the sizes of the model, not on the batch."""
        params = hk.transform(self._loss).init(rng, batch)
        return params if self.lora is None else self.lora.base_frozen(params)

    def init_carry(self, batch: Batch) -> tuple:
        """Returns the empty carry of a language model."""
        del batch
        return ()

    def loss(
        self, params: Params, carry: tuple, rng: jax.Array, batch: Batch, *, is_training: bool = True
    ) -> tuple[tuple, LossOutput]:
        """Returns the cross-entropy in nats summed over supervised positions, and their number; also in evaluation."""
        drops = is_training and self.lora is not None and self.lora.dropout > 0  # otherwise it is deterministic
        rows = random_bits.row_ids(batch) if drops else None
        return carry, hk.transform(self._loss).apply(params, rng if drops else None, batch, rows)

    def logits(self, params: Params, batch: Batch) -> jax.Array:
        """Returns the logits, [B, T, vocab_size], float32."""
        return hk.transform(self._logits).apply(params, None, batch)[..., : self.vocab_size]

    def published(self, folder: str) -> PublishedFolder:
        """Returns the parameters of this decoder in the folder of a published model; reads headers only."""
        from models import family_tensors  # of no use to a run that starts from its seed

        return family_tensors.published_folder(self, folder)

    def residual(self, params: Params, batch: Batch) -> jax.Array:
        """Returns the residual stream after the last layer and before the final norm, [B, T, D]."""
        return hk.transform(lambda b: self._stack(b, None)).apply(params, None, batch)

    def _loss(self, batch: Batch, rows: jax.Array | None = None) -> LossOutput:
        def tail(head: Head, x: jax.Array, side: tuple[Side, jax.Array, jax.Array]) -> LossOutput:
            _, targets, weights = side
            return losses.cross_entropy(self._head(head, x), targets, weights, vocab_size=self.vocab_size)

        return self._stack(batch, tail, rows)

    def _logits(self, batch: Batch) -> jax.Array:
        return self._stack(batch, lambda head, x, side: self._head(head, x))

    def _stack(self, batch: Batch, tail_fn, rows: jax.Array | None = None) -> Any:
        embedding = self._embedding()
        head = self._head_params(embedding)
        side = Side(batch["segment_ids"], self._rotary_tables(batch["positions"]), rows=rows)
        layers = stack.layer_stack(
            lambda x, side, kind=self.kinds[0]: Block(self, kind)(x, side[0]),
            self.num_layers,
            remat=REMAT[self.remat],
            tail=None if tail_fn is None else stack.Tail(tail_fn, head),
            **self._pattern,
        )
        return layers(self._embedded(embedding, batch), (side, batch["targets"], batch["weights"]))

    def empty_cache(self, rows: int, length: int) -> KeysAndValues:
        """Returns an empty cache of keys and values for `rows` rows of at most `length` positions.

        [L, B, S, N, K] each, in the compute dtype, laid out by the activation table; positions are not sharded.
        """
        shape = (self.num_layers, rows, length, self.num_kv_heads, self.head_width)
        return self._laid_out((jnp.zeros(shape, self.dtype), jnp.zeros(shape, self.dtype)))

    def extend(
        self, params: Params, cache: KeysAndValues, ids: jax.Array, start: jax.Array, last: jax.Array
    ) -> tuple[jax.Array, KeysAndValues]:
        """Runs the decoder on T new positions of each row, and adds their keys and values to the cache.

        Args:
          params: the parameters.
          cache: from `empty_cache` or `extend`.
          ids: [B, T], int32.
          start: position of the first new id, [B], or [] if it is the same in all rows, int32. Cached entries from
            there on are replaced.
          last: [B], int32, index in `ids` of the position whose logits are wanted.

        Returns:
          Logits of the next token at `last`, [B, vocab_size], float32, and the cache.
        """
        starts = jnp.broadcast_to(start, ids.shape[:1])
        positions = starts[:, None] + jnp.arange(ids.shape[1])
        batch = {"inputs": ids, "positions": positions, "segment_ids": jnp.ones_like(ids)}
        logits, new = hk.transform(self._extended).apply(params, None, batch, cache, last)
        if start.ndim == 0:
            cache = jax.tree.map(lambda c, n: jax.lax.dynamic_update_slice(c, n, (0, 0, start, 0, 0)), cache, new)
        else:
            update = jax.vmap(lambda c, n, s: jax.lax.dynamic_update_slice(c, n, (0, s, 0, 0)), (1, 1, 0), 1)
            cache = jax.tree.map(lambda c, n: update(c, n, starts), cache, new)
        return logits[:, : self.vocab_size], self._laid_out(cache)

    def _extended(self, batch: Batch, cache: KeysAndValues, last: jax.Array) -> tuple[jax.Array, KeysAndValues]:
        embedding = self._embedding()
        head = self._head_params(embedding)
        side = Side(batch["segment_ids"], self._rotary_tables(batch["positions"]), batch["positions"])
        layers = stack.layer_stack(
            lambda x, side, before, kind=self.kinds[0]: Block(self, kind).extended(x, side, before),
            self.num_layers,
            outputs="stacked",
            **self._pattern,
        )
        x, new = layers(self._embedded(embedding, batch), side, cache)
        chosen = jnp.take_along_axis(x, last[:, None, None], axis=1)  # [B, 1, D]
        return self._head(head, chosen)[:, 0], new

    @staticmethod
    def _laid_out(cache: KeysAndValues) -> KeysAndValues:
        return jax.tree.map(lambda a: logical.constrain(a, None, "batch", None, "kv_heads", "head_dim"), cache)

    @property
    def _pattern(self) -> dict[str, Any]:
        return {"pattern": self.kinds} if len(self.kinds) > 1 else {}

    def _embedded(self, embedding: jax.Array, batch: Batch) -> jax.Array:
        """Returns the input of the first layer, [B, T, D]."""
        rows = ("batch", "residual_length")
        x = derivatives.embedded(embedding, batch["inputs"], rows, self.dtype)
        if self.scaled_embedding:
            x *= jnp.asarray(self.embed_dim**0.5, self.dtype)
        if self.positions == "learned":
            shape, init = (self.max_positions, self.embed_dim), hk.initializers.TruncatedNormal(0.02)
            table = logical.param("position_embedding", shape, (None, "embed"), init, kind="embedding", as_stored=True)
            x += derivatives.embedded(table, batch["positions"], rows, self.dtype, None)
        return logical.constrain(x, *rows, "embed")

    def _rotary_tables(self, positions: jax.Array) -> dict[str, rotary.RotaryTables]:
        """Returns the rotary tables of layers: under GLOBAL, and under LOCAL if those of local layers differ.

        They also scale queries and keys, each by the root of the factor of the scores.
        """
        if self.positions == "learned":
            return {}
        make = functools.partial(rotary.tables, positions, self.head_width, length=self.score_scale**0.5)
        tables = {GLOBAL: make(theta=self.rope_theta, scaling=self.rope_scaling)}
        if self.local_rope_theta is not None:
            tables[LOCAL] = make(theta=self.local_rope_theta)
        return jax.tree.map(lambda table: logical.constrain(table, "batch", "length", None, None), tables)

    def _embedding(self) -> jax.Array:
        # As the output matrix it has columns of about unit length, so that initial logits are of order 1.
        stddev = 1.0 / math.sqrt(self.embed_dim) if self.tied else 1.0

        def init(shape, dtype):
            rows = hk.initializers.TruncatedNormal(stddev)(shape, dtype)
            return jnp.where(jnp.arange(shape[0])[:, None] < self.vocab_size, rows, 0.0)

        shape = (self.stored_vocab_size, self.embed_dim)
        return logical.param("embedding", shape, ("vocab", "embed"), init, as_stored=True)

    def _head_params(self, embedding: jax.Array) -> Head:
        norm = decoder_block.norm_params(self, "final_norm", self.embed_dim)
        if self.tied:
            return Head(norm, logical.constrain(embedding.astype(self.dtype), "vocab", "embed").T)
        shape, axes = (self.embed_dim, self.stored_vocab_size), ("embed", "vocab")
        return Head(norm, logical.param("unembedding", shape, axes, self._unembedding_init, compute_dtype=self.dtype))

    def _unembedding_init(self, shape, dtype) -> jax.Array:
        columns = hk.initializers.TruncatedNormal(1.0 / math.sqrt(self.embed_dim))(shape, dtype)
        return jnp.where(jnp.arange(shape[1]) < self.vocab_size, columns, 0.0)

    def _head(self, head: Head, x: jax.Array) -> jax.Array:
        logits = derivatives.unembedded(decoder_block.normalize(self, x, *head.norm), head.unembed)
        if self.logit_softcap is not None:
            logits = self.logit_softcap * jnp.tanh(logits / self.logit_softcap)
        return logical.constrain(logits, "batch", "length", "vocab")


def preset(name: str, **changes) -> Transformer:
    """Returns the decoder called `name` (see `models.presets`), with fields replaced by `changes`.

    Raises:
      UserError: unknown name.
      TypeError: unknown field.
    """
    if name not in presets.FIELDS:
        near = difflib.get_close_matches(name, presets.FIELDS, n=1, cutoff=0.3) or list(presets.FIELDS)
        raise UserError(
            f"transformer.preset: no preset {name!r} (did you mean {near[0]}?); expected one of "
            f"{', '.join(presets.FIELDS)}"
        )
    return Transformer(**{**presets.FIELDS[name], **changes})
