"""The parts of the decoder's layers by name: attention, feed-forward layers, and the table of all others.

B batch, T length, D embed, H query heads, N key/value heads, K head_dim, F mlp.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from core import logical
from core.errors import UserError
from core.types import LossOutput
from models import attention, block_sparse, derivatives, experts, quantized, rotary, s5
from models.attention import KeysAndValues
from models.decoder_config import GLOBAL, LOCAL, DecoderConfig
from models.layer_parts import Call, Part, Result, Side, Work
from models.splash_tiles import Tiles

# Logical axes of the inputs and outputs of each matrix.
_AXES = {
    "query": (("embed",), ("heads", "head_dim")),
    "key": (("embed",), ("kv_heads", "head_dim")),
    "value": (("embed",), ("kv_heads", "head_dim")),
    "output": (("heads", "head_dim"), ("embed",)),
    "gate": (("embed",), ("mlp",)),
    "up": (("embed",), ("mlp",)),
    "down": (("mlp",), ("embed",)),
}


class _Matrices(Part):
    """A part of matrices that have biases and adapters as the decoder says."""

    def __init__(self, config: DecoderConfig):
        self.config = config

    def _weight(
        self,
        name: str,
        shape: tuple[int, ...],
        axes: tuple[str, ...],
        *,
        fan_in: int,
        in_dims: int = 1,
        stacked: int = 0,
    ) -> jax.Array:
        init = hk.initializers.TruncatedNormal(fan_in**-0.5)
        how = {"in_dims": in_dims, "stacked": stacked, "compute_dtype": self.config.dtype}
        if self.config.quantization != "none" and not stacked:  # laid out for computation after it is rounded
            return logical.param(name, shape, axes, init, **how, as_stored=True).astype(self.config.dtype)
        return logical.param(name, shape, axes, init, **how)

    def _biased(self, name: str, x: jax.Array, axes: tuple[str, ...], *, among: tuple[str, ...]) -> jax.Array:
        """Adds a bias with these axes, the last ones of x, if the model has it."""
        if self.config.bias not in among:
            return x
        shape = x.shape[-len(axes) :]
        return x + logical.param(f"{name}_bias", shape, axes, jnp.zeros, kind="bias", compute_dtype=self.config.dtype)

    def _product(self, name: str, subscripts: str, x: jax.Array, weight: jax.Array, side: Side) -> jax.Array:
        """Multiplies activations and a matrix, and adds the output of the matrix's adapter if the model has one."""
        inward, outward = _AXES[name.removeprefix("shared_")]
        if self.config.quantization == "none":
            product = jnp.einsum(subscripts, x, weight)
        else:
            product = quantized.product(subscripts, (*inward, *outward), x, weight)
        if self.config.lora is None:
            return product
        return self.config.lora.added(name, product, x, (inward, outward), rows=side.rows)


