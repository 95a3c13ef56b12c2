"""Multi-head latent attention: keys and values of all heads are linear maps of one short vector per position.

    c = norm(x W_c);   k = [c W_k, rotated(x W_r)];   v = c W_v;   q = [n, rotated(r)] with [n, r] = norm(x W_a) W_q

W_k, W_v and W_q differ from head to head. Without `query_latent_dim`, [n, r] = x W_q. DeepSeek-AI 2024, "DeepSeek-V2",
section 2.1. In generation the cache has c and rotated(x W_r) of each position.

B batch, T length, D embed, H heads, N plain_dim, P rotary_dim, V value_dim, R latent_dim, Q query_latent_dim.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from core import logical
from core.errors import UserError, check_integer, check_number
from models import derivatives
from models.decoder import rotary
from models.decoder.attention import attention, cudnn_attention
from models.decoder.attention.kv_cache import KeysAndValues
from models.decoder.attention.scores import Scores
from models.decoder.attention.splash_tiles import Tiles
from models.decoder.layers import Matrices
from models.decoder.parts import Call, Decoder, Part, Result, Work

_EPS = 1e-6  # epsilon of the short vectors' norms, whatever the decoder's is
_LATENT = "latent"
_UP = ((_LATENT,), ("heads", "head_dim"))
_DOWN = (("embed",), (None,))
_HEADS = ("batch", "length", "heads", "head_dim")

logical.declare(_LATENT, "width of the short vectors of latent attention", like="embed")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentAttention(Part):
    """A mixer: causal attention within segments, with keys and values from one short vector per position.

    Attributes:
      latent_dim: R, the width of these vectors.
      plain_dim, rotary_dim: N and P, the dimensions of queries and keys without and with a rotary embedding; P is even.
      value_dim: V, the size of a head of values.
      query_latent_dim: Q, the width of the short vectors of queries; None: there are none.
      interleaved: whether the rotary embedding pairs dimensions 2i and 2i + 1; otherwise i and i + P / 2.
      score_sharpening: m: scores are multiplied by (1 + 0.1 m ln s)^2, where s >= 1 is the factor of `rope_scaling`.
    """

    latent_dim: int
    plain_dim: int = 128
    rotary_dim: int = 64
    value_dim: int = 128
    query_latent_dim: int | None = None
    interleaved: bool = True
    score_sharpening: float = 0.0

    name = "latent_attention"
    norm = "attention"

    def __post_init__(self):
        for field in ("latent_dim", "plain_dim", "rotary_dim", "value_dim", "query_latent_dim"):
            if (value := getattr(self, field)) is not None or field != "query_latent_dim":
                check_integer(value, where=f"LatentAttention.{field}", least=1)
        check_number(self.score_sharpening, where="LatentAttention.score_sharpening", least=0)
        if self.rotary_dim % 2:
            raise UserError(f"LatentAttention.rotary_dim = {self.rotary_dim}: expected an even number")

    @property
    def matrices(self) -> tuple[str, ...]:  # type: ignore[override]
        """The matrices that low-rank adapters can change."""
        of_queries = ("query",) if self.query_latent_dim is None else ("query_down", "query_up")
        return (*of_queries, "latent_down", "latent_up", "output")

    def with_same_parameters(self) -> Part:
        return dataclasses.replace(self, interleaved=True, score_sharpening=0.0)

    def check(self, decoder: Decoder) -> None:
        if decoder.bias != "none":
            raise UserError(f"LatentAttention needs Transformer.bias = 'none', and it is {decoder.bias!r}")
        if decoder.quantization != "none":
            raise UserError(
                f"Transformer.quantization = {decoder.quantization!r}: LatentAttention needs 'none', because "
                "generation multiplies its matrices in another order, and would round other numbers than training"
            )
        if decoder.num_kv_heads != decoder.num_heads:
            raise UserError(
                f"Transformer.num_kv_heads = {decoder.num_kv_heads}: latent attention has a key for each of "
                f"num_heads = {decoder.num_heads}; expected {decoder.num_heads}"
            )

    def rotation(self, decoder: Decoder) -> rotary.Rotation | None:
        return rotary.Rotation(decoder.rope_theta, decoder.rope_scaling, width=self.rotary_dim)

    def score_scale(self, decoder: Decoder) -> float:
        """Returns the factor applied to scores."""
        factor = max(getattr(decoder.rope_scaling, "factor", 1.0), 1.0)
        return (self.plain_dim + self.rotary_dim) ** -0.5 * (1 + 0.1 * self.score_sharpening * math.log(factor)) ** 2

    def __call__(self, decoder: Decoder, x: jax.Array, call: Call) -> Result:
        c, side, of = decoder, call.side, Matrices(decoder)
        d, h, n, r = c.embed_dim, c.num_heads, self.plain_dim, self.latent_dim
        q = self._queries(of, x, call)
        down = of.weight("latent_down", (d, r + self.rotary_dim), ("embed", None), fan_in=d)
        joined = of.product("latent_down", "btd,dr->btr", x, down, side, _DOWN)
        latent = _normalized("latent_norm", joined[..., :r])
        shared = self._rotated(c, joined[:, :, None, r:], call)[:, :, 0]
        entry = checkpoint_name(jnp.concatenate([latent, shared], axis=-1), "key")  # [B, T, R + P]
        entry = logical.constrain(entry, "batch", "length", None)
        up = of.weight("latent_up", (r, h, n + self.value_dim), (_LATENT, "heads", "head_dim"), fan_in=r)
        scores, state = Scores(self.score_scale(c)), None
        if call.before is not None:
            assert side.padding is not None
            up = up if c.lora is None else c.lora.changed("latent_up", up, _UP)
            q = jnp.concatenate([jnp.einsum("bthn,rhn->bthr", q[..., :n], up[..., :n]), q[..., n:]], axis=-1)
            before, own = KeysAndValues(call.before.state, call.before.state), entry[:, :, None]
            how: dict[str, Any] = {"choice": c.attention}
            mixed, (state, _) = attention.cached(q, own, own, before, call.before.start, side.padding, scores, **how)
            mixed = jnp.einsum("bthr,rhv->bthv", mixed[..., :r], up[..., n:])
        else:
            both = of.product("latent_up", "btr,rhk->bthk", entry[..., :r], up, side, _UP)
            keys = jnp.broadcast_to(entry[:, :, None, r:], (*both.shape[:3], self.rotary_dim))
            keys, values = jnp.concatenate([both[..., :n], keys], axis=-1), both[..., n:]
            mixed = self._attended(c, q, keys, values, call, scores)
        mixed = logical.constrain(mixed, *_HEADS)
        fan_in = 2 * c.num_layers * h * self.value_dim
        out = of.weight("output", (h, self.value_dim, d), (*_HEADS[2:], "embed"), fan_in=fan_in, in_dims=2)
        return Result(of.product("output", "bthk,hkd->btd", mixed, out, side), () if state is None else state)

    def _queries(self, of: Matrices, x: jax.Array, call: Call) -> jax.Array:
        c, q, side, width = of.decoder, self.query_latent_dim, call.side, self.plain_dim + self.rotary_dim
        if q is None:
            weight = of.weight("query", (c.embed_dim, c.num_heads, width), ("embed", *_HEADS[2:]), fan_in=c.embed_dim)
            found = checkpoint_name(of.product("query", "btd,dhk->bthk", x, weight, side), "query")
        else:
            down = of.weight("query_down", (c.embed_dim, q), ("embed", None), fan_in=c.embed_dim)
            latent = _normalized("query_latent_norm", of.product("query_down", "btd,dq->btq", x, down, side, _DOWN))
            latent = checkpoint_name(latent, "query")
            weight = of.weight("query_up", (q, c.num_heads, width), (_LATENT, *_HEADS[2:]), fan_in=q)
            found = of.product("query_up", "btq,qhk->bthk", latent, weight, side, _UP)
        found = logical.constrain(found, *_HEADS)
        rotated = self._rotated(c, found[..., self.plain_dim :], call)
        return logical.constrain(jnp.concatenate([found[..., : self.plain_dim], rotated], axis=-1), *_HEADS)

    def _rotated(self, decoder: Decoder, x: jax.Array, call: Call) -> jax.Array:
        rotation = self.rotation(decoder)
        if not call.side.turns or rotation is None:
            return x
        if self.interleaved:
            # A product with ones and zeros, as in `rotary`: strided slices do not fill the registers of a TPU.
            order = [*range(0, self.rotary_dim, 2), *range(1, self.rotary_dim, 2)]
            places = jnp.asarray(np.eye(self.rotary_dim)[order], x.dtype)
            x = jnp.einsum("bthj,kj->bthk", x, places, precision=jax.lax.Precision.HIGHEST)
        return rotary.apply(x, call.side.turns[decoder.rotations.index(rotation)])

    @staticmethod
    def _attended(
        c: Decoder, q: jax.Array, keys: jax.Array, values: jax.Array, call: Call, scores: Scores
    ) -> jax.Array:
        keys, values = (logical.constrain(a, "batch", "length", "kv_heads", "head_dim") for a in (keys, values))
        how: dict[str, Any] = {"choice": c.attention, "arranged": True, "tiles": c.attention_tiles or Tiles()}
        return attention.attend(q, keys, values, call.side.segment_ids, scores, **how)

    def work(self, decoder: Decoder, length: int) -> Work:
        d, h, width = decoder.embed_dim, decoder.num_heads, self.plain_dim + self.rotary_dim
        q = self.query_latent_dim
        queries = d * h * width if q is None else q * (d + h * width)
        entries = d * (self.latent_dim + self.rotary_dim) + self.latent_dim * h * (self.plain_dim + self.value_dim)
        return Work(queries + entries + h * self.value_dim * d, length * h * (width + self.value_dim) / 2)

    def empty_state(self, decoder: Decoder, rows: int, length: int) -> jax.Array:
        """Returns zeros, [rows, 1, length, R + P]."""
        return jnp.zeros((rows, 1, length, self.latent_dim + self.rotary_dim), decoder.dtype)

    def laid_out(self, state: jax.Array) -> jax.Array:
        return logical.constrain(state, "batch", None, None, None)

    def shrink(self, multiples: Mapping[str, int]) -> LatentAttention:
        short, head = math.lcm(16, multiples["embed"]), math.lcm(8, multiples["head_dim"])
        sizes: dict[str, Any] = {"latent_dim": short, "plain_dim": head, "rotary_dim": head, "value_dim": head}
        return dataclasses.replace(self, **sizes, query_latent_dim=self.query_latent_dim and short)

    def settings(self, decoder: Decoder) -> dict[str, Any]:
        return super().settings(decoder) | {f"{self.name}.scale": self.score_scale(decoder)}

    def on_gpus(self, decoder: Decoder, length: int) -> str | None:
        if decoder.attention in ("plain", "none", "splash"):
            return f"attention = {decoder.attention!r}"
        width, values = self.plain_dim + self.rotary_dim, self.value_dim
        problem = cudnn_attention.problem(length, width, decoder.dtype, softcap=None, value_dim=values)
        return f"plain products: {problem}" if problem else "flash attention of cuDNN"


def _normalized(name: str, x: jax.Array) -> jax.Array:
    return derivatives.rms_norm(x, logical.param(name, (x.shape[-1],), ("norm",), jnp.ones), _EPS)
