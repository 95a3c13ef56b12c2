"""Optimizers that look at whole matrices compute the same numbers when the matrices are in pieces."""

import jax
import numpy as np
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
RATE = optimizers.constant(3e-3)
OPTIMIZERS = {
    "adafactor": optimizers.adafactor(learning_rate=RATE, min_factored=8),
    "lion": optimizers.lion(learning_rate=RATE),
    "muon": optimizers.muon(learning_rate=RATE),
}
# In ulp of each leaf, in float32, after 3 steps. Lion takes a sign, so a momentum that is all rounding could turn one
# of its updates around (6e-3 at this rate); on these batches none is.
MEASURED = {  # gradients, losses, params, opt_state
    "adafactor": (8, 1, 1, 7),
    "lion": (8, 1, 1, 9),
    "muon": (8, 4, 3, 7),
}
BATCHES = list(table.random_batches(60, steps=3))


def trajectory(optimizer, tables, slice_name):
    spec = {k: Field(a.shape, a.dtype, ("batch", "length")[: a.ndim]) for k, a in BATCHES[0].items()}
    bound = Partitioner(tables, slice=slices.get(slice_name), devices=jax.devices())
    return agreement.run(bound.program(MODEL, optimizer, spec, seed=7), BATCHES)


def limits(name):
    parts = ("gradients", "losses", "params", "opt_state")
    return {"fresh": 0.0} | {p: agreement.HEADROOM * ulp for p, ulp in zip(parts, MEASURED[name], strict=True)}


@pytest.mark.slow
@pytest.mark.covers("M16")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_numbers_do_not_depend_on_the_pieces(name):
    one = trajectory(OPTIMIZERS[name], strategies.data_parallel(), "v5e-1")
    split = trajectory(OPTIMIZERS[name], strategies.fsdp_tensor(tensor=2), "v4-8")
    found = agreement.compare(split, one)
    assert not {part: found[part] for part, ulp in limits(name).items() if found[part].ulp > ulp}
    leaves, structure = jax.tree.flatten(one.opt_state)
    for i, leaf in enumerate(leaves):
        for wrong in (np.zeros_like(leaf), leaf * 1.01 if leaf.dtype == np.float32 else leaf + 1):
            if not np.array_equal(wrong, leaf):  # factors that a matrix does not have are kept as a zero
                changed = jax.tree.unflatten(structure, [*leaves[:i], wrong, *leaves[i + 1 :]])
                assert agreement.difference(changed, one.opt_state).ulp > limits(name)["opt_state"]
