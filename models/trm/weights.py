"""The parameters of the Tiny Recursive Model: shapes, logical axes and initialization."""

import functools
import math
from collections.abc import Mapping
from typing import NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp

from core import logical
from models.trm.config import Config
from models.trm.net import States

logical.declare("puzzles", "rows of a table with one for each puzzle", mesh_axis="fsdp")

_TRUNCATED_STDDEV = 0.87962566103423978  # of a standard normal distribution truncated at +-2


class Weights(NamedTuple):
    """The parameters.

    D embed, V vocab as stored, T positions with prefix, N puzzles as stored.
    """

    embedding: jax.Array  # [V, D], float32: cast after the lookup
    unembedding: jax.Array  # [D, V]
    halt_head: jax.Array  # [D, 2]
    halt_bias: jax.Array  # [2]
    starts: States  # z_h [1, 1, D], each z_l [1, 1, D]
    positions: jax.Array | None  # [T, D]
    puzzle_table: jax.Array | None  # [N, puzzle_dim], float32: cast after the lookup
    layers: tuple[Mapping[str, jax.Array], ...]


def make(model: Config, length: int) -> Weights:
    """Creates or reads the parameters inside `hk.transform`; `length` is T, the positions with the prefix."""
    d, v, dtype = model.embed_dim, model.stored_vocab_size, model.dtype
    rows, columns = (_entries(model, axis=axis) for axis in (0, 1))
    bias = hk.initializers.Constant(model.halt_bias)
    return Weights(
        embedding=logical.param("embedding", (v, d), ("vocab", "embed"), rows, as_stored=True),
        unembedding=logical.param("unembedding", (d, v), ("embed", "vocab"), columns, compute_dtype=dtype),
        halt_head=logical.param("halt_head", (d, 2), ("embed", None), jnp.zeros, compute_dtype=dtype),
        halt_bias=logical.param("halt_bias", (2,), (None,), bias, compute_dtype=dtype),
        starts=_starts(model),
        positions=_positions(model, length),
        puzzle_table=_puzzle_table(model),
        layers=_layers(model, length),
    )


def truncated_normal(fan_in: int) -> hk.initializers.TruncatedNormal:
    """Returns a truncated normal initializer with variance 1 / fan_in."""
    return hk.initializers.TruncatedNormal(1 / (math.sqrt(fan_in) * _TRUNCATED_STDDEV))


def _entries(model: Config, *, axis: int):
    def init(shape, dtype) -> jax.Array:
        exists = jnp.arange(shape[axis]) < model.vocab_size
        drawn = truncated_normal(model.embed_dim)(shape, dtype)
        return jnp.where(exists[:, None] if axis == 0 else exists, drawn, 0.0)

    return init


def _starts(model: Config) -> States:
    d, count, dtype = model.embed_dim, model.num_latents, model.dtype
    fixed = functools.partial(logical.param, init=truncated_normal(1), trainable=False, compute_dtype=dtype)
    z_h = fixed("h_init", (d,), ("embed",))
    if not count:
        return States(jax.lax.stop_gradient(z_h)[None, None], ())
    z_l = fixed("l_init", (count, d), (None, "embed"))
    z_h, z_l = jax.lax.stop_gradient((z_h, z_l))
    return States(z_h[None, None], tuple(z_l[i][None, None] for i in range(count)))


def _positions(model: Config, length: int) -> jax.Array | None:
    if model.positions != "learned":
        return None
    d, axes = model.embed_dim, (None, "embed")
    return logical.param(
        "positions", (length, d), axes, truncated_normal(d), kind="embedding", compute_dtype=model.dtype
    )


def _puzzle_table(model: Config) -> jax.Array | None:
    if not model.puzzle_width:
        return None
    stored = math.ceil(model.num_puzzles / model.puzzle_multiple) * model.puzzle_multiple
    return logical.param("puzzle_table", (stored, model.puzzle_width), ("puzzles", None), jnp.zeros, kind="table")


def _layers(model: Config, length: int) -> tuple[Mapping[str, jax.Array], ...]:
    d, f, h, num = model.embed_dim, model.mlp_width(model.embed_dim), model.num_heads, model.num_layers

    def matrix(name: str, shape: tuple, axes: tuple, *, fan_in: int, in_dims: int = 1) -> jax.Array:
        # The axis is not named `layers`: the same blocks run repeatedly, so a pipeline cannot split them into stages.
        make = functools.partial(logical.param, in_dims=in_dims, stacked=1, compute_dtype=model.dtype)
        return make(name, (num, *shape), (None, *axes), truncated_normal(fan_in))

    with hk.name_scope("layers"), hk.name_scope("block"):
        stacked = {
            "gate_up": matrix("gate_up", (d, 2, f), ("embed", None, "mlp"), fan_in=d),
            "down": matrix("down", (f, d), ("mlp", "embed"), fan_in=f),
        }
        if model.mixer == "attention":
            k = d // h
            stacked["qkv"] = matrix("qkv", (d, 3, h, k), ("embed", None, "heads", "head_dim"), fan_in=d)
            stacked["output"] = matrix("output", (h, k, d), ("heads", "head_dim", "embed"), fan_in=d, in_dims=2)
        else:
            ft = model.mlp_width(length)
            stacked["token_gate_up"] = matrix("token_gate_up", (length, 2, ft), (None, None, "mlp"), fan_in=length)
            stacked["token_down"] = matrix("token_down", (ft, length), ("mlp", None), fan_in=ft)
    for prefix in ("", "token_") if model.mixer == "mlp" else ("",):
        both = stacked.pop(f"{prefix}gate_up")  # stored together; two products are faster than one that is sliced
        stacked[f"{prefix}gate"], stacked[f"{prefix}up"] = both[:, :, 0], both[:, :, 1]
    return tuple({name: w[i] for name, w in stacked.items()} for i in range(num))
