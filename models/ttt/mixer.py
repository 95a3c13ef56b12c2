"""A layer with test-time training as the mixer of a decoder's layers (TTT-LM)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp

from core import logical
from core.types import LossOutput, WeightedSum
from models.decoder.attention import ring_attention
from models.decoder.parts import Call, Decoder, Part, Result, Work
from models.ttt import inner_loop, layer
from models.ttt.config import TTTConfig
from models.ttt.inner_loop import Linear

_ERRORS = ("initial", "step_0", "step_1")  # see `layer.Outcome`
_NOT_BEGUN = -1  # place of a row whose state does not have the initial weights yet


class _Weights(hk.Module):
    """Makes the layer's parameters in a Haiku module of their own, because other mixers use the same names."""

    def __call__(self, decoder: Decoder, config: TTTConfig) -> layer.Weights:
        fan_in = 2 * decoder.num_layers * config.num_heads * config.head_dim
        init = hk.initializers.TruncatedNormal(fan_in**-0.5)
        return layer.make(config, decoder.embed_dim, dtype=decoder.dtype, output_init=init)


@dataclasses.dataclass(frozen=True)
class TTTMixer(Part):
    """A mixer with test-time training.

    Attributes:
      config: the settings of the layer.
    """

    config: TTTConfig

    is_recurrent = True

    @property
    def name(self) -> str:  # type: ignore[override]
        """The name of its Haiku module."""
        return f"ttt_{self.config.inner}"

    def __call__(self, decoder: Decoder, x: jax.Array, call: Call) -> Result:
        weights = _Weights(call.name)(decoder, self.config)
        if call.before is not None:
            before = self._begun(weights, call.before.state)
            y, state = layer.extend(self.config, weights, x, before, call.real(x.shape[1]))
            return Result(y, state)
        # The inner loop reads positions in order, and all of them.
        x = ring_attention.arrange(x, "batch", "length", "embed", back=True)
        segments = ring_attention.arrange(call.side.segment_ids, "batch", "length", back=True)
        x = logical.constrain(x, "batch", None, "embed")
        found = layer.run(self.config, weights, x, segments)
        y = ring_attention.arrange(found.output, "batch", "length", "embed")
        return Result(y, (), () if call.weights is None else self._sums(found.errors, segments))

    def work(self, decoder: Decoder, length: int) -> Work:
        return Work(*layer.multiplications(self.config, decoder.embed_dim))

    def empty_state(self, decoder: Decoder, rows: int, length: int) -> layer.State:
        """Returns states with weights of zero; rows get the learned initial weights with their first token."""
        c = self.config
        pairs = zip(c.sizes, c.sizes[1:], strict=False)
        heads = (rows, c.num_heads)
        fast = tuple(Linear(jnp.zeros((*heads, n, out)), jnp.zeros((*heads, out))) for n, out in pairs)
        memory = inner_loop.Memory(fast, jax.tree.map(jnp.zeros_like, fast), None)
        recent = jnp.zeros((rows, c.conv_reach, c.num_heads, c.head_dim))
        return layer.State(memory, recent, None, jnp.full((rows,), _NOT_BEGUN, jnp.int32))

    def laid_out(self, state: layer.State) -> layer.State:
        def by_head(a: jax.Array) -> jax.Array:
            return logical.constrain(a, "batch", "heads", *(None,) * (a.ndim - 2))

        return layer.State(
            jax.tree.map(by_head, state.memory),
            logical.constrain(state.recent, "batch", None, "heads", "head_dim"),
            None,
            logical.constrain(state.place, "batch"),
        )

    def empty_sums(self) -> dict[str, jax.Array]:
        return {name: jnp.zeros(()) for name in (*_ERRORS, "counted")}

    def finish(self, found: LossOutput, sums: Any, *, num_layers: int, is_training: bool) -> LossOutput:
        """Returns the loss with the reconstruction losses as metrics."""
        del num_layers, is_training
        metrics = {f"{self.name}/{name}": WeightedSum(sums[name], sums["counted"]) for name in _ERRORS}
        return found._replace(metrics={**found.metrics, **metrics})

    def shrink(self, multiples: Mapping[str, int]) -> TTTMixer:
        return TTTMixer(self.config.shrink(multiples))

    def settings(self, decoder: Decoder) -> dict[str, Any]:
        return {f"{self.name}.{name}": value for name, value in dataclasses.asdict(self.config).items()}

    def _begun(self, weights: layer.Weights, state: layer.State) -> layer.State:
        first = layer.empty(self.config, weights, state.place.shape[0])
        is_new = state.place == _NOT_BEGUN
        return jax.tree.map(lambda a, b: jnp.where(is_new.reshape(-1, *(1,) * (a.ndim - 1)), a, b), first, state)

    def _sums(self, errors: jax.Array, segments: jax.Array) -> dict[str, jax.Array]:
        size, (count, length) = self.config.mini_batch, (errors.shape[2], segments.shape[1])
        last = [min((n + 1) * size, length) - 1 for n in range(count)]
        counted = (segments[:, jnp.asarray(last)] > 0).astype(jnp.float32)  # [B, N]
        totals = jnp.einsum("bhne,bn->e", errors, counted)
        found = dict(zip(_ERRORS, totals, strict=True))
        return {**found, "counted": jnp.sum(counted) * self.config.num_heads}
