"""Base class of models that are one Haiku function of the batch and carry no state from step to step."""

import abc
import functools
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import haiku as hk
import jax

from core import logical
from core.parameters import ParamSpec
from core.types import Batch, Carry, LossOutput, Params


class HaikuModel(abc.ABC):
    """A `core.types.Model` whose subclass defines `sums`; usually a frozen dataclass.

    Attributes:
      names: logical axes of the parameters of stock Haiku modules, by pattern (`core.logical.named`).
    """

    names: ClassVar[Mapping[str, Sequence[str | None] | ParamSpec]] = {}

    @abc.abstractmethod
    def sums(self, batch: Batch, *, is_training: bool) -> LossOutput:
        """Returns the loss as sums over the batch, not means; called inside `hk.transform`."""

    def init(self, rng: jax.Array, batch: Batch) -> Params:
        """Returns initial parameters."""
        return self._transformed(is_training=False).init(rng, batch)

    def init_carry(self, batch: Batch) -> Carry:
        """Returns the empty carry ()."""
        del batch
        return ()

    def loss(
        self, params: Params, carry: Carry, rng: jax.Array, batch: Batch, *, is_training: bool
    ) -> tuple[Carry, LossOutput]:
        """Returns the carry unchanged, and `sums`."""
        return carry, self._transformed(is_training=is_training).apply(params, rng, batch)

    def _transformed(self, **options: Any) -> hk.Transformed:
        return hk.transform(logical.named(functools.partial(self.sums, **options), self.names))
