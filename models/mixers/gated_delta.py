"""Linear attention with the gated delta rule: a K x V matrix for each head is the memory of a row.

    S_t = exp(g_t) S_{t-1} + beta_t k_t (v_t - exp(g_t) S_{t-1}^T k_t)^T;   y_t = S_t^T q_t / sqrt(K)

Yang et al. 2025, "Gated Delta Networks". The layer is that of Qwen3-Next: short causal convolutions of queries, keys
and values; queries and keys then have length 1; a gate of the outputs. A chunk of positions is computed at once, by
inverting a triangular matrix (Yang et al. 2024, "Parallelizing Linear Transformers with the Delta Rule"). S does not
pass from one segment of a packed row to the next.

B batch, T length, D embed, N key heads, G value heads of a key head, K key_dim, V value_dim, W kernel.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from core import logical
from core.errors import UserError, check_integer
from models import derivatives
from models.decoder.attention import ring_attention
from models.decoder.parts import Call, Decoder, Part, Result, Work

_EPS = 1e-6  # added to the squared length of queries and keys
_product = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)
_ROW = ("batch", None, "heads")  # whole rows: the loop over chunks is not split
_MEMORY = ("batch", "heads", None, None, None)


class State(NamedTuple):
    """The state of rows in generation.

    Attributes:
      memory: S, [B, N, G, K, V], float32.
      inputs: the last W - 1 inputs of the convolutions of queries, keys and values, [B, W - 1, N, ...].
    """

    memory: jax.Array
    inputs: tuple[jax.Array, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatedDelta(Part):
    """A mixer by the gated delta rule, with heads of its own.

    Attributes:
      key_heads: N, heads of queries and keys.
      value_heads: N G, heads of values; a multiple of `key_heads`.
      key_dim, value_dim: K and V, the sizes of heads.
      kernel: W, number of positions that the convolution reads.
      chunk: positions computed at once; it changes results by rounding alone.
    """

    key_heads: int
    value_heads: int
    key_dim: int = 128
    value_dim: int = 128
    kernel: int = 4
    chunk: int = 64

    name = "gated_delta"
    is_recurrent = True
    without_adapters = (
        *(f"delta_{name}" for name in ("query", "key", "value", "gate", "output")),
        "strength",
        "step",
    )

    def __post_init__(self):
        for field in dataclasses.fields(self):
            check_integer(getattr(self, field.name), where=f"GatedDelta.{field.name}", least=1)
        if self.value_heads % (n := self.key_heads):
            raise UserError(f"GatedDelta.value_heads = {self.value_heads}: expected a multiple of key_heads = {n}")

    @property
    def _widths(self) -> tuple[int, int, int]:
        return self.key_dim, self.key_dim, self.value_heads // self.key_heads * self.value_dim

    def __call__(self, decoder: Decoder, x: jax.Array, call: Call) -> Result:
        names = ("batch", "length", "embed")
        x = ring_attention.arrange(x, *names, back=True)
        segment_ids = ring_attention.arrange(call.side.segment_ids, *names[:2], back=True)
        n, g, v = self.key_heads, self.value_heads // self.key_heads, self.value_dim
        groups = jnp.cumsum(jnp.pad(segment_ids[:, 1:] != segment_ids[:, :-1], ((0, 0), (1, 0))), axis=1)
        before = self.empty_state(decoder, x.shape[0], 0) if call.before is None else call.before.state
        mixed, inputs, bound = [], [], self.kernel**-0.5

        def rates(shape: Any, dtype: Any) -> jax.Array:
            return jnp.log(hk.initializers.RandomUniform(0.01, 16.0)(shape, dtype))

        for name, width, earlier in zip(("query", "key", "value"), self._widths, before.inputs, strict=True):
            new = self._projected(decoder, f"delta_{name}", x, width)
            if call.before is not None:  # otherwise padding has a segment of its own
                new = jnp.where(call.real(x.shape[1])[..., None, None], new, 0)
            shape, init = (self.kernel, n, width), hk.initializers.TruncatedNormal(bound)
            kernel = logical.param(f"{name}_kernel", shape, (None, "heads", "head_dim"), init, kind="bias")
            every = jnp.concatenate([earlier, checkpoint_name(new, name)], axis=1)
            mixed.append(derivatives.ACTIVATIONS[decoder.activation](_convolved(every, kernel, groups)))
            inputs.append(every[:, x.shape[1] :])
        q, k = (a * jax.lax.rsqrt(jnp.sum(a * a, axis=-1, keepdims=True) + _EPS) for a in mixed[:2])
        value = mixed[2].reshape(*x.shape[:2], n, g, v)
        strength, step = (self._projected(decoder, name, x, g, None) for name in ("strength", "step"))
        bias = logical.param("step_bias", (n, g), ("heads", None), jnp.ones, kind="bias")
        log_rate = logical.param("log_rate", (n, g), ("heads", None), rates, kind="bias")
        log_decay = -jnp.exp(log_rate) * jax.nn.softplus(step.astype(jnp.float32) + bias)
        strength = jax.nn.sigmoid(strength.astype(jnp.float32))
        rows = Rows(q * self.key_dim**-0.5, k, value, strength, log_decay, groups)
        y, memory = scan(rows, logical.constrain(before.memory, *_MEMORY), chunk=self.chunk)
        scale = logical.param("delta_norm", (v,), ("norm",), jnp.ones)
        y = derivatives.rms_norm(y, scale, decoder.norm_eps).reshape(*x.shape[:2], n, g * v)
        gate = checkpoint_name(self._projected(decoder, "delta_gate", x, g * v), "gate")
        y = (y * jax.nn.silu(gate.astype(jnp.float32))).astype(x.dtype)
        y = logical.constrain(y, "batch", "length", "heads", "head_dim")
        init = hk.initializers.TruncatedNormal((2 * decoder.num_layers * n * g * v) ** -0.5)
        how = (n, g * v, decoder.embed_dim), ("heads", "head_dim", "embed"), init
        out = logical.param("delta_output", *how, in_dims=2, compute_dtype=decoder.dtype)
        y = ring_attention.arrange(jnp.einsum("btnv,nvd->btd", y, out), *names)
        return Result(y, () if call.before is None else State(memory, tuple(inputs)))

    def _projected(self, of: Decoder, name: str, x: jax.Array, width: int, axis: str | None = "head_dim") -> jax.Array:
        shape, axes = (of.embed_dim, self.key_heads, width), ("embed", "heads", axis)
        init = hk.initializers.TruncatedNormal(of.embed_dim**-0.5)
        weight = logical.param(name, shape, axes, init, compute_dtype=of.dtype)
        return logical.constrain(jnp.einsum("btd,dnk->btnk", x, weight), *_ROW, axis)

    def work(self, decoder: Decoder, length: int) -> Work:
        inner, convolved = self.value_heads * self.value_dim, self.key_heads * sum(self._widths)
        matrices = decoder.embed_dim * (convolved + 2 * (inner + self.value_heads))
        return Work(matrices, 3 * self.key_dim * inner + self.kernel * convolved)

    def empty_state(self, decoder: Decoder, rows: int, length: int) -> State:
        n, sizes = self.key_heads, (self.key_dim, self.value_dim)
        inputs = (jnp.zeros((rows, self.kernel - 1, n, width), decoder.dtype) for width in self._widths)
        return State(jnp.zeros((rows, n, self.value_heads // n, *sizes)), tuple(inputs))

    def laid_out(self, state: State) -> State:
        inputs = tuple(logical.constrain(a, *_ROW, "head_dim") for a in state.inputs)
        return State(logical.constrain(state.memory, *_MEMORY), inputs)

    def shrink(self, multiples: Mapping[str, int]) -> GatedDelta:
        heads, width = math.lcm(2, multiples["heads"]), math.lcm(8, multiples["head_dim"])
        ratio = min(2, self.value_heads // self.key_heads)
        return dataclasses.replace(self, key_heads=heads, value_heads=ratio * heads, key_dim=width, value_dim=width)

    def settings(self, decoder: Decoder) -> dict[str, Any]:
        return {name: value for name, value in super().settings(decoder).items() if name != f"{self.name}.chunk"}


class Rows(NamedTuple):
    """The inputs of the rule.

    Attributes:
      query, key, value: [B, T, N, K], [B, T, N, K] and [B, T, N, G, V].
      strength, log_decay: beta and g, [B, T, N, G].
      groups: [B, T], number of the segment in its row, from 0; group 0 continues the memory before the row.
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array
    strength: jax.Array
    log_decay: jax.Array
    groups: jax.Array


