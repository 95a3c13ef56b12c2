"""The interface of a part of a decoder's layer: a mixer over positions, or a feed-forward.

    x += Mixer(norm(x));   x += FeedForward(norm(x))

A part is a frozen dataclass of settings. Called in the Haiku module of a layer, it makes its parameters and maps the
normalized stream [B, T, D] to what is added to it. It also describes itself: FLOPs of a token, the state that replaces
earlier positions in generation, and sums over rows that become losses or metrics. A part of one's own is such a class
in any module; `models.decoder.layers` has those that most decoders use.

B batch, T length, D embed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import jax

from core.errors import UserError
from core.types import LossOutput
from models.decoder import rotary
from models.decoder.prefix import Prefix

if TYPE_CHECKING:
    from models.decoder.attention.splash_tiles import Tiles
    from models.lora import Lora


class Decoder(Protocol):
    """The fields and properties of `models.decoder.config.DecoderConfig` that a part may read."""

    num_layers: int
    embed_dim: int
    mlp_dim: int
    num_heads: int
    num_kv_heads: int
    rope_theta: float
    rope_scaling: rotary.Scaling | None
    dtype: str
    quantization: str
    attention: str
    attention_tiles: Tiles | None
    norm: str
    norm_eps: float
    bias: str
    gated: bool
    activation: str
    lora: Lora | None

    @property
    def head_width(self) -> int:
        """K: the size of a head."""

    @property
    def rotations(self) -> tuple[rotary.Rotation, ...]:
        """The different rotary embeddings of the mixers: the decoder's, if any has it, and others by layer."""

    @property
    def layer_kinds(self) -> tuple[Any, ...]:
        """The kinds of successive layers, `config.LayerKind`, repeated over the stack."""


class Side(NamedTuple):
    """Arrays that belong to rows and are the same for all layers.

    Attributes:
      segment_ids: [B, T], int32.
      turns: rotary tables, one for each of `Decoder.rotations`.
      rows: [B], int32, global row ids, if inputs of adapters are dropped; otherwise None.
      padding: [B], int32, the number of empty slots before a row, if earlier slots are cached; otherwise None.
      prefix: which positions attend both ways; None: attention is causal.
      continues: [B], bool, whether the first position continues the segment in which the row of the step before ended,
        if parts keep states between steps; otherwise None.
    """

    segment_ids: jax.Array
    turns: tuple[rotary.RotaryTables, ...]
    padding: jax.Array | None = None
    rows: jax.Array | None = None
    prefix: Prefix | None = None
    continues: jax.Array | None = None


class Earlier(NamedTuple):
    """The slots before those of a call.

    Attributes:
      state: what the part returned for them, or its empty state.
      start: their number, [], int32.
    """

    state: Any
    start: jax.Array


class Call(NamedTuple):
    """The arguments of a part besides the stream.

    Attributes:
      side: arrays that belong to rows.
      before: earlier slots, whose state the part continues; None: rows are complete.
      weights: [B, T], of supervised positions; None if there are earlier slots.
      drops: whether the capacity of experts applies.
      carried: the state in which the row of the training step before ended, for parts that keep it; otherwise None.
      name: name of the part in its layer, for the Haiku module of its parameters if it has one of its own.
    """

    side: Side
    before: Earlier | None = None
    weights: jax.Array | None = None
    drops: bool = False
    carried: Any = None
    name: str = ""

    def real(self, length: int) -> jax.Array:
        """Returns whether each of the `length` positions is a token and not padding, [B, T]."""
        if self.before is None:
            return self.side.segment_ids > 0
        assert self.side.padding is not None
        return self.before.start + jax.numpy.arange(length) >= self.side.padding[:, None]


class Result(NamedTuple):
    """The result of a part.

    Attributes:
      y: [B, T, D], added to the stream.
      state: the state after these positions, if the call had `before` or `carried`; otherwise ().
      sums: tree of sums over rows, float32, of the structure of `Part.empty_sums`.
    """

    y: jax.Array
    state: Any = ()
    sums: Any = ()


class Work(NamedTuple):
    """Multiplications of a token: with matrices of parameters, which may be frozen, and others."""

    matrices: float
    others: float = 0


