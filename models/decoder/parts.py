"""The interface of the parts of a decoder's layers: mixers over positions, and feed-forwards.

    x += Mixer(norm(x));   x += FeedForward(norm(x))

A part is a frozen dataclass of settings. Called in the Haiku module of a layer, it makes its parameters.

B batch, T length, D embed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
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

    vocab_size: int
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
    positions: str
    bias: str
    gated: bool
    activation: str
    lora: Lora | None

    @property
    def head_width(self) -> int:
        """K: the size of a head."""

    @property
    def stored_vocab_size(self) -> int:
        """V: the number of rows of a table of the vocabulary."""

    @property
    def key_sources(self) -> tuple[Part, ...]:
        """The attention of first layers whose keys and values later layers use."""

    @property
    def rotations(self) -> tuple[rotary.Rotation, ...]:
        """The different rotary embeddings of the mixers."""

    @property
    def layer_kinds(self) -> tuple[Any, ...]:
        """The kinds (`config.LayerKind`) of the first layers, then those that later layers repeat."""


class Side(NamedTuple):
    """Arrays that belong to rows, and are the same for all layers.

    Attributes:
      segment_ids: [B, T] int32.
      turns: rotary tables, one for each of `Decoder.rotations`; () with learned positions.
      rows: [B] int32, global row ids, if inputs of adapters are dropped; otherwise None.
      padding: [B] int32, empty slots at a row's beginning, in generation; otherwise None.
      prefix: which positions attend in both directions; None: none.
      continues: [B] bool, whether a row continues the previous step's segment; None: no state is kept between steps.
      layer_inputs: [B, L, T, P], those of all L layers, in generation; otherwise None.
    """

    segment_ids: jax.Array
    turns: tuple[rotary.RotaryTables, ...]
    padding: jax.Array | None = None
    rows: jax.Array | None = None
    prefix: Prefix | None = None
    continues: jax.Array | None = None
    layer_inputs: jax.Array | None = None


class Earlier(NamedTuple):
    """The slots before the new ones of a call, in generation.

    Attributes:
      state: the part's state after them.
      start: the number of these slots, [] int32.
    """

    state: Any
    start: jax.Array


class Call(NamedTuple):
    """The arguments of a part in addition to its input.

    Attributes:
      side: arrays that belong to rows.
      before: the earlier slots, in generation; otherwise None.
      weights: [B, T], the weights of positions in the loss; None: no sums are computed.
      drops: whether experts drop tokens beyond their capacity.
      carried: the part's state at the end of the previous training step's rows; None: none.
      name: of the part in its layer.
      stream: [B, T, D], the residual stream before the norm.
      layer_input: [B, T, P]; None: none.
      shared: keys and values of earlier layers, by number among `Decoder.key_sources`.
    """

    side: Side
    before: Earlier | None = None
    weights: jax.Array | None = None
    drops: bool = False
    carried: Any = None
    name: str = ""
    stream: jax.Array | None = None
    layer_input: jax.Array | None = None
    shared: Mapping[int, Any] = MappingProxyType({})

    def real(self, length: int) -> jax.Array:
        """Returns whether each of `length` = T positions is a token and not padding, [B, T] bool."""
        if self.before is None:
            return self.side.segment_ids > 0
        assert self.side.padding is not None
        return self.before.start + jax.numpy.arange(length) >= self.side.padding[:, None]


class Result(NamedTuple):
    """The result of a part.

    Attributes:
      y: [B, T, D], which is added to the residual stream.
      state: after these positions, if the call had `before` or `carried`; () if there is none.
      sums: float32 sums over rows, as `Part.empty_sums`.
      shared: keys and values for later layers; () if there are none.
    """

    y: jax.Array
    state: Any = ()
    sums: Any = ()
    shared: Any = ()


class Work(NamedTuple):
    """Multiplications per token.

    Attributes:
      matrices: those with parameter matrices.
      others: all others, such as those of scores.
    """

    matrices: float
    others: float = 0


class Part:
    """Base class of mixers and feed-forwards; its defaults suit a causal part without state and sums.

    Attributes:
      name: name of its state and sums in a layer; a feed-forward without `norm` is called "feed_forward" there.
      norm: prefix of the name of the norm before it; None: "mixer" or "feed_forward".
      is_recurrent: whether the size of its state does not depend on the length of rows.
      keeps_state: whether it can continue from `Call.carried`.
      sees_prefix: whether it supports `Side.prefix`.
      matrices: names of those that low-rank adapters can change.
      without_adapters: names of its other matrices.
    """

    name: str = ""
    norm: str | None = None
    is_recurrent = False
    keeps_state = False
    sees_prefix = False
    matrices: tuple[str, ...] = ()
    without_adapters: tuple[str, ...] = ()

    def check(self, decoder: Decoder) -> None:
        """Raises UserError if fields of the decoder do not fit the part."""

    def adaptable_matrices(self) -> tuple[str, ...]:
        """Returns those of `matrices` that it has with its settings."""
        return self.matrices

    def with_same_parameters(self) -> Part:
        """Returns the part with settings that do not change its parameters set to their defaults."""
        return self

    def rotation(self, decoder: Decoder) -> rotary.Rotation | None:
        """Returns the part's rotary embedding; None if it has none."""
        del decoder
        return None

    def __call__(self, decoder: Decoder, x: jax.Array, call: Call) -> Result:
        """Runs the part on its input x [B, T, D], in the Haiku module of its layer."""
        raise NotImplementedError

    def work(self, decoder: Decoder, length: int) -> Work:
        """Returns the multiplications per token in the forward pass of rows of `length` positions."""
        raise NotImplementedError

    def empty_state(self, decoder: Decoder, rows: int, length: int) -> Any:
        """Returns the state before the first of at most `length` slots, leaves [rows, ...]; () if it has none."""
        del decoder, rows, length
        return ()

    def laid_out(self, state: Any) -> Any:
        """Constrains the sharding of a state."""
        return state

    def empty_sums(self) -> Any:
        """Returns zeros for the sums; () for a part without sums."""
        return ()

    def finish(self, found: LossOutput, sums: Any, *, num_layers: int, is_training: bool) -> LossOutput:
        """Adds losses and metrics of the part to the loss of the decoder.

        Args:
          found: the sums with the cross-entropy.
          sums: the part's sums over all layers.
          num_layers: number of layers with this part.
        """
        del sums, num_layers, is_training
        return found

    def shrink(self, multiples: Mapping[str, int]) -> Part:
        """Returns a small part; by default, the part itself.

        `multiples`, by logical axis, should divide its sizes.
        """
        del multiples
        return self

    def settings(self, decoder: Decoder) -> dict[str, Any]:
        """Returns the settings that change the part's results, by `name.field`."""
        del decoder
        return {f"{self.name}.{field.name}": getattr(self, field.name) for field in dataclasses.fields(self)}  # type: ignore[arg-type]

    def on_gpus(self, decoder: Decoder, length: int) -> str | None:
        """Returns in words how the part computes attention on GPUs; None if it has no attention."""
        del decoder, length
        return None


def adaptable(decoder: Decoder) -> tuple[str, ...]:
    """Returns the names of a decoder's matrices that low-rank adapters can change."""
    parts = [part for kind in decoder.layer_kinds for part in (*kind.mixers, kind.feed_forward) if part is not None]
    without = {name for part in parts for name in part.without_adapters}
    if not decoder.gated:
        without.add("gate")
    return tuple(dict.fromkeys(name for part in parts for name in part.adaptable_matrices() if name not in without))


@dataclasses.dataclass(frozen=True)
class Sum:
    """Several mixers in one layer, whose outputs are added.

    Attributes:
      parts: the mixers, at least two.
    """

    parts: tuple[Part, ...]

    def __post_init__(self):
        if len(self.parts) < 2 or not all(isinstance(part, Part) for part in self.parts):
            raise UserError(
                f"Sum.parts = {self.parts!r}: expected at least two mixers, such as (@layers.Attention(), @s5.S5())"
            )
