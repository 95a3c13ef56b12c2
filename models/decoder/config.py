"""The fields of the decoder: its sizes, and what differs between families of models."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Self, TypeGuard

from core import units
from core.errors import UserError, check_integer, check_number
from core.rematerialization import OnHost, Remat
from models import derivatives, quantized
from models.decoder import chunked_loss, rotary
from models.decoder.attention import attention
from models.decoder.attention.splash_tiles import Tiles
from models.decoder.layer_inputs import LayerInputs
from models.decoder.layers import Attention, Mlp
from models.decoder.parts import Decoder, Part, Sum
from models.decoder.planner_config import Planner
from models.lora import Lora

# Checkpoint names of the arrays that each choice saves for the backward pass of a layer, in addition to its input. The
# comments give, for the 7B model, the MiB saved per layer and row of 2048 tokens, including the input, and the
# fraction of the layer's matrix products that is recomputed.
_ATTENTION = ("norm", "query", "key", "value", attention.MIXED)
REMAT: Mapping[str, Remat] = {
    "none": "none",  # saves whatever derivatives need, with weights as stored
    "projections": (*_ATTENTION, "attended", "gate", "up"),  # 182 MiB, 0: every product and the kernel's output
    "attention_and_mlp": (*_ATTENTION, "gate", "up"),  # 166 MiB, 1/12: all but attention's output projection
    "attention_and_up": (*_ATTENTION, "attended", "up"),  # 139 MiB, 2/9: all but the gate
    "attention": _ATTENTION,  # 80 MiB, 1/2: the kernel's inputs and output
    "attention_on_host": OnHost(on_host=_ATTENTION[1:], on_device=("norm",)),  # as attention; 64 MiB on the host
    "attention_and_input_on_host": OnHost(("input", *_ATTENTION[1:]), ("norm",)),  # as attention; 80 MiB on the host
    "dots": "dots",  # as projections, but the attention kernel runs again
    "halves": ("norm", "attended"),  # 32 MiB, 7/10: the inputs of attention and of the feed-forward layer
    "input_on_host": OnHost(("input",), ("norm",)),  # as full; 16 MiB on the host
    "full": ("norm",),  # 16 MiB, 7/9: the reciprocal root mean squares of the norms
}
_CHOICES = {
    "remat": REMAT,
    "dtype": ("bfloat16", "float32"),
    "quantization": quantized.CHOICES,
    "attention": attention.CHOICES,
    "norm": ("rms", "rms_offset", "layer"),
    "post_norm": (False, True, "only"),
    "bias": ("none", "qkv", "all"),
    "activation": derivatives.ACTIVATIONS,
    "positions": ("rotary", "learned"),
    **dict.fromkeys(("tied", "gated", "layer_scale", "keeps_states"), (False, True)),
}
# Fields that do not change what the model computes.
_NOT_SETTINGS = {
    "remat",
    "dtype",
    "attention",
    "vocab_multiple",
    "lora",
    "loss_chunk",
    "keeps_states",
    "attention_tiles",
}
_COUNTS = ("vocab_size", "num_layers", "embed_dim", "mlp_dim", "num_heads", "num_kv_heads")
_OPTIONAL_COUNTS = ("head_dim", "max_positions")
_POSITIVE = ("norm_eps", "rope_theta", "logit_softcap", "logit_scale", "residual_scale")


class LayerKind(NamedTuple):
    """The static properties in which layers of a decoder can differ.

    Attributes:
      mixers: the mixers, whose outputs are added.
      feed_forward: the feed-forward; None: the layer has none.
      module: name of the Haiku module with its parameters.
      is_first: whether the layer is one of `DecoderConfig.first_feed_forward`.
    """

    mixers: tuple[Part, ...]
    feed_forward: Part | None
    module: str = "block"
    is_first: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig(Decoder):
    """The fields of `models.decoder.transformer.Transformer`, with Llama's defaults.

    Attributes:
      vocab_size: number of entries of the vocabulary.
      num_layers, embed_dim, mlp_dim, num_heads, num_kv_heads: sizes; num_heads is a multiple of num_kv_heads.
      head_dim: size of a head, even with rotary positions; None: embed_dim / num_heads.
      tied: whether the embedding is also the output matrix; its initial standard deviation is then 1 /
        sqrt(embed_dim), not 1.
      remat: what is saved for the backward pass: "none" (all it needs), "projections", "attention_and_mlp",
        "attention_and_up", "attention", "dots", "halves", "full" (least); or, in host memory, "attention_on_host",
        "attention_and_input_on_host", "input_on_host". See `REMAT`.
      quantization: "none", "int8" or "fp8": type of the products of attention and dense feed-forward layers
        (`models.quantized`). Of the TPUs, only tpu7x has FP8.
      dtype: compute dtype, "bfloat16" or "float32". Parameters are stored in float32, except with `lora`.
      attention: "auto", "plain", "splash", "cudnn" or "none" (`models.decoder.attention.attention.attend`).
      norm: "rms" (x / rms * scale), "rms_offset" (x / rms * (1 + scale)) or "layer" (LayerNorm with a bias).
      norm_eps: added to the mean square or variance.
      post_norm: what is normalized: False: inputs of mixers and feed-forwards; "only": their outputs; True: both.
      residual_scale: factor of the outputs of mixers and feed-forwards.
      layer_scale: whether a frozen number, initially 1, multiplies the stream after each layer.
      bias: "none"; "qkv": queries, keys and values have biases; "all": also the output and the feed-forward layer.
      gated: whether a feed-forward multiplies two projections of its input, one of them activated.
      activation: "silu", "gelu", or its approximations "gelu_tanh" and "gelu_sigmoid".
      positions: "rotary"; or "learned": a vector for each of `max_positions` positions is added to the embedding.
      max_positions: the largest number of positions in a row; None: no limit.
      rope_theta, rope_scaling: base of the rotary embedding, and its scaling to longer contexts
        (`models.decoder.rotary`).
      logit_softcap: logits x become softcap tanh(x / softcap); None: no bound.
      logit_scale: factor of logits, before the bound.
      scaled_embedding: factor of embeddings; True: sqrt(embed_dim); False: 1.
      mixer: the part (`parts.Part`) that mixes positions, or a `parts.Sum` of several; a tuple is repeated over the
        layers, such as (Attention(window=512), Attention()).
      feed_forward: a part, or None for layers without one; a tuple is repeated over the layers.
      first_feed_forward: the feed-forwards of the first layers, one per layer, instead of `feed_forward`.
      first_mixer: the mixers of these first layers, one per layer; (): those of `mixer`.
      layer_inputs: gives each layer a small input for each token; None: no inputs.
      planner: adds plans of finished chunks to the embedded tokens (`models.decoder.chunk_planner`); None: no plans.
      keeps_states: whether parts with a state, such as `s5.S5`, continue from the end of the previous step's rows,
        without their gradient (truncated backpropagation); for `tasks.chunked`. Rows whose first position is 0 start
        anew.
      lora: low-rank adapters, the only parameters that are then trained (`models.lora.adapted`); None: no adapters.
      loss_chunk: positions of each row whose logits a chip computes at a time for the loss; 0: all; None: as many as
        have about `chunk_bytes` of logits.
      attention_tiles: tiles of the splash kernel; None: the defaults. Block-sparse attention does not use them, and
        ring attention ignores their `fused_backward`.
      vocab_multiple: the multiple to which the stored vocabulary is rounded up.
    """

    vocab_size: int = 32000
    num_layers: int
    embed_dim: int
    mlp_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int | None = None
    tied: bool = False
    remat: str = "none"
    quantization: str = "none"
    dtype: str = "bfloat16"
    attention: str = "auto"
    norm: str = "rms"
    norm_eps: float = 1e-5
    post_norm: bool | str = False
    residual_scale: float = 1.0
    layer_scale: bool = False
    bias: str = "none"
    gated: bool = True
    activation: str = "silu"
    positions: str = "rotary"
    max_positions: int | None = None
    rope_theta: float = 10000.0
    rope_scaling: rotary.Scaling | None = None
    logit_softcap: float | None = None
    logit_scale: float = 1.0
    scaled_embedding: bool | float = False
    mixer: Part | Sum | tuple[Part | Sum, ...] = dataclasses.field(default_factory=Attention)
    feed_forward: Part | tuple[Part | None, ...] | None = dataclasses.field(default_factory=Mlp)
    first_feed_forward: tuple[Part | None, ...] = ()
    first_mixer: tuple[Part | Sum, ...] = ()
    layer_inputs: LayerInputs | None = None
    planner: Planner | None = None
    keeps_states: bool = False
    lora: Lora | None = None
    loss_chunk: int | None = None
    attention_tiles: Tiles | None = None
    vocab_multiple: int = 128

    def __post_init__(self):
        for field in (*_COUNTS, *_OPTIONAL_COUNTS, "vocab_multiple"):
            if (value := getattr(self, field)) is not None or field not in _OPTIONAL_COUNTS:
                check_integer(value, where=f"Transformer.{field}", least=1)
        is_count = isinstance(self.loss_chunk, int) and not isinstance(self.loss_chunk, bool) and self.loss_chunk >= 0
        if self.loss_chunk is not None and not is_count:
            raise UserError(f"Transformer.loss_chunk = {self.loss_chunk!r}: expected None, 0 or a number of positions")
        for field in _POSITIVE:
            if (value := getattr(self, field)) is not None:
                check_number(value, where=f"Transformer.{field}", is_positive=True)
        for field, choices in _CHOICES.items():
            if getattr(self, field) not in choices:
                raise UserError(
                    f"Transformer.{field} = {getattr(self, field)!r}: expected one of {', '.join(map(str, choices))}"
                )
        if not isinstance(self.scaled_embedding, bool):
            check_number(self.scaled_embedding, where="Transformer.scaled_embedding", is_positive=True)
        quantized.check(self.quantization)
        if self.num_heads % self.num_kv_heads:
            raise UserError(
                f"Transformer: num_heads = {self.num_heads} is not a multiple of num_kv_heads = {self.num_kv_heads}"
            )
        if self.head_dim is None and self.embed_dim % self.num_heads:
            raise UserError(
                f"Transformer: embed_dim = {self.embed_dim} does not divide over num_heads = {self.num_heads}; "
                "set head_dim, or choose sizes that divide"
            )
        if self.positions == "rotary" and self.head_width % 2:
            raise UserError(f"Transformer: head_dim = {self.head_width} is odd; rotary embeddings need an even size")
        if self.planner is not None and self.head_width % 2:
            raise UserError(
                f"Transformer.planner has rotary embeddings, also where positions = {self.positions!r}, and head_dim = "
                f"{self.head_width} is odd; expected an even head_dim, or planner = None"
            )
        if self.positions == "learned" and self.max_positions is None:
            raise UserError("Transformer: learned positions need max_positions, the number of vectors to learn")
        if self.layer_inputs is not None and self.planner is not None:
            raise UserError("Transformer.layer_inputs and planner are not supported together: set one of them to None")
        self._check_parts()
        self._check_shared_keys()

    def _check_parts(self) -> None:
        for field, value, kinds, expected in (
            ("mixer", self.mixer, (Part, Sum), "a mixer such as @s5.S5()"),
            ("feed_forward", self.feed_forward, (Part, type(None)), "a part such as @experts.Experts(), or None"),
        ):
            wrong = [one for one in _tuple(value) if not isinstance(one, kinds)]
            if wrong or value == ():
                raise UserError(
                    f"Transformer.{field} = {value!r}: expected {expected}, or a tuple of these that is repeated over "
                    "the layers"
                )
        if not isinstance(firsts := self.first_feed_forward, tuple) or not all(
            isinstance(one, Part | None) for one in firsts
        ):
            raise UserError(
                f"Transformer.first_feed_forward = {firsts!r}: expected a tuple of parts, such as (@layers.Mlp(), "
                "@layers.Mlp())"
            )
        given = self.first_mixer
        if not (isinstance(given, tuple) and all(isinstance(one, Part | Sum) for one in given)) or (
            given and len(given) != len(firsts)
        ):
            raise UserError(
                f"Transformer.first_mixer = {given!r}: expected a tuple of {len(firsts)} mixers, one for each entry of "
                "first_feed_forward, or ()"
            )
        if firsts and len(firsts) >= self.num_layers:
            raise UserError(
                f"Transformer.first_feed_forward has {len(firsts)} entries, and num_layers = {self.num_layers}: "
                "expected fewer, because other layers follow"
            )
        for kind in self.layer_kinds:
            names = [part.name for part in kind.mixers]
            names += [name for slot, _, parts in slots(kind) if slot == "feed_forward" for name in parts]
            if doubled := [name for name in names if names.count(name) > 1]:
                raise UserError(
                    f"Transformer: a layer has two parts called {doubled[0]!r}: make one of them a "
                    "subclass with another `name`"
                )
            own = {name: (*part.matrices, *part.without_adapters) for name, part in parts_of(kind).items()}
            every = [matrix for matrices in own.values() for matrix in matrices]
            if shared := [matrix for matrix in every if every.count(matrix) > 1]:
                owners = " and ".join(name for name, matrices in own.items() if shared[0] in matrices)
                raise UserError(
                    f"Transformer: {owners} of one layer would share their matrices, such as {shared[0]!r}: use parts "
                    "whose parameters have other names, such as s5.S5 or TTTMixer"
                )
            for part in parts_of(kind).values():
                _check_class(type(part))
        if (rest := self.num_layers - len(firsts)) % (group := self.group):
            after = f" after {units.counted(len(firsts), 'first layer')}" * bool(firsts)
            nearest = [len(firsts) + n for n in (max(rest // group, 1) * group, (rest // group + 1) * group)]
            raise UserError(
                f"Transformer: num_layers = {self.num_layers} is not a multiple of {group}{after}, the number of "
                f"layers after which mixer and feed_forward repeat; nearest: {nearest[0]}, {nearest[1]}"
            )

    def _check_shared_keys(self) -> None:
        firsts, others = (
            {part for kind in kinds for part in kind.mixers} for kinds in (self.first_kinds, self.repeated_kinds)
        )
        if wrong := [part for part in firsts if _shares(part)]:
            raise UserError(
                f"Transformer.first_mixer has {wrong[0]}: first layers have keys of their own; set shares_keys = False"
            )
        for source in self.key_sources:
            if source not in firsts:
                raise UserError(
                    "Transformer.mixer has attention with shares_keys = True, and no layer of first_mixer has the same "
                    f"attention with keys of its own: add {source}"
                )
            if source in others:
                raise UserError(
                    "Transformer.mixer has layers with keys of their own among layers that share the keys of the same "
                    f"attention in first_mixer, {source}: let all share, or none"
                )

    def settings(self) -> dict[str, Any]:
        """Returns the settings on which the model's results depend, by name."""
        found = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in _NOT_SETTINGS}
        found["head_dim"] = self.head_width
        if (planner := found.pop("planner")) is not None:
            found |= {f"planner.{name}": value for name, value in dataclasses.asdict(planner).items()}
        layers = [self.layer_kind(layer) for layer in range(self.num_layers)]
        found["mixer"] = tuple("+".join(part.name for part in kind.mixers) for kind in layers)
        del found["first_feed_forward"], found["first_mixer"]
        del found["mlp_dim"]  # parts say their width
        found["feed_forward"] = tuple("none" if (part := kind.feed_forward) is None else part.name for kind in layers)
        several: dict[str, list[Any]] = {}  # the value in each layer that has it
        for kind in layers:
            for part in parts_of(kind).values():
                for name, value in part.settings(self).items():
                    several.setdefault(name, []).append(value)
        found |= {
            name: values[0] if all(v == values[0] for v in values) else tuple(values)
            for name, values in several.items()
        }
        return found if self.lora is None else {**found, "lora.alpha": self.lora.alpha}

    @property
    def head_width(self) -> int:
        return self.head_dim or self.embed_dim // self.num_heads

    @property
    def stored_vocab_size(self) -> int:
        return math.ceil(self.vocab_size / self.vocab_multiple) * self.vocab_multiple

    @property
    def chunk_bytes(self) -> int:
        """About the most bytes of logits that a chip computes at a time if `loss_chunk` is None."""
        return chunked_loss.CHUNK_BYTES

    @property
    def _mixers(self) -> tuple[tuple[Part, ...], ...]:
        return _each_alone(_tuple(self.mixer))

    @property
    def _repeated(self) -> list[tuple[tuple[Part, ...], Part | None]]:
        mixers, others = self._mixers, _tuple(self.feed_forward)
        return [(mixers[i % len(mixers)], others[i % len(others)]) for i in range(math.lcm(len(mixers), len(others)))]

    @property
    def group(self) -> int:
        """The number of layers after which the structure of parameters repeats, not counting the first layers."""
        return _period_of_parameters(self._repeated)

    @property
    def first_group(self) -> int:
        """The number of first layers after which the structure of their parameters repeats; 1 if there are none."""
        return _period_of_parameters(self._firsts) if self._firsts else 1

    @property
    def num_first_layers(self) -> int:
        return len(self.first_feed_forward)

    @property
    def _firsts(self) -> list[tuple[tuple[Part, ...], Part | None]]:
        mixers = _each_alone(self.first_mixer) or self._mixers
        return [(mixers[i % len(mixers)], part) for i, part in enumerate(self.first_feed_forward)]

    @property
    def first_kinds(self) -> tuple[LayerKind, ...]:
        """The kinds of the first layers, one per layer."""
        modules = _modules(self.first_group)
        return tuple(LayerKind(*one, modules[i % len(modules)], True) for i, one in enumerate(self._firsts))

    @property
    def repeated_kinds(self) -> tuple[LayerKind, ...]:
        """The pattern of kinds that the layers after the first ones repeat."""
        both, modules, start = self._repeated, _modules(self.group), len(self.first_feed_forward)
        count = period(both)
        return tuple(LayerKind(*both[(start + i) % count], modules[i % len(modules)]) for i in range(count))

    @property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        return (*self.first_kinds, *self.repeated_kinds)

    @property
    def key_sources(self) -> tuple[Attention, ...]:
        return tuple(dict.fromkeys(part.source for mixers, _ in self._repeated for part in mixers if _shares(part)))

    @property
    def rotations(self) -> tuple[rotary.Rotation, ...]:
        layers = [*self._firsts, *self._repeated] if self.first_mixer else [*self._repeated, *self._firsts]
        found = [part.rotation(self) for mixers, last in layers for part in (*mixers, last) if part is not None]
        others = {one: (one.theta, one.scaling) != (self.rope_theta, self.rope_scaling) for one in found if one}
        return tuple(sorted(others, key=lambda one: others[one]))

    @property
    def max_cached_positions(self) -> int | None:
        """The original length of LongRoPE, because all keys of a longer row have other factors; None: no such limit."""
        return self.rope_scaling.original_length if isinstance(self.rope_scaling, rotary.LongRope) else None

    def for_longer_rows(self) -> Self:
        """Returns the decoder with the long factors of LongRoPE for rows of every length."""
        assert isinstance(self.rope_scaling, rotary.LongRope)
        scaling = dataclasses.replace(self.rope_scaling, short=self.rope_scaling.long)
        return dataclasses.replace(self, rope_scaling=scaling)

    def layer_kind(self, layer: int) -> LayerKind:
        """Returns the kind of a layer by its number, from 0."""
        first, kinds = self.first_kinds, self.repeated_kinds
        return first[layer] if layer < len(first) else kinds[(layer - len(first)) % len(kinds)]

    def attention_on_gpus(self, length: int) -> str:
        """Returns in words how attention over `length` positions is computed on GPUs."""
        mixers = dict.fromkeys(part for kind in self.layer_kinds for part in kind.mixers)
        found = {part.name: how for part in mixers if (how := part.on_gpus(self, length)) is not None}
        if len(found) < 2:
            return next(iter(found.values()), "none: no mixer of this decoder is attention")
        return "; ".join(f"{name}: {how}" for name, how in found.items())

    def shrink(self, multiples: Mapping[str, int]) -> Self:
        """Returns a small decoder of this kind; most sizes are multiples of `multiples`, by logical axis."""
        kv_heads, is_equal = multiples["kv_heads"], self.num_heads == self.num_kv_heads
        heads = math.lcm(multiples["heads"], kv_heads * (1 if is_equal else 2))
        groups = math.lcm(2 if self.group == 1 else 1, multiples["layers"])
        layers, count = self.group * groups, period(self._firsts) if self.first_mixer else self.first_group
        firsts, width = self.first_feed_forward[:count], math.lcm(16, multiples["mlp"])

        def small(part: Part) -> Part:
            return part.small(self, width) if isinstance(part, Mlp) else part.shrink(multiples)

        found = dataclasses.replace(
            self,
            num_layers=len(firsts) + layers * math.ceil(len(self.repeated_kinds) / layers),
            embed_dim=math.lcm(16, multiples["embed"]),
            mlp_dim=width,
            num_heads=heads,
            num_kv_heads=heads if is_equal else kv_heads,
            head_dim=math.lcm(8, multiples["head_dim"]),
            mixer=_each(self.mixer, small),
            feed_forward=_each(self.feed_forward, small),
            first_feed_forward=_each(firsts, small),
            first_mixer=_each(self.first_mixer[:count], small),
            layer_inputs=self.layer_inputs and dataclasses.replace(self.layer_inputs, width=8),
            planner=self.planner and dataclasses.replace(self.planner, chunk=8),
        )
        return dataclasses.replace(found, rope_scaling=_shrunk(self.rope_scaling, found))