class Attention(_Matrices):
    """Causal attention within segments, `models.attention`."""

    matrices = ("query", "key", "value", "output")

    def __call__(self, x: jax.Array, call: Call) -> Result:
        """See `Part.__call__`."""
        c, side = self.config, call.side
        d, h, n, k = c.embed_dim, c.num_heads, c.num_kv_heads, c.head_width
        wq = self._weight("query", (d, h, k), ("embed", "heads", "head_dim"), fan_in=d)
        wk = self._weight("key", (d, n, k), ("embed", "kv_heads", "head_dim"), fan_in=d)
        wv = self._weight("value", (d, n, k), ("embed", "kv_heads", "head_dim"), fan_in=d)
        fan_in = 2 * c.num_layers * h * k
        wo = self._weight("output", (h, k, d), ("heads", "head_dim", "embed"), fan_in=fan_in, in_dims=2)
        q = self._product("query", "btd,dhk->bthk", x, wq, side)
        q = self._heads("query", q, call, "heads")
        key = self._product("key", "btd,dnk->btnk", x, wk, side)
        key = self._heads("key", key, call, "kv_heads")
        value = self._product("value", "btd,dnk->btnk", x, wv, side)
        value = self._biased("value", value, ("kv_heads", "head_dim"), among=("qkv", "all"))
        value = logical.constrain(value, "batch", "length", "kv_heads", "head_dim")
        q, key, value = map(checkpoint_name, (q, key, value), ("query", "key", "value"))
        mixed, after = self._mixed(q, key, value, call)
        mixed = logical.constrain(mixed, "batch", "length", "heads", "head_dim")
        out = self._product("output", "bthk,hkd->btd", mixed, wo, side)
        return Result(self._biased("output", out, ("norm",), among=("all",)), after)

    def _mixed(self, q: jax.Array, key: jax.Array, value: jax.Array, call: Call) -> tuple[jax.Array, Any]:
        """Returns the attention of queries [B, T, H, K] to keys and values [B, T, N, K], and the cache after."""
        c, side = self.config, call.side
        how = {"choice": c.attention, "window": c.window if call.kind == LOCAL else None, **self._scores(call)}
        if call.before is None:
            whole = {"arranged": True, "prefix": side.prefix, "tiles": c.attention_tiles or Tiles()}
            return attention.attend(q, key, value, side.segment_ids, **whole, **how), ()
        return attention.cached(q, key, value, *call.before, side.padding, **how)

    def _scores(self, call: Call) -> dict[str, float | None]:
        scale = 1.0 if call.side.turns else self.config.score_scale  # otherwise the rotary tables scale
        return {"scale": scale, "softcap": self.config.attention_softcap}

    def _heads(self, name: str, x: jax.Array, call: Call, heads: str) -> jax.Array:
        """Adds the bias of heads [B, T, heads, K], normalizes and rotates them.

        They have the sharding of the strategy before and after. The constraint after is for the gradient: where keys
        are gathered over positions, it is scattered before it is rotated.
        """
        x = self._biased(name, x, (heads, "head_dim"), among=("qkv", "all"))
        if self.config.qk_norm:
            x = normalized(self.config, f"{name}_norm", x)
        x = logical.constrain(x, "batch", "length", heads, "head_dim")
        if not (turns := call.side.turns):
            return x
        return logical.constrain(
            rotary.apply(x, turns.get(call.kind, turns[GLOBAL])), "batch", "length", heads, "head_dim"
        )

    def work(self, kind: str, length: int) -> Work:
        """See `Part.work`; T H K for causal scores and as much for the mixing, W H K of a window of W positions."""
        c = self.config
        inner, kv = c.num_heads * c.head_width, c.num_kv_heads * c.head_width
        span = length if kind == GLOBAL else min(length, 2 * (c.window or length))  # twice the mean number attended to
        return Work(c.embed_dim * (2 * inner + 2 * kv), span * inner)

    def empty_state(self, kind: str, rows: int, length: int) -> KeysAndValues:
        """Returns empty keys and values; of a layer with a window, with room for the window alone."""
        c = self.config
        entries = length if kind == GLOBAL else min(length, c.window or length)
        shape = (rows, c.num_kv_heads, entries, c.head_width)
        return KeysAndValues(*(jnp.zeros(shape, c.dtype) for _ in range(2)))

    def laid_out(self, state: KeysAndValues) -> KeysAndValues:
        """See `Part.laid_out`."""
        return KeysAndValues(*(logical.constrain(a, "batch", "kv_heads", None, "head_dim") for a in state))


