"""A frozen decoder with one layer of test-time training after its final norm, read in chunks, with a gate.

    h = base(chunk);    SKIP: logits = h E';    UPDATE: logits = (h + TTT(RMSNorm(h))) E'

E' is the output matrix of the base, whose positions start again in every chunk. A gate decides between SKIP and UPDATE
from signals of the whole chunk, so the model is causal only from chunk to chunk.

"When to Ponder: Adaptive Compute Allocation for Code Generation via Test-Time Training", 2026.
R rows of chunks, C positions of a chunk, n chunks of a row of the batch, D embed, H heads.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp

from core import logical, parameters, random_bits
from core.errors import UserError, check_fields
from core.types import Batch, LossOutput, Params, WeightedSum
from models import derivatives, losses
from models.decoder import chunked_loss
from models.decoder.experts import experts_of
from models.decoder.transformer import Transformer
from models.ttt import gates, layer
from models.ttt.config import TTTConfig
from models.ttt.gates import Gate, Signals

if TYPE_CHECKING:
    from core.checkpoints.published import PublishedFolder

CARRIES = ("none", "document")
HIDDEN = "hidden"  # field of a batch with the hidden states of the base, [B, T, D], if they were computed before
_RECONSTRUCTION = ("initial", "step_0", "step_1")
_NAME = "adapter"
_NORM_EPS = 1e-6


class Adapter(NamedTuple):
    """The trained parameters of an adapted decoder; `scale` is None without `AdaptedDecoder.gating_scale`."""

    norm: jax.Array  # [D], scale of the norm before the layer
    scale: jax.Array | None  # [], learned factor of the learning rates
    weights: layer.Weights


class Chunks(NamedTuple):
    """Chunks as rows.

    Attributes:
      hidden: [R, C, D], hidden states of the base.
      targets, segments: [R, C], int32.
      weights: [R, C], float32.
    """

    hidden: jax.Array
    targets: jax.Array
    segments: jax.Array
    weights: jax.Array


class Text(NamedTuple):
    """Positions whose cross-entropy is computed: x [R, P, D], targets and weights [R, P]."""

    x: jax.Array
    targets: jax.Array
    weights: jax.Array


class Read(NamedTuple):
    """The output and the signals of the layer for chunks.

    Attributes:
      output: [R, C, D].
      signals: [R] each; `loss` is 0 here.
    """

    output: jax.Array
    signals: Signals


class _Parameters(hk.Module):
    def __call__(self, model: AdaptedDecoder) -> Adapter:
        d, dtype = model.base.embed_dim, model.base.dtype
        scale = logical.param("gating_scale", (), (), jnp.ones) if model.gating_scale else None
        norm = logical.param("input_norm", (d,), ("norm",), jnp.ones)
        return Adapter(norm, scale, layer.make(model.layer, d, dtype=dtype, output_init=jnp.zeros))


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdaptedDecoder:
    """A frozen decoder with an adapter; batches are those of the decoder.

    If a batch has the field `hidden`, the hidden states of the base, the base is not run.

    Attributes:
      base: the decoder; its parameters come from the folder or run that INIT_FROM names.
      chunk: C, positions of a chunk; a multiple of `layer.mini_batch` that divides the length of a row.
      carry: what starts from the learned initial weights: "none": every chunk; "document": every segment of a row.
      gate: decides in training which chunks use the layer.
      per_batch: whether chunks that are read together share one decision.
      gating_scale: whether the learning rates of the inner models have a learned factor.
      loss_positions: number of positions of each chunk, drawn in training, whose cross-entropy is computed; None: all.
      reconstruction_weight: weight of the reconstruction losses in the loss.
      base_dtype: dtype in which the base is stored, "bfloat16" or "float32".
    """

    base: Transformer
    layer: TTTConfig
    chunk: int = 512
    carry: str = "none"
    gate: Gate = gates.UPDATE
    per_batch: bool = False
    gating_scale: bool = False
    loss_positions: int | None = None
    reconstruction_weight: float = 0.1
    base_dtype: str = "bfloat16"

    def __post_init__(self):
        if self.chunk < 1 or self.chunk % self.layer.mini_batch:
            raise UserError(
                f"AdaptedDecoder.chunk = {self.chunk}: expected a multiple of the {self.layer.mini_batch} tokens of a "
                "mini-batch (TTTConfig.mini_batch)"
            )
        if self.base.max_positions is not None and self.chunk > self.base.max_positions:
            raise UserError(
                f"AdaptedDecoder.chunk = {self.chunk}: the positions of the base are limited; expected at most "
                f"{self.base.max_positions}"
            )
        if self.carry not in CARRIES:
            raise UserError(f"AdaptedDecoder.carry = {self.carry!r}: expected one of {', '.join(CARRIES)}")
        if self.loss_positions is not None and not 1 <= self.loss_positions <= self.chunk:
            raise UserError(
                f"AdaptedDecoder.loss_positions = {self.loss_positions}: expected from 1 to the chunk, {self.chunk}"
            )
        if not 0 <= self.reconstruction_weight < math.inf:
            raise UserError(f"AdaptedDecoder.reconstruction_weight = {self.reconstruction_weight}: expected at least 0")
        if self.base_dtype not in ("bfloat16", "float32"):
            raise UserError(f"AdaptedDecoder.base_dtype = {self.base_dtype!r}: expected 'bfloat16' or 'float32'")
        if self.base.lora is not None or experts_of(self.base) is not None:
            raise UserError("AdaptedDecoder.base: a decoder with adapters or experts of its own cannot be adapted")

    @property
    def couples_rows(self) -> bool:
        """Whether the gate makes one decision for a batch, which depends on all of its rows."""
        return self.per_batch and self.gate.reads != ""

    def init(self, rng: jax.Array, batch: Batch) -> Params:
        """Returns initial parameters; those of the base are frozen, in `base_dtype`."""
        text = {name: value for name, value in batch.items() if name != HIDDEN}
        base = self.base.init(rng, text)
        names = parameters.names(base)
        ours = hk.transform(lambda: _Parameters(_NAME)(self)).init(jax.random.fold_in(rng, 1))
        return logical.frozen({**base, **ours}, names, self.base_dtype)

    def init_carry(self, batch: Batch) -> Any:
        """Returns the state of the gate before the first chunk."""
        del batch
        return self.gate.init()

    def loss(
        self, params: Params, carry: Any, rng: jax.Array, batch: Batch, *, is_training: bool = True
    ) -> tuple[Any, LossOutput]:
        """Returns the gate's next state, and the loss under its decisions, summed over supervised positions.

        The loss is cross-entropy plus the weighted reconstruction loss of chunks with UPDATE.
        """
        unembed, adapter = self.base.head(params).unembed, self._adapter(params)
        key = jax.random.key(0) if rng is None else rng
        chunks = self._chunks(params, batch)
        numbers = _numbers(batch, chunks)

        def one(carry: tuple[Any, Any], item: tuple[jax.Array, Chunks]) -> tuple[tuple[Any, Any], LossOutput]:
            (state, memory), (number, chunks) = carry, item
            random = jax.random.fold_in(key, number)
            draws = random, numbers
            state, memory, read, updates = self._decide(unembed, adapter, state, memory, draws, chunks)
            x = read.output if self.gate == gates.UPDATE else _chosen(updates, read.output, chunks.hidden)
            text = Text(x, chunks.targets, chunks.weights)
            if is_training and self.loss_positions is not None:
                rows = random_bits.row_ids(batch)
                places = jnp.repeat(rows, len(chunks.hidden) // len(rows))  # chunks of a row draw alike
                text = _sampled(text, random_bits.row_keys(random, places), self.loss_positions)
            return (state, memory), self._sums(unembed, text, chunks, read, updates)

        (carry, _), each = _in_order(one, (carry, self._start(adapter, chunks)), chunks)
        return carry, jax.tree.map(lambda a: jnp.sum(a, axis=0), each)

    def evaluate(self, params: Params, rng: jax.Array, batch: Batch) -> LossOutput:
        """Returns the cross-entropy with UPDATE in all chunks, and that with SKIP as the metric `loss_skip`.

        Extras have the values of every chunk, [B, n], that `models.ttt.evaluation.collected` reads.
        """
        del rng
        unembed, adapter = self.base.head(params).unembed, self._adapter(params)

        def one(memory: Any, item: tuple[jax.Array, Chunks]) -> tuple[Any, dict[str, jax.Array]]:
            _, chunks = item
            memory, read = self._read(adapter, memory, chunks)
            found = {
                "loss_skip": self._losses(unembed, chunks.hidden, chunks),
                "loss_update": self._losses(unembed, read.output, chunks),
                "tokens": jnp.sum(chunks.weights, axis=1),
            }
            return memory, {**found, **{name: getattr(read.signals, name) for name in _RECONSTRUCTION}}

        chunks = self._chunks(params, batch)
        _, found = _in_order(one, self._start(adapter, chunks), chunks)  # [places, R]
        weight = jnp.sum(found["tokens"])
        skip, update = (jnp.sum(found[name]) for name in ("loss_skip", "loss_update"))
        means = {
            f"reconstruction/{name}": WeightedSum(jnp.sum(found[name] * found["tokens"]), weight)
            for name in _RECONSTRUCTION
        }
        rows = batch["inputs"].shape[0]
        answers = {name: self._by_row(value, rows) for name, value in found.items()}
        answers |= {name: batch[name] for name in ("documents",) if name in batch}
        return LossOutput(update, weight, {"loss_skip": WeightedSum(skip, weight), **means}, answers)

    def decided(self, params: Params, state: Any, rng: jax.Array, batch: Batch) -> tuple[Any, dict[str, jax.Array]]:
        """Returns the gate's next state, and what results when chunks are read as the gate decides.

        That is, for every chunk [B, n], the decision `updates` and the summed cross-entropy `losses`.

        Args:
          rng: the key of the gate's draws.
          batch: as for `loss`.
        """
        unembed, adapter = self.base.head(params).unembed, self._adapter(params)

        def one(carry: tuple[Any, Any], item: tuple[jax.Array, Chunks]) -> tuple[tuple[Any, Any], dict[str, jax.Array]]:
            (state, memory), (number, chunks) = carry, item
            draws = jax.random.fold_in(rng, number), numbers
            state, memory, read, updates = self._decide(unembed, adapter, state, memory, draws, chunks)
            x = _chosen(updates, read.output, chunks.hidden)
            return (state, memory), {"updates": updates, "losses": self._losses(unembed, x, chunks)}

        chunks = self._chunks(params, batch)
        numbers = _numbers(batch, chunks)
        (state, _), found = _in_order(one, (state, self._start(adapter, chunks)), chunks)
        return state, {name: self._by_row(value, batch["inputs"].shape[0]) for name, value in found.items()}

    def hidden(self, params: Params, batch: Batch) -> jax.Array:
        """Returns the hidden states of the base after its final norm, chunk by chunk, [B, T, D]."""
        text = {name: self._split(batch[name]) for name in ("inputs", "targets", "segment_ids", "positions", "weights")}
        first = jnp.where(text["segment_ids"] == text["segment_ids"][:, :1], text["positions"][:, :1], 0)
        base = {module: leaves for module, leaves in params.items() if not module.startswith(_NAME)}
        found = self.base.hidden(base, {**text, "positions": text["positions"] - first})
        return found.reshape(*batch["inputs"].shape, -1)

    def published(self, folder: str) -> PublishedFolder:
        """Returns access to the base's parameters in the folder of a published model."""
        return self.base.published(folder)

    @property
    def added_parameters(self) -> tuple[str, ...]:
        """A wildcard over the paths of the parameters that the base lacks."""
        return (f"{_NAME}/*",)

    @property
    def vocab_size(self) -> int:
        """The size of the vocabulary."""
        return self.base.vocab_size

    @property
    def stored_vocab_size(self) -> int:
        """The number of entries of the vocabulary as stored, with padding."""
        return self.base.stored_vocab_size

    def settings(self) -> dict[str, Any]:
        """Returns the settings on which the model's results depend, by name."""
        ours = {f"layer.{name}": value for name, value in dataclasses.asdict(self.layer).items()}
        return {**self.base.settings(), **ours, "chunk": self.chunk, "carry": self.carry}

    def layer_flops(self) -> float:
        """Returns the FLOPs of the layer for one token, forward."""
        return 2.0 * sum(layer.multiplications(self.layer, self.base.embed_dim))

    def base_flops(self) -> float:
        """Returns the FLOPs of the base for one token, forward."""
        return self.base.flops_per_token(self.chunk) / 3

    def flops_per_token(self, length: int) -> float:
        """Returns the training FLOPs per token if every chunk is an UPDATE and all positions have a loss."""
        del length
        return self.base_flops() + 2.0 * self.base.embed_dim * self.stored_vocab_size + 3 * self.layer_flops()

    def shrink(self, multiples: Mapping[str, int]) -> AdaptedDecoder:
        """Returns a small model of this kind."""
        base, layer_ = self.base.shrink(multiples), self.layer.shrink(multiples)
        chunk = max(2 ** (min(self.chunk, 64).bit_length() - 1), layer_.mini_batch)
        positions = self.loss_positions and min(self.loss_positions, chunk)
        return dataclasses.replace(self, base=base, layer=layer_, chunk=chunk, loss_positions=positions)

    def _adapter(self, params: Params) -> Adapter:
        return hk.transform(lambda: _Parameters(_NAME)(self)).apply(params, None)

    def _chunks(self, params: Params, batch: Batch) -> Chunks:
        rows, length = batch["inputs"].shape
        text = {name: self._split(batch[name]) for name in ("targets", "segment_ids", "weights")}
        hidden = self._split(batch[HIDDEN] if HIDDEN in batch else self.hidden(params, batch))
        if hidden.shape[-1] != self.base.embed_dim:
            raise UserError(
                f"AdaptedDecoder.base has width {self.base.embed_dim}, and the hidden states of the batch have "
                f"{hidden.shape[-1]}: they were computed with another base"
            )
        hidden = jax.lax.stop_gradient(hidden).astype(self.base.dtype)
        count = length // self.chunk
        found = Chunks(hidden, text["targets"], text["segment_ids"], text["weights"])
        if self.carry == "none":
            return jax.tree.map(lambda a: a[None], found)
        return jax.tree.map(lambda a: jnp.swapaxes(a.reshape(rows, count, *a.shape[1:]), 0, 1), found)

    def _split(self, a: jax.Array) -> jax.Array:
        """Divides rows [B, T, ...] into chunks, [B n, C, ...]."""
        rows, length = a.shape[:2]
        if length % self.chunk:
            raise UserError(
                f"AdaptedDecoder.chunk = {self.chunk} does not divide the {length} positions of a row: set LENGTH to a "
                "multiple of it"
            )
        return a.reshape(rows * (length // self.chunk), self.chunk, *a.shape[2:])

    def _by_row(self, value: jax.Array, rows: int) -> jax.Array:
        """Converts [places, R] to [B, n]."""
        return value.reshape(rows, -1) if self.carry == "none" else value.T

    def _start(self, adapter: Adapter, chunks: Chunks) -> Any:
        if self.carry == "none":
            return ()
        return layer.empty(self.layer, adapter.weights, chunks.hidden.shape[1], segments=True)

    def _read(self, adapter: Adapter, memory: Any, chunks: Chunks) -> tuple[Any, Read]:
        x = derivatives.rms_norm(chunks.hidden, adapter.norm, _NORM_EPS)
        scale = None if adapter.scale is None else jnp.broadcast_to(adapter.scale, x.shape[:1])
        before = None if self.carry == "none" else memory
        found = layer.run(self.layer, adapter.weights, x, chunks.segments, before, rate_scale=scale)
        counted = (chunks.segments[:, self.layer.mini_batch - 1 :: self.layer.mini_batch] > 0)[:, None, :, None]
        number = jnp.maximum(jnp.sum(counted, axis=(1, 2, 3)), 1) * self.layer.num_heads
        errors = jnp.sum(found.errors * counted, axis=(1, 2)) / number[:, None]  # [R, 3]
        signals = Signals(jnp.zeros_like(errors[:, 0]), *errors.T)
        return (() if self.carry == "none" else found.state), Read(chunks.hidden + found.output, signals)

    def _decide(
        self,
        unembed: jax.Array,
        adapter: Adapter,
        state: Any,
        memory: Any,
        draws: tuple[jax.Array, jax.Array],
        chunks: Chunks,
    ) -> tuple[Any, Any, Read, jax.Array]:
        """`draws` are the key and the `numbers` of `gates.decide_rows`."""
        tokens, (key, numbers) = jnp.sum(chunks.weights, axis=1), draws
        rows = functools.partial(gates.decide_rows, self.gate, numbers=numbers, per_batch=self.per_batch)
        reads = self.gate.reads
        zeros = jnp.zeros_like(tokens)
        skipped = Read(chunks.hidden, Signals(zeros, zeros, zeros, zeros))
        if self.gate == gates.UPDATE:
            after, read = self._read(adapter, memory, chunks)
            return state, after, read, tokens > 0
        if reads == "reconstruction":
            after, read = self._read(adapter, memory, chunks)
            state, updates = rows(state, jax.lax.stop_gradient(read.signals), tokens > 0, key)
        else:
            divisor = jnp.where(tokens > 0, tokens, 1)
            losses_ = self._losses(unembed, chunks.hidden, chunks) / divisor if reads else zeros
            state, updates = rows(state, skipped.signals._replace(loss=losses_), tokens > 0, key)

            def run(memory: Any, chunks: Chunks) -> tuple[Any, Read]:
                return self._read(adapter, memory, chunks)

            after, read = jax.lax.cond(jnp.any(updates), run, lambda memory, _: (memory, skipped), memory, chunks)
        after = jax.tree.map(functools.partial(_chosen, updates), after, memory)
        return state, after, read, updates

    def _sums(self, unembed: jax.Array, text: Text, chunks: Chunks, read: Read, updates: jax.Array) -> LossOutput:
        def sums(unembed: jax.Array, x: jax.Array, side: tuple[jax.Array, jax.Array]) -> LossOutput:
            return losses.cross_entropy(self.base.unembedded(unembed, x), *side, vocab_size=self.vocab_size)

        side, positions = (text.targets, text.weights), self._positions(*text.x.shape[:2])
        out = chunked_loss.total(sums, unembed, text.x, side, positions=positions)
        tokens = jnp.sum(text.weights, axis=1)
        errors = sum(getattr(read.signals, name) for name in _RECONSTRUCTION) / len(_RECONSTRUCTION)
        counted = tokens * updates
        reconstruction = jnp.sum(counted * errors)
        metrics = {
            **out.metrics,
            "cross_entropy": WeightedSum(out.loss_sum, out.weight_sum),
            "reconstruction": WeightedSum(reconstruction, jnp.sum(counted)),
            "update_rate": WeightedSum(jnp.sum(updates.astype(jnp.float32)), jnp.sum((tokens > 0).astype(jnp.float32))),
        }
        return LossOutput(out.loss_sum + self.reconstruction_weight * reconstruction, out.weight_sum, metrics)

    def _positions(self, rows: int, length: int) -> int:
        chunk = self.base.loss_chunk
        if chunk is None:
            chunk = chunked_loss.default_positions(rows, length, self.stored_vocab_size)
        return chunk or length

    def _losses(self, unembed: jax.Array, x: jax.Array, chunks: Chunks) -> jax.Array:
        rows, length = x.shape[:2]
        pieces = -(-length // self._positions(rows, length))
        while length % pieces:
            pieces += 1

        def split(a: jax.Array) -> jax.Array:
            return jnp.moveaxis(a.reshape(rows, pieces, -1, *a.shape[2:]), 1, 0)

        def one(part: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
            x, targets, weights = part
            logits = self.base.unembedded(unembed, x)
            return jnp.sum(losses.token_losses(logits, targets, vocab_size=self.vocab_size) * weights, axis=1)

        return jnp.sum(jax.lax.map(one, jax.tree.map(split, (x, chunks.targets, chunks.weights))), axis=0)


def _numbers(batch: Batch, chunks: Chunks) -> jax.Array:
    """Returns a number for each of the chunks that are read together, [R], which does not depend on accumulation."""
    rows, together = random_bits.row_ids(batch), chunks.hidden.shape[1]
    count = together // len(rows)
    return (rows[:, None] * count + jnp.arange(count)).reshape(together)


def _in_order(one: Any, carry: Any, chunks: Chunks) -> tuple[Any, Any]:
    return jax.lax.scan(one, carry, (jnp.arange(chunks.hidden.shape[0]), chunks))


def _sampled(text: Text, keys: jax.Array, count: int) -> Text:
    """Draws `count` positions of each row, supervised ones first, with the row's key."""
    draws = jax.vmap(lambda key, weights: jax.random.uniform(key, weights.shape) + (weights > 0))(keys, text.weights)
    _, places = jax.lax.top_k(draws, count)  # [R, count]
    return Text(
        jnp.take_along_axis(text.x, places[..., None], axis=1),
        *(jnp.take_along_axis(a, places, axis=1) for a in (text.targets, text.weights)),
    )


def _chosen(updates: jax.Array, update: jax.Array, skip: jax.Array) -> jax.Array:
    return jnp.where(updates.reshape(-1, *(1,) * (update.ndim - 1)), update, skip)


def adapted(
    *,
    base: Transformer,
    inner: str = "linear",
    head_dim: int = 64,
    num_heads: int | None = None,
    base_rate: float | None = None,
    settings: Mapping[str, Any] | None = None,
    **options: Any,
) -> AdaptedDecoder:
    """Returns a decoder with an adapter.

    Args:
      base: the decoder, such as `@pretrained.model()`.
      num_heads: None: as many as fit in the width of the decoder, at least 1.
      base_rate: learning rate of the inner model; None: 1 for "linear", 0.1 for "mlp", as published.
      settings: further fields of `TTTConfig`, by name.
      **options: further fields of `AdaptedDecoder`.
    """
    check_fields(settings or {}, TTTConfig, where="adapter.adapted.settings")
    check_fields(options, AdaptedDecoder, where="adapter.adapted")
    if num_heads is None:
        num_heads = max(base.embed_dim // max(head_dim, 1), 1)  # TTTConfig refuses heads without width
    if base_rate is None:
        base_rate = 1.0 if inner == "linear" else 0.1
    config = TTTConfig(inner=inner, head_dim=head_dim, num_heads=num_heads, base_rate=base_rate, **(settings or {}))
    return AdaptedDecoder(base=base, layer=config, **options)
