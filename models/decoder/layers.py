"""The parts that most decoders use: attention and feed-forward layers, and the norms before them.

B batch, T length, D embed, H query heads, N key/value heads, K head_dim, F mlp.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Self

import haiku as hk
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from core import logical
from core.errors import UserError, check_integer, check_number
from models import derivatives, quantized
from models.decoder import rotary
from models.decoder.attention import attention, cudnn_attention, kv_cache
from models.decoder.attention.kv_cache import KeysAndValues
from models.decoder.attention.scores import Scores
from models.decoder.attention.splash_tiles import Tiles
from models.decoder.parts import Call, Decoder, Part, Result, Side, Work

# Logical axes of each matrix's inputs and outputs.
_Axes = tuple[tuple[str | None, ...], tuple[str | None, ...]]
_AXES: dict[str, _Axes] = {
    "query": (("embed",), ("heads", "head_dim")),
    "key": (("embed",), ("kv_heads", "head_dim")),
    "value": (("embed",), ("kv_heads", "head_dim")),
    "output": (("heads", "head_dim"), ("embed",)),
    "gate": (("embed",), ("mlp",)),
    "up": (("embed",), ("mlp",)),
    "down": (("mlp",), ("embed",)),
}


class Matrices:
    """Makes and applies the matrices of a part, with the biases, adapters and quantization of a decoder."""

    def __init__(self, decoder: Decoder):
        self.decoder = decoder

    def weight(
        self,
        name: str,
        shape: tuple[int, ...],
        axes: tuple[str | None, ...],
        *,
        fan_in: int,
        in_dims: int = 1,
        stacked: int = 0,
        exchanged: bool = False,
    ) -> jax.Array:
        """Returns a matrix in the compute dtype.

        Args:
          name, shape, axes, in_dims, stacked, exchanged: as in `core.logical.param`.
          fan_in: initial values have about the standard deviation fan_in ** -0.5.
        """
        init = hk.initializers.TruncatedNormal(fan_in**-0.5)
        how: dict[str, Any] = {"in_dims": in_dims, "stacked": stacked, "compute_dtype": self.decoder.dtype}
        how["exchanged"] = exchanged
        if self.decoder.quantization != "none" and not stacked:  # it is laid out for computation after it is rounded
            return logical.param(name, shape, axes, init, **how, as_stored=True).astype(self.decoder.dtype)
        return logical.param(name, shape, axes, init, **how)

    def biased(self, name: str, x: jax.Array, axes: tuple[str, ...], *, among: tuple[str, ...]) -> jax.Array:
        """Returns x plus the bias of a matrix, if the decoder has one.

        Args:
          axes: logical axes of the bias, the last ones of x.
          among: values of the decoder's `bias` with which it exists.
        """
        if self.decoder.bias not in among:
            return x
        shape = x.shape[-len(axes) :]
        return x + logical.param(f"{name}_bias", shape, axes, jnp.zeros, kind="bias", compute_dtype=self.decoder.dtype)

    def product(
        self, name: str, subscripts: str, x: jax.Array, weight: jax.Array, side: Side, axes: _Axes | None = None
    ) -> jax.Array:
        """Multiplies activations and a matrix, and adds the output of its adapter if there is one.

        Args:
          subscripts: of an einsum of x and the matrix.
          axes: logical axes of inputs and outputs; None: from `_AXES`, by name.
        """
        inward, outward = axes or _AXES[name.removeprefix("shared_")]
        if self.decoder.quantization == "none":
            product = jnp.einsum(subscripts, x, weight)
        else:
            product = quantized.product(self.decoder.quantization, subscripts, (*inward, *outward), x, weight)
        if self.decoder.lora is None:
            return product
        return self.decoder.lora.added(name, product, x, (inward, outward), rows=side.rows)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Heads(Part):
    """Base class of attention with the decoder's heads; a subclass mixes the values.

    Attributes:
      qk_norm: whether queries and keys are normalized before the rotation; True: each head; "all_heads": all together.
      scale: factor above 0 of scores; None: 1 / sqrt(head_dim).
      softcap: scores x become softcap tanh(x / softcap); None: no bound.
      output_gate: whether the sigmoid of a further projection, in the query matrix, multiplies the heads' outputs.
      head_dim, num_kv_heads: size of a head, and number of key/value heads; None: the decoder's.
      values_are_keys: whether values are the keys before their norm and rotation.
      value_norm: whether the values of each head are divided by their root mean square.
    """

    qk_norm: bool | str = False
    scale: float | None = None
    softcap: float | None = None
    output_gate: bool = False
    head_dim: int | None = None
    num_kv_heads: int | None = None
    values_are_keys: bool = False
    value_norm: bool = False

    def __post_init__(self):
        if not (isinstance(self.qk_norm, bool) or self.qk_norm == "all_heads"):
            raise UserError(f"{type(self).__name__}.qk_norm = {self.qk_norm!r}: expected True, False or 'all_heads'")
        for field in ("scale", "softcap"):
            if (value := getattr(self, field)) is not None:
                check_number(value, where=f"{type(self).__name__}.{field}", is_positive=True)
        for field in ("head_dim", "num_kv_heads"):
            if (value := getattr(self, field)) is not None:
                check_integer(value, where=f"{type(self).__name__}.{field}", least=1)

    matrices = ("query", "key", "value", "output")
    sinks = False  # whether there are sinks
    shares_keys = False  # whether keys and values are those of an earlier layer

    def adaptable_matrices(self) -> tuple[str, ...]:
        without = ("key", "value") if self.shares_keys else ("value",) if self.values_are_keys else ()
        return tuple(name for name in self.matrices if name not in without)

    def with_same_parameters(self) -> Self:
        return dataclasses.replace(self, scale=None, softcap=None, value_norm=False)

    def check(self, decoder: Decoder) -> None:
        name = type(self).__name__
        for field in ("output_gate", "values_are_keys"):
            if getattr(self, field) and decoder.bias != "none":
                raise UserError(f"{name}.{field} = True needs Transformer.bias = 'none', and it is {decoder.bias!r}")
        if decoder.num_heads % self.kv_heads(decoder):
            raise UserError(
                f"{name}.num_kv_heads = {self.num_kv_heads}: Transformer.num_heads = {decoder.num_heads} is not a "
                "multiple of it"
            )
        is_odd = self.head_dim is not None and self.head_dim % 2
        if is_odd and decoder.positions == "rotary" and self.rotation(decoder) is not None:
            raise UserError(f"{name}.head_dim = {self.head_dim} is odd; rotary embeddings need an even size")

    def width(self, decoder: Decoder) -> int:
        """Returns K, the size of a head."""
        return self.head_dim or decoder.head_width

    def kv_heads(self, decoder: Decoder) -> int:
        """Returns N, the number of key/value heads."""
        return self.num_kv_heads or decoder.num_kv_heads

    def score_scale(self, decoder: Decoder) -> float:
        """Returns the factor that multiplies scores."""
        return self.width(decoder) ** -0.5 if self.scale is None else self.scale

    def rotation(self, decoder: Decoder) -> rotary.Rotation | None:
        length = self.score_scale(decoder) ** 0.5  # for queries and keys each
        width = self.width(decoder)
        own = None if width == decoder.head_width else width
        return rotary.Rotation(decoder.rope_theta, decoder.rope_scaling, length, own)

    def scores(self, decoder: Decoder, call: Call, *, window: int | None = None) -> Scores:
        """Returns the scale, bound and window of scores; the scale is 1 if rotary tables apply it."""
        rotation = self.rotation(decoder) if call.side.turns else None
        tables_scale = rotation is not None and rotation.width in (None, self.width(decoder))
        return Scores(1.0 if tables_scale else self.score_scale(decoder), self.softcap, window)

    def settings(self, decoder: Decoder) -> dict[str, Any]:
        own: dict[str, Any] = {"scale": self.score_scale(decoder)}
        if self.width(decoder) == decoder.head_width:
            own["head_dim"] = None  # however it is written
        if self.kv_heads(decoder) == decoder.num_kv_heads:
            own["num_kv_heads"] = None
        return super().settings(decoder) | {f"{self.name}.{field}": value for field, value in own.items()}

    def __call__(self, decoder: Decoder, x: jax.Array, call: Call) -> Result:
        c, side, of = decoder, call.side, Matrices(decoder)
        d, h, n, k = c.embed_dim, c.num_heads, self.kv_heads(c), self.width(c)
        wq = of.weight("query", (d, h, k * (1 + self.output_gate)), ("embed", "heads", "head_dim"), fan_in=d)
        wk, wv = (
            of.weight(name, (d, n, k), ("embed", "kv_heads", "head_dim"), fan_in=d) if has else None
            for name, has in (("key", not self.shares_keys), ("value", not (self.shares_keys or self.values_are_keys)))
        )
        fan_in = 2 * c.num_layers * h * k
        wo = of.weight("output", (h, k, d), ("heads", "head_dim", "embed"), fan_in=fan_in, in_dims=2)
        q = of.product("query", "btd,dhk->bthk", x, wq, side)
        q, gate = (q[..., :k], q[..., k:]) if self.output_gate else (q, None)
        q = self._heads(of, "query", q, call, "heads")
        if wk is None:
            q, (key, value) = checkpoint_name(q, "query"), call.shared[c.key_sources.index(self.source)]
        else:
            key, value = self._keys_and_values(of, x, wk, wv, call)
            q, key, value = map(checkpoint_name, (q, key, value), ("query", "key", "value"))
        mixed, after, _, shared = self._mixed(c, q, key, value, call)
        if gate is not None:
            mixed *= jax.nn.sigmoid(checkpoint_name(gate, "gate").astype(jnp.float32)).astype(mixed.dtype)
        mixed = logical.constrain(mixed, "batch", "length", "heads", "head_dim")
        out = of.product("output", "bthk,hkd->btd", mixed, wo, side)
        out = of.biased("output", out, ("norm",), among=("all",))
        return Result(out, after, shared=shared if self in c.key_sources else ())

    @property
    def source(self) -> Self:
        """The attention whose keys and values it uses; itself if it has its own."""
        return self

    def _keys_and_values(
        self, of: Matrices, x: jax.Array, wk: jax.Array, wv: jax.Array | None, call: Call
    ) -> tuple[jax.Array, jax.Array]:
        """Returns keys and values [B, T, N, K]; without `wv`, values are the projected keys."""
        projected = of.product("key", "btd,dnk->btnk", x, wk, call.side)
        key = self._heads(of, "key", projected, call, "kv_heads")
        value = projected if wv is None else of.product("value", "btd,dnk->btnk", x, wv, call.side)
        value = of.biased("value", value, ("kv_heads", "head_dim"), among=("qkv", "all"))
        if self.value_norm:
            value = derivatives.rms_norm(value, jnp.ones(value.shape[-1]), of.decoder.norm_eps)
        return key, logical.constrain(value, "batch", "length", "kv_heads", "head_dim")

    def _mixed(self, c: Decoder, q: jax.Array, key: jax.Array, value: jax.Array, call: Call) -> Result:
        """Returns the mixed values [B, T, H, K], the new KV cache or (), and the keys and values to share."""
        raise NotImplementedError

    def _heads(self, of: Matrices, name: str, x: jax.Array, call: Call, heads: str) -> jax.Array:
        """Adds the bias to heads x [B, T, `heads`, K] of the matrix `name`, normalizes and rotates them."""
        x = of.biased(name, x, (heads, "head_dim"), among=("qkv", "all"))
        if self.qk_norm:
            together = x.reshape(*x.shape[:2], -1) if self.qk_norm == "all_heads" else x
            x = normalized(of.decoder, f"{name}_norm", together).reshape(x.shape)
        x = logical.constrain(x, "batch", "length", heads, "head_dim")
        rotation = self.rotation(of.decoder)
        if rotation is None or not call.side.turns:
            return x
        turned = rotary.apply(x, call.side.turns[of.decoder.rotations.index(rotation)])
        return logical.constrain(turned, "batch", "length", heads, "head_dim")

    def work(self, decoder: Decoder, length: int) -> Work:
        """Returns the work per token; causal scores and mixing together take T H K multiplications."""
        c = decoder
        inner, projected = c.num_heads * self.width(c), 0 if self.shares_keys else 2 - self.values_are_keys
        kv = projected * self.kv_heads(c) * self.width(c)
        return Work(c.embed_dim * ((2 + self.output_gate) * inner + kv), length * inner)

    def empty_state(self, decoder: Decoder, rows: int, length: int) -> KeysAndValues:
        """Returns a KV cache of `length` empty slots: keys and values, [rows, N, length, K] each."""
        c = decoder
        return KeysAndValues(*(jnp.zeros((rows, self.kv_heads(c), length, self.width(c)), c.dtype) for _ in range(2)))

    def laid_out(self, state: KeysAndValues) -> KeysAndValues:
        return KeysAndValues(*(logical.constrain(a, "batch", "kv_heads", None, "head_dim") for a in state))

    def on_gpus(self, decoder: Decoder, length: int) -> str | None:
        c = decoder
        if c.attention == "splash":
            return "the splash kernel, which GPUs cannot run: set attention = 'auto'"
        if c.attention == "plain":
            return "plain products"
        if c.attention == "none":
            return "none: attention = 'none' mixes no positions"
        needs: dict[str, Any] = {"softcap": self.softcap, "has_sinks": self.sinks}
        problem = cudnn_attention.problem(length, self.width(c), c.dtype, **needs)
        return f"plain products: {problem}" if problem else "flash attention of cuDNN"

    def shrink(self, multiples: Mapping[str, int]) -> Self:
        heads = self.num_kv_heads and multiples["kv_heads"]
        return dataclasses.replace(
            self, num_kv_heads=heads, head_dim=self.head_dim and 2 * math.lcm(8, multiples["head_dim"])
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Attention(Heads):
    """Causal attention within segments.

    Attributes:
      window: number of positions that a query attends to, its own being the last; None: all up to its own.
      rope_theta: base of the part's own rotary embedding, without scaling; None: the decoder's base and scaling.
      rotary_fraction: fraction of a head's dimensions, from the first, that is rotated, from 0 to 1.
      sinks: whether heads learn a score that takes a share of the softmax without a value (Xiao et al. 2023).
      shares_keys: whether keys and values are those of the last layer of `Transformer.first_mixer` with the same
        attention.
    """

    window: int | None = None
    rope_theta: float | None = None
    rotary_fraction: float = 1.0
    sinks: bool = False
    shares_keys: bool = False

    def __post_init__(self):
        super().__post_init__()
        check_number(self.rotary_fraction, where="Attention.rotary_fraction", least=0, most=1)
        if self.window is not None:
            check_integer(self.window, where="Attention.window", least=1)
        if self.rope_theta is not None:
            check_number(self.rope_theta, where="Attention.rope_theta", is_positive=True)

    name = "attention"
    norm = "attention"
    sees_prefix = True

    def with_same_parameters(self) -> Self:
        return dataclasses.replace(super().with_same_parameters(), window=None, rope_theta=None, rotary_fraction=1.0)

    def shrink(self, multiples: Mapping[str, int]) -> Self:
        found = super().shrink(multiples)
        rotated = int((found.head_dim or math.lcm(8, multiples["head_dim"])) * self.rotary_fraction)
        is_odd = 0 < self.rotary_fraction < 1 and (rotated % 2 or not rotated)
        return dataclasses.replace(found, rotary_fraction=0.5) if is_odd else found

    @property
    def source(self) -> Self:
        return dataclasses.replace(self, shares_keys=False)

    def check(self, decoder: Decoder) -> None:
        super().check(decoder)
        if self.shares_keys and decoder.attention == "none":
            raise UserError(
                "Attention.shares_keys = True: Transformer.attention = 'none' needs own values in each layer"
            )
        width = int(self.width(decoder) * self.rotary_fraction)
        if 0 < self.rotary_fraction < 1 and (width % 2 or not width):
            raise UserError(
                f"Attention.rotary_fraction = {self.rotary_fraction}: rotates {width} of {self.width(decoder)} "
                "dimensions of a head; expected an even number of at least 2"
            )

    def rotation(self, decoder: Decoder) -> rotary.Rotation | None:
        found = super().rotation(decoder)
        if self.rotary_fraction == 0 or found is None:
            return None
        if self.rope_theta is not None:
            found = dataclasses.replace(found, theta=self.rope_theta, scaling=None)
        if self.rotary_fraction < 1:  # dimensions that are not rotated are not scaled either
            width = int(self.width(decoder) * self.rotary_fraction)
            found = dataclasses.replace(found, length=1.0, width=width)
        return found

    def _mixed(self, c: Decoder, q: jax.Array, key: jax.Array, value: jax.Array, call: Call) -> Result:
        side, how = call.side, self.scores(c, call, window=self.window)
        sinks = logical.param("sinks", (c.num_heads,), ("heads",), jnp.zeros) if self.sinks else None
        if call.before is not None:
            assert side.padding is not None
            if c.attention == "none":
                return Result(*attention.cached(q, key, value, *call.before, side.padding, how, choice=c.attention))
            seen, after = KeysAndValues(key, value), None
            if not self.shares_keys:
                seen, after = kv_cache.extended(key, value, *call.before, window=self.window)
            mixed = attention.of_cache(q, seen, call.before.start, side.padding, how, sinks=sinks)
            return Result(mixed, () if after is None else after, shared=seen)
        mixed = attention.attend(
            q,
            key,
            value,
            side.segment_ids,
            how,
            choice=c.attention,
            arranged=True,
            prefix=side.prefix,
            sinks=sinks,
            tiles=c.attention_tiles or Tiles(),
        )
        return Result(mixed, shared=KeysAndValues(key, value))

    def empty_shared(
        self, decoder: Decoder, rows: int, length: int, before: KeysAndValues | None = None
    ) -> KeysAndValues:
        """Returns placeholders for the keys and values that the part gives to later layers.

        Args:
          rows, length: B and T.
          before: the part's KV cache, in generation; otherwise None.
        """
        if before is not None:
            return kv_cache.unseen(before, length, window=self.window)
        new = jnp.zeros((rows, length, self.kv_heads(decoder), self.width(decoder)), decoder.dtype)
        new = logical.constrain(new, "batch", "length", "kv_heads", "head_dim")
        return KeysAndValues(new, new)

    def work(self, decoder: Decoder, length: int) -> Work:
        inner = decoder.num_heads * self.width(decoder)
        span = min(length, 2 * (self.window or length))  # twice the mean number of attended positions
        return super().work(decoder, length)._replace(others=span * inner)

    def empty_state(self, decoder: Decoder, rows: int, length: int) -> Any:
        """Returns an empty KV cache for `length` slots, or for the window if that is less; () if keys are shared."""
        if self.shares_keys:
            return ()
        return super().empty_state(decoder, rows, min(length, self.window or length))

    def settings(self, decoder: Decoder) -> dict[str, Any]:
        usual = dataclasses.replace(self, rope_theta=None)
        own = None if self.rotation(decoder) == usual.rotation(decoder) else self.rope_theta
        return super().settings(decoder) | {f"{self.name}.rope_theta": own}


@dataclasses.dataclass(frozen=True)
class Mlp(Part):
    """A feed-forward layer, gated or not, with the decoder's activation.

    Attributes:
      mlp_dim: number of hidden units; None: the decoder's.
    """

    mlp_dim: int | None = None

    def __post_init__(self):
        if self.mlp_dim is not None:
            check_integer(self.mlp_dim, where="Mlp.mlp_dim", least=1)

    name = "mlp"
    norm = "mlp"
    sees_prefix = True
    matrices = ("gate", "up", "down")

    def __call__(self, decoder: Decoder, x: jax.Array, call: Call) -> Result:
        return Result(self.products(decoder, x, call.side, width=self.mlp_dim))

    def products(
        self, decoder: Decoder, x: jax.Array, side: Side, *, prefix: str = "", width: int | None = None
    ) -> jax.Array:
        """Computes the output of the layer, [B, T, D].

        Args:
          prefix: of the parameters' names.
          width: number of hidden units; None: the decoder's.
        """
        c, of = decoder, Matrices(decoder)
        d, f = c.embed_dim, width or c.mlp_dim
        gate = of.weight(f"{prefix}gate", (d, f), ("embed", "mlp"), fan_in=d) if c.gated else None
        up = of.weight(f"{prefix}up", (d, f), ("embed", "mlp"), fan_in=d)
        down = of.weight(f"{prefix}down", (f, d), ("mlp", "embed"), fan_in=2 * c.num_layers * f)
        if gate is None:
            hidden = derivatives.activated(_hidden(of, f"{prefix}up", up, x, side), c.activation)
        else:
            hidden = _hidden(of, f"{prefix}gate", gate, x, side)
            hidden = derivatives.gated(hidden, _hidden(of, f"{prefix}up", up, x, side), c.activation)
        hidden = logical.constrain(hidden, "batch", "length", "mlp")  # [B, T, F]
        out = of.product(f"{prefix}down", "btf,fd->btd", hidden, down, side)
        return of.biased(f"{prefix}down", out, ("norm",), among=("all",))

    def work(self, decoder: Decoder, length: int) -> Work:
        return Work(decoder.embed_dim * products_per_input(decoder, self.mlp_dim or decoder.mlp_dim))

    def settings(self, decoder: Decoder) -> dict[str, Any]:
        return {"mlp_dim": self.mlp_dim or decoder.mlp_dim}

    def small(self, decoder: Decoder, width: int) -> Self:
        """Returns the part for a small decoder of `width` hidden units; its own width is a multiple of `width`."""
        return dataclasses.replace(self, mlp_dim=self.mlp_dim and max(1, round(self.mlp_dim / decoder.mlp_dim)) * width)


def _hidden(of: Matrices, name: str, weight: jax.Array, x: jax.Array, side: Side) -> jax.Array:
    return of.biased(name, of.product(name, "btd,df->btf", x, weight, side), ("mlp",), among=("all",))


def products_per_input(decoder: Decoder, width: int) -> int:
    """Returns the multiplications, per token and input entry, of a feed-forward with `width` hidden units."""
    return (3 if decoder.gated else 2) * width


def normalized(config: Decoder, name: str, x: jax.Array) -> jax.Array:
    """Normalizes the last dimension of x by the decoder's norm, with the parameters `name`."""
    return normalize(config, x, *norm_params(config, name, x.shape[-1]))


def norm_params(config: Decoder, name: str, width: int) -> tuple[jax.Array, ...]:
    """Makes the parameters of a norm: its scale [width] and, for LayerNorm, its bias."""
    init = jnp.zeros if config.norm == "rms_offset" else jnp.ones
    scale = logical.param(name, (width,), ("norm",), init)
    if config.norm != "layer":
        return (scale,)
    return scale, logical.param(f"{name}_bias", (width,), ("norm",), jnp.zeros)


def normalize(config: Decoder, x: jax.Array, scale: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """Normalizes the last dimension of x by the decoder's norm, in float32.

    Args:
      scale, bias: [D]; bias None: RMSNorm.
    """
    if bias is not None:
        return derivatives.layer_norm(x, scale, bias, config.norm_eps)
    return derivatives.rms_norm(x, 1.0 + scale if config.norm == "rms_offset" else scale, config.norm_eps)
