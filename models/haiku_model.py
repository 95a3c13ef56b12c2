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
      names: axes of the parameters of stock Haiku modules, by pattern (`core.logical.named`). Parameters that
        `core.logical.param` makes need no entry.
    """

    names: ClassVar[Mapping[str, Sequence[str | None] | ParamSpec]] = {}

    @abc.abstractmethod
    def sums(self, batch: Batch, *, is_training: bool) -> LossOutput:
        """Returns the loss as sums over the batch, never means; runs inside `hk.transform`."""

    def init(self, rng: jax.Array, batch: Batch) -> Params:
        """Returns initial parameters. Raises UserError as `core.logical.named`."""
        return self._transformed(is_training=False).init(rng, batch)

    def init_carry(self, batch: Batch) -> Carry:
        """Returns the empty carry ()."""
        del batch
        return ()

    def loss(
        self, params: Params, carry: Carry, rng: jax.Array, batch: Batch, *, is_training: bool
    ) -> tuple[Carry, LossOutput]:
        """Returns the carry and `sums`.

        Args:
          params: the parameters.
          carry: returned as it is.
          rng: the key of the step.
          batch: {field: [B, ...]}.
          is_training: passed to `sums`.
        """
        return carry, self._transformed(is_training=is_training).apply(params, rng, batch)

    def _transformed(self, **options: Any) -> hk.Transformed:
        return hk.transform(logical.named(functools.partial(self.sums, **options), self.names))
