"""Fine-tuning: a trained GPT, its embeddings frozen, learns which bytes of Python code belong to comments."""

import dataclasses

import haiku as hk
import jax
import jax.numpy as jnp
from gpt import GPT

from models import losses

NAMES = {**GPT.names, "*/tag/w": ("embed", None), "*/tag/b": (None,)}
HASH, NEWLINE = (3 + byte for byte in b"#\n")  # ids: 3 special ones come before the bytes


def in_comment(ids):
    """Returns whether each id comes after a # of its line; [B, T] -> [B, T]."""
    place = jnp.arange(ids.shape[1])

    def last(wanted):
        return jax.lax.cummax(jnp.where(ids == wanted, place, -1), axis=1)

    return last(HASH) > last(NEWLINE)


@dataclasses.dataclass(frozen=True)
class CommentTagger(GPT):
    """GPT with another head and other targets."""

    names = NAMES

    def sums(self, batch, *, is_training):
        """Cross-entropy, summed over bytes."""
        tags = in_comment(batch["inputs"]).astype(jnp.int32)
        return super().sums({**batch, "targets": tags}, is_training=is_training)

    def _head(self, x, side):
        logits = hk.Linear(2, name="tag")(hk.LayerNorm(-1, True, True, name="norm")(x))  # [B, T, 2]
        return losses.cross_entropy(logits, side["targets"], side["weights"], vocab_size=2)
