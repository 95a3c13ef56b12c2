"""A GPT of stock Haiku modules, with dropout. B batch, T length, D embed, V vocab."""

import dataclasses

import haiku as hk
import jax
import jax.numpy as jnp

from core import random_bits, stack
from core.parameters import ParamSpec
from models import losses
from models.haiku_model import HaikuModel

NAMES = {  # what the dimensions of every parameter mean, by pattern over its path
    "embed/*": ("vocab", "embed"),
    "positions/*": ParamSpec((None, "embed"), kind="embedding"),
    "*/attention/linear/w": ("heads", "embed"),
    "*/attention/linear/b": ("embed",),
    "*/attention/*/w": ("embed", "heads"),
    "*/attention/*/b": ("heads",),
    "*/up/w": ("embed", "mlp"),
    "*/up/b": ("mlp",),
    "*/down/w": ("mlp", "embed"),
    "*/down/b": ("embed",),
    "*norm*": ("norm",),
    "*/unembed/w": ("embed", "vocab"),
}
INIT = hk.initializers.VarianceScaling(0.5)


@dataclasses.dataclass(frozen=True)
class GPT(HaikuModel):
    """A decoder that reads documents packed into rows."""

    vocab_size: int
    max_length: int
    num_layers: int = 4
    num_heads: int = 4
    embed_dim: int = 64
    dropout: float = 0.1
    dtype: str = "float32"

    names = NAMES

    def sums(self, batch, *, is_training):
        """Cross-entropy, summed over supervised tokens."""
        tokens = hk.Embed(self.vocab_size, self.embed_dim, name="embed")(batch["inputs"])
        positions = hk.Embed(self.max_length, self.embed_dim, name="positions")(batch["positions"])
        x = (tokens + positions).astype(self.dtype)  # [B, T, D]
        side = {name: batch[name] for name in ("segment_ids", "targets", "weights")}
        side["rows"] = random_bits.row_ids(batch)
        tail = stack.haiku_tail(self._head, x, side)
        return stack.layer_stack(lambda x, side: self._block(x, side, is_training), self.num_layers, tail=tail)(x, side)

    def _block(self, x, side, is_training):
        def drop(x):  # keyed by row: the same bits under every strategy
            return random_bits.dropout(hk.next_rng_key(), self.dropout, x, side["rows"]) if is_training else x

        segments = side["segment_ids"]
        mask = jnp.tril(segments[:, None, :, None] == segments[:, None, None, :])  # [B, 1, T, T]
        head_dim = self.embed_dim // self.num_heads
        attention = hk.MultiHeadAttention(self.num_heads, head_dim, w_init=INIT, name="attention")
        h = hk.LayerNorm(-1, True, True, name="norm_1")(x)
        x += drop(attention(h, h, h, mask=mask))
        h = hk.Linear(4 * self.embed_dim, w_init=INIT, name="up")(hk.LayerNorm(-1, True, True, name="norm_2")(x))
        return x + drop(hk.Linear(self.embed_dim, w_init=INIT, name="down")(jax.nn.gelu(h)))

    def _head(self, x, side):
        h = hk.LayerNorm(-1, True, True, name="norm")(x)
        logits = hk.Linear(self.vocab_size, with_bias=False, w_init=INIT, name="unembed")(h)  # [B, T, V]
        return losses.cross_entropy(logits, side["targets"], side["weights"], vocab_size=self.vocab_size)
