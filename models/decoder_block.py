"""One layer of the decoder: attention and a feed-forward layer.

B batch, T length, D embed, H query heads, N key/value heads, K head_dim, F mlp.
"""

from typing import NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from core import logical
from models import attention, derivatives, experts, rotary
from models.attention import KeysAndValues
from models.decoder_config import GLOBAL, LOCAL, DecoderConfig
from models.prefix import Prefix


class Side(NamedTuple):
    """Arrays that belong to rows and are the same for all layers.

    Attributes:
      segment_ids: [B, T], int32.
      turns: rotary tables by kind of layer; only of GLOBAL if all kinds share one table; empty for learned positions.
      rows: [B], int32, global row ids, if inputs of adapters are dropped; otherwise None.
      padding: [B], int32, the number of empty slots before a row, if earlier slots are cached; otherwise None.
      prefix: which positions attend both ways; None: attention is causal.
    """

    segment_ids: jax.Array
    turns: dict[str, rotary.RotaryTables]
    padding: jax.Array | None = None
    rows: jax.Array | None = None
    prefix: Prefix | None = None


class Earlier(NamedTuple):
    """The slots before those of a call.

    Attributes:
      cache: their keys and values.
      start: their number, [], int32.
    """

    cache: KeysAndValues
    start: jax.Array


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


