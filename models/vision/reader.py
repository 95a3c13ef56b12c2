"""Finds where in an image a question points, in a few glimpses at a coarse view of the image.

    content of a block = maximum over its patches of MLP(patch);   block = content + place
    question = words, read with the state;   a = softmax(key(block) . query(question, state));   state += a value(block)

A block is a square of patches, and a glimpse one such step. The relevance of a patch is the logit of its block in the
last glimpse, plus the patch's key times a query made from the block and the question. The reader also answers the
question from what its last glimpse saw, and the model adds the loss of this answer to its own.

With `points`, each block gives an answer of its own, weighted by the last glimpse:

    p(answer) = sum over blocks of p(block) p(answer | content of the block, words)
    p(block) = softmax(4 correlation(key, query))

B images, N patches, D width of patches, M blocks, T words, E width of words, W width of the reader.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np

from core import logical
from core.errors import UserError, check_integer, check_number
from models.vision.small import NAME, dense, unit

_NORMAL = hk.initializers.RandomNormal()
_SHARPNESS = 4.0  # with `points`, the largest logit of a block; the smallest is its negative
_POWER = 3.0  # of p(block) in the choice of patches


class Glimpsed(NamedTuple):
    """The result of a reader.

    Attributes:
      block: [B, N]: the logit of each patch's block in the last glimpse.
      within: [B, N]: the relevance of each patch, without that of its block.
      seen: [B, S, W]: hidden units from which the reader answers. S is 1, or M with `points`.
      log_shares: [B, S]: the logarithm of the share of each answer.
    """

    block: jax.Array
    within: jax.Array
    seen: jax.Array
    log_shares: jax.Array

    @property
    def relevance(self) -> jax.Array:
        """The relevance of patches, that of their block included, [B, N]."""
        return self.within + self.block

    def log_answers(self, vocab_size: int) -> jax.Array:
        """Returns the log-probabilities of an answer's first token, [B, vocab_size]; call it inside a Haiku module."""
        of_each = jax.nn.log_softmax(dense("reader_answer", self.seen, vocab_size), axis=-1)
        return jax.nn.logsumexp(of_each + self.log_shares[..., None], axis=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reader:
    """Computes the relevance of patches from a coarse view of the image and the words.

    Attributes:
      block: patches along the side of a block; divides those along the side of an image.
      glimpses: how often blocks are looked at.
      width: W, even.
      answers: weight of the loss of the reader's own answers; 0: it does not answer.
      points: whether patches are chosen where the last glimpse looks (`pointed`).
    """

    block: int
    glimpses: int = 2
    width: int = 64
    answers: float = 1.0
    points: bool = False

    def __post_init__(self):
        for name in ("block", "glimpses", "width"):
            check_integer(getattr(self, name), where=f"Reader.{name}", least=1)
        check_number(self.answers, where="Reader.answers", least=0)
        if self.points and not self.answers:
            raise UserError(
                "Reader.points = True and answers = 0: the last glimpse learns where to look from the reader's own "
                "answers; expected answers above 0"
            )
        if self.width % 2:
            raise UserError(f"Reader.width = {self.width}: expected an even number")

    def glimpsed(self, patches: jax.Array, words: jax.Array, is_word: jax.Array) -> Glimpsed:
        """Returns what the reader finds in images; call it inside a Haiku module.

        Args:
          patches: [B, N, D], before they attend to one another.
          words: [B, T, E].
          is_word: [B, T], 1 at the words of the question.

        Raises:
          UserError: `block` does not divide the side of an image in patches.
        """
        side = math.isqrt(patches.shape[1])
        if side % self.block:
            raise UserError(
                f"Reader.block = {self.block} does not divide {side}, the patches along the side of an image"
            )
        across, wide = side // self.block, self.width
        fine = dense("reader_patch", unit(patches), wide, "gelu")
        fine = dense("reader_patch_2", fine, wide, "gelu")
        blocks = fine.reshape(len(fine), across, self.block, across, self.block, wide)
        content = dense("reader_content", unit(jnp.max(blocks, axis=(2, 4))), wide, "gelu")
        what = unit(content)
        blocks = (what + self._places(across)).reshape(len(fine), -1, wide)  # [B, M, W]

        order = jnp.cumsum(is_word, axis=-1) - 1
        read = dense("reader_words", unit(words), wide) + _sinusoids(order, wide)
        mean = jnp.sum(read * is_word[..., None], axis=1) / jnp.maximum(jnp.sum(is_word, axis=-1), 1)[:, None]
        state, logits = jnp.zeros_like(mean), jnp.zeros(blocks.shape[:2])
        for glimpse in range(self.glimpses):
            name = f"reader_{glimpse}"
            sought = dense(f"{name}_sought", jnp.concatenate([mean, state], axis=-1), wide)
            weights = jnp.einsum("btw,bw->bt", dense(f"{name}_word", read, wide), sought) / math.sqrt(wide)
            asked = jnp.einsum("bt,btw->bw", jax.nn.softmax(jnp.where(is_word > 0, weights, -1e9), axis=-1), read)
            known = jnp.concatenate([mean, asked * jnp.any(is_word > 0, axis=-1)[:, None], state], axis=-1)
            query = dense(f"{name}_query", dense(f"{name}_known", known, 2 * wide, "gelu"), wide)
            keys = dense(f"{name}_key", dense(f"{name}_block", blocks, wide, "gelu"), wide)
            if self.points:
                logits = _SHARPNESS * jnp.einsum("bmw,bw->bm", unit(keys), unit(query)) / wide
                if glimpse == self.glimpses - 1:
                    break
            else:
                logits = jnp.einsum("bmw,bw->bm", keys, query) / math.sqrt(wide)
            seen = jnp.einsum("bm,bmw->bw", jax.nn.softmax(logits, axis=-1), dense(f"{name}_value", blocks, wide))
            state = unit(state + seen)
        log_shares = jax.nn.log_softmax(logits, axis=-1)
        if self.points:  # which words were looked at would tell what earlier glimpses saw
            read_from = what.reshape(blocks.shape)
            told = jnp.broadcast_to(mean[:, None], blocks.shape)
        else:
            read_from, told, log_shares = seen[:, None], known[:, None], jnp.zeros((len(fine), 1))
        seen = dense("reader_seen", jnp.concatenate([read_from, told], axis=-1), wide, "gelu")
        own = dense("reader_own", known, wide)[:, None] + dense("reader_own_block", blocks, wide)
        by_block = logits.reshape(len(fine), across, 1, across, 1)
        return Glimpsed(self._of_patches(by_block), self._within(fine, own, across), seen, log_shares)

    def pointed(self, block: jax.Array, within: jax.Array) -> jax.Array:
        """Returns log q(block) + log p(patch | block) of every patch, [B, N]; q is p(block)^3, normalized.

        `block` and `within` are logits, [B, N]. Blocks get no gradient.
        """
        side = math.isqrt(block.shape[1])
        blocks = (len(block), side // self.block, self.block, side // self.block, self.block)
        share = jax.nn.log_softmax(within.reshape(blocks), axis=(2, 4)).reshape(block.shape)
        return jax.nn.log_softmax(_POWER * jax.lax.stop_gradient(block), axis=-1) + 2 * math.log(self.block) + share

    def _places(self, across: int) -> jax.Array:
        tables = [
            logical.param(f"{NAME}_reader_{of}", (across, self.width), (None, None), _NORMAL, kind="embedding")
            for of in ("rows", "columns")
        ]
        return tables[0][:, None] + tables[1]

    def _of_patches(self, x: jax.Array) -> jax.Array:
        """Returns [B, N] from x [B, rows of blocks, r, columns of blocks, c], where r and c are 1 or `block`."""
        rows, across, _, _, _ = x.shape
        return jnp.broadcast_to(x, (rows, across, self.block, across, self.block)).reshape(rows, -1)

    def _within(self, fine: jax.Array, own: jax.Array, across: int) -> jax.Array:
        rows = len(fine)
        fine = fine.reshape(rows, across, self.block, across, self.block, self.width)
        own = own.reshape(rows, across, across, self.width)
        return self._of_patches(jnp.einsum("byrxcw,byxw->byrxc", fine, own) / math.sqrt(self.width))


def _sinusoids(order: jax.Array, width: int) -> jax.Array:
    frequency = 100.0 ** (-np.arange(width // 2) / (width // 2))
    angle = order[..., None] * frequency
    return jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], axis=-1)
