"""Norms, activations, gates, embedding and unembedding, with derivatives that are tuned for the TPU compiler.

Optimization barriers make XLA compute only once a gradient that several matrix products read.

B batch, T length, D embed, V vocab.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from core import logical
from core.errors import check_number


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """Returns x / sqrt(mean(x^2) + eps) * scale over the last dimension (Zhang & Sennrich 2019, eq. 4).

    It is computed in float32, and returned in the dtype of x.
    """
    return _rms_norm_forward(x, scale, eps)[0]


def _rms_norm_forward(x: jax.Array, scale: jax.Array, eps: float) -> tuple[jax.Array, tuple]:
    wide = x.astype(jnp.float32)
    per_length = checkpoint_name(jax.lax.rsqrt(jnp.mean(wide**2, axis=-1) + eps), "norm")  # [B, T]
    y = (wide * per_length[..., None] * scale).astype(x.dtype)
    return y, (x, scale, per_length)


def _rms_norm_back(eps: float, saved: tuple, dy: jax.Array) -> tuple[jax.Array, jax.Array]:
    del eps
    x, scale, per_length = saved
    unit, dy = x.astype(jnp.float32) * per_length[..., None], dy.astype(jnp.float32)
    d_unit = dy * scale
    dx = per_length[..., None] * (d_unit - unit * jnp.mean(d_unit * unit, axis=-1, keepdims=True))
    return dx.astype(x.dtype), jnp.sum(dy * unit, axis=range(x.ndim - 1)).astype(scale.dtype)


rms_norm.defvjp(_rms_norm_forward, _rms_norm_back)


def layer_norm(x: jax.Array, scale: jax.Array, bias: jax.Array, eps: float) -> jax.Array:
    """Returns (x - mean) / sqrt(variance + eps) * scale + bias over the last dimension (Ba et al. 2016).

    It is computed in float32, and returned in the dtype of x.

    Args:
      x: [..., D].
      scale, bias: [D].
      eps: added to the variance.
    """
    wide = x.astype(jnp.float32)
    centered = wide - jnp.mean(wide, axis=-1, keepdims=True)
    per_length = checkpoint_name(jax.lax.rsqrt(jnp.mean(centered**2, axis=-1, keepdims=True) + eps), "norm")
    return (centered * per_length * scale + bias).astype(x.dtype)


ACTIVATIONS: Mapping[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "gelu_sigmoid": lambda x: x * jax.nn.sigmoid(1.702 * x),  # CLIP's
}


def activated(x: jax.Array, activation: str) -> jax.Array:
    """Applies an activation of `ACTIVATIONS`, computed in float32."""
    return ACTIVATIONS[activation](checkpoint_name(x, "up").astype(jnp.float32)).astype(x.dtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClampedGate:
    """The gate of gpt-oss's experts: sigmoid(slope g) g (u + 1), for a clamped gate g and up projection u.

    Attributes:
      slope: factor of g in the sigmoid.
      limit: upper limit of g; u is clamped to [-limit, limit].
    """

    slope: float = 1.702
    limit: float = 7.0

    def __post_init__(self):
        for field in ("slope", "limit"):
            check_number(getattr(self, field), where=f"ClampedGate.{field}", is_positive=True)

    def __call__(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        gate, up = checkpoint_name(gate, "gate"), checkpoint_name(up, "up")
        wide = jnp.minimum(gate.astype(jnp.float32), self.limit)
        other = jnp.clip(up.astype(jnp.float32), -self.limit, self.limit)
        return (jax.nn.sigmoid(self.slope * wide) * wide * (other + 1)).astype(gate.dtype)


def gated(gate: jax.Array, up: jax.Array, activation: str | ClampedGate = "silu") -> jax.Array:
    """Returns activation(gate) * up, or the result of a `ClampedGate`, computed in float32."""
    if isinstance(activation, ClampedGate):
        return activation(gate, up)
    if activation == "silu":
        return _silu_gated(gate, up)
    gate, up = checkpoint_name(gate, "gate"), checkpoint_name(up, "up")
    return (ACTIVATIONS[activation](gate.astype(jnp.float32)) * up.astype(jnp.float32)).astype(gate.dtype)


@jax.custom_vjp
def _silu_gated(gate: jax.Array, up: jax.Array) -> jax.Array:
    return _gated_forward(gate, up)[0]


def _gated_forward(gate: jax.Array, up: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    gate, up = checkpoint_name(gate, "gate"), checkpoint_name(up, "up")
    wide = gate.astype(jnp.float32)
    return (wide * _sigmoid(wide) * up.astype(jnp.float32)).astype(gate.dtype), (gate, up)


def _gated_back(saved: tuple[jax.Array, jax.Array], dy: jax.Array) -> tuple[jax.Array, jax.Array]:
    gate, up, wide_dy = (a.astype(jnp.float32) for a in (*saved, dy))
    share = _sigmoid(gate)
    silu = gate * share
    d_gate, d_up = wide_dy * up * (share + silu * (1 - share)), wide_dy * silu
    return jax.lax.optimization_barrier((d_gate.astype(dy.dtype), d_up.astype(dy.dtype)))


def _sigmoid(x: jax.Array) -> jax.Array:
    """Computes the sigmoid by tanh, which is one instruction on a TPU."""
    return 0.5 + 0.5 * jnp.tanh(0.5 * x)


_silu_gated.defvjp(_gated_forward, _gated_back)


@jax.custom_vjp
def with_float32_gradient(x: jax.Array) -> jax.Array:
    """Returns x, which is float32, and converts its gradient to float32."""
    return x


with_float32_gradient.defvjp(lambda x: (x, None), lambda _, dy: (dy.astype(jnp.float32),))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4, 5))
def embedded(
    table: jax.Array,
    ids: jax.Array,
    rows: tuple[str | None, ...],
    dtype: str,
    axes: tuple[str | None, str] = ("vocab", "embed"),
    where_stored: bool = False,
) -> jax.Array:
    """Returns the rows `ids` of an embedding table; their gradients are summed in the dtype of the table.

    Args:
      table: [V, D], with the logical axes `axes`.
      ids: [...], int32, with the logical axes `rows`.
      where_stored: whether to look up ids where the table is stored, if its sharding allows this, and exchange the
        results, instead of gathering the table.
    """
    specs = logical.lookup_specs(axes, rows) if where_stored else None
    if specs is not None:
        split = jax.lax.with_sharding_constraint
        found = split(table.astype(dtype), specs.table)[split(ids, specs.ids)]
        for move in reversed(specs.moves):
            found = split(found, move)
        return found
    return logical.constrain(table.astype(dtype), axes[0], None)[ids]  # indexed by row: rows are not sharded


def _embedded_back(
    rows: tuple[str | None, ...],
    dtype: str,
    axes: tuple[str | None, str],
    where_stored: bool,
    saved: tuple,
    dy: jax.Array,
) -> tuple[jax.Array, None]:
    del dtype, where_stored
    table, ids = saved
    summed = jnp.zeros_like(table)
    specs = logical.lookup_specs(axes, rows)
    if specs is None:
        return logical.constrain(summed, axes[0], None).at[ids].add(dy.astype(jnp.float32)), None
    split = jax.lax.with_sharding_constraint
    for move in specs.moves:  # sent in the compute dtype, converted to float32 where it is summed
        dy = split(dy, move)
    summed = split(summed, specs.table).at[split(ids, specs.ids)].add(dy.astype(jnp.float32))
    return split(summed, specs.table), None


embedded.defvjp(lambda table, ids, *static: (embedded(table, ids, *static), (table, ids)), _embedded_back)


@jax.custom_vjp
def unembedded(x: jax.Array, weight: jax.Array) -> jax.Array:
    """Returns x [B, T, D] times weight [D, V], float32.

    The gradient of the result is rounded to the dtype of x.
    """
    return jnp.einsum("btd,dv->btv", x, weight, preferred_element_type=jnp.float32)


def _unembedded_back(saved: tuple[jax.Array, jax.Array], dy: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, weight = saved
    dy = jax.lax.optimization_barrier(logical.constrain(dy.astype(x.dtype), "batch", "length", "vocab"))
    return jnp.einsum("btv,dv->btd", dy, weight), jnp.einsum("btd,btv->dv", x, dy)


unembedded.defvjp(lambda x, weight: (unembedded(x, weight), (x, weight)), _unembedded_back)
