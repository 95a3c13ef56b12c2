"""A decoder that answers questions about images.

    patches = vision tower(image);   chosen = selector(patches, question);   x[slots] = connector(patches[chosen])

The row of a batch has slots for the patches of its images, then a question, then the answer. Patches and question
attend to one another both ways, the answer causally; with `causal`, attention is causal.

B batch, T length, I images of a row, S slots of an image, N patches, D embed, V width of the vision tower.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import haiku as hk
import jax
import jax.numpy as jnp

from core import identity, logical, parameters, random_bits, units
from core.checkpoints import published_files
from core.errors import UserError, check_integer
from core.types import Batch, Carry, LossOutput, Params, WeightedSum
from models import derivatives, losses
from models.decoder.config import parts_of
from models.decoder.prefix import Prefix
from models.decoder.published import families
from models.decoder.transformer import Inserted, Transformer
from models.vision import selector as selecting
from models.vision import tower as towers
from models.vision.reader import Glimpsed
from models.vision.selector import Chosen, Selector
from models.vision.tower import VisionTower

if TYPE_CHECKING:
    from core.checkpoints.published import PublishedFolder
    from models.vision.families import TwoFolders

_CONNECTOR = "connector"
PARTS = (towers.NAME, _CONNECTOR, selecting.NAME, "decoder")  # the decoder has all parameters without these names
_ALL = Selector(num_chosen=1, method="all")


@dataclasses.dataclass(frozen=True, kw_only=True)
class VisionLanguageModel:
    """A decoder that sees images; attributes that are not listed are those of the decoder.

    Batches have the fields of a decoder's and, for I images in each row:

      images: [B, H, W, 3] or [B, I, H, W, 3], uint8.
      slots: [B, I S], int32, the positions of the patches of each image in its row; -1 for images that are not there.
      until: [B, T], int32, the last position that each position attends to.
      kind: [B], int32, optional: the kind of question, by which evaluations count answers.

    Attributes:
      selector: chooses patches; None: all patches.
      vision_folder: folder of a published tower, read in addition to the decoder's; "": none.
      connector_dim: width of the hidden layer of the connector; None: one matrix.
      connector_activation: of its hidden layer, one of `models.derivatives.ACTIVATIONS`.
      connector_bias: whether the matrices of the connector have biases.
      connector_square: rows and columns of patches whose features the connector joins to one vector; 1 with a selector.
      causal: whether images and questions attend causally.
      freeze: what is not trained, some of "vision", "connector", "selector" and "decoder".
      frozen_dtype: dtype in which that is stored, "bfloat16" or "float32".
      kinds: names of the kinds of questions, by the number in the field `kind`.
    """

    couples_rows: ClassVar[bool] = False

    decoder: Transformer
    vision: VisionTower
    selector: Selector | None = None
    vision_folder: str = dataclasses.field(default="", metadata=identity.NOT_IDENTITY)
    connector_dim: int | None = None
    connector_activation: str = "gelu"
    connector_bias: bool = True
    connector_square: int = 1
    causal: bool = False
    freeze: tuple[str, ...] = ()
    frozen_dtype: str = "bfloat16"
    kinds: tuple[str, ...] = ()

    def __post_init__(self):
        if unknown := sorted(set(self.freeze) - set(PARTS)):
            raise UserError(f"VisionLanguageModel.freeze: {', '.join(unknown)}: expected some of {', '.join(PARTS)}")
        if self.frozen_dtype not in ("bfloat16", "float32"):
            raise UserError(f"VisionLanguageModel.frozen_dtype = {self.frozen_dtype!r}: expected bfloat16 or float32")
        if self.connector_activation not in derivatives.ACTIVATIONS:
            expected = ", ".join(derivatives.ACTIVATIONS)
            raise UserError(
                f"VisionLanguageModel.connector_activation = {self.connector_activation!r}: expected one of {expected}"
            )
        check_integer(self.connector_square, where="VisionLanguageModel.connector_square", least=1)
        if self.vision.side % self.connector_square:
            raise UserError(
                f"VisionLanguageModel.connector_square = {self.connector_square} does not divide {self.vision.side}, "
                "the patches along the side of an image"
            )
        if self.connector_square > 1 and self.selector is not None:
            raise UserError(
                f"VisionLanguageModel.connector_square = {self.connector_square} joins squares of patches, of which a "
                "selector would take parts: set selector = None"
            )
        parts = {part for kind in self.decoder.layer_kinds for part in parts_of(kind).values()}
        blind = {part.name for part in parts if not part.sees_prefix}
        blind |= {name for name in ("planner", "layer_inputs") if getattr(self.decoder, name) is not None}
        if blind:
            raise UserError(
                f"VisionLanguageModel.decoder has {', '.join(sorted(blind))}: only attention can attend both ways to "
                "images and questions and hide patches; expected the default mixer, a feed_forward without states, and "
                "planner and layer_inputs = None"
            )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "decoder" not in vars(self):
            raise AttributeError(name)
        return getattr(self.decoder, name)

    @property
    def _selector(self) -> Selector:
        return self.selector or _ALL

    def init(self, rng: jax.Array, batch: Batch) -> Params:
        """Returns initial parameters; those in `freeze` are frozen, in `frozen_dtype`.

        If the decoder has low-rank adapters, all other parameters of the model are frozen, too.
        """
        params = hk.transform(lambda b: self._sums(b, jnp.zeros((), jnp.int32), is_training=False)).init(rng, batch)
        if self.decoder.lora is not None:
            params = self.decoder.lora.base_frozen(params)
        paths = [parameters.path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
        chosen = [path for path in paths if part_of(path) in self.freeze]
        return logical.frozen(params, chosen, self.frozen_dtype) if chosen else params

    def init_carry(self, batch: Batch) -> Carry:
        """Returns a step counter at 0 if the selector is learned, else ()."""
        del batch
        return {"step": jnp.zeros((), jnp.int32)} if self._selector.is_learned else ()

    def loss(
        self, params: Params, carry: Carry, rng: jax.Array, batch: Batch, *, is_training: bool = True
    ) -> tuple[Carry, LossOutput]:
        """Returns the next carry and the loss as sums."""
        step = carry["step"] if carry else jnp.zeros((), jnp.int32)
        run = hk.transform(lambda b: self._sums(b, step, is_training=is_training))
        out = run.apply(params, rng if self._draws(is_training=is_training) else None, batch)
        return ({"step": step + is_training} if carry else ()), out

    def logits(self, params: Params, batch: Batch) -> jax.Array:
        """Returns the logits, [B, T, vocab_size]."""

        def run(batch: Batch) -> jax.Array:
            read, inserted, *_ = self._read(batch, jnp.zeros((), jnp.int32), is_training=False)
            return self.decoder.all_logits(read, inserted=inserted)

        rng = jax.random.key(0) if self._draws(is_training=False) else None
        return hk.transform(run).apply(params, rng, batch)[..., : self.decoder.vocab_size]

    def evaluate(self, params: Params, rng: jax.Array, batch: Batch) -> LossOutput:
        """Returns the sums of the loss, and in how many rows all answer tokens are right.

        `extras` has `chosen` [B, I N], 1 for the chosen patches and 0 for others; `answers` [B, T], the most likely id
        after each position; and `right` [B], 1 if a row's answer is right.
        """

        def run(batch: Batch) -> tuple[jax.Array, jax.Array]:
            read, inserted, chosen, _ = self._read(batch, jnp.zeros((), jnp.int32), is_training=False)
            return self.decoder.all_logits(read, inserted=inserted), chosen.hard

        drawn = rng if self._draws(is_training=False) else None
        logits, hard = hk.transform(run).apply(params, drawn, batch)
        size = self.decoder.vocab_size
        out = losses.cross_entropy(logits, batch["targets"], batch["weights"], vocab_size=size)
        answers = jnp.argmax(logits[..., :size], axis=-1)
        asked = batch["weights"] > 0
        counts = jnp.any(asked, axis=-1).astype(jnp.float32)
        right = counts * jnp.all((answers == batch["targets"]) | ~asked, axis=-1)
        metrics = {**out.metrics, "exact": WeightedSum(jnp.sum(right), jnp.sum(counts))}
        if "kind" in batch:
            for number, name in enumerate(self.kinds):
                here = batch["kind"] == number
                metrics[f"exact_{name}"] = WeightedSum(jnp.sum(right * here), jnp.sum(counts * here))
        rows = len(batch["inputs"])
        return out._replace(
            metrics=metrics, extras={"chosen": hard.reshape(rows, -1), "answers": answers, "right": right}
        )

    def _draws(self, *, is_training: bool) -> bool:
        lora = self.decoder.lora
        drops = is_training and lora is not None and lora.dropout > 0
        return drops or self._selector.method == "random" or (is_training and self._selector.method == "gumbel")

    def _sums(self, batch: Batch, step: jax.Array, *, is_training: bool) -> LossOutput:
        read, inserted, _, guesses = self._read(batch, step, is_training=is_training)
        lora = self.decoder.lora
        rows = random_bits.row_ids(batch) if is_training and lora is not None and lora.dropout > 0 else None
        out = self.decoder.sums(read, rows, is_training=is_training, inserted=inserted)
        if guesses is None:
            return out
        metrics = {**out.metrics, "reader_accuracy": guesses.metrics["accuracy"]}
        if is_training:
            out = out._replace(loss_sum=out.loss_sum + self._answers * guesses.loss_sum)
        return out._replace(metrics=metrics)

    @property
    def _answers(self) -> float:
        reader = self._selector.reader
        return reader.answers if reader is not None and self._selector.is_learned else 0.0

    def _read(
        self, batch: Batch, step: jax.Array, *, is_training: bool
    ) -> tuple[Batch, Inserted, Chosen, LossOutput | None]:
        """The last result is the loss of the reader's own answers; None without them."""
        images, rows = batch["images"], len(batch["inputs"])
        images = images.reshape(-1, *images.shape[-3:])  # [B I, H, W, 3]
        number = len(images) // rows
        slots = batch["slots"].reshape(rows, number, -1)  # [B, I, S]
        selector, n, s = self._selector, self.image_tokens, slots.shape[-1]
        selector.check(num_patches=n, slots=s)
        self._check_positions(batch["inputs"].shape[1], images=number, left_out=n - s)
        at = Placed.of(batch, slots)
        patches = self.vision.embedded(images, dtype=self.decoder.dtype)
        scores, guesses = None, None
        if selector.is_learned:
            words = self.decoder.token_embeddings(batch["inputs"]).astype(jnp.float32)
            scores, glimpsed = selector.scores(self.vision.whole_patches(images), patches, words, at.question)
            if self._answers and glimpsed is not None:
                guesses = self._guessed(batch, at, glimpsed)
        ids = random_bits.row_ids(batch)[:, None] * number + jnp.arange(number)
        chosen = selector.choose(
            scores,
            rows=ids.reshape(-1),
            num_patches=n,
            slots=s,
            step=step,
            is_training=is_training,
        )
        features = self._joined(self.vision.encoded(patches, self.decoder))
        if s < n:  # a product with ones and zeros is exact, and every strategy can partition it
            taken = jax.nn.one_hot(chosen.indices, n, dtype=features.dtype)
            features = jnp.einsum("bsn,bnv->bsv", taken, features)
        visual = self._connected(features).reshape(rows, number * s, -1)
        return *at.decoded(batch, visual, chosen, shift=n - s, causal=self.causal), guesses

    @property
    def text_part(self) -> Transformer:
        """The decoder, which reads text without images."""
        return self.decoder

    @property
    def image_tokens(self) -> int:
        """Number of vectors per image before a selector drops some."""
        return self.vision.num_patches // self.connector_square**2

    def image_vectors(self, params: Params, images: jax.Array) -> jax.Array:
        """Returns the vectors of images [I, H, W, 3] uint8, as the decoder reads them, [I, `image_tokens`, D]."""

        def run(images: jax.Array) -> jax.Array:
            patches = self.vision.embedded(images, dtype=self.decoder.dtype)
            return self._connected(self._joined(self.vision.encoded(patches, self.decoder)))

        return hk.transform(run).apply(params, None, images)

    def _joined(self, x: jax.Array) -> jax.Array:
        """Joins the features of squares of patches, [B, N, V] -> [B, N / square^2, V square^2]."""
        square, side = self.connector_square, self.vision.side // self.connector_square
        if square == 1:
            return x
        x = x.reshape(len(x), side, square, side, square, -1).transpose(0, 1, 3, 2, 4, 5)
        return x.reshape(len(x), side * side, -1)

    def _guessed(self, batch: Batch, at: Placed, glimpsed: Glimpsed) -> LossOutput:
        after = jnp.pad(at.question[..., 1:], ((0, 0), (0, 0), (0, 1)))
        last = at.question * (1 - after)  # the last word of a question, whose target the answer begins with
        chosen = (jnp.where(last > 0, batch[name][:, None], 0) for name in ("targets", "weights"))
        targets, weights = (jnp.sum(of_question, axis=-1) for of_question in chosen)
        size = self.decoder.vocab_size
        logits = glimpsed.log_answers(size).reshape(*targets.shape, size)
        return losses.cross_entropy(logits, targets, weights, vocab_size=size)

    def _check_positions(self, length: int, *, images: int, left_out: int) -> None:
        """Raises UserError for rows with too many positions; `left_out` is the number of patches left out per image.

        All images may be in one segment. Only learned positions would then be wrong without an error.
        """
        most, images = self.decoder.max_positions, images if self.decoder.positions == "learned" else 1
        length += images * left_out
        if most is not None and length > most:
            raise UserError(
                f"rows with all patches of {units.counted(images, 'image')} have {length} positions, and the decoder "
                f"has max_positions = {most}: set LENGTH lower, or give a row fewer images"
            )

    def _connected(self, x: jax.Array) -> jax.Array:
        width, d = x.shape[-1], self.decoder.embed_dim
        if self.connector_dim is not None:
            hidden = self._matrix("up", x, (width, self.connector_dim), (None, "mlp"))
            x = derivatives.activated(hidden, self.connector_activation)
            width = self.connector_dim
        x = self._matrix("down", x, (width, d), ("mlp" if self.connector_dim is not None else None, "embed"))
        return logical.constrain(x, "batch", "residual_length", "embed")

    def _matrix(self, name: str, x: jax.Array, shape: tuple[int, int], axes: tuple[str | None, ...]) -> jax.Array:
        init = hk.initializers.TruncatedNormal(shape[0] ** -0.5)
        how: dict[str, Any] = {"compute_dtype": self.decoder.dtype}
        y = x @ logical.param(f"{_CONNECTOR}_{name}", shape, axes, init, **how)
        if not self.connector_bias:
            return y
        bias = logical.param(f"{_CONNECTOR}_{name}_bias", shape[1:], ("norm",), jnp.zeros, kind="bias", **how)
        return y + bias

    def published(self, folder: str) -> PublishedFolder | TwoFolders:
        """Returns access to the parameters of the model, its vision tower or its decoder, whichever the folder has.

        With `vision_folder`, `folder` is that of the decoder, and both are read.
        """
        from models.vision import families as vision_families  # imported only when parameters are read from a folder
        from models.vision import published

        def tower(of: str) -> PublishedFolder:
            config = families.read_config(published_files.small_files(of))
            return vision_families.published_folder(self.vision, of, config)

        if self.vision_folder:
            return vision_families.TwoFolders(tower(self.vision_folder), self.decoder.published(folder))
        config = families.read_config(published_files.small_files(folder))
        if (kind := str(config.get("model_type"))) in published.FAMILIES:
            return published.published_folder(self, folder, config)
        return tower(folder) if kind in vision_families.FAMILIES else self.decoder.published(folder)

    @property
    def added_parameters(self) -> tuple[str, ...]:
        """The path patterns of the parameters that the decoder alone lacks."""
        return (*self.decoder.added_parameters, *(f"{part}_*" for part in PARTS if part != "decoder"))

    def settings(self) -> dict[str, Any]:
        """Returns settings on which results depend, by name."""
        found = {f"vision.{f.name}": getattr(self.vision, f.name) for f in dataclasses.fields(self.vision)}
        names = ("connector_dim", "connector_activation", "connector_bias", "connector_square", "causal")
        found |= {name: getattr(self, name) for name in names}
        if self.selector:
            found |= {f"selector.{f.name}": getattr(self.selector, f.name) for f in dataclasses.fields(self.selector)}
            del found["selector.temperature_steps"]  # of training alone
        return {**self.decoder.settings(), **found}

    def flops_per_token(self, length: int) -> float:
        """Returns training FLOPs per position of rows of `length` positions with one image.

        The connector and the selector are not counted.
        """
        is_frozen = towers.NAME in self.freeze or self.decoder.lora is not None
        decoder = self.decoder.flops_per_token(length)
        if "decoder" in self.freeze and self.decoder.lora is None:
            decoder -= self.decoder.flops_per_token(0) / 3
        return decoder + self.vision.flops(is_frozen=is_frozen) / length

    def shrink(self, multiples: Mapping[str, int]) -> VisionLanguageModel:
        """Returns a small model of this kind, for images of the same size."""
        small = self.decoder.shrink(multiples)
        assert isinstance(small, Transformer)
        width = self.connector_dim and small.mlp_dim
        return dataclasses.replace(self, decoder=small, vision=self.vision.shrink(multiples), connector_dim=width)


