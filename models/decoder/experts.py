"""A mixture of experts as a feed-forward layer; `expert_routing` computes it."""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Mapping
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp

from core import logical, wrappers
from core.errors import UserError, check_number
from core.types import LossOutput, Model
from models import derivatives
from models.decoder import expert_routing
from models.decoder.layers import Matrices, Mlp, norm_params, normalized, products_per_input
from models.decoder.parts import Call, Decoder, Part, Result, Work, adaptable

SCORES = ("softmax", "sigmoid")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experts(Part, expert_routing.Choices):
    """A mixture of experts, used as a feed-forward layer.

    Attributes:
      num_experts: E, number of experts per layer.
      top_k: k, number of experts that a token passes through.
      mlp_dim: F, width of an expert; None: the decoder's `mlp_dim`.
      scores: how logits become scores: "softmax" over all experts, or "sigmoid" of each.
      normalized: whether the scores of the chosen experts are divided by their sum.
      scale: factor above 0 of these scores.
      has_correction: whether a frozen vector, initially 0, is added to the scores when experts are chosen.
      num_groups: number of equal groups of successive experts; 1: no grouping.
      top_groups: number of groups per token, from which its experts are chosen.
      has_biases: whether the router and the experts' matrices have biases.
      clamped_gate: how the gate and the other projection are bounded and multiplied; None: the decoder's activation of
        the gate, times the other projection.
      shared_mlp_dim: width of a shared expert, which every token also passes through; None: there is none.
      shared_gate: whether the shared expert's output is multiplied by the sigmoid of a learned score.
      separate_norms: whether router, experts and shared expert read the stream through separate norms, and the outputs
        of experts and shared expert are normalized.
      output_scales: whether a learned number multiplies the factors of each expert.
      capacity_factor: in the training loss, every expert takes at most capacity_factor x T x top_k / num_experts
        choices of a row, rounded up, where T includes padding; None: no limit.
      load_balance_coef: coefficient of the balancing loss.
      z_loss: coefficient of the squared logsumexp of the router's logits.
    """

    num_experts: int
    top_k: int
    mlp_dim: int | None = None
    scores: str = "softmax"
    normalized: bool = True
    scale: float = 1.0
    has_correction: bool = False
    num_groups: int = 1
    top_groups: int = 1
    has_biases: bool = False
    clamped_gate: derivatives.ClampedGate | None = None
    shared_mlp_dim: int | None = None
    shared_gate: bool = False
    separate_norms: bool = False
    output_scales: bool = False
    capacity_factor: float | None = None
    load_balance_coef: float = 0.0
    z_loss: float = 0.0

    name = "experts"
    norm = "mlp"
    sees_prefix = True
    without_adapters = Mlp.matrices

    def __post_init__(self):
        for field in ("num_experts", "top_k", "mlp_dim", "shared_mlp_dim", "num_groups", "top_groups"):
            value = getattr(self, field)
            optional = field.endswith("mlp_dim")
            is_count = isinstance(value, int) and not isinstance(value, bool) and value >= 1
            if not (is_count or (optional and value is None)):
                raise UserError(f"Experts.{field} = {value!r}: expected an integer of at least 1")
        if self.top_k > self.num_experts:
            raise UserError(
                f"Experts.top_k = {self.top_k}, but num_experts = {self.num_experts}: expected from 1 to "
                f"{self.num_experts}"
            )
        check_number(self.scale, where="Experts.scale", is_positive=True)
        self._check_groups()
        for field in ("shared_gate", "separate_norms"):
            if getattr(self, field) and self.shared_mlp_dim is None:
                raise UserError(f"Experts.{field} = True: there is no shared expert: set shared_mlp_dim")
        if self.scores not in SCORES:
            raise UserError(f"Experts.scores = {self.scores!r}: expected one of {', '.join(SCORES)}")
        if self.capacity_factor is not None and not (
            _is_number(self.capacity_factor) and 0 < self.capacity_factor < math.inf
        ):
            raise UserError(
                f"Experts.capacity_factor = {self.capacity_factor!r}: expected a number above 0, or None for no limit"
            )
        for field in ("load_balance_coef", "z_loss"):
            value = getattr(self, field)
            if not (_is_number(value) and 0 <= value < math.inf):
                raise UserError(f"Experts.{field} = {value!r}: expected a finite number of at least 0")

    def _check_groups(self) -> None:
        of_group, rest = divmod(self.num_experts, self.num_groups)
        if self.num_groups > 1 and (rest or of_group < 2):
            raise UserError(
                f"Experts.num_groups = {self.num_groups}: num_experts = {self.num_experts} do not divide into "
                "groups of at least 2"
            )
        least = -(-self.top_k // of_group)
        if not least <= self.top_groups <= self.num_groups:
            raise UserError(
                f"Experts.top_groups = {self.top_groups}: expected from {least}, which have top_k = {self.top_k} "
                f"experts, to num_groups = {self.num_groups}"
            )

    def slots(self, length: int) -> int:
        assert self.capacity_factor is not None
        return min(length, math.ceil(self.capacity_factor * length * self.top_k / self.num_experts))

    def width(self, decoder: Decoder) -> int:
        """Returns F, the width of an expert."""
        return self.mlp_dim or decoder.mlp_dim

    def check(self, decoder: Decoder) -> None:
        if decoder.bias == "all" and not self.has_biases:
            raise UserError(
                "Transformer.bias = 'all': these experts have no biases; expected 'none' or 'qkv', or "
                "Experts.has_biases = True"
            )
        if self.clamped_gate is not None and not decoder.gated:
            raise UserError(f"Experts.clamped_gate = {self.clamped_gate!r}: this decoder has no gate; expected None")
        if self.separate_norms and decoder.norm != "rms":
            raise UserError(f"Experts.separate_norms = True needs Transformer.norm = 'rms', and it is {decoder.norm!r}")
        lora = decoder.lora
        if lora is not None and (wrong := [t for t in lora.targets if t in self.without_adapters]):
            raise UserError(
                f"lora.adapted.targets: {', '.join(wrong)} are matrices of experts, which have no adapters; expected "
                f"some of {adaptable(decoder)}"
            )

    def __call__(self, decoder: Decoder, x: jax.Array, call: Call) -> Result:
        c, of = decoder, Matrices(decoder)
        d, f, e = c.embed_dim, self.width(c), self.num_experts
        init = hk.initializers.TruncatedNormal(d**-0.5)
        router = logical.param("router", (d, e), ("embed", None), init, kind="router")
        inward, outward = ("expert", "embed", "mlp"), ("expert", "mlp", "embed")
        own: dict[str, Any] = {"stacked": 1, "exchanged": True}
        gate = of.weight("gate", (e, d, f), inward, fan_in=d, **own) if c.gated else None
        up = of.weight("up", (e, d, f), inward, fan_in=d, **own)
        down = of.weight("down", (e, f, d), outward, fan_in=2 * c.num_layers * f, **own)
        biases = self._biases(c) if self.has_biases else None
        correction = None
        if self.has_correction:
            correction = logical.param("correction", (e,), (None,), jnp.zeros, trainable=False)
        if call.before is None:
            expert_routing.check_capacity(self)  # also in evaluation, which is traced before the first training step
        weights, read = expert_routing.Weights(router, gate, up, down, biases, correction), x
        if self.output_scales:
            weights = weights._replace(output_scales=logical.param("output_scales", (e,), (None,), jnp.ones))
        if self.separate_norms:
            assert call.stream is not None
            read = derivatives.rms_norm(call.stream, jnp.ones(d), c.norm_eps)
            scale = logical.param("router_scale", (d,), ("norm",), jnp.ones) * d**-0.5
            weights = weights._replace(router=router * scale[:, None], input_scale=norm_params(c, "expert_norm", d)[0])
        y, routing = expert_routing.mixture(
            self,
            read,
            weights,
            call.real(x.shape[1]),
            activation=self.clamped_gate or c.activation,
            drops=call.drops,
        )
        if (width := self.shared_mlp_dim) is not None:
            shared = Mlp().products(c, x, call.side, prefix="shared_", width=width)
            if self.separate_norms:
                y, shared = normalized(c, "expert_post_norm", y), normalized(c, "shared_post_norm", shared)
            y += _gated(shared, x) if self.shared_gate else shared
        return Result(y, (), () if call.weights is None else routing.summed(call.weights))

    def _biases(self, c: Decoder) -> tuple[jax.Array, jax.Array | None, jax.Array, jax.Array]:
        e, d, f = self.num_experts, c.embed_dim, self.width(c)

        def bias(name: str, width: int, axis: str) -> jax.Array:
            how: dict[str, Any] = {"kind": "bias", "stacked": 1, "exchanged": True, "compute_dtype": c.dtype}
            return logical.param(f"{name}_bias", (e, width), ("expert", axis), jnp.zeros, **how)

        router = logical.param("router_bias", (e,), (None,), jnp.zeros)
        return router, bias("gate", f, "mlp") if c.gated else None, bias("up", f, "mlp"), bias("down", d, "norm")

    def work(self, decoder: Decoder, length: int) -> Work:
        width = self.top_k * self.width(decoder) + (self.shared_mlp_dim or 0)
        return Work(decoder.embed_dim * (products_per_input(decoder, width) + self.num_experts + self.shared_gate))

    def empty_sums(self) -> dict[str, jax.Array]:
        return expert_routing.empty_sums(self)

    def finish(self, found: LossOutput, sums: Any, *, num_layers: int, is_training: bool) -> LossOutput:
        return expert_routing.with_routing(self, self.name, found, sums, num_layers=num_layers, is_training=is_training)

    def shrink(self, multiples: Mapping[str, int]) -> Experts:
        width = math.lcm(16, multiples["mlp"])
        return dataclasses.replace(
            self,
            num_experts=math.lcm(4, multiples["expert"]),
            top_k=min(self.top_k, 2),
            num_groups=min(self.num_groups, 2),
            top_groups=1,
            mlp_dim=self.mlp_dim and width,
            shared_mlp_dim=self.shared_mlp_dim and width,
        )

    def settings(self, decoder: Decoder) -> dict[str, Any]:
        training = {f"{self.name}.{field}" for field in ("capacity_factor", "load_balance_coef", "z_loss")}
        found = {name: value for name, value in super().settings(decoder).items() if name not in training}
        return {**found, f"{self.name}.mlp_dim": self.width(decoder)}


def _gated(shared: jax.Array, x: jax.Array) -> jax.Array:
    width = x.shape[-1]
    init = hk.initializers.TruncatedNormal(width**-0.5)
    weight = logical.param("shared_score", (width, 1), ("embed", None), init, kind="router", compute_dtype=x.dtype)
    return shared * jax.nn.sigmoid((x @ weight).astype("float32")).astype(shared.dtype)


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def experts_of(decoder: Decoder) -> Experts | None:
    """Returns the experts of the first kind of layer that has some; None if none has."""
    parts = (kind.feed_forward for kind in decoder.layer_kinds)
    return next((part for part in parts if isinstance(part, Experts)), None)


def trained(
    *, model: Model, capacity_factor: float | None = None, load_balance_coef: float = 0.0, z_loss: float = 0.0
) -> Model:
    """Returns a copy of a decoder with experts, with settings for training them.

    Args:
      model: the decoder, or a model that wraps one.
      capacity_factor, load_balance_coef, z_loss: see `Experts`.

    Raises:
      UserError: `model` has no experts, or a setting is out of range.
    """
    owner = wrappers.field_owner(model, "feed_forward")
    parts = (
        () if owner is None else owner.feed_forward if isinstance(owner.feed_forward, tuple) else (owner.feed_forward,)
    )
    if not any(isinstance(part, Experts) for part in parts):
        raise UserError(
            f"experts.trained.model is {type(model).__name__} without experts: expected a decoder with some"
        )
    how: dict[str, Any] = {"capacity_factor": capacity_factor, "load_balance_coef": load_balance_coef, "z_loss": z_loss}
    changed = (dataclasses.replace(part, **how) if isinstance(part, Experts) else part for part in parts)
    made = tuple(changed)
    return wrappers.with_field(model, "feed_forward", made if isinstance(owner.feed_forward, tuple) else made[0])
