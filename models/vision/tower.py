"""A vision transformer (ViT): the patches of an image as vectors that attend to one another.

    x = patches W + b + positions;   x += Attention(norm(x));   x += MLP(norm(x));   features = norm(x)

Dosovitskiy et al. 2020, section 3.1. `VisionTower` expresses the towers of SigLIP and CLIP.

B images, N patches, D embed.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np

from core import logical, stack
from core.errors import UserError, check_integer, check_number
from models import derivatives
from models.decoder import layers, rotary
from models.decoder.block import Block
from models.decoder.config import REMAT, DecoderConfig
from models.decoder.parts import Call, Side
from models.decoder.prefix import Prefix

logical.declare("pixel_rows", "rows of pixels of a patch")
logical.declare("pixel_columns", "columns of pixels of a patch")
logical.declare("channels", "colors of a pixel")

CHANNELS = 3
NAME = "vision"  # first part of the paths of all parameters
_COUNTS = ("image_size", "patch_size", "embed_dim", "mlp_dim", "num_heads")
_POSITIONS = ("learned", "rotary")


@dataclasses.dataclass(frozen=True, kw_only=True)
class VisionTower:
    """A vision transformer; sizes have no defaults, and the other defaults are those of SigLIP.

    Attributes:
      image_size: rows and columns of pixels of an image.
      patch_size: rows and columns of pixels of a patch; divides `image_size` unless `cut`.
      num_layers: number of layers; 0: patches do not attend.
      embed_dim, mlp_dim, num_heads: sizes of the layers.
      norm_eps: the number added to the variance in norms.
      activation: one of `models.derivatives.ACTIVATIONS`.
      positions: "learned": a vector for each patch is added; "rotary": half of the dimensions of queries and keys are
        rotated by the row, half by the column of a patch.
      patch_bias: whether the embedding of patches has a bias.
      class_token: whether a learned vector precedes the patches in attention.
      input_norm: whether patches are normalized before the first layer.
      output_norm: whether features are normalized after the last layer.
      cut: whether rows and columns of pixels after the last whole patch are left out.
      mean, std: of the colors, from 0 to 1; pixels become (pixel / 255 - mean) / std.
    """

    image_size: int
    patch_size: int
    num_layers: int
    embed_dim: int
    mlp_dim: int
    num_heads: int
    norm_eps: float = 1e-6
    activation: str = "gelu_tanh"
    positions: str = "learned"
    patch_bias: bool = True
    class_token: bool = False
    input_norm: bool = False
    output_norm: bool = True
    cut: bool = False
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)

    def __post_init__(self):
        for name in (*_COUNTS, "num_layers"):
            check_integer(getattr(self, name), where=f"VisionTower.{name}", least=0 if name == "num_layers" else 1)
        check_number(self.norm_eps, where="VisionTower.norm_eps", is_positive=True)
        if self.activation not in derivatives.ACTIVATIONS:
            expected = ", ".join(derivatives.ACTIVATIONS)
            raise UserError(f"VisionTower.activation = {self.activation!r}: expected one of {expected}")
        if self.image_size % self.patch_size and not (self.cut and self.image_size > self.patch_size):
            below = self.image_size // self.patch_size * self.patch_size or self.patch_size
            raise UserError(
                f"VisionTower: image_size = {self.image_size} is not a multiple of patch_size = {self.patch_size}; "
                f"nearest sizes that are: {below}, {below + self.patch_size}"
            )
        if self.positions not in _POSITIONS:
            raise UserError(f"VisionTower.positions = {self.positions!r}: expected one of {', '.join(_POSITIONS)}")
        if self.num_layers and self.embed_dim % self.num_heads:
            raise UserError(
                f"VisionTower: embed_dim = {self.embed_dim} does not divide over num_heads = {self.num_heads}"
            )
        if self.positions == "rotary" and (self.class_token or self.embed_dim // self.num_heads % 4):
            raise UserError(
                "VisionTower.positions = 'rotary' needs heads whose size is a multiple of 4 and no class token; here "
                f"the size is {self.embed_dim // self.num_heads} and class_token = {self.class_token}"
            )
        if len(self.mean) != CHANNELS or len(self.std) != CHANNELS or min(self.std) <= 0:
            raise UserError(f"VisionTower: mean = {self.mean}, std = {self.std}: expected 3 numbers each, std above 0")

    @property
    def side(self) -> int:
        """The number of patches in a row of an image."""
        return self.image_size // self.patch_size

    @property
    def num_patches(self) -> int:
        """The number of patches of an image, N."""
        return self.side**2

    def check(self, images: Any) -> None:
        """Raises UserError if images [..., H, W, 3] have another size than the tower's, or are not uint8."""
        size = (self.image_size, self.image_size, CHANNELS)
        if images.shape[-3:] != size or images.dtype != jnp.uint8:
            raise UserError(
                f"images of {'x'.join(map(str, images.shape[-3:]))} {images.dtype}; the vision tower needs "
                f"{'x'.join(map(str, size))} uint8: set the task's image_size = {self.image_size}, to which it resizes"
            )

    def whole_patches(self, images: jax.Array) -> jax.Array:
        """Returns images [B, H, W, 3] without the rows and columns after the last whole patch, if `cut`."""
        size = self.side * self.patch_size
        return images[:, :size, :size] if self.cut else images

    def embedded(self, images: jax.Array, *, dtype: str) -> jax.Array:
        """Returns the patches of images [B, H, W, 3] uint8 as vectors [B, N, D]."""
        self.check(images)
        p, d = self.patch_size, self.embed_dim
        images = self.whole_patches(images)
        pixels = (images.astype(jnp.float32) / 255 - jnp.asarray(self.mean)) / jnp.asarray(self.std)
        x = pixels.astype(dtype).reshape(len(images), self.side, p, self.side, p, CHANNELS)
        x = x.transpose(0, 1, 3, 2, 4, 5).reshape(len(images), self.num_patches, p, p, CHANNELS)
        init = hk.initializers.TruncatedNormal((p * p * CHANNELS) ** -0.5)
        axes = ("pixel_rows", "pixel_columns", "channels", "embed")
        kernel = logical.param(f"{NAME}_patches", (p, p, CHANNELS, d), axes, init, in_dims=3, compute_dtype=dtype)
        x = jnp.einsum("bnrcx,rcxd->bnd", x, kernel)
        if self.patch_bias:
            x += logical.param(f"{NAME}_patches_bias", (d,), ("norm",), jnp.zeros, kind="bias", compute_dtype=dtype)
        if self.positions == "learned":
            shape = (self.num_patches + self.class_token, d)
            init = hk.initializers.TruncatedNormal(d**-0.5)
            how: dict[str, Any] = {"kind": "embedding", "compute_dtype": dtype}
            table = logical.param(f"{NAME}_positions", shape, (None, "embed"), init, **how)
            x += table[self.class_token :]
        return logical.constrain(x, "batch", "residual_length", "embed")

    def encoded(self, x: jax.Array, like: DecoderConfig) -> jax.Array:
        """Returns the features of embedded patches x, [B, N, D], in the dtype of the decoder `like`."""
        config = self._config(like)
        if self.class_token:
            x = jnp.concatenate([self._class(len(x), like.dtype), x], axis=1)
        if self.input_norm:
            x = layers.normalized(config, f"{NAME}_input_norm", x)
        if self.num_layers:
            x = self._layers(x, config)
        if self.output_norm:
            x = layers.normalized(config, f"{NAME}_output_norm", x)
        return x[:, self.class_token :]

    def _class(self, rows: int, dtype: str) -> jax.Array:
        d = self.embed_dim
        init = hk.initializers.TruncatedNormal(d**-0.5)
        vector = logical.param(f"{NAME}_class", (d,), ("norm",), init, kind="bias", compute_dtype=dtype)
        table = logical.param(f"{NAME}_positions", (self.num_patches + 1, d), (None, "embed"), init, kind="embedding")
        return jnp.broadcast_to(vector + table[0].astype(dtype), (rows, 1, d))

    def _layers(self, x: jax.Array, config: DecoderConfig) -> jax.Array:
        length = x.shape[1]
        everywhere = jnp.ones(x.shape[:2], jnp.int32)
        turns: tuple[rotary.RotaryTables, ...] = ()
        if self.positions == "rotary":
            tables = rotary_2d(self.side, config.head_width, theta=100.0, length=config.rotations[0].length)
            turns = (jax.tree.map(lambda a: jnp.broadcast_to(a, (len(x), *a.shape[1:])), tables),)
        side = Side(everywhere, turns, prefix=Prefix(everywhere * (length - 1)))

        def layer(x: jax.Array, side: Side) -> jax.Array:
            return Block(config, config.layer_kinds[0])(x, Call(side))[0]

        return stack.layer_stack(layer, self.num_layers, name=f"{NAME}_layers", remat=REMAT[config.remat])(x, side)

    def _config(self, like: DecoderConfig) -> DecoderConfig:
        """Returns the settings of the layers; their size of the vocabulary has no meaning."""
        length = self.num_patches + self.class_token
        return DecoderConfig(
            vocab_size=1,
            num_layers=max(self.num_layers, 1),
            embed_dim=self.embed_dim,
            mlp_dim=self.mlp_dim,
            num_heads=self.num_heads,
            num_kv_heads=self.num_heads,
            remat=like.remat,
            dtype=like.dtype,
            attention=like.attention if like.attention == "plain" else "auto",
            norm="layer",
            norm_eps=self.norm_eps,
            bias="all",
            gated=False,
            activation=self.activation,
            positions="learned",
            max_positions=length,
        )

    def flops(self, *, is_frozen: bool) -> float:
        """Returns the training FLOPs of one image without recomputation."""
        d, f, n = self.embed_dim, self.mlp_dim, self.num_patches
        per_layer = 2 * n * (4 * d * d + 2 * d * f) + 4 * n * n * d
        forward = 2 * n * self.patch_size**2 * CHANNELS * d + self.num_layers * per_layer
        return float(forward if is_frozen else 3 * forward)

    def shrink(self, multiples: Mapping[str, int]) -> VisionTower:
        """Returns a small tower for images of the same size."""
        heads = math.lcm(multiples["heads"], multiples["kv_heads"])
        return dataclasses.replace(
            self,
            num_layers=math.lcm(2, multiples["layers"]) if self.num_layers else 0,
            embed_dim=math.lcm(16, multiples["embed"], 4 * heads),
            mlp_dim=math.lcm(16, multiples["mlp"]),
            num_heads=heads,
        )


def rotary_2d(side: int, head_dim: int, *, theta: float, length: float) -> rotary.RotaryTables:
    """Returns rotary tables of a square of patches, [1, N, 1, K].

    Half of the frequencies are for the row, half for the column.

    Args:
      side: patches along a side.
      length: a factor of every entry.
    """
    place = np.arange(side * side)
    quarter = head_dim // 4
    frequency = theta ** (-np.arange(quarter) / quarter)
    angle = np.concatenate([place[:, None] // side * frequency, place[:, None] % side * frequency], axis=-1)
    tables = (length * np.concatenate([table, table], axis=-1) for table in (np.cos(angle), np.sin(angle)))
    return rotary.RotaryTables(*(jnp.asarray(table[None, :, None], jnp.float32) for table in tables))
