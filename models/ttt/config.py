"""The settings of a layer with test-time training."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from core.errors import UserError, check_integer, check_number

_CHOICES = {"inner": ("linear", "mlp"), "variant": ("published", "ponder")}
_COUNTS = ("num_heads", "head_dim", "mini_batch", "conv_width", "expansion")
_PONDER_WIDTH = 768  # the width at which PonderTTT's rates are those of its configuration


@dataclasses.dataclass(frozen=True, kw_only=True)
class TTTConfig:
    """The settings of a layer of `models.ttt.layer`.

    Attributes:
      inner: the model that learns from the tokens of a row: "linear" (TTT-Linear) or "mlp" (TTT-MLP).
      variant: "published" (Sun et al. 2024), or "ponder", as in the code of "When to Ponder" (2026).
      num_heads, head_dim: number of heads, and the even size of each.
      mini_batch: number of successive tokens whose gradients are taken at the same weights.
      conv_width: number of tokens that the convolutions over queries and keys read.
      base_rate: learning rate of the inner model, which learned factors multiply.
      rope_theta: base of the rotary embedding of places in a mini-batch.
      expansion: hidden width of the inner MLP, in multiples of head_dim.
      decay: a factor of rates grows by exp(decay) from token to token of a mini-batch; only for "ponder".
      diagonal: 0: a token reads weights that have also learned from the token itself; -1: from earlier tokens only.
      rate_scale: factor of the learning rate; 0 makes the layer static.
      resets: whether every mini-batch starts from the initial weights.
    """

    inner: str = "linear"
    variant: str = "published"
    num_heads: int
    head_dim: int
    mini_batch: int = 16
    conv_width: int = 4
    base_rate: float = 1.0
    rope_theta: float = 1e4
    expansion: int = 4
    decay: float = 0.0
    diagonal: int = 0
    rate_scale: float = 1.0
    resets: bool = False

    def __post_init__(self):
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise UserError(f"TTTConfig.{name} = {getattr(self, name)!r}: expected one of {', '.join(choices)}")
        for name in _COUNTS:
            check_integer(getattr(self, name), where=f"TTTConfig.{name}", least=1)
        if self.head_dim % 2:
            raise UserError(f"TTTConfig.head_dim = {self.head_dim} is odd; rotary embeddings need an even size")
        if self.diagonal not in (0, -1):
            raise UserError(f"TTTConfig.diagonal = {self.diagonal}: expected 0 or -1")
        for name in ("base_rate", "rope_theta"):
            check_number(getattr(self, name), where=f"TTTConfig.{name}", is_positive=True)
        check_number(self.rate_scale, where="TTTConfig.rate_scale", least=0)
        check_number(self.decay, where="TTTConfig.decay")
        if self.decay and self.variant != "ponder":
            raise UserError(f"TTTConfig.decay = {self.decay}: only the variant 'ponder' has a decay; expected 0")

    def shrink(self, multiples: Mapping[str, int]) -> TTTConfig:
        """Returns the settings of a small layer."""
        head_dim = math.lcm(8, multiples["head_dim"])
        mini_batch = 2 ** (min(self.mini_batch, 16).bit_length() - 1)  # divides the positions of a smoke run
        return dataclasses.replace(self, num_heads=multiples["heads"], head_dim=head_dim, mini_batch=mini_batch)

    @property
    def is_ponder(self) -> bool:
        """Whether the variant is "ponder"."""
        return self.variant == "ponder"

    @property
    def norm_eps(self) -> float:
        """The epsilon of the norms of heads and of the layer's output."""
        return 1e-5 if self.is_ponder else 1e-6

    @property
    def conv_lag(self) -> int:
        """The number of most recent tokens, counting the current one, that a convolution does not read."""
        return int(self.is_ponder)

    @property
    def conv_reach(self) -> int:
        """The number of earlier tokens that the convolutions need."""
        return self.conv_width - 1 + self.conv_lag

    @property
    def sizes(self) -> tuple[int, ...]:
        """The widths of the inner model, from its input to its output."""
        hidden = () if self.inner == "linear" else (self.expansion * self.head_dim,)
        return (self.head_dim, *hidden, self.head_dim)

    def rate_factor(self, width: int) -> float:
        """Returns the constant factor of learning rates in a model of this width."""
        factor = self.base_rate * self.rate_scale / self.head_dim
        return factor * _PONDER_WIDTH / width if self.is_ponder else factor
