"""Optimizers compute the same numbers when parameters and state are sharded: those of core and those of optax."""

import jax
import numpy as np
import optax
import optax.contrib
import pytest

from core import optimizers, slices
from core.batches import Field
from models import agreement_subjects as table
from models.decoder import transformer
from parallel import strategies
from parallel.partitioner import Partitioner
from parallel.verify import agreement

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
RATE = optimizers.constant(3e-3)
EPS = 1e-4  # as in `agreement.MEASURED`: at 1e-8 an update with a gradient near zero depends on its last bits
OWN = {
    "adafactor": optimizers.adafactor(learning_rate=RATE, min_factored=8),
    "lion": optimizers.lion(learning_rate=RATE),
    "muon": optimizers.muon(learning_rate=RATE),
}
EXTERNAL = {
    "adan": optimizers.from_optax(transformation=optax.adan(3e-3, eps=EPS)),
    "prodigy": optimizers.from_optax(transformation=optax.contrib.prodigy(estim_lr0=1e-3, eps=EPS)),
    "schedule_free": optimizers.from_optax(transformation=optax.contrib.schedule_free_adamw(3e-3, eps=EPS)),
    "sm3": optimizers.from_optax(transformation=optax.sm3(3e-3), by_layer=True),
    "lamb": optimizers.from_optax(transformation=optax.lamb(3e-3, eps=EPS), by_layer=True),
}
# In ulp of each leaf, in float32, after 3 steps. Lion takes a sign, so a momentum that contains only rounding errors
# could reverse one of its updates (6e-3 at this rate); on these batches none is reversed. SM3 divides gradients by a
# root of their squares, with a fixed epsilon of 1e-8, and stores the quotient: where a gradient is nearly zero, the
# last bits of a sum are magnified.
MEASURED = {  # gradients, losses, params, opt_state
    "adafactor": (8, 1, 1, 7),
    "lion": (8, 1, 1, 9),
    "muon": (8, 4, 3, 7),
    "adan": (10, 1, 5, 13),
    "prodigy": (10, 1, 2, 8),
    "schedule_free": (10, 2, 9, 19),
    "sm3": (10, 3, 3, 250),
    "lamb": (10, 2, 2, 14),
}
BATCHES = list(table.random_batches(60, steps=3))


def trajectory(optimizer, tables, slice_name):
    spec = {k: Field(a.shape, a.dtype, ("batch", "length")[: a.ndim]) for k, a in BATCHES[0].items()}
    bound = Partitioner(tables, slice=slices.get(slice_name), devices=jax.devices())
    return agreement.run(bound.program(MODEL, optimizer, spec, seed=7), BATCHES)


def limits(name):
    parts = ("gradients", "losses", "params", "opt_state")
    return {"fresh": 0.0} | {p: agreement.HEADROOM * ulp for p, ulp in zip(parts, MEASURED[name], strict=True)}


def sharded_agrees_with(one, optimizer, name):
    """Compares the optimizer under fsdp_tensor on a v4-8 with its trajectory on one device."""
    found = agreement.compare(trajectory(optimizer, strategies.fsdp_tensor(tensor=2), "v4-8"), one)
    assert not {part: found[part] for part, ulp in limits(name).items() if found[part].ulp > ulp}


@pytest.mark.slow  # 10 to 25 s each; tests/core/test_external_optimizers.py is quick
@pytest.mark.covers("M16")
@pytest.mark.parametrize("name", EXTERNAL)
def test_optimizers_of_optax_do_not_depend_on_the_sharding(name):
    one = trajectory(EXTERNAL[name], strategies.data_parallel(), "v5e-1")
    sharded_agrees_with(one, EXTERNAL[name], name)
    moved = jax.tree.map(lambda new, old: np.any(new != old), one.params, one.fresh)
    assert all(jax.tree.leaves(moved))
    assert agreement.difference(jax.tree.map(lambda p: p * 1.01, one.params), one.params).ulp > limits(name)["params"]


@pytest.mark.slow
@pytest.mark.covers("M16")
@pytest.mark.parametrize("name", OWN)
def test_own_optimizers_do_not_depend_on_the_sharding(name):
    one = trajectory(OWN[name], strategies.data_parallel(), "v5e-1")
    sharded_agrees_with(one, OWN[name], name)
    leaves, structure = jax.tree.flatten(one.opt_state)
    for i, leaf in enumerate(leaves):
        for wrong in (np.zeros_like(leaf), leaf * 1.01 if leaf.dtype == np.float32 else leaf + 1):
            if not np.array_equal(wrong, leaf):  # factors that a matrix does not have are kept as a zero
                changed = jax.tree.unflatten(structure, [*leaves[:i], wrong, *leaves[i + 1 :]])
                assert agreement.difference(changed, one.opt_state).ulp > limits(name)["opt_state"]
