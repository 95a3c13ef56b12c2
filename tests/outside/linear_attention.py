"""Causal linear attention as a mixer of the decoder: y_t = f(q_t) S_t / f(q_t) z_t, with f(x) = elu(x) + 1.

    S_t = S_{t-1} + f(k_t) v_t^T;   z_t = z_{t-1} + f(k_t)

Katharopoulos et al. 2020, equations 8 to 12. Rows are computed with a masked product of all pairs of positions, and
generation continues S and z. B batch, T length, D embed, H heads, K head_dim.
"""

import dataclasses
from typing import NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp

from core import logical
from models.decoder.attention import ring_attention
from models.decoder.parts import Part, Result, Work

IN, HEADS = ("embed", "heads", "head_dim"), ("batch", "length", "heads", "head_dim")


class State(NamedTuple):
    """S [B, H, K, K] and z [B, H, K], float32."""

    sums: jax.Array
    norm: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearAttention(Part):
    """The settings of a layer: its heads and their size."""

    heads: int
    head_dim: int

    name = "linear"
    is_recurrent = True

    def __call__(self, decoder, x, call):
        x = ring_attention.arrange(x, "batch", "length", "embed", back=True)  # in the order of the row
        segments = ring_attention.arrange(call.side.segment_ids, "batch", "length", back=True)
        d, h, k, length = x.shape[-1], self.heads, self.head_dim, x.shape[1]

        def param(name, shape, axes, fan_in, in_dims=1):
            init = hk.initializers.TruncatedNormal(fan_in**-0.5)
            return logical.param(f"linear_{name}", shape, axes, init, in_dims=in_dims, compute_dtype=decoder.dtype)

        query, key, value = (
            logical.constrain(jnp.einsum("btd,dhk->bthk", x, param(name, (d, h, k), IN, d)), *HEADS)
            for name in ("query", "key", "value")
        )
        query, key = (jax.nn.elu(a.astype(jnp.float32)) + 1 for a in (query, key))
        key = jnp.where(call.real(length)[:, :, None, None], key, 0)
        pairs = jnp.einsum("bthk,bshk->bhts", query, key)
        sees = jnp.tril(jnp.ones((length, length), bool))
        if call.before is None:
            sees &= (segments[:, :, None] == segments[:, None, :])[:, None]
        pairs = jnp.where(sees, pairs, 0)
        mixed, norm = jnp.einsum("bhts,bshk->bthk", pairs, value), jnp.einsum("bhts->bth", pairs)
        after = ()
        if call.before is not None:
            before = call.before.state
            mixed += jnp.einsum("bthk,bhkv->bthv", query, before.sums)
            norm += jnp.einsum("bthk,bhk->bth", query, before.norm)
            after = State(before.sums + jnp.einsum("bshk,bshv->bhkv", key, value), before.norm + jnp.sum(key, axis=1))
        mixed = logical.constrain((mixed / jnp.maximum(norm, 1e-6)[..., None]).astype(x.dtype), *HEADS)
        y = jnp.einsum("bthk,hkd->btd", mixed, param("output", (h, k, d), (*IN[1:], "embed"), h * k, in_dims=2))
        return Result(ring_attention.arrange(y, "batch", "length", "embed"), after)

    def work(self, decoder, length):
        width = self.heads * self.head_dim
        return Work(4 * decoder.embed_dim * width, length * width)  # half of the pairs, twice

    def empty_state(self, decoder, rows, length):
        return State(
            jnp.zeros((rows, self.heads, self.head_dim, self.head_dim)), jnp.zeros((rows, self.heads, self.head_dim))
        )

    def laid_out(self, state):
        return State(*(logical.constrain(a, "batch", "heads", *[None] * (a.ndim - 2)) for a in state))

    def shrink(self, multiples):
        return LinearAttention(heads=multiples["heads"], head_dim=8 * multiples["head_dim"])
