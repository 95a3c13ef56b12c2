"""A hierarchical planner that makes plans from finished chunks of a row, which later positions read.

    s_j = mean of chunk j;   repeated:  l = Low(l + h + s),  h = High(h + l);   x_t += sigmoid(g . x_t) W (h + l)_j(t)

Two stacks of causal layers run over the summaries s_j, one per chunk of c positions. The low stack runs several times
for each step of the high stack (Wang et al. 2025, "Hierarchical Reasoning Model"). Gradients flow only through the last
step of both. Position t reads the plan of the chunk before its own, j(t) = t // c - 1, if the plan belongs to its
segment.

B batch, T length, D embed, c positions per chunk, n chunks.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp

from core import logical
from core.errors import UserError
from models.decoder import layers, rotary
from models.decoder.block import Block
from models.decoder.config import DecoderConfig
from models.decoder.parts import Call, Side
from models.decoder.planner_config import Planner


class State(NamedTuple):
    """The state of generation: the sum of the embedded tokens of each chunk; [rows, n, D] float32."""

    sums: jax.Array


def empty_state(settings: Planner, rows: int, length: int, embed_dim: int) -> State:
    """Returns the state before the first slot.

    Args:
      length: largest number of slots of a row.
    """
    return State(jnp.zeros((rows, -(-length // settings.chunk), embed_dim)))


class Plans(hk.Module):
    """The Haiku module of a decoder's planner."""

    def __init__(self, config: DecoderConfig, settings: Planner):
        super().__init__("planner")
        self.settings = settings
        parts = (part for kind in config.layer_kinds for part in kind.mixers)
        usual = next((part for part in parts if isinstance(part, layers.Heads)), layers.Attention())
        self.config = dataclasses.replace(
            config,
            num_layers=1,
            mixer=layers.Attention(qk_norm=usual.qk_norm, scale=usual.scale, softcap=usual.softcap),
            attention="auto",
            feed_forward=layers.Mlp(),
            first_feed_forward=(),
            first_mixer=(),
            positions="rotary",
            lora=None,
            planner=None,
        )

    def __call__(self, x: jax.Array, segment_ids: jax.Array) -> jax.Array:
        """Returns the vectors [B, T, D] to add to the embedded tokens `x` [B, T, D], given their segments [B, T]."""
        check_layout()
        c, length = self.settings.chunk, x.shape[1]
        extra = -length % c
        tokens = jnp.pad(x.astype(jnp.float32), ((0, 0), (0, extra), (0, 0))).reshape(len(x), -1, c, x.shape[2])
        ids = jnp.pad(segment_ids, ((0, 0), (0, extra))).reshape(len(x), -1, c)
        counts = ids == ids[:, :, -1:]
        sums = jnp.sum(jnp.where(counts[..., None], tokens, 0), axis=2)
        plans = self._plans(sums / jnp.sum(counts, axis=2)[..., None], ids[:, :, -1])
        chunk = jnp.broadcast_to(jnp.arange(length) // c - 1, segment_ids.shape)
        return self._read(x, plans, chunk, ids[:, :, -1], segment_ids)

    def extended(self, x: jax.Array, state: State, places: jax.Array) -> tuple[jax.Array, State]:
        """Returns the vectors to add to embedded tokens x [B, T, D] of new slots, and the new state.

        Rows have one segment each; `places` [B, T] are the slots' positions, negative for empty slots.
        """
        c, count = self.settings.chunk, state.sums.shape[1]
        of = (places[..., None] // c == jnp.arange(count)) & (places >= 0)[..., None]  # [B, T, n]
        sums = state.sums + jnp.einsum("btn,btd->bnd", of.astype(jnp.float32), x.astype(jnp.float32))
        ones = jnp.ones((len(x), count), jnp.int32)
        plans = self._plans(sums / c, ones)  # causal, so that plans of unfinished chunks do not change others
        y = self._read(x, plans, places // c - 1, ones, jnp.ones(places.shape, jnp.int32))
        return y, State(sums)

    def _plans(self, summaries: jax.Array, segment_ids: jax.Array) -> jax.Array:
        """Returns the plan of each chunk, [B, n, D], from summaries [B, n, D] of chunks in segments [B, n]."""
        config, settings = self.config, self.settings
        positions = jnp.broadcast_to(jnp.arange(summaries.shape[1]), segment_ids.shape)
        make = functools.partial(rotary.tables, positions, theta=config.rope_theta)
        turns = tuple(make(one.width or config.head_width, length=one.length) for one in config.rotations)
        call = Call(Side(segment_ids, turns))
        kind = config.layer_kinds[0]
        low, high = (
            [Block(config, kind._replace(module=f"{name}_{i}")) for i in range(settings.layers)]
            for name in ("low", "high")
        )

        def run(blocks: list[Block], x: jax.Array) -> jax.Array:
            for block in blocks:
                x = block(x, call)[0]
            return x

        def step(state: tuple[jax.Array, jax.Array], low_steps: int) -> tuple[jax.Array, jax.Array]:
            h, plan = state
            for _ in range(low_steps):
                plan = run(low, plan + h + given)
            return run(high, h + plan), plan

        given = summaries.astype(config.dtype)
        h, plan = jnp.zeros_like(given), jnp.zeros_like(given)
        for _ in range(settings.high_steps - 1):
            h, plan = jax.lax.stop_gradient(step((h, plan), settings.low_steps))
        for _ in range(settings.low_steps - 1):
            plan = jax.lax.stop_gradient(run(low, plan + h + given))
        h, plan = step((h, plan), 1)
        return h + plan

    def _read(
        self, x: jax.Array, plans: jax.Array, chunk: jax.Array, of_plans: jax.Array, segment_ids: jax.Array
    ) -> jax.Array:
        """Returns the gated plan of `chunk` [B, T] for each position; 0 if that is negative or of another segment."""
        d = x.shape[-1]
        at = jnp.maximum(chunk, 0)
        is_there = (chunk >= 0) & (jnp.take_along_axis(of_plans, at, axis=1) == segment_ids)
        options: dict[str, Any] = {"compute_dtype": self.config.dtype}
        init = hk.initializers.TruncatedNormal(d**-0.5)
        output = logical.param("output", (d, d), (None, "embed"), init, **options)
        gate = logical.param("gate", (d,), ("norm",), jnp.zeros, kind="bias", **options)
        read = jnp.take_along_axis(plans @ output, at[..., None], axis=1)
        opened = jax.nn.sigmoid((x @ gate).astype(jnp.float32))[..., None].astype(x.dtype)
        return jnp.where(is_there[..., None], opened * read, 0)


def flops_per_token(settings: Planner, config: DecoderConfig) -> float:
    """Returns training FLOPs per token, without those of attention among summaries.

    For each chunk and matrix entry, a step of a layer takes 6 FLOPs, or 2 without gradient.
    """
    layer = sum(part.work(config, 0).matrices for part in (layers.Attention(), layers.Mlp()))
    low, high = settings.high_steps * settings.low_steps, settings.high_steps
    products = 2 * (low + high) * settings.layers + 4 * 2 * settings.layers
    return (products * layer + 6 * config.embed_dim**2) / settings.chunk


def check_layout() -> None:
    """Raises UserError if the strategy being traced shards positions."""
    for name in ("length", "residual_length"):
        spec = logical.activation_spec(name)
        if spec is not None and logical.shards(spec[0], jax.sharding.get_abstract_mesh().shape) > 1:
            raise UserError(
                f"planner: this strategy shards positions ({name}), and a plan is of whole chunks: choose one that "
                "does not, such as fsdp or fsdp_tensor"
            )