class Block(hk.Module):
    """One layer: attention and feed-forward, each on a normalized copy of the residual stream."""

    def __init__(self, config: DecoderConfig, kind: str, name: str = "block", *, drops: bool = False):
        """Makes the layer; `drops`: whether the capacity of experts applies, as in the training loss."""
        super().__init__(name)
        self.config = config
        self.kind = kind
        self.drops = drops

    def __call__(self, x: jax.Array, side: Side) -> tuple[jax.Array, experts.Routing | None]:
        """Runs the layer, [B, T, D] -> [B, T, D]; also returns the sums of the routing, if there are experts."""
        x, _, routing = self._run(x, side, None)
        return x, routing

    def extended(self, x: jax.Array, side: Side, before: Earlier) -> tuple[jax.Array, KeysAndValues]:
        """Runs the layer on slots that follow cached ones.

        Args:
          x: [B, T, D].
          side: with `padding`.
          before: the cached slots.

        Returns:
          [B, T, D], and the cache with the new slots.
        """
        x, after, _ = self._run(x, side, before)
        assert after is not None
        return x, after

    def _run(
        self, x: jax.Array, side: Side, before: Earlier | None
    ) -> tuple[jax.Array, KeysAndValues | None, experts.Routing | None]:
        x = logical.constrain(x, "batch", "residual_length", "embed")
        mixed, new = self._attention(self._input_norm("attention", x), side, before)
        x = x + self._output_norm("attention", mixed)
        x = checkpoint_name(logical.constrain(x, "batch", "residual_length", "embed"), "attended")
        y, routing = self._feed_forward(self._input_norm("mlp", x), side, before)
        x = x + self._output_norm("mlp", y)
        return logical.constrain(x, "batch", "residual_length", "embed"), new, routing

    def _input_norm(self, part: str, x: jax.Array) -> jax.Array:
        return normalized(self.config, f"{part}_norm", x)

    def _output_norm(self, part: str, x: jax.Array) -> jax.Array:
        return normalized(self.config, f"{part}_post_norm", x) if self.config.post_norm else x

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
        return logical.param(name, shape, axes, init, **how)

    def _biased(self, name: str, x: jax.Array, axes: tuple[str, ...], *, among: tuple[str, ...]) -> jax.Array:
        """Adds a bias with these axes, the last ones of x, if the model has it."""
        if self.config.bias not in among:
            return x
        shape = x.shape[-len(axes) :]
        return x + logical.param(f"{name}_bias", shape, axes, jnp.zeros, kind="bias", compute_dtype=self.config.dtype)

    def _attention(self, x: jax.Array, side: Side, before: Earlier | None) -> tuple[jax.Array, KeysAndValues | None]:
        c = self.config
        d, h, n, k = c.embed_dim, c.num_heads, c.num_kv_heads, c.head_width
        wq = self._weight("query", (d, h, k), ("embed", "heads", "head_dim"), fan_in=d)
        wk = self._weight("key", (d, n, k), ("embed", "kv_heads", "head_dim"), fan_in=d)
        wv = self._weight("value", (d, n, k), ("embed", "kv_heads", "head_dim"), fan_in=d)
        fan_in = 2 * c.num_layers * h * k
        wo = self._weight("output", (h, k, d), ("heads", "head_dim", "embed"), fan_in=fan_in, in_dims=2)
        q = self._adapted("query", jnp.einsum("btd,dhk->bthk", x, wq), x, side)
        q = self._heads("query", q, side, "heads")
        key = self._adapted("key", jnp.einsum("btd,dnk->btnk", x, wk), x, side)
        key = self._heads("key", key, side, "kv_heads")
        value = self._adapted("value", jnp.einsum("btd,dnk->btnk", x, wv), x, side)
        value = self._biased("value", value, ("kv_heads", "head_dim"), among=("qkv", "all"))
        value = logical.constrain(value, "batch", "length", "kv_heads", "head_dim")
        q, key, value = map(checkpoint_name, (q, key, value), ("query", "key", "value"))
        how = {
            "choice": c.attention,
            "scale": 1.0 if side.turns else c.score_scale,  # otherwise the rotary tables scale
            "window": c.window if self.kind == LOCAL else None,
            "softcap": c.attention_softcap,
        }
        if before is None:
            whole = {"arranged": True, "prefix": side.prefix}
            mixed, after = attention.attend(q, key, value, side.segment_ids, **whole, **how), None
        else:
            mixed, after = attention.cached(q, key, value, *before, side.padding, **how)
        mixed = logical.constrain(mixed, "batch", "length", "heads", "head_dim")
        out = self._adapted("output", jnp.einsum("bthk,hkd->btd", mixed, wo), mixed, side)
        return self._biased("output", out, ("norm",), among=("all",)), after

    def _heads(self, name: str, x: jax.Array, side: Side, heads: str) -> jax.Array:
        """Adds the bias of heads [B, T, heads, K], normalizes and rotates them.

        They have the sharding of the strategy before and after. The constraint after is for the gradient: where keys
        are gathered over positions, it is scattered before it is rotated.
        """
        x = self._biased(name, x, (heads, "head_dim"), among=("qkv", "all"))
        if self.config.qk_norm:
            x = normalized(self.config, f"{name}_norm", x)
        x = logical.constrain(x, "batch", "length", heads, "head_dim")
        if not side.turns:
            return x
        return logical.constrain(
            rotary.apply(x, side.turns.get(self.kind, side.turns[GLOBAL])), "batch", "length", heads, "head_dim"
        )

    def _adapted(self, name: str, product: jax.Array, x: jax.Array, side: Side) -> jax.Array:
        """Adds the output of the matrix's adapter, if the model has one, to the product with x."""
        if self.config.lora is None:
            return product
        return self.config.lora.added(name, product, x, _AXES[name.removeprefix("shared_")], rows=side.rows)

    def _feed_forward(
        self, x: jax.Array, side: Side, before: Earlier | None
    ) -> tuple[jax.Array, experts.Routing | None]:
        c = self.config
        if c.experts is None:
            return self._mlp(x, side), None
        d, f, e = c.embed_dim, c.expert_dim, c.experts.number
        init = hk.initializers.TruncatedNormal(d**-0.5)
        router = logical.param("router", (d, e), ("embed", None), init, kind="router")
        inward, outward = ("expert", "embed", "mlp"), ("expert", "mlp", "embed")
        gate = self._weight("gate", (e, d, f), inward, fan_in=d, stacked=1) if c.gated else None
        up = self._weight("up", (e, d, f), inward, fan_in=d, stacked=1)
        down = self._weight("down", (e, f, d), outward, fan_in=2 * c.num_layers * f, stacked=1)
        real = side.segment_ids > 0
        if before is None:
            experts.check_capacity(c.experts)  # also in evaluation, which is traced before the first step of training
        if before is not None:
            real = before.start + jnp.arange(x.shape[1]) >= side.padding[:, None]
        y, routing = experts.mixture(
            c.experts,
            x,
            experts.Weights(router, gate, up, down),
            real,
            activation=c.activation,
            drops=self.drops,
        )
        if (width := c.experts.shared_mlp_dim) is not None:
            y += self._mlp(x, side, prefix="shared_", width=width)
        return y, routing

    def _mlp(self, x: jax.Array, side: Side, *, prefix: str = "", width: int | None = None) -> jax.Array:
        c = self.config
        d, f = c.embed_dim, width or c.mlp_dim
        gate = self._weight(f"{prefix}gate", (d, f), ("embed", "mlp"), fan_in=d) if c.gated else None
        up = self._weight(f"{prefix}up", (d, f), ("embed", "mlp"), fan_in=d)
        down = self._weight(f"{prefix}down", (f, d), ("mlp", "embed"), fan_in=2 * c.num_layers * f)
        if gate is None:
            hidden = derivatives.activated(self._mlp_input(f"{prefix}up", up, x, side), c.activation)
        else:
            hidden = self._mlp_input(f"{prefix}gate", gate, x, side)
            hidden = derivatives.gated(hidden, self._mlp_input(f"{prefix}up", up, x, side), c.activation)
        hidden = logical.constrain(hidden, "batch", "length", "mlp")  # [B, T, F]
        return self._biased(
            f"{prefix}down", self._adapted(f"{prefix}down", hidden @ down, hidden, side), ("norm",), among=("all",)
        )

    def _mlp_input(self, name: str, weight: jax.Array, x: jax.Array, side: Side) -> jax.Array:
        return self._biased(name, self._adapted(name, x @ weight, x, side), ("mlp",), among=("all",))


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
