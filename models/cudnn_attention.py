"""Flash attention of cuDNN, for GPUs of NVIDIA, through `jax.nn.dot_product_attention`. No GPU has run it yet.

Causal attention and windows are flags of cuDNN's kernel, which then skips what no query sees. Segments and prefixes
are a mask, which JAX passes as a bias [B, 1, T, T] in the dtype of the queries: it needs T^2 entries per row, but not
for every head as plain scores do. What the kernel cannot compute is left to plain products, for the reason that
`problem` returns.
"""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from core import jax_internals
from models import prefix as prefixes

MOST_HEAD_DIM = 128  # 256 from Hopper on, where no test compares it


def problem(
    *,
    dtype: DTypeLike,
    head_dim: int,
    length: int,
    softcap: float | None,
    has_key_bias: bool = False,
    is_sharded: bool = False,
) -> str:
    """Returns why cuDNN cannot compute an attention; "" if it can.

    Args:
      dtype: of queries, keys and values.
      head_dim: their last dimension.
      length: positions of a row.
      softcap: bound of the scores; None: not bounded.
      has_key_bias: whether there are biases of keys, which may need a gradient.
      is_sharded: whether the positions of a row are on several devices.
    """
    if jnp.dtype(dtype) not in (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16)):
        return f"cuDNN computes in bfloat16 or float16, not in {jnp.dtype(dtype).name}"
    if head_dim % 8 or head_dim > MOST_HEAD_DIM:
        return f"cuDNN needs a head_dim that is a multiple of 8, at most {MOST_HEAD_DIM}, not {head_dim}"
    if length % 2:
        return f"cuDNN needs an even number of positions, not {length}"
    if softcap is not None:
        return f"cuDNN does not bound scores (attention_softcap = {softcap})"
    if has_key_bias:
        return "cuDNN has no gradient for the biases of keys"
    if is_sharded:
        return "the positions of a row are on several devices"
    return ""


def is_available() -> bool:
    """Returns whether JAX has found cuDNN on this machine; without it, its attention cannot be traced."""
    return jax_internals.cudnn_version() is not None


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segment_ids: jax.Array,
    kv_segment_ids: jax.Array,
    until: jax.Array | None = None,
    *,
    scale: float | None,
    window: int | None,
    implementation: str = "cudnn",
) -> jax.Array:
    """Computes attention of whole rows; arguments and result as in `models.attention.plain`.

    Args:
      q, k, v, segment_ids, kv_segment_ids, scale, window: as there.
      until: [B, T], of a prefix (`models.prefix.Prefix`).
      implementation: "xla" computes the same call without cuDNN, on any device.
    """
    seen = segment_ids[:, :, None] == kv_segment_ids[:, None, :]  # [B, T, S]
    if until is not None:
        seen &= prefixes.visible(until, window=window)
        flags = {}
    elif window is None or window >= q.shape[1]:
        flags = {"is_causal": True}
    else:
        flags = {"is_causal": True, "local_window_size": (window - 1, 0)}
    return jax.nn.dot_product_attention(
        q, k, v, mask=seen[:, None], scale=scale, implementation=implementation, **flags
    )