def scan(rows: Rows, memory: jax.Array, *, chunk: int) -> tuple[jax.Array, jax.Array]:
    """Applies the rule to rows, from the memory before them, [B, N, G, K, V].

    Returns:
      y [B, T, N, G, V], and the memory after the last position.
    """
    length = rows.groups.shape[1]
    c = min(chunk, length)

    def split(a: jax.Array, mode: Any = "constant") -> jax.Array:  # [chunks, B, c, ...]
        padded = jnp.pad(a, ((0, 0), (0, -length % c), *[(0, 0)] * (a.ndim - 2)), mode=mode)
        return jnp.moveaxis(padded.reshape(a.shape[0], -1, c, *a.shape[2:]), 1, 0)

    # Padding has no strength, and does not decay.
    chunks = Rows(*map(split, rows))._replace(groups=split(rows.groups, "edge"))
    first = (memory, jnp.zeros(memory.shape[:1], rows.groups.dtype))
    (memory, _), y = jax.lax.scan(jax.checkpoint(_chunk, prevent_cse=False), first, chunks)
    return jnp.moveaxis(y, 0, 1).reshape(memory.shape[0], -1, *y.shape[3:])[:, :length], memory


def _chunk(carry: tuple[jax.Array, jax.Array], rows: Rows) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
    (memory, group), groups = carry, rows.groups
    total = jnp.moveaxis(jnp.cumsum(rows.log_decay, axis=1), 1, -1)  # [B, N, G, c]
    seen = ((groups[:, :, None] == groups[:, None]) & jnp.tri(groups.shape[1], dtype=bool))[:, None, None]
    decay = jnp.where(seen, jnp.exp(jnp.where(seen, total[..., :, None] - total[..., None, :], 0.0)), 0.0)
    from_before = jnp.exp(total) * (groups == group[:, None])[:, None, None]
    to_end = jnp.exp(total[..., -1:] - total) * (groups == groups[:, -1:])[:, None, None]
    strength = jnp.moveaxis(rows.strength, 1, -1)  # [B, N, G, c]
    overlap = _product("bink,bjnk->bnij", rows.key, rows.key)[:, :, None] * decay * strength[..., None]
    recalled = _product("bink,bngkv->bngiv", rows.key, memory) * from_before[..., None]
    differences = (jnp.moveaxis(rows.value, 1, 3) - recalled) * strength[..., None]
    differences = _product("bngij,bngjv->bngiv", _inverse(jnp.tril(overlap, -1)), differences)
    y = _product("bink,bngkv->bngiv", rows.query, memory) * from_before[..., None]
    scores = _product("bink,bjnk->bnij", rows.query, rows.key)[:, :, None] * decay
    y += _product("bngij,bngjv->bngiv", scores, differences)
    added = _product("bjnk,bngjv->bngkv", rows.key, differences * to_end[..., None])
    return (memory * from_before[..., -1, None, None] + added, groups[:, -1]), jnp.moveaxis(y, 3, 1)


