"""Operations of the blocks of the recursive network, with custom derivatives that save little memory.

For rematerialization, outputs and scales of norms have the checkpoint name `NORMED`, inputs of gates `GATED`.
"""

import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

NORMED, GATED = "normed", "gated"


@jax.custom_vjp
def swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    """Returns silu(gate) * up, elementwise (Shazeer 2020, "GLU variants improve transformer")."""
    return jax.nn.silu(gate) * up


def _swiglu_forward(gate: jax.Array, up: jax.Array):
    return swiglu(gate, up), (gate, up)


def _swiglu_backward(kept, d_out: jax.Array):
    gate, up = kept
    s = jax.nn.sigmoid(gate)
    return d_out * up * (s * (1 + gate * (1 - s))), d_out * (gate * s)


swiglu.defvjp(_swiglu_forward, _swiglu_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def rms_norm(x: jax.Array, axis: int, eps: float) -> jax.Array:
    """Returns x / sqrt(mean(x^2) + eps), in the dtype of x; the mean, over `axis`, is in float32."""
    return _normed(x, axis, eps)[0]


def _normed(x: jax.Array, axis: int, eps: float) -> tuple[jax.Array, jax.Array]:
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(wide**2, axis=axis, keepdims=True) + eps)
    return (wide * scale).astype(x.dtype), scale


def _rms_norm_forward(x: jax.Array, axis: int, eps: float):
    y, scale = (checkpoint_name(a, NORMED) for a in _normed(x, axis, eps))
    return y, (y, scale)


def _rms_norm_backward(axis: int, eps: float, kept, d_y: jax.Array):
    del eps
    y, scale = kept
    wide, d = y.astype(jnp.float32), d_y.astype(jnp.float32)
    d_x = scale * (d - wide * jnp.mean(d * wide, axis=axis, keepdims=True))
    return (d_x.astype(d_y.dtype),)


rms_norm.defvjp(_rms_norm_forward, _rms_norm_backward)


@jax.custom_vjp
def over_positions(w: jax.Array, x: jax.Array) -> jax.Array:
    """Applies a linear layer to the first axis: w [I, O], x [I, B, D] -> [O, B, D].

    JAX's own derivative would transpose large arrays, which is slow on a CPU.
    """
    return jnp.einsum("io,ibd->obd", w, x)


def _over_positions_forward(w: jax.Array, x: jax.Array):
    return over_positions(w, x), (w, x)


def _over_positions_backward(kept, d_out: jax.Array):
    w, x = kept
    if w.shape[1] > w.shape[0]:
        d_w = jnp.einsum("obd,ibd->oi", d_out, x).T
    else:
        d_w = jnp.einsum("ibd,obd->io", x, d_out)
    return d_w, jnp.einsum("io,obd->ibd", w, d_out)


over_positions.defvjp(_over_positions_forward, _over_positions_backward)