def part_of(path: str) -> str:
    """Returns the element of `PARTS` to which the parameter at `path` belongs."""
    return next((part for part in PARTS[:-1] if path.startswith(f"{part}_")), PARTS[-1])


def _placed(slots: jax.Array, values: jax.Array) -> jax.Array:
    """Returns the value of the slot at each position, [B, T], and 0 where there is none.

    No product, which TPUs would round to bfloat16: integers above 256 would change.

    Args:
      slots: `Placed.slots`.
      values: [B, I S].
    """
    return jnp.sum(jnp.where(slots > 0, values[..., None], 0), axis=1, dtype=values.dtype)


@dataclasses.dataclass(frozen=True)
class Placed:
    """Where images and questions are in the rows of a batch.

    Attributes:
      slots: [B, I S, T], float32: 1 where the slot has its position.
      question: [B, I, T], float32: 1 at the positions of the question about each image.
      image: [B, I, T], bool: whether a position belongs to the segment of the image.
    """

    slots: jax.Array
    question: jax.Array
    image: jax.Array

    @staticmethod
    def of(batch: Batch, slots: jax.Array) -> Placed:
        """Returns where images and questions are; `slots` are [B, I, S], -1 for no image."""
        segments, until = batch["segment_ids"], batch["until"]
        rows, number, size = slots.shape
        place = jnp.arange(segments.shape[1])
        at = (slots[..., None] == place).astype(jnp.float32)  # [B, I, S, T]
        first = at[:, :, 0].astype(jnp.int32)
        segment, last = (jnp.sum(first * a[:, None], axis=-1)[..., None] for a in (segments, until))  # [B, I, 1]
        own = (segments[:, None] == segment) & (segment > 0)
        is_slot = jnp.any(at > 0, axis=(1, 2))
        question = own & (place <= last) & ~is_slot[:, None]
        return Placed(at.reshape(rows, number * size, -1), question.astype(jnp.float32), own)

    def decoded(
        self, batch: Batch, visual: jax.Array, chosen: Chosen, *, shift: int, causal: bool
    ) -> tuple[Batch, Inserted, Chosen]:
        """Returns the decoder's batch, the vectors to insert, and the chosen patches.

        Positions are as if all patches of each image were there.

        Args:
          visual: the chosen patches, [B, I S, D].
          shift: by how many positions an image moves the text after it.
        """
        if causal:
            return self._decoded_causally(batch, visual, chosen, shift)
        is_slot, bias = jnp.sum(self.slots, axis=1) > 0, None
        if chosen.bias is not None:
            bias = _placed(self.slots, chosen.bias.reshape(len(visual), -1))
        values = jnp.einsum("bst,bsd->btd", self.slots.astype(visual.dtype), visual)
        read = {**batch, "positions": self._positions(batch["positions"], chosen, shift)}
        return read, Inserted(values, is_slot, Prefix(batch["until"], bias)), chosen

    def _decoded_causally(
        self, batch: Batch, visual: jax.Array, chosen: Chosen, shift: int
    ) -> tuple[Batch, Inserted, Chosen]:
        is_slot, prefix = jnp.sum(self.slots, axis=1) > 0, None
        if chosen.bias is not None:
            bias = _placed(self.slots, chosen.bias.reshape(len(visual), -1))
            prefix = Prefix(jnp.broadcast_to(jnp.arange(is_slot.shape[1]), is_slot.shape), bias)
        values = jnp.einsum("bst,bsd->btd", self.slots.astype(visual.dtype), visual)
        read = {**batch, "positions": self._positions(batch["positions"], chosen, shift)}
        return read, Inserted(values, is_slot, prefix), chosen

    def _positions(self, positions: jax.Array, chosen: Chosen, shift: int) -> jax.Array:
        """Returns positions [B, T], each moved by `shift` for every earlier image of its segment."""
        if not shift:
            return positions
        rows, number = self.image.shape[:2]
        begins = self.slots.reshape(rows, number, -1, self.slots.shape[-1])[:, :, 0] > 0  # [B, I, T]
        places = jnp.arange(begins.shape[-1])
        start = jnp.sum(jnp.where(begins, places, 0), axis=-1)
        moved = positions + shift * jnp.sum(self.image & (places > start[:, :, None]), axis=1)
        first = jnp.sum(jnp.where(begins, moved[:, None], 0), axis=-1)
        index = chosen.indices.reshape(rows, number, -1).astype(jnp.int32) + first[:, :, None]
        is_slot = jnp.sum(self.slots, axis=1) > 0
        return jnp.where(is_slot, _placed(self.slots, index.reshape(rows, -1)), moved)