@jax.custom_vjp
def _inverse(lower: jax.Array) -> jax.Array:
    """Returns (1 + lower)^-1 of a strictly lower triangular matrix; each step doubles the inverted blocks."""
    c, size = lower.shape[-1], 1
    inverse = jnp.broadcast_to(jnp.eye(c), lower.shape)
    while size < c:
        block = jnp.arange(c) // size
        between = (block[:, None] == block + 1) & (block[:, None] % 2 == 1)
        inverse -= _product("...ij,...jk,...kl->...il", inverse, jnp.where(between, lower, 0.0), inverse)
        size *= 2
    return inverse


def _inverse_backward(inverse: jax.Array, of_inverse: jax.Array) -> tuple[jax.Array]:
    transposed = jnp.swapaxes(inverse, -1, -2)
    return (-jnp.tril(_product("...ij,...jk,...kl->...il", transposed, of_inverse, transposed), -1),)


_inverse.defvjp(lambda lower: (_inverse(lower),) * 2, _inverse_backward)


def _convolved(every: jax.Array, kernel: jax.Array, groups: jax.Array) -> jax.Array:
    taps, length = kernel.shape[0], groups.shape[1]
    wider = jnp.pad(groups, ((0, 0), (taps - 1, 0)))  # the first group continues what was before
    found = jnp.zeros_like(every[:, :length], jnp.float32)
    for i, place in enumerate(slice(i, i + length) for i in range(taps)):
        found += jnp.where((wider[:, place] == groups)[..., None, None], every[:, place] * kernel[i], 0.0)
    return found
