"""Selects the patches of an image that matter for a question.

    score = gain * (w1 z(entropy) + w2 z(edges) + w3 z(relevance))
    w = 3 softmax(MLP(statistics of the maps, question))

A map has one number for each patch, and z standardizes it over an image. Entropy and edges are those of
`texture_maps`; relevance is learned, from patch and question. With `Reader.points`, `Reader.pointed` of this sum is the
score.

A hard choice of K patches has no gradient. Three estimators give one:

    straight_through  the K best; their keys have the bias log p - stop_gradient(log p), with p = softmax(score / t)
    gumbel            the same p, but the K best of scores with Gumbel noise in training (Kool et al. 2019)
    soft              all patches, with a bias of the keys log sigmoid((score - threshold) / t); the threshold is
                      between the K-th and the next score. Evaluation hides all but the K best. With slots for only K
                      patches, it is straight_through until t is at its last value; then scores have no gradient.

The temperature t falls geometrically over the first steps. `blind` hides all patches.

B images, N patches, K chosen patches, S slots, D width of patches, E width of the decoder.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np

from core import logical, random_bits
from core.errors import UserError
from models.decoder.prefix import HIDDEN
from models.vision.reader import Glimpsed, Reader
from models.vision.small import NAME, dense, unit

LEARNED = ("straight_through", "gumbel", "soft")
METHODS = (*LEARNED, "all", "random", "center", "blind")
_MAPS = ("entropy", "edges", "relevance")
_EPS = 1e-6
_SOBEL = np.array([[-1, 0, 1], [-2, 0, 2], [-1, 0, 1]], np.float32) / 8


class Chosen(NamedTuple):
    """The patches that take the slots of an image.

    Attributes:
      indices: [B, S], int32, in ascending order.
      bias: [B, S], added to the attention logits of these patches as keys; None: nothing is added.
      hard: [B, N]: 1 at the chosen patches, 0 at others.
    """

    indices: jax.Array
    bias: jax.Array | None
    hard: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class Selector:
    """Chooses K patches of each image.

    Attributes:
      num_chosen: K; the method "all" does not read it.
      method: one of `METHODS`.
      width: width of the vectors whose product is the relevance, without a reader.
      balancer_width: width of the hidden layer that weighs the maps.
      temperature: t at the first step, and from step `temperature_steps` on.
      temperature_steps: steps over which the temperature falls.
      reader: computes the relevance; None: each patch is compared with the mean of the words.
      reads_question: whether scores depend on the question.
    """

    num_chosen: int
    method: str = "soft"
    width: int = 64
    balancer_width: int = 128
    temperature: tuple[float, float] = (1.0, 0.2)
    temperature_steps: int = 1000
    reader: Reader | None = None
    reads_question: bool = True

    def __post_init__(self):
        if self.method not in METHODS:
            raise UserError(f"Selector.method = {self.method!r}: expected one of {', '.join(METHODS)}")
        for name in ("num_chosen", "width", "balancer_width", "temperature_steps"):
            if (value := getattr(self, name)) < 1:
                raise UserError(f"Selector.{name} = {value}: expected at least 1")
        if len(self.temperature) != 2 or not all(0 < t < math.inf for t in self.temperature):
            raise UserError(f"Selector.temperature = {self.temperature}: expected two numbers above 0, first and last")

    @property
    def is_learned(self) -> bool:
        """Whether patches are chosen by learned scores."""
        return self.method in LEARNED

    def temperature_at(self, step: jax.Array) -> jax.Array:
        """Returns the temperature t after `step` training steps, []."""
        first, last = self.temperature
        done = jnp.minimum(step.astype(jnp.float32) / self.temperature_steps, 1.0)
        return first * (last / first) ** done

    def check(self, *, num_patches: int, slots: int) -> None:
        """Raises UserError if K is above `num_patches`, or `slots`, per image, is neither of them."""
        k = num_patches if self.method == "all" else self.num_chosen
        if k > num_patches:
            raise UserError(f"Selector.num_chosen = {k} is above {num_patches}, the patches of an image")
        if slots not in (k, num_patches):
            expected = f"{k}, the chosen patches, or {num_patches}, all patches" if k < num_patches else str(k)
            raise UserError(
                f"the data leave {slots} positions for an image, and the selector {self.method!r} needs {expected}: "
                "set the task's image_tokens"
            )

    def scores(
        self, images: jax.Array, patches: jax.Array, words: jax.Array, is_word: jax.Array
    ) -> tuple[jax.Array, Glimpsed | None]:
        """Returns the scores of patches, [R I, N], and what the reader found.

        Args:
          images: [R I, H, W, 3], uint8, whole patches: I images for each of R rows.
          patches: [R I, N, D], before they attend to one another.
          words: [R, T, E], the embeddings of a row.
          is_word: [R, I, T], 1 at the words of the question about each image.
        """
        side = math.isqrt(patches.shape[1])
        question = jnp.einsum("bit,btd->bid", is_word, words)
        question /= jnp.maximum(jnp.sum(is_word, axis=-1), 1)[..., None]
        question = question.reshape(len(images), -1)
        if not self.reads_question:
            is_word, question = jnp.zeros_like(is_word), jnp.zeros_like(question)
        raw, glimpsed = texture_maps(images, side), None
        if self.reader is None:
            found = self._relevance(patches, question)
        else:
            words = jnp.repeat(words, is_word.shape[1], axis=0)
            glimpsed = self.reader.glimpsed(patches, words, is_word.reshape(len(images), -1))
            found = glimpsed.within if self.reader.points else glimpsed.relevance
        raw = [*raw, found]
        maps = jnp.stack([standardized(a) for a in raw], axis=1)  # [B, 3, N]
        weights = self._weights(jnp.stack(raw, axis=1), question)
        gain = jnp.exp(logical.param(f"{NAME}_gain", (1,), (None,), jnp.zeros, kind="bias"))
        found = gain * jnp.einsum("bm,bmn->bn", weights, maps)
        if self.reader is None or glimpsed is None:
            return found, None
        return (self.reader.pointed(glimpsed.block, found) if self.reader.points else found), glimpsed

    def _relevance(self, patches: jax.Array, question: jax.Array) -> jax.Array:
        x = dense("patch_hidden", unit(patches), self.width, "gelu")
        keys = dense("patch", x, self.width)
        query = dense("question", dense("question_hidden", unit(question), self.width, "gelu"), self.width)
        own = dense("salience", keys, 1)[..., 0]
        return jnp.einsum("bnw,bw->bn", keys, query) / math.sqrt(self.width) + own

    def _weights(self, raw: jax.Array, question: jax.Array) -> jax.Array:
        statistics = [jnp.mean(raw, axis=-1), jnp.std(raw, axis=-1), jnp.max(raw, axis=-1)]
        known = jnp.concatenate([*statistics, unit(question)], axis=-1)
        hidden = dense("balancer_hidden", known, self.balancer_width, "gelu")
        return len(_MAPS) * jax.nn.softmax(dense("balancer", hidden, len(_MAPS)), axis=-1)

    def choose(
        self,
        scores: jax.Array | None,
        *,
        rows: jax.Array,
        num_patches: int,
        slots: int,
        step: jax.Array,
        is_training: bool,
    ) -> Chosen:
        """Returns the patches for S slots: K of them, or all N.

        A bias hides or weakens those that are not chosen.

        Args:
          scores: [B, N]; None if the method needs none.
          rows: [B], a number of each image for random draws.
          slots: S, K or N.
        """
        if self.method == "all":
            everything = jnp.broadcast_to(jnp.arange(num_patches), (len(rows), num_patches))
            return Chosen(everything, None, jnp.ones(everything.shape))
        if self.method == "blind":
            index = jnp.broadcast_to(jnp.arange(slots), (len(rows), slots))
            return Chosen(index, jnp.full(index.shape, HIDDEN), jnp.zeros((len(rows), num_patches)))
        ranked = self._ranked(scores, rows, num_patches, is_training=is_training)
        hard = hard_choice(ranked, self.num_chosen)
        is_soft = self.method == "soft" and is_training and slots == num_patches
        temperature = self.temperature_at(step)
        if slots == self.num_chosen and slots < num_patches:
            # The patches in ascending order of their places.
            index = jnp.sort(jax.lax.top_k(ranked, self.num_chosen)[1], axis=-1)
            bias = None
        else:
            index = jnp.broadcast_to(jnp.arange(num_patches), hard.shape)
            bias = jnp.where(hard > 0, 0.0, HIDDEN)
            if is_soft:
                assert scores is not None
                bias = soft_bias(scores, self.num_chosen, temperature)
        if self.is_learned and is_training and not is_soft:
            assert scores is not None
            if self.method == "soft":
                scores = jnp.where(step < self.temperature_steps, scores, jax.lax.stop_gradient(scores))
            log_p = jax.nn.log_softmax(scores / temperature, axis=-1)
            taken = jnp.take_along_axis(log_p, index, axis=-1)
            through = taken - jax.lax.stop_gradient(taken)
            bias = through if bias is None else bias + jnp.where(bias == 0, through, 0.0)
        return Chosen(index, bias, hard)

    def _ranked(self, scores: jax.Array | None, rows: jax.Array, num_patches: int, *, is_training: bool) -> jax.Array:
        if self.method == "center":
            side = math.isqrt(num_patches)
            place = np.arange(num_patches)
            offsets = np.stack([place // side, place % side]) - (side - 1) / 2
            return jnp.broadcast_to(jnp.asarray(-np.sum(offsets**2, axis=0), jnp.float32), (len(rows), num_patches))
        if self.method == "random":
            keys = random_bits.row_keys(hk.next_rng_key(), rows)
            return jax.vmap(lambda key: jax.random.uniform(key, (num_patches,)))(keys)
        assert scores is not None
        ranked = jax.lax.stop_gradient(scores)
        if self.method == "gumbel" and is_training:
            keys = random_bits.row_keys(hk.next_rng_key(), rows)
            ranked += jax.vmap(lambda key: jax.random.gumbel(key, (num_patches,)))(keys)
        return ranked


def hard_choice(ranked: jax.Array, number: int) -> jax.Array:
    """Returns 1 at the `number` largest of each row [B, N] and 0 elsewhere."""
    index = jax.lax.top_k(ranked, number)[1]
    return jnp.sum(jax.nn.one_hot(index, ranked.shape[-1], dtype=jnp.float32), axis=1)


def soft_bias(scores: jax.Array, number: int, temperature: jax.Array) -> jax.Array:
    """Returns log sigmoid((score - threshold) / t), [B, N]; 0 if K, `number`, is N.

    The threshold is halfway between the K-th and the next score.
    """
    if number == scores.shape[-1]:
        return jnp.zeros_like(scores)
    best = jax.lax.top_k(scores, number + 1)[0]
    threshold = (best[:, number - 1] + best[:, number]) / 2
    return jax.nn.log_sigmoid((scores - threshold[:, None]) / temperature)


def standardized(x: jax.Array) -> jax.Array:
    """Subtracts the mean of each row [B, N] and divides by its standard deviation."""
    centered = x - jnp.mean(x, axis=-1, keepdims=True)
    return centered * jax.lax.rsqrt(jnp.mean(centered**2, axis=-1, keepdims=True) + _EPS)


def texture_maps(images: jax.Array, side: int) -> list[jax.Array]:
    """Returns entropy and edges, [B, N] each, of images [B, H, W, 3] uint8.

    Edges are the mean magnitude of Sobel's filters; entropy is that of a softmax over features of a patch. `side`
    patches are along each side.
    """
    pixels = images.astype(jnp.float32) / 255
    gray = pixels @ jnp.asarray([0.299, 0.587, 0.114])
    padded = jnp.pad(gray, ((0, 0), (1, 1), (1, 1)), mode="edge")
    h, w = gray.shape[1:]

    def filtered(kernel: np.ndarray) -> jax.Array:
        shifted = [(padded[:, r : r + h, c : c + w], kernel[r, c]) for r in range(3) for c in range(3)]
        return sum((float(weight) * part for part, weight in shifted if weight), jnp.zeros_like(gray))

    across, down = filtered(_SOBEL), filtered(_SOBEL.T)
    magnitude = jnp.sqrt(across**2 + down**2 + _EPS)
    red, green, blue = (pixels[..., i] for i in range(3))
    layers = [red, green, blue, red - green, blue - (red + green) / 2, across, down, magnitude]
    per_patch = jnp.stack([_patch_means(layer, side) for layer in layers], axis=-1)  # [B, N, 8]
    place = np.arange(side * side)
    y, x = ((a + 0.5) / side * 2 - 1 for a in (place // side, place % side))
    where = jnp.asarray(np.stack([y, x, np.sqrt(x**2 + y**2)], axis=-1), jnp.float32)
    channels = jnp.concatenate([per_patch, jnp.broadcast_to(where, (*per_patch.shape[:2], 3))], axis=-1)
    log_p = jax.nn.log_softmax(channels, axis=-1)
    return [-jnp.sum(jnp.exp(log_p) * log_p, axis=-1), per_patch[..., -1]]


def _patch_means(x: jax.Array, side: int) -> jax.Array:
    b, h, w = x.shape
    return jnp.mean(x.reshape(b, side, h // side, side, w // side), axis=(2, 4)).reshape(b, -1)
