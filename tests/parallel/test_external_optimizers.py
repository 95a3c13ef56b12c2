"""Transformations of optax compute the same numbers when parameters and state are sharded."""

import jax
import numpy as np
import optax
import optax.contrib
import pytest

from core import optimizers, slices
from core.batches import Field
from models import agreement_subjects as table
from models import transformer
from parallel import agreement, strategies
from parallel.partitioner import Partitioner

MODEL = transformer.Transformer(
    vocab_size=60,
    num_layers=2,
    embed_dim=16,
    mlp_dim=48,
    num_heads=4,
    num_kv_heads=2,
    vocab_multiple=4,
    dtype="float32",
)
EPS = 1e-4  # as in `agreement.MEASURED`: at 1e-8 an update with a gradient near zero depends on its last bits
OPTIMIZERS = {
    "adan": optimizers.from_optax(transformation=optax.adan(3e-3, eps=EPS)),
    "prodigy": optimizers.from_optax(transformation=optax.contrib.prodigy(estim_lr0=1e-3, eps=EPS)),
    "schedule_free": optimizers.from_optax(transformation=optax.contrib.schedule_free_adamw(3e-3, eps=EPS)),
    "sm3": optimizers.from_optax(transformation=optax.sm3(3e-3), by_layer=True),
    "lamb": optimizers.from_optax(transformation=optax.lamb(3e-3, eps=EPS), by_layer=True),
}
# In ulp of each leaf, in float32, after 3 steps. SM3 divides gradients by a root of their squares, with a fixed epsilon
# of 1e-8, and stores the quotient: where a gradient is nearly zero, the last bits of a sum are magnified.
MEASURED = {  # gradients, losses, params, opt_state
    "adan": (10, 1, 5, 13),
    "prodigy": (10, 1, 2, 8),
    "schedule_free": (10, 2, 9, 19),
    "sm3": (10, 3, 3, 250),
    "lamb": (10, 2, 2, 14),
}
BATCHES = list(table.random_batches(60, steps=3))


def program(optimizer, tables, slice_name):
    spec = {k: Field(a.shape, a.dtype, ("batch", "length")[: a.ndim]) for k, a in BATCHES[0].items()}
    bound = Partitioner(tables, slice=slices.get(slice_name), devices=jax.devices())
    return bound.program(MODEL, optimizer, spec, seed=7)


@pytest.mark.covers("M16")
@pytest.mark.slow  # 10 to 25 s each; tests/core/test_external_optimizers.py is quick
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_numbers_do_not_depend_on_the_pieces(name):
    one = agreement.run(program(OPTIMIZERS[name], strategies.data_parallel(), "v5e-1"), BATCHES)
    split = agreement.run(program(OPTIMIZERS[name], strategies.fsdp_tensor(tensor=2), "v4-8"), BATCHES)
    found = agreement.compare(split, one)
    parts = ("gradients", "losses", "params", "opt_state")
    limits = {"fresh": 0.0} | {p: agreement.HEADROOM * u for p, u in zip(parts, MEASURED[name], strict=True)}
    assert not {part: found[part] for part, ulp in limits.items() if found[part].ulp > ulp}
    moved = jax.tree.map(lambda new, old: np.any(new != old), one.params, one.fresh)
    assert all(jax.tree.leaves(moved))
    assert agreement.difference(jax.tree.map(lambda p: p * 1.01, one.params), one.params).ulp > limits["params"]
