"""How a gradient becomes a direction. What stands around every rule, and its arguments: `core.optimizers.base`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from core import parameters
from core.optimizers.base import trained_by
from core.types import Params

MATRICES: Mapping[str, str] = MappingProxyType(  # of models.transformer; the letters: see `muon`
    {
        "layers/*/query": "lioo",
        "layers/*/key": "lioo",
        "layers/*/value": "lioo",
        "layers/*/output": "liio",
        "layers/*/gate": "lio",
        "layers/*/up": "lio",
        "layers/*/down": "lio",
    }
)


@trained_by(weight_decay=0.1)
def adamw(*, b1: float = 0.9, b2: float = 0.95, eps: float = 1e-8) -> optax.GradientTransformation:
    """AdamW (Loshchilov & Hutter 2019, algorithm 2) behind a clip of the global gradient norm.

    Args:
      b1: decay of the first moment.
      b2: decay of the second moment.
      eps: added to the root of the second moment.
    """
    return optax.scale_by_adam(b1=b1, b2=b2, eps=eps)


@trained_by(weight_decay=0.0)
def adafactor(
    *,
    decay_rate: float = 0.8,
    clip_update: float = 1.0,
    relative: bool = True,
    min_factored: int = 128,
    stacked: Sequence[str] = ("layers/*",),
    matrices: Mapping[str, str] = MATRICES,
) -> optax.GradientTransformation:
    """Adafactor (Shazeer & Stern 2018, algorithms 4 and 5) without momentum: a row and a column in place of a moment.

    Args:
      decay_rate: the second moment of step t decays by 1 - t^-decay_rate.
      clip_update: largest root mean square of an update, before the learning rate.
      relative: multiply an update by the root mean square of its parameter; the learning rate is then a fraction of
        it, about 1e-2.
      min_factored: the moment of a matrix with at least so many rows and columns is factored; that of a parameter that
        is in no pattern of `matrices`, over its two largest dimensions where both are of at least this size.
      stacked: patterns of parameters with a leading dimension of layers; each layer is a parameter of its own.
      matrices: by pattern, which dimensions are rows and which columns, as for `muon`: attention weights are matrices
        with their heads joined, however narrow a head is. Of these default names, a parameter of a model of your own
        with another number of dimensions is in no pattern.

    Raises:
      ValueError: letters that make no matrix; at `init`, a parameter with another number of dimensions than `matrices`
        gives it.
    """
    parameters.check_letters(matrices)
    rule = optax.chain(
        optax.scale_by_factored_rms(decay_rate=decay_rate, min_dim_size_to_factor=min_factored),
        optax.clip_by_block_rms(clip_update),
        optax.scale_by_param_block_rms() if relative else optax.identity(),
    )
    joined = parameters.as_matrices(rule, parameters.of_one_layer(matrices), strict=matrices is not MATRICES)
    return parameters.by_layer(joined, lambda name: parameters.matches_any(name, tuple(stacked)))


@trained_by(weight_decay=1.0)
def lion(*, b1: float = 0.9, b2: float = 0.99) -> optax.GradientTransformation:
    """Lion (Chen et al. 2023, algorithm 2): the sign of an interpolated momentum; one moment in place of two.

    The learning rate is three to ten times smaller than for `adamw`, the decay three to ten times larger.

    Args:
      b1: weight of the momentum in the update.
      b2: decay of the momentum.
    """
    return optax.scale_by_lion(b1=b1, b2=b2)


@trained_by(weight_decay=0.1)
def muon(
    *,
    momentum: float = 0.95,
    rms: float = 0.2,
    b1: float = 0.9,
    b2: float = 0.95,
    eps: float = 1e-8,
    matrices: Mapping[str, str] = MATRICES,
) -> optax.GradientTransformation:
    """Muon (Jordan 2024) for the matrices of the layers, each layer by itself; AdamW for everything else.

    The momentum of a matrix [rows, columns] is made nearly orthogonal by five Newton-Schulz steps, and scaled so that
    learning rate and decay are those of AdamW (Liu et al. 2025, eq. 4).

    Args:
      momentum: decay of Muon's moment (Nesterov's form).
      rms: root mean square of an update before the learning rate.
      b1, b2, eps: of AdamW.
      matrices: by pattern, a letter for each dimension: l (layer: a matrix each; layers take turns, so that one at a
        time is gathered), i (inputs: rows), o (outputs: columns). Several i or o are one side together: query
        [l, i, o, o] is a matrix [embed, heads x head_dim].

    Raises:
      ValueError: letters that make no matrix; at `init`, a parameter with another number of dimensions, or no matrix.
    """
    parameters.check_letters(matrices)
    layer = parameters.of_one_layer(matrices)
    of_layer = optax.chain(
        optax.contrib.scale_by_muon(
            beta=momentum, weight_dimension_numbers=lambda p: parameters.dimension_numbers(p, layer)
        ),
        parameters.scale_to_rms(rms, layer),
    )
    orthogonal = parameters.by_layer(
        of_layer, lambda name: (parameters.letters_of(name, matrices) or "").startswith("l"), in_turn=True
    )
    return optax.partition(
        {"matrix": orthogonal, "other": optax.scale_by_adam(b1=b1, b2=b2, eps=eps)},
        lambda params: parameters.matrix_labels(params, matrices),
    )


class Atan2State(NamedTuple):
    """What `adam_atan2` keeps."""

    count: jax.Array  # type: ignore[assignment]  # [], int32, steps done; hides tuple.count
    mu: Params  # first moments
    nu: Params  # second moments


@trained_by(weight_decay=0.1, clip_norm=None, no_decay=())
def adam_atan2(*, b1: float = 0.9, b2: float = 0.95) -> optax.GradientTransformation:
    """Adam with an arctangent in place of the quotient (Everett et al. 2024): no epsilon, and no scale of the gradient.

    The first moment's bias is corrected outside the arctangent, as in the adam-atan2 package that the Tiny Recursive
    Model uses; there is no constant in it. A steady gradient gives pi/4, not 1. Everything is decayed, nothing clipped.

        direction = atan2(m, sqrt(v / (1 - b2^t))) / (1 - b1^t)

    Args:
      b1: decay of the first moment.
      b2: decay of the second moment.
    """

    def init(params: Params) -> Atan2State:
        zeros = jax.tree.map(jnp.zeros_like, params)
        return Atan2State(jnp.zeros((), jnp.int32), zeros, zeros)

    def update(grads: Params, state: Atan2State, params: Any = None) -> tuple[Params, Atan2State]:
        del params
        count = state.count + 1
        mu = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, state.mu, grads)
        nu = jax.tree.map(lambda v, g: b2 * v + (1 - b2) * g**2, state.nu, grads)
        corrected = jnp.sqrt(1 - b2**count)
        direction = jax.tree.map(lambda m, v: jnp.arctan2(m, jnp.sqrt(v) / corrected) / (1 - b1**count), mu, nu)
        return direction, Atan2State(count, mu, nu)

    return optax.GradientTransformation(init, update)