class BlockSparseAttention(Attention):
    """Attention to global, near and drawn blocks, `models.block_sparse`."""

    def check(self) -> None:
        """See `Part.check`."""
        if self.config.attention == "none":
            raise UserError("Transformer.attention = 'none' mixes no positions: expected another with 'block_sparse'")
        if self.config.attention == "cudnn":
            raise UserError("Transformer.attention = 'cudnn' cannot skip blocks: expected another with 'block_sparse'")

    def _mixed(self, q: jax.Array, key: jax.Array, value: jax.Array, call: Call) -> tuple[jax.Array, Any]:
        assert self.config.block_sparse is not None
        if call.side.prefix is not None:
            raise UserError("mixer = 'block_sparse' is causal, and this model attends both ways to a part of a row")
        how = {"settings": self.config.block_sparse, **self._scores(call)}
        if call.before is None:
            choice = self.config.attention
            return block_sparse.attend(q, key, value, call.side.segment_ids, choice=choice, **how), ()
        return block_sparse.cached(q, key, value, *call.before, call.side.padding, **how)

    def work(self, kind: str, length: int) -> Work:
        """See `Part.work`."""
        assert self.config.block_sparse is not None
        inner = self.config.num_heads * self.config.head_width
        return Work(super().work(GLOBAL, length).matrices, 2 * self.config.block_sparse.attended(length) * inner)

    def empty_state(self, kind: str, rows: int, length: int) -> KeysAndValues:
        """See `Part.empty_state`; a drawn block may be any of the row."""
        return super().empty_state(GLOBAL, rows, length)


class Mlp(_Matrices):
    """A feed-forward layer, gated or not."""

    matrices = ("gate", "up", "down")

    def __call__(self, x: jax.Array, call: Call) -> Result:
        """See `Part.__call__`."""
        return Result(self.products(x, call.side))

    def products(self, x: jax.Array, side: Side, *, prefix: str = "", width: int | None = None) -> jax.Array:
        """Returns the output [B, T, D]; the parameters have names that start with `prefix`."""
        c = self.config
        d, f = c.embed_dim, width or c.mlp_dim
        gate = self._weight(f"{prefix}gate", (d, f), ("embed", "mlp"), fan_in=d) if c.gated else None
        up = self._weight(f"{prefix}up", (d, f), ("embed", "mlp"), fan_in=d)
        down = self._weight(f"{prefix}down", (f, d), ("mlp", "embed"), fan_in=2 * c.num_layers * f)
        if gate is None:
            hidden = derivatives.activated(self._input(f"{prefix}up", up, x, side), c.activation)
        else:
            hidden = self._input(f"{prefix}gate", gate, x, side)
            hidden = derivatives.gated(hidden, self._input(f"{prefix}up", up, x, side), c.activation)
        hidden = logical.constrain(hidden, "batch", "length", "mlp")  # [B, T, F]
        out = self._product(f"{prefix}down", "btf,fd->btd", hidden, down, side)
        return self._biased(f"{prefix}down", out, ("norm",), among=("all",))

    def _input(self, name: str, weight: jax.Array, x: jax.Array, side: Side) -> jax.Array:
        return self._biased(name, self._product(name, "btd,df->btf", x, weight, side), ("mlp",), among=("all",))

    def work(self, kind: str, length: int) -> Work:
        """See `Part.work`."""
        return Work(self.config.embed_dim * self.products_per_input(self.config.mlp_dim))

    def products_per_input(self, width: int) -> int:
        """Returns the columns of all matrices of `width` hidden units."""
        return (3 if self.config.gated else 2) * width


