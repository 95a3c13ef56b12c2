"""cuDNN's flash attention for NVIDIA GPUs, through `jax.nn.dot_product_attention`. No GPU has run it yet.

Segments and prefixes become a mask, which JAX passes as a bias [B, 1, T, T].
"""

from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from core import jax_internals
from core.errors import UserError
from models.decoder import prefix as prefixes
from models.decoder.attention import ring_attention
from models.decoder.attention.scores import Scores
from models.decoder.prefix import Prefix

MOST_HEAD_DIM = 128  # from Hopper on, cuDNN allows 256


def problem(
    length: int,
    head_dim: int,
    dtype: DTypeLike,
    *,
    softcap: float | None,
    value_dim: int | None = None,
    prefix: Prefix | None = None,
    has_sinks: bool = False,
) -> str:
    """Returns why cuDNN cannot compute an attention with the strategy's sharding tables; "" if it can.

    Args:
      length: positions per row.
      head_dim: width of queries and keys.
      value_dim: width of values; None: `head_dim`.
      softcap: as in `models.decoder.attention.scores.Scores`.
      prefix: as in `models.decoder.attention.attention.attend`.
    """
    if jax_internals.cudnn_version() is None:
        return "JAX has found no cuDNN"
    if jnp.dtype(dtype) not in (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16)):
        return f"cuDNN computes in bfloat16 or float16, not in {jnp.dtype(dtype).name}"
    if head_dim % 8 or head_dim > MOST_HEAD_DIM:
        return f"cuDNN needs a head_dim that is a multiple of 8, at most {MOST_HEAD_DIM}, not {head_dim}"
    if value_dim is not None and value_dim > head_dim:
        return f"cuDNN needs values that are at most as wide as keys ({head_dim}), not {value_dim}"
    if length % 2:
        return f"cuDNN needs an even number of positions, not {length}"
    if softcap is not None:
        return f"cuDNN does not bound scores (softcap = {softcap})"
    if has_sinks:
        return "JAX gives cuDNN no attention sinks"
    if prefix is not None and prefix.key_bias is not None:
        return "cuDNN has no gradient for the biases of keys"
    if ring_attention.length_shards() > 1 or ring_attention.shards() > 1:
        return "the positions of a row are on several devices"
    return ""


def check(
    length: int,
    head_dim: int,
    dtype: DTypeLike,
    *,
    softcap: float | None,
    value_dim: int | None = None,
    prefix: Prefix | None = None,
    has_sinks: bool = False,
) -> None:
    """Raises UserError, with the reason, if cuDNN cannot compute an attention.

    Args:
      length, head_dim, dtype, softcap, value_dim, prefix, has_sinks: as in `problem`.
    """
    needs: dict[str, Any] = {"softcap": softcap, "value_dim": value_dim, "prefix": prefix, "has_sinks": has_sinks}
    if reason := problem(length, head_dim, dtype, **needs):
        raise UserError(f"attention = 'cudnn': {reason}; attention = 'auto' uses plain products where cuDNN cannot")


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segment_ids: jax.Array,
    kv_segment_ids: jax.Array,
    until: jax.Array | None = None,
    *,
    scores: Scores,
    implementation: Literal["xla", "cudnn"] = "cudnn",
) -> jax.Array:
    """Computes attention of whole rows.

    Args:
      q, k, v, segment_ids, kv_segment_ids: as in `models.decoder.attention.attention.plain`.
      until: [B, T], of a `models.decoder.prefix.Prefix`; None: attention is causal.
      implementation: "xla": without cuDNN, on any device.
    """
    seen = segment_ids[:, :, None] == kv_segment_ids[:, None, :]  # [B, T, S]
    if until is not None:
        seen &= prefixes.visible(until, window=scores.window)
    width = v.shape[-1]
    if width < k.shape[-1]:  # JAX's function needs keys and values of the same width
        v = jnp.pad(v, ((0, 0), (0, 0), (0, 0), (0, k.shape[-1] - width)))
    local = (scores.window - 1, 0) if scores.window is not None and scores.window < q.shape[1] else None
    mixed = jax.nn.dot_product_attention(
        q,
        k,
        v,
        mask=seen[:, None],
        scale=scores.scale,
        implementation=implementation,
        is_causal=until is None,
        local_window_size=local if until is None else None,
    )
    return mixed if width == k.shape[-1] else mixed[..., :width]
