"""One layer of the decoder: a mixer over positions, and a feed-forward.

B batch, T length, D embed.
"""

import haiku as hk
import jax
from jax.ad_checkpoint import checkpoint_name

from core import logical
from models import decoder_parts
from models.decoder_config import DecoderConfig, LayerKind
from models.layer_parts import Call, Earlier, Part

State = dict[str, object]  # of one layer, by the names of its parts


class Block(hk.Module):
    """One layer: mixer and feed-forward, each on a normalized copy of the residual stream."""

    def __init__(self, config: DecoderConfig, kind: LayerKind):
        """Makes the layer; the names of its parameters start with the kind's `module`."""
        super().__init__(kind.module)
        self.config = config
        self.kind = kind

    def __call__(self, x: jax.Array, call: Call) -> tuple[jax.Array, State, dict[str, object]]:
        """Runs the layer on the stream [B, T, D].

        Args:
          x: the stream.
          call: the other arguments; the state of `call.before` is that of the layer.

        Returns:
          The stream, the state by part, and the sums by part.
        """
        states: State = {}
        sums: dict[str, object] = {}
        x = logical.constrain(x, "batch", "residual_length", "embed")
        for slot, norm, parts in slots(self.config, self.kind):
            normed = decoder_parts.normalized(self.config, f"{norm}_norm", x)
            added = None
            for name, part in parts.items():
                y, state, found = part(normed, _of_part(call, name))
                added = y if added is None else added + y
                states |= {name: state} if jax.tree.leaves(state) else {}
                sums |= {name: found} if jax.tree.leaves(found) else {}
            if self.config.post_norm:
                added = decoder_parts.normalized(self.config, f"{norm}_post_norm", added)
            x = logical.constrain(x + added, "batch", "residual_length", "embed")
            x = checkpoint_name(x, "attended") if slot == "mixer" else x
        return x, states, sums


def slots(config: DecoderConfig, kind: LayerKind) -> list[tuple[str, str, dict[str, Part]]]:
    """Returns the slots of a layer: name, start of the names of its norms, and parts by name."""
    mixers = {name: decoder_parts.part(config, name, name) for name in kind.mixers}
    norm = "attention" if "attention" in mixers else "mixer"
    if kind.feed_forward == "none":
        return [("mixer", norm, mixers)]
    name = kind.feed_forward if kind.feed_forward in ("mlp", "experts") else "feed_forward"
    last = {name: decoder_parts.part(config, kind.feed_forward, name)}
    return [("mixer", norm, mixers), ("feed_forward", "mlp" if name == "experts" else name, last)]


def _of_part(call: Call, name: str) -> Call:
    if call.carried is not None:
        call = call._replace(carried=call.carried.get(name))
    if call.before is None:
        return call
    return call._replace(before=Earlier(call.before.state.get(name, ()), call.before.start))