class ExpertMixture(_Matrices):
    """A mixture of experts, `models.experts`."""

    def __init__(self, config: DecoderConfig):
        super().__init__(config)
        assert config.experts is not None
        self.experts = config.experts

    def check(self) -> None:
        """See `Part.check`."""
        if self.config.bias == "all":
            raise UserError("Transformer.bias = 'all': experts have no biases; expected 'none' or 'qkv'")
        lora = self.config.lora
        if lora is not None and (wrong := [t for t in lora.targets if t in Mlp.matrices]):
            targets = tuple(target for target in lora.targets if target not in wrong)
            raise UserError(
                f"lora.adapted.targets: {', '.join(wrong)} are matrices of experts, which have no adapters; set "
                f"targets = {targets or Attention.matrices}"
            )

    def __call__(self, x: jax.Array, call: Call) -> Result:
        """See `Part.__call__`."""
        c, settings = self.config, self.experts
        d, f, e = c.embed_dim, c.expert_dim, settings.number
        init = hk.initializers.TruncatedNormal(d**-0.5)
        router = logical.param("router", (d, e), ("embed", None), init, kind="router")
        inward, outward = ("expert", "embed", "mlp"), ("expert", "mlp", "embed")
        gate = self._weight("gate", (e, d, f), inward, fan_in=d, stacked=1) if c.gated else None
        up = self._weight("up", (e, d, f), inward, fan_in=d, stacked=1)
        down = self._weight("down", (e, f, d), outward, fan_in=2 * c.num_layers * f, stacked=1)
        if call.before is None:
            experts.check_capacity(settings)  # also in evaluation, which is traced before the first step of training
        y, routing = experts.mixture(
            settings,
            x,
            experts.Weights(router, gate, up, down),
            call.real(x.shape[1]),
            activation=c.activation,
            drops=call.drops,
        )
        if (width := settings.shared_mlp_dim) is not None:
            y += Mlp(c).products(x, call.side, prefix="shared_", width=width)
        return Result(y, (), () if call.weights is None else routing.summed(call.weights))

    def work(self, kind: str, length: int) -> Work:
        """See `Part.work`; of the experts that a token passes through."""
        width = self.experts.top_k * self.config.expert_dim + (self.experts.shared_mlp_dim or 0)
        return Work(self.config.embed_dim * (Mlp(self.config).products_per_input(width) + self.experts.number))

    def empty_sums(self) -> dict[str, jax.Array]:
        """See `Part.empty_sums`."""
        return experts.empty_sums(self.experts)

    def finish(self, found: LossOutput, sums: Any, *, num_layers: int, is_training: bool) -> LossOutput:
        """See `Part.finish`."""
        return experts.with_routing(self.experts, found, sums, num_layers=num_layers, is_training=is_training)


def _state_space(config: DecoderConfig, module: str) -> Part:
    assert config.s5 is not None
    return s5.StateSpace(config.s5, embed_dim=config.embed_dim, dtype=config.dtype, module=module)


def _ttt(config: DecoderConfig, name: str) -> Part:
    from models.ttt.mixer import TTTMixer  # of no use to other decoders

    return TTTMixer(config, name)


_PARTS: Mapping[str, Callable[[DecoderConfig, str], Part]] = {
    "attention": lambda config, _: Attention(config),
    "block_sparse": lambda config, _: BlockSparseAttention(config),
    "mlp": lambda config, _: Mlp(config),
    "experts": lambda config, _: ExpertMixture(config),
    "s5": _state_space,
    "ttt_linear": _ttt,
    "ttt_mlp": _ttt,
}


def part(config: DecoderConfig, name: str, module: str) -> Part:
    """Returns a part of a decoder's layers.

    Args:
      config: the decoder.
      name: an entry of `decoder_config.MIXERS` or `FEED_FORWARDS`.
      module: name of the Haiku module of its parameters, if it has one of its own.
    """
    return _PARTS[name](config, module)


def normalized(config: DecoderConfig, name: str, x: jax.Array) -> jax.Array:
    """Normalizes the last dimension of x with the parameters `name`, by the model's norm."""
    return normalize(config, x, *norm_params(config, name, x.shape[-1]))


def norm_params(config: DecoderConfig, name: str, width: int) -> tuple[jax.Array, ...]:
    """Returns the parameters of a norm: its scale [width], and the bias [width] of a LayerNorm."""
    init = jnp.zeros if config.norm == "rms_offset" else jnp.ones
    scale = logical.param(name, (width,), ("norm",), init)
    if config.norm != "layer":
        return (scale,)
    return scale, logical.param(f"{name}_bias", (width,), ("norm",), jnp.zeros)


def normalize(config: DecoderConfig, x: jax.Array, scale: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """Normalizes the last dimension of x, in float32."""
    if bias is not None:
        return derivatives.layer_norm(x, scale, bias, config.norm_eps)
    return derivatives.rms_norm(x, 1.0 + scale if config.norm == "rms_offset" else scale, config.norm_eps)
