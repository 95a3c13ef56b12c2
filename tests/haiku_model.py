"""A model for tests that is one Haiku function."""

import haiku as hk


class HaikuModel:
    """A model whose loss is the Haiku function `_loss(batch) -> LossOutput`, without a carry.

    Attributes:
      draws: whether it draws random bits; otherwise it gets no key.
    """

    draws = False

    def init(self, rng, batch):
        return hk.transform(self._loss).init(rng, batch)

    def init_carry(self, batch):
        return ()

    def loss(self, params, carry, rng, batch, *, is_training):
        return carry, hk.transform(self._loss).apply(params, rng if self.draws else None, batch)
