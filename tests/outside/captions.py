"""A task of images beside text, and a model that writes the caption. B batch, T length, D embed, V vocab."""

import dataclasses

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np

from core import logical, stack
from core.batches import Field
from models import losses
from models.haiku_model import HaikuModel
from tasks.sampled import SampledTask

WORDS = ("the", "red", "green", "blue", "square", "is", "left", "right")  # an id is a place in this list
START, SQUARE, IS, SIZE, LENGTH = 0, 4, 5, 8, 4
INIT = hk.initializers.VarianceScaling()


@dataclasses.dataclass(frozen=True)
class Squares(SampledTask):
    """Pictures of a colored square, with captions: red square is left."""

    num_streams: int

    def spec(self, batch_size):
        """A picture and a caption for each row."""
        words = Field((batch_size, LENGTH), np.int32, ("batch", "length"))
        pixels = Field((batch_size, SIZE, SIZE, 3), np.uint8, ("batch", None, None, None))
        return {"pixels": pixels, "inputs": words, "targets": words}

    def row(self, rng, *, is_training):
        """One row of each field; here, training and validation differ in their random numbers alone."""
        color, is_right, top, left = rng.integers([3, 2, SIZE - 2, 2])
        pixels = rng.integers(0, 64, (SIZE, SIZE, 3), dtype=np.uint8)
        left += is_right * SIZE // 2
        pixels[top : top + 3, left : left + 3, color] = 255
        words = np.array([START, 1 + color, SQUARE, IS, 6 + is_right], np.int32)
        return {"pixels": pixels, "inputs": words[:-1], "targets": words[1:]}


@dataclasses.dataclass(frozen=True)
class Captioner(HaikuModel):
    """Adds a projection of the picture to every word, in every layer."""

    num_layers: int = 4
    embed_dim: int = 32
    mlp_dim: int = 64

    def sums(self, batch, *, is_training):
        """Cross-entropy, summed over words."""
        table = logical.param("table", (len(WORDS), self.embed_dim), ("vocab", "embed"), INIT)
        pixels = batch["pixels"].reshape(len(batch["pixels"]), -1) / 255  # [B, P]
        x = stack.layer_stack(self._block, self.num_layers)(table[batch["inputs"]], pixels)  # [B, T, D]
        weights = jnp.ones(batch["targets"].shape)
        return losses.cross_entropy(x @ table.T, batch["targets"], weights, vocab_size=len(WORDS))

    def _block(self, x, pixels):
        look = logical.param("look", (pixels.shape[1], self.embed_dim), (None, "embed"), INIT)
        up = logical.param("up", (self.embed_dim, self.mlp_dim), ("embed", "mlp"), INIT)
        down = logical.param("down", (self.mlp_dim, self.embed_dim), ("mlp", "embed"), INIT)
        seen = x + (pixels @ look)[:, None]
        return x + logical.constrain(jax.nn.gelu(seen @ up), "batch", "length", "mlp") @ down