class Part:
    """A mixer or a feed-forward; the defaults are those of a causal part without state and sums.

    Subclasses are frozen dataclasses, so that equal parts are equal values.

    Attributes:
      name: name of its state and sums in a layer; two parts of a layer have different names.
      norm: start of the name of the norm before it; None: `mixer_norm`, or `feed_forward_norm`.
      is_recurrent: whether it has a state of one size for rows of any length.
      keeps_state: whether it can continue from the state of the training step before, `Call.carried`.
      sees_prefix: whether it works where a part of a row attends both ways (`Side.prefix`).
      matrices: names of the matrices that low-rank adapters can change.
      without_adapters: names of its other matrices, which no adapter of the decoder can have.
    """

    name: str = ""
    norm: str | None = None
    is_recurrent = False
    keeps_state = False
    sees_prefix = False
    matrices: tuple[str, ...] = ()
    without_adapters: tuple[str, ...] = ()

    def check(self, decoder: Decoder) -> None:
        """Checks the decoder's fields that concern the part; raises UserError."""

    def with_same_parameters(self) -> Part:
        """Returns the part without settings on which its parameters do not depend.

        Layers whose parts are equal without them are stacked in the same arrays.
        """
        return self

    def rotation(self, decoder: Decoder) -> rotary.Rotation | None:
        """Returns by how much it rotates queries and keys; None: it does not."""
        del decoder
        return None

    def __call__(self, decoder: Decoder, x: jax.Array, call: Call) -> Result:
        """Runs the part on the normalized stream [B, T, D], in the Haiku module of its layer."""
        raise NotImplementedError

    def work(self, decoder: Decoder, length: int) -> Work:
        """Returns the multiplications of a token in rows of `length` positions."""
        raise NotImplementedError

    def empty_state(self, decoder: Decoder, rows: int, length: int) -> Any:
        """Returns the state before the first of at most `length` slots, leaves [rows, ...]."""
        del decoder, rows, length
        return ()

    def laid_out(self, state: Any) -> Any:
        """Constrains a state by the activation table."""
        return state

    def empty_sums(self) -> Any:
        """Returns zeros for the sums; () for a part without sums."""
        return ()

    def finish(self, found: LossOutput, sums: Any, *, num_layers: int, is_training: bool) -> LossOutput:
        """Adds losses and metrics of the part to the loss of the decoder.

        Args:
          found: the cross-entropy.
          sums: sums of all layers.
          num_layers: the number of layers with this part.
          is_training: whether losses are added.
        """
        del sums, num_layers, is_training
        return found

    def shrink(self, multiples: Mapping[str, int]) -> Part:
        """Returns a small part for rehearsals, whose sizes are multiples of `multiples`, by logical axis."""
        del multiples
        return self

    def settings(self, decoder: Decoder) -> dict[str, Any]:
        """Returns the settings that change the function of the part, by `name.field`."""
        del decoder
        return {f"{self.name}.{field.name}": getattr(self, field.name) for field in dataclasses.fields(self)}  # type: ignore[arg-type]

    def on_gpus(self, decoder: Decoder, length: int) -> str | None:
        """Returns how it computes attention on GPUs; None if it has none."""
        del decoder, length
        return None


def adaptable(decoder: Decoder) -> tuple[str, ...]:
    """Returns the names of the matrices of a decoder that low-rank adapters can change."""
    parts = [part for kind in decoder.layer_kinds for part in (*kind.mixers, kind.feed_forward) if part is not None]
    without = {name for part in parts for name in part.without_adapters}
    if not decoder.gated:
        without.add("gate")
    return tuple(dict.fromkeys(name for part in parts for name in part.matrices if name not in without))


@dataclasses.dataclass(frozen=True)
class Sum:
    """Several mixers of one layer, whose outputs are added.

    Attributes:
      parts: the mixers, with different names.
    """

    parts: tuple[Part, ...]

    def __post_init__(self):
        if len(self.parts) < 2 or not all(isinstance(part, Part) for part in self.parts):
            raise UserError(
                f"Sum.parts = {self.parts!r}: expected at least two mixers, such as (@layers.Attention(), @s5.S5())"
            )
