"""A recurrent model of stock Haiku modules: a state carried from batch to batch, dropout, and two losses.

`launch/run agreement --model reader:build` compares it. B batch, T length, D width, V vocab.
"""

import dataclasses

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax

from core import logical, random_bits
from core.batches import Field
from core.types import LossOutput, WeightedSum
from tasks.sampled import SampledTask

NAMES = {
    "embed/*": ("vocab", "embed"),
    "gru/w_i": ("embed", "mlp"),
    "gru/w_h": ("embed", "mlp"),
    "gru/b": ("mlp",),
    "words/w": ("embed", "vocab"),
    "words/b": ("vocab",),
    "size/w": ("embed", None),
    "size/b": (None,),
}


@dataclasses.dataclass(frozen=True)
class Walks(SampledTask):
    """Random walks over the words, and how far each has come."""

    num_streams: int = 4
    words: int = 32
    length: int = 8

    def spec(self, batch_size):
        """Words, their successors, and the distance from the first word."""
        fields = {"inputs": np.int32, "targets": np.int32, "distance": np.float32}
        return {name: Field((batch_size, self.length), kind, ("batch", "length")) for name, kind in fields.items()}

    def row(self, rng, *, is_training):
        """Draws one walk."""
        walk = np.cumsum(rng.integers(-2, 3, self.length + 1)).astype(np.int32)
        return {
            "inputs": walk[:-1] % self.words,
            "targets": walk[1:] % self.words,
            "distance": (walk[1:] / self.words).astype(np.float32),
        }


@dataclasses.dataclass(frozen=True)
class Reader:
    """Predicts the next word and the distance; its state goes on where the batch before ended."""

    vocab_size: int = 32
    width: int = 16
    dropout: float = 0.2

    def init(self, rng, batch):
        """Returns the parameters."""
        return self._transformed(is_training=False).init(rng, self.init_carry(batch), batch)

    def init_carry(self, batch):
        """Returns the states of the rows [B, D], and the number of batches."""
        return {"state": jnp.zeros((len(batch["inputs"]), self.width)), "batches": jnp.int32(0)}

    def loss(self, params, carry, rng, batch, *, is_training):
        """Returns the next carry and the sums."""
        return self._transformed(is_training=is_training).apply(params, rng, carry, batch)

    def _transformed(self, *, is_training):
        def sums(carry, batch):
            x = hk.Embed(self.vocab_size, self.width, name="embed")(batch["inputs"])  # [B, T, D]
            y, state = hk.dynamic_unroll(hk.GRU(self.width, name="gru"), jnp.swapaxes(x, 0, 1), carry["state"])
            y = jnp.swapaxes(y, 0, 1)
            if is_training:
                y = random_bits.dropout(hk.next_rng_key(), self.dropout, y, random_bits.row_ids(batch))
            logits = hk.Linear(self.vocab_size, name="words")(y)
            words = jnp.sum(optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]))
            squares = jnp.sum((hk.Linear(1, name="size")(y)[..., 0] - batch["distance"]) ** 2)
            count = jnp.float32(batch["targets"].size)
            metrics = {"words": WeightedSum(words, count), "squares": WeightedSum(squares, count)}
            carried = {"state": jax.lax.stop_gradient(state), "batches": carry["batches"] + 1}
            return carried, LossOutput(words + squares, count, metrics)

        return hk.transform(logical.named(sums, NAMES))


def build():
    """Returns the model and its task."""
    return Reader(), Walks()
