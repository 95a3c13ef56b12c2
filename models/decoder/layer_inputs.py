"""Inputs of layers: a small vector for each layer and token, which changes what the layer adds to the stream.

    e[l] = (sqrt(P) E[l, inputs] + norm(x W[l] / sqrt(D))) / sqrt(2)       of all layers, from the embedded tokens x
    x += norm((act(x G) * e[l]) O)                                         at the end of layer l

Gemma 3n, Gemma 4 (Gemma team 2025 and 2026).

B batch, T length, D embed, L layers, P width, V vocab as stored.
"""

import dataclasses

import haiku as hk
import jax
import jax.numpy as jnp

from core import logical
from core.errors import check_integer
from models import derivatives
from models.decoder import layers
from models.decoder.parts import Decoder

_ROWS = ("batch", "residual_length")
_TABLE = ("vocab", "layer_inputs")
logical.declare(_TABLE[1], "inputs of all layers, side by side", like="embed")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerInputs:
    """Inputs of layers, with the decoder's norm and activation.

    Attributes:
      width: P, the size of the input of a layer, at least 1.
    """

    width: int

    def __post_init__(self):
        check_integer(self.width, where="LayerInputs.width", least=1)

    def of_tokens(self, decoder: Decoder, ids: jax.Array, x: jax.Array) -> jax.Array:
        """Returns the inputs of all layers, [L, B, T, P], from ids [B, T] and embedded tokens x [B, T, D].

        Call it outside of layers.
        """
        c, width = decoder, self.width
        total = c.num_layers * width

        def init(shape: tuple[int, ...], dtype: str) -> jax.Array:
            rows = hk.initializers.TruncatedNormal(width**-0.5)(shape, dtype)
            return jnp.where(jnp.arange(shape[0])[:, None] < c.vocab_size, rows, 0.0)

        shape = (c.stored_vocab_size, total)
        table = logical.param("layer_embedding", shape, _TABLE, init, as_stored=True)
        looked = derivatives.embedded(table, ids, _ROWS, c.dtype, _TABLE, True)
        matrix = logical.param(
            "layer_projection",
            (c.embed_dim, total),
            ("embed", None),
            hk.initializers.TruncatedNormal(1.0),
            compute_dtype=c.dtype,
        )
        projected = jnp.einsum("btd,de->bte", x, matrix) * jnp.asarray(c.embed_dim**-0.5, x.dtype)
        split = (*ids.shape, c.num_layers, width)
        looked, projected = (logical.constrain(a.reshape(split), *_ROWS, None, None) for a in (looked, projected))
        normed = layers.normalized(c, "layer_projection_norm", projected)
        found = (normed + looked * jnp.asarray(width**0.5, x.dtype)) * jnp.asarray(0.5**0.5, x.dtype)
        return logical.constrain(jnp.moveaxis(found, 2, 0), None, *_ROWS, None)

    def added(self, decoder: Decoder, x: jax.Array, given: jax.Array) -> jax.Array:
        """Returns what a layer adds to the stream x [B, T, D], from its input `given` [B, T, P].

        Call it in the Haiku module of the layer.
        """
        c, d, p = decoder, decoder.embed_dim, self.width
        init = hk.initializers.TruncatedNormal
        gate = logical.param("layer_input_gate", (d, p), ("embed", None), init(d**-0.5), compute_dtype=c.dtype)
        output = logical.param(
            "layer_input_output", (p, d), (None, "embed"), init((2 * c.num_layers * p) ** -0.5), compute_dtype=c.dtype
        )
        opened = derivatives.gated(jnp.einsum("btd,dp->btp", x, gate), given, c.activation)
        return layers.normalized(c, "layer_input_norm", jnp.einsum("btp,pd->btd", opened, output))

    def work(self, decoder: Decoder) -> int:
        """Returns the multiplications per token, of all layers."""
        return 3 * decoder.num_layers * decoder.embed_dim * self.width
