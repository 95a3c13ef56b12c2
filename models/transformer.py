"""A Llama-style decoder: RMSNorm, rotary embedding, grouped-query attention, SwiGLU.

The dataclass is both configuration and model: it satisfies `core.types.Model`. It names the axes of its arrays and does
not refer to a mesh. Packed rows attend within their segment, and positions restart in each segment.

    x = E[inputs];   x += Attention(norm(x));   x += MLP(norm(x));   logits = norm(x) U

Touvron et al. 2023 (Llama), section 2.2; Ainslie et al. 2023 (GQA); Shazeer 2020 (SwiGLU).
B batch, T length, D embed, F mlp, H heads, N key/value heads, K head_dim, V vocab as stored, L layers.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from core import logical, stack
from core.errors import UserError
from core.types import Batch, LossOutput, Params
from models import attention, derivatives, losses

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "tiny": {"num_layers": 2, "embed_dim": 64, "mlp_dim": 176, "num_heads": 4, "num_kv_heads": 2, "vocab_size": 259},
    "125m": {"num_layers": 12, "embed_dim": 768, "mlp_dim": 2048, "num_heads": 12, "num_kv_heads": 12},
    "1b": {"num_layers": 22, "embed_dim": 2048, "mlp_dim": 5632, "num_heads": 32, "num_kv_heads": 4},
    "7b": {"num_layers": 32, "embed_dim": 4096, "mlp_dim": 11008, "num_heads": 32, "num_kv_heads": 32},
}
# Checkpoint names of the arrays that each choice saves for the backward pass of a layer, in addition to its input. The
# comments give the MiB saved per layer and row of 2048 tokens of the 7B, including the input, and the fraction of the
# layer's matrix products that is recomputed.
_ATTENTION = ("norm", "query", "key", "value", attention.MIXED)
REMAT: Mapping[str, str | tuple[str, ...]] = {
    "none": "none",  # no rematerialization: saves whatever the derivatives need
    "projections": (*_ATTENTION, "attended", "gate", "up"),  # 182 MiB, 0: every product and the kernel's output
    "attention_and_up": (*_ATTENTION, "attended", "up"),  # 139 MiB, 2/9: all but the gate
    "attention": _ATTENTION,  # 80 MiB, 1/2: the kernel's inputs and output
    "dots": "dots",  # as projections, but the kernel runs again
    "halves": ("norm", "attended"),  # 32 MiB, 7/10: the inputs of attention and of the feed-forward layer
    "full": ("norm",),  # 16 MiB, 7/9: the reciprocal root mean squares of the norms
}
_DTYPES = ("bfloat16", "float32")


class Side(NamedTuple):
    """Arrays that belong to rows and are the same for all layers."""

    segment_ids: jax.Array  # [B, T]
    rotary: attention.RotaryTables  # [B, T, 1, K] each


@dataclasses.dataclass(frozen=True, kw_only=True)
class Transformer:
    """A decoder-only language model.

    Batches have `inputs`, `targets`, `segment_ids`, `positions` [B, T] int32 and `weights` [B, T] float32.

    Attributes:
      vocab_size: entries of the vocabulary; stored rounded up to `vocab_multiple`.
      num_layers, embed_dim, mlp_dim, num_heads, num_kv_heads, head_dim: sizes; head_dim defaults to embed/heads.
      tied: use the embedding as the output matrix; its initial standard deviation is then 1 / sqrt(embed_dim) instead
        of 1.
      remat: what the backward pass saves and does not recompute: "none" (saves everything), "projections",
        "attention_and_up", "attention", "dots", "halves", "full" (saves least); see `REMAT`. Pipelines always
        use "full".
      dtype: of computation, "bfloat16" or "float32"; parameters, norms, softmax and loss are float32.
      attention: "auto", "plain", "splash" or "none"; see `models.attention.attend`.
      rope_theta, norm_eps: constants of the rotary embedding and of RMSNorm.
      vocab_multiple: part of the model and independent of the mesh, so that parameters do not depend on the strategy.

    Raises:
      UserError: sizes that do not fit together.
    """

    vocab_size: int = 32000
    num_layers: int
    embed_dim: int
    mlp_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int | None = None
    tied: bool = False
    remat: str = "none"
    dtype: str = "bfloat16"
    attention: str = "auto"
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    vocab_multiple: int = 128

    def __post_init__(self):
        for field in ("vocab_size", "num_layers", "embed_dim", "mlp_dim", "num_heads", "num_kv_heads"):
            if getattr(self, field) < 1:
                raise UserError(f"Transformer.{field} = {getattr(self, field)}: expected at least 1")
        if self.num_heads % self.num_kv_heads:
            raise UserError(
                f"Transformer: num_heads = {self.num_heads} is not a multiple of num_kv_heads = {self.num_kv_heads}"
            )
        if self.head_dim is None and self.embed_dim % self.num_heads:
            raise UserError(
                f"Transformer: embed_dim = {self.embed_dim} does not divide over num_heads = {self.num_heads}; "
                "set head_dim, or choose sizes that divide"
            )
        if self.head_width % 2:
            raise UserError(f"Transformer: head_dim = {self.head_width} is odd; rotary embeddings need an even size")
        for field, choices in (("remat", REMAT), ("dtype", _DTYPES), ("attention", attention.CHOICES)):
            if getattr(self, field) not in choices:
                raise UserError(f"Transformer.{field} = {getattr(self, field)!r}: expected one of {', '.join(choices)}")

    @property
    def head_width(self) -> int:
        """K: the size of a head."""
        return self.head_dim or self.embed_dim // self.num_heads

    @property
    def stored_vocab_size(self) -> int:
        """V: the vocabulary rounded up to `vocab_multiple`."""
        return math.ceil(self.vocab_size / self.vocab_multiple) * self.vocab_multiple

    def init(self, rng: jax.Array, batch: Batch) -> Params:
        """Initializes the parameters in float32; they depend only on the sizes of the model, not on the batch."""
        return hk.transform(self._loss).init(rng, batch)

    def init_carry(self, batch: Batch) -> tuple:
        """Returns the empty carry of a language model."""
        del batch
        return ()

    def loss(
        self, params: Params, carry: tuple, rng: jax.Array, batch: Batch, *, is_training: bool = True
    ) -> tuple[tuple, LossOutput]:
        """Returns the cross-entropy in nats summed over supervised positions, and their number; also in evaluation."""
        del rng, is_training  # the loss is deterministic, and the same in evaluation
        return carry, hk.transform(self._loss).apply(params, None, batch)

    def logits(self, params: Params, batch: Batch) -> jax.Array:
        """Returns the logits, [B, T, vocab_size], float32."""
        return hk.transform(self._logits).apply(params, None, batch)[..., : self.vocab_size]

    def residual(self, params: Params, batch: Batch) -> jax.Array:
        """Returns the residual stream after the last layer and before the final norm, [B, T, D]."""
        return hk.transform(lambda b: self._stack(b, None)).apply(params, None, batch)

    def flops_per_token(self, length: int) -> float:
        """Returns training FLOPs per token without recomputation.

        6 per parameter of a matrix product, and 6 L T H K for causal attention.
        """
        inner = self.num_heads * self.head_width
        kv = self.num_kv_heads * self.head_width
        per_layer = self.embed_dim * (2 * inner + 2 * kv + 3 * self.mlp_dim)
        matmul = self.num_layers * per_layer + self.embed_dim * self.stored_vocab_size
        return 6.0 * matmul + 6.0 * self.num_layers * length * inner

    def shrink(self, multiples: Mapping[str, int]) -> Transformer:
        """Returns the smallest decoder of this kind whose dimensions are multiples of `multiples`, by logical axis."""
        kv_heads = multiples["kv_heads"]
        group = 1 if self.num_heads == self.num_kv_heads else 2
        heads = math.lcm(multiples["heads"], kv_heads * group)
        head_dim = math.lcm(8, multiples["head_dim"])
        return dataclasses.replace(
            self,
            num_layers=math.lcm(2, multiples["layers"]),
            embed_dim=math.lcm(16, multiples["embed"]),
            mlp_dim=math.lcm(16, multiples["mlp"]),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
        )

    def _loss(self, batch: Batch) -> LossOutput:
        def tail(head: dict, x: jax.Array, side: tuple[Side, jax.Array, jax.Array]) -> LossOutput:
            _, targets, weights = side
            return losses.cross_entropy(self._head(head, x), targets, weights, vocab_size=self.vocab_size)

        return self._stack(batch, tail)

    def _logits(self, batch: Batch) -> jax.Array:
        return self._stack(batch, lambda head, x, side: self._head(head, x))

    def _stack(self, batch: Batch, tail_fn) -> Any:
        embedding = self._embedding()
        head = self._head_params(embedding)
        x = derivatives.embedded(embedding, batch["inputs"], ("batch", "residual_length"), self.dtype)  # [B, T, D]
        x = logical.constrain(x, "batch", "residual_length", "embed")
        side = Side(batch["segment_ids"], self._rotary_tables(batch["positions"]))
        layers = stack.layer_stack(
            lambda x, side: Block(self)(x, side[0]),
            self.num_layers,
            remat=REMAT[self.remat],
            tail=None if tail_fn is None else stack.Tail(tail_fn, head),
        )
        return layers(x, (side, batch["targets"], batch["weights"]))

    def _rotary_tables(self, positions: jax.Array) -> attention.RotaryTables:
        """Returns rotary tables that also scale queries and keys by K^(-1/4), so that scores are scaled by K^(-1/2)."""
        length = self.head_width**-0.25
        tables = attention.rotary_tables(positions, self.head_width, theta=self.rope_theta, length=length)
        return jax.tree.map(lambda table: logical.constrain(table, "batch", "length", None, None), tables)

    def _embedding(self) -> jax.Array:
        # As the output matrix it has columns of about unit length, so that initial logits are of order 1.
        stddev = 1.0 / math.sqrt(self.embed_dim) if self.tied else 1.0

        def init(shape, dtype):
            rows = hk.initializers.TruncatedNormal(stddev)(shape, dtype)
            return jnp.where(jnp.arange(shape[0])[:, None] < self.vocab_size, rows, 0.0)

        shape = (self.stored_vocab_size, self.embed_dim)
        return logical.param("embedding", shape, ("vocab", "embed"), init, as_stored=True)

    def _head_params(self, embedding: jax.Array) -> dict[str, jax.Array]:
        scale = logical.param("final_norm", (self.embed_dim,), ("norm",), jnp.ones)
        if self.tied:
            return {"scale": scale, "unembed": logical.constrain(embedding.astype(self.dtype), "vocab", "embed").T}
        return {
            "scale": scale,
            "unembed": logical.param(
                "unembedding",
                (self.embed_dim, self.stored_vocab_size),
                ("embed", "vocab"),
                self._unembedding_init,
                compute_dtype=self.dtype,
            ),
        }

    def _unembedding_init(self, shape, dtype) -> jax.Array:
        columns = hk.initializers.TruncatedNormal(1.0 / math.sqrt(self.embed_dim))(shape, dtype)
        return jnp.where(jnp.arange(shape[1]) < self.vocab_size, columns, 0.0)

    def _head(self, head: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        x = derivatives.rms_norm(x, head["scale"], self.norm_eps)
        return logical.constrain(derivatives.unembedded(x, head["unembed"]), "batch", "length", "vocab")


class Block(hk.Module):
    """One layer: attention and feed-forward, each on a normalized copy of the residual stream."""

    def __init__(self, config: Transformer, name: str = "block"):
        super().__init__(name)
        self.config = config

    def __call__(self, x: jax.Array, side: Side) -> jax.Array:
        """Runs the layer, [B, T, D] -> [B, T, D]."""
        x = logical.constrain(x, "batch", "residual_length", "embed")
        x = x + self._attention(self._norm("attention_norm", x), side)
        x = checkpoint_name(logical.constrain(x, "batch", "residual_length", "embed"), "attended")
        x = x + self._mlp(self._norm("mlp_norm", x))
        return logical.constrain(x, "batch", "residual_length", "embed")

    def _norm(self, name: str, x: jax.Array) -> jax.Array:
        return derivatives.rms_norm(x, logical.param(name, x.shape[-1:], ("norm",), jnp.ones), self.config.norm_eps)

    def _weight(
        self, name: str, shape: tuple[int, ...], axes: tuple[str, ...], *, fan_in: int, in_dims: int = 1
    ) -> jax.Array:
        init = hk.initializers.TruncatedNormal(1.0 / math.sqrt(fan_in))
        return logical.param(name, shape, axes, init, in_dims=in_dims, compute_dtype=self.config.dtype)

    def _attention(self, x: jax.Array, side: Side) -> jax.Array:
        c = self.config
        d, h, n, k = c.embed_dim, c.num_heads, c.num_kv_heads, c.head_width
        wq = self._weight("query", (d, h, k), ("embed", "heads", "head_dim"), fan_in=d)
        wk = self._weight("key", (d, n, k), ("embed", "kv_heads", "head_dim"), fan_in=d)
        wv = self._weight("value", (d, n, k), ("embed", "kv_heads", "head_dim"), fan_in=d)
        fan_in = 2 * c.num_layers * h * k
        wo = self._weight("output", (h, k, d), ("heads", "head_dim", "embed"), fan_in=fan_in, in_dims=2)
        q = rotary_heads(jnp.einsum("btd,dhk->bthk", x, wq), side, "heads")
        key = rotary_heads(jnp.einsum("btd,dnk->btnk", x, wk), side, "kv_heads")
        value = logical.constrain(jnp.einsum("btd,dnk->btnk", x, wv), "batch", "length", "kv_heads", "head_dim")
        q, key, value = map(checkpoint_name, (q, key, value), ("query", "key", "value"))
        mixed = attention.attend(q, key, value, side.segment_ids, choice=c.attention, scale=1.0)
        mixed = logical.constrain(mixed, "batch", "length", "heads", "head_dim")
        return jnp.einsum("bthk,hkd->btd", mixed, wo)

    def _mlp(self, x: jax.Array) -> jax.Array:
        d, f = self.config.embed_dim, self.config.mlp_dim
        gate = self._weight("gate", (d, f), ("embed", "mlp"), fan_in=d)
        up = self._weight("up", (d, f), ("embed", "mlp"), fan_in=d)
        down = self._weight("down", (f, d), ("mlp", "embed"), fan_in=2 * self.config.num_layers * f)
        hidden = derivatives.gated(x @ gate, x @ up)  # [B, T, F]
        return logical.constrain(hidden, "batch", "length", "mlp") @ down


def rotary_heads(x: jax.Array, side: Side, heads: str) -> jax.Array:
    """Rotates heads [B, T, heads, K] by their positions, with the sharding of the strategy before and after.

    The constraint after is for the gradient: where keys are gathered over positions, it is scattered before it is
    rotated.
    """
    axes = ("batch", "length", heads, "head_dim")
    return logical.constrain(attention.apply_rotary(logical.constrain(x, *axes), side.rotary), *axes)


def preset(name: str, **changes) -> Transformer:
    """Returns the decoder called `name` ("tiny", "125m", "1b", "7b"), with fields replaced by `changes`.

    Raises:
      UserError: unknown name.
      TypeError: unknown field.
    """
    if name not in PRESETS:
        near = difflib.get_close_matches(name, PRESETS, n=1, cutoff=0.3) or list(PRESETS)
        raise UserError(f"transformer.preset: no preset {name!r}; expected one of {', '.join(PRESETS)} ({near[0]}?)")
    return Transformer(**{**PRESETS[name], **changes})
