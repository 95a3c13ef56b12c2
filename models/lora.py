"""Low-rank adapters: trained parameters that are added to the frozen matrices of a decoder.

    y = x W + (alpha / rank) dropout(x) A B          A [in, rank], B [rank, out], B = 0 at the start

Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models", section 4.1.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp

from core import logical, parameters, random_bits, wrappers
from core.errors import UserError
from core.types import Model, Params
from models.decoder.attention import ring_attention

TARGETS = ("query", "key", "value", "output", "gate", "up", "down")
PATTERNS = ("*_lora_a", "*_lora_b")  # paths of adapters
_RANK = "rank"

logical.declare(_RANK, "inner dimension of a low-rank adapter")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lora:
    """Adapters of a decoder's matrices.

    Attributes:
      rank: inner dimension of an adapter.
      alpha: an adapter's output is multiplied by alpha / rank.
      targets: names of the matrices with an adapter (`Part.matrices`).
      dropout: rate at which inputs of adapters are dropped in training.
      base_dtype: dtype of the frozen parameters, "bfloat16" or "float32"; routers of experts stay in float32.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...]
    dropout: float = 0.0
    base_dtype: str = "bfloat16"

    def __post_init__(self):
        if isinstance(self.rank, bool) or not isinstance(self.rank, int) or self.rank < 1:
            raise UserError(f"lora.adapted.rank = {self.rank!r}: expected an integer of at least 1")
        if not 0 < self.alpha < float("inf"):
            raise UserError(f"lora.adapted.alpha = {self.alpha}: expected a positive number")
        if not 0 <= self.dropout < 1:
            raise UserError(f"lora.adapted.dropout = {self.dropout}: expected from 0 to below 1")
        if not self.targets or len(set(self.targets)) < len(self.targets):
            raise UserError(
                f"lora.adapted.targets = {self.targets}: expected at least one matrix, such as 'query', and each once"
            )
        if self.base_dtype not in ("bfloat16", "float32"):
            raise UserError(f"lora.adapted.base_dtype = {self.base_dtype!r}: expected 'bfloat16' or 'float32'")

    @property
    def scale(self) -> float:
        """The factor of the adapter's output."""
        return self.alpha / self.rank

    def added(
        self,
        name: str,
        product: jax.Array,
        x: jax.Array,
        axes: tuple[tuple[str | None, ...], tuple[str | None, ...]],
        *,
        rows: jax.Array | None,
    ) -> jax.Array:
        """Returns a product of x and a matrix plus the output of the matrix's adapter, if it has one.

        Args:
          product: x times the matrix, [B, T, *out].
          x: [B, T, *in].
          axes: logical axes of in and out.
          rows: [B], global row ids for dropout; None: no dropout.
        """
        if name not in self.targets:
            return product
        inner = axes[0]
        a, b = self._pair(name, x.shape[2:], product.shape[2:], axes, x.dtype)
        if rows is not None:
            key, names = hk.next_rng_key(), ("batch", "length", *inner)
            # Masks are drawn in the order of the row, also if x is in the order of a ring.
            x = random_bits.dropout(
                key, self.dropout, x, rows, arranged=lambda kept: ring_attention.arrange(kept, *names)
            )
        hidden = jnp.tensordot(x, a, len(inner))  # [B, T, rank]
        return product + self.scale * jnp.tensordot(hidden, b, 1)

    def _pair(
        self, name: str, width: tuple[int, ...], out: tuple[int, ...], axes: Any, dtype: Any
    ) -> tuple[jax.Array, jax.Array]:
        """Makes A [*width, rank] and B [rank, *out]."""
        inner, outer = axes
        fan_in = math.prod(width)
        init = hk.initializers.RandomUniform(-(fan_in**-0.5), fan_in**-0.5)
        shapes = (*width, self.rank), (self.rank, *out)
        options: dict[str, Any] = {"compute_dtype": dtype}
        a = logical.param(f"{name}_lora_a", shapes[0], (*inner, _RANK), init, in_dims=len(inner), **options)
        b = logical.param(f"{name}_lora_b", shapes[1], (_RANK, *outer), jnp.zeros, in_dims=1, **options)
        return a, b

    def changed(self, name: str, weight: jax.Array, axes: tuple[tuple[str | None, ...], tuple[str | None, ...]]) -> Any:
        """Returns a matrix [*in, *out], with its adapter added if it is a target, without dropout.

        `axes` are the logical axes of in and out.
        """
        if name not in self.targets:
            return weight
        depth = len(axes[0])
        a, b = self._pair(name, weight.shape[:depth], weight.shape[depth:], axes, weight.dtype)
        return weight + self.scale * jnp.tensordot(a, b, 1)

    def base_frozen(self, params: Params) -> Params:
        """Returns parameters with all but the adapters frozen, and stored in `base_dtype`.

        Routers of experts keep their dtype.
        """
        base = [name for name in parameters.names(params) if not name.endswith(("_lora_a", "_lora_b"))]
        routers = [name for name in base if name.endswith(("/router", "/router_bias", "/correction"))]
        params = logical.frozen(params, [name for name in base if name not in routers], self.base_dtype)
        return logical.frozen(params, routers)

    def merged(self, base: Any, a: Any, b: Any) -> Any:
        """Returns W + (alpha / rank) A B of one layer, float32 numpy.

        `base` is W [*in, *out], `a` is A [*in, rank], `b` is B [rank, *out].
        """
        return base.astype("float32") + self.scale * (
            a.astype("float32").reshape(-1, self.rank) @ b.astype("float32").reshape(self.rank, -1)
        ).reshape(base.shape)


def adapted(
    *,
    model: Model,
    rank: int = 8,
    alpha: float = 16.0,
    targets: Sequence[str] = TARGETS,
    dropout: float = 0.0,
    base_dtype: str = "bfloat16",
) -> Model:
    """Returns a copy of a model in which only low-rank adapters of its decoder are trained.

    Args:
      model: a decoder, such as `@pretrained.model()`, or a model that wraps one.
      rank, alpha, targets, dropout, base_dtype: see `Lora`.

    Raises:
      UserError: `model` has no field `lora`, or a setting is out of range.
    """
    if wrappers.field_path(model, "lora") is None:
        raise UserError(
            f"lora.adapted.model is {type(model).__name__}, which has no field `lora`: expected a decoder, such as "
            "@pretrained.model() or @transformer.Transformer()"
        )
    settings = Lora(rank=rank, alpha=alpha, targets=tuple(targets), dropout=dropout, base_dtype=base_dtype)
    return wrappers.with_field(model, "lora", settings)
