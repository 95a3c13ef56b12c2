"""One layer of the decoder: mixers over positions, and a feed-forward.

B batch, T length, D embed.
"""

import functools
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from core import logical
from models.decoder import layers
from models.decoder.config import DecoderConfig, LayerKind, slots
from models.decoder.parts import Call, Earlier

State = dict[str, object]  # states of one layer, by name of the part
Shared = dict[int, object]  # keys and values that later layers use, by number among `DecoderConfig.key_sources`


class Passing(NamedTuple):
    """What a layer passes to the next one in generation.

    Attributes:
      stream: the residual stream, [B, T, D].
      number: [B] int32, the number of the next layer; () if the decoder has no `layer_inputs`.
      shared: keys and values for later layers, by number among `DecoderConfig.key_sources`.
    """

    stream: jax.Array
    number: Any
    shared: Shared

    def with_places(self, config: DecoderConfig, kinds: Sequence[LayerKind], states: Sequence[State]) -> "Passing":
        """Returns a copy with placeholders for keys and values that layers of `kinds` compute for later layers."""
        rows, length = self.stream.shape[:2]
        places: Shared = {}
        for kind, state in zip(kinds, states, strict=True):
            for part in kind.mixers:
                if isinstance(part, layers.Attention) and part in config.key_sources:
                    before: Any = state[part.name]
                    number = config.key_sources.index(part)
                    places[number] = part.empty_shared(config, rows, length, before)
        return self._replace(shared={**places, **self.shared})


class Block(hk.Module):
    """One layer: its parts read the residual stream, and their outputs are added to it."""

    def __init__(self, config: DecoderConfig, kind: LayerKind):
        super().__init__(kind.module)
        self.config = config
        self.kind = kind

    def __call__(self, x: jax.Array, call: Call) -> tuple[jax.Array, State, dict[str, object], Shared]:
        """Runs the layer on the residual stream x [B, T, D].

        Returns:
          The stream; states and sums of parts, by name; and `call.shared` with the layer's own entries.
        """
        states: State = {}
        sums: dict[str, object] = {}
        shared: Shared = dict(call.shared)
        x = logical.constrain(x, "batch", "residual_length", "embed")
        for slot, norm, parts in slots(self.kind):
            is_before = self.config.post_norm != "only"
            normed = layers.normalized(self.config, f"{norm}_norm", x) if is_before else x
            outputs = []
            for name, part in parts.items():
                found = part(self.config, normed, _of_part(call, name)._replace(stream=x))
                outputs.append(found.y)
                states |= {name: found.state} if jax.tree.leaves(found.state) else {}
                sums |= {name: found.sums} if jax.tree.leaves(found.sums) else {}
                if found.shared:
                    shared[self.config.key_sources.index(part)] = found.shared
            added = functools.reduce(operator.add, outputs)
            if self.config.post_norm:
                added = layers.normalized(self.config, f"{norm}_post_norm", added)
            if self.config.residual_scale != 1.0:
                scaled = added * jnp.float32(self.config.residual_scale)  # the factor is not rounded
                added = scaled.astype(added.dtype)
            x = logical.constrain(x + added, "batch", "residual_length", "embed")
            x = checkpoint_name(x, "attended") if slot == "mixer" else x
        if self.config.layer_inputs is not None:
            assert call.layer_input is not None
            x += self.config.layer_inputs.added(self.config, x, call.layer_input)
            x = logical.constrain(x, "batch", "residual_length", "embed")
        if self.config.layer_scale:
            scale = jax.lax.stop_gradient(logical.param("layer_scale", (1,), (None,), jnp.ones, trainable=False))
            x = logical.constrain(x * scale.astype(x.dtype), "batch", "residual_length", "embed")
        return x, states, sums, shared


def _of_part(call: Call, name: str) -> Call:
    call = call._replace(name=name)
    if call.carried is not None:
        call = call._replace(carried=call.carried.get(name))
    if call.before is None:
        return call
    return call._replace(before=Earlier(call.before.state.get(name, ()), call.before.start))