def _shrunk(scaling: rotary.Scaling | None, decoder: DecoderConfig) -> rotary.Scaling | None:
    """Returns a scaling of rotary frequencies with factors for the smaller heads of a decoder."""
    if not isinstance(scaling, rotary.LongRope):
        return scaling
    widths = [one.width or decoder.head_width for one in decoder.rotations if one.scaling == scaling]
    width = max(widths, default=2 * len(scaling.short))  # all factors if no part uses them
    return dataclasses.replace(scaling, short=scaling.short[: width // 2], long=scaling.long[: width // 2])


def slots(kind: LayerKind) -> list[tuple[str, str, dict[str, Part]]]:
    """Returns the slots of a layer (mixers, feed-forward): name, prefix of the names of its norms, parts by name."""
    mixers = {part.name: part for part in kind.mixers}
    norm = next((part.norm for part in kind.mixers if part.norm is not None), "mixer")
    if (last := kind.feed_forward) is None:
        return [("mixer", norm, mixers)]
    name = "feed_forward" if last.norm is None else last.name
    return [("mixer", norm, mixers), ("feed_forward", last.norm or "feed_forward", {name: last})]


def parts_of(kind: LayerKind) -> dict[str, Part]:
    """Returns the parts of a layer by name."""
    return {name: part for _, _, parts in slots(kind) for name, part in parts.items()}


def _check_class(kind: type[Part]) -> None:
    if not (dataclasses.is_dataclass(kind) and kind.__hash__ is not None):
        raise UserError(f"{kind.__qualname__}: a part is a frozen dataclass: add @dataclasses.dataclass(frozen=True)")
    if kind.name == "":
        raise UserError(f"{kind.__qualname__}: a part has a name, for its state and sums: add `name = 'my_part'`")


def period(values: list[Any]) -> int:
    """Returns the length of the shortest pattern whose whole repetitions give `values`, which is not empty."""
    count = len(values)
    return next(p for p in range(1, count + 1) if count % p == 0 and values == values[:p] * (count // p))


def _period_of_parameters(layers: list[tuple[tuple[Part, ...], Part | None]]) -> int:
    return period([tuple(part and part.with_same_parameters() for part in (*mixers, last)) for mixers, last in layers])


def _each_alone(mixers: tuple[Part | Sum, ...]) -> tuple[tuple[Part, ...], ...]:
    return tuple(one.parts if isinstance(one, Sum) else (one,) for one in mixers)


def _shares(part: Part) -> TypeGuard[Attention]:
    return isinstance(part, Attention) and part.shares_keys


def _modules(group: int) -> list[str]:
    return ["block"] if group == 1 else [f"block_{i}" for i in range(group)]


def _tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def _each(value: Any, change: Callable[[Part], Part]) -> Any:
    if isinstance(value, tuple):
        return tuple(_each(one, change) for one in value)
    if isinstance(value, Sum):
        return Sum(tuple(map(change, value.parts)))
    return None if value is None else change(value)
