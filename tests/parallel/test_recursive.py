"""The recursive model sharded over chips: its numbers, the layout of carry and table, and an exact resume."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from core import step
from core.checkpoints.store import Checkpoints
from models.agreement_subjects import batches_for
from models.trm.agreement_subject import MODEL as RECURSIVE
from parallel import strategies
from parallel.verify import agreement
from parallel.verify.agreement import EXAMPLES, ONE_DEVICE, Example
from tests.lab.subjects import bind

BATCHES = list(batches_for(RECURSIVE, steps=20))
QUICK_STEPS = 8  # rows halt after at most 3
MIXING = dataclasses.replace(RECURSIVE, mixer="mlp")
SHIPPED = [name for name, example in EXAMPLES.items() if not example.strategy.pipeline]  # a pipeline cannot hold it
CASES = {
    "8 devices": (RECURSIVE, Example("v4-16", strategies.hsdp(data=2))),  # rows over both axes, weights over one
    "mlp": (MIXING, Example("v4-8", strategies.fsdp_tensor(tensor=2))),  # hidden units over one, rows over the other
    **{name: (RECURSIVE, EXAMPLES[name]) for name in SHIPPED},
    **{f"mlp {name}": (MIXING, EXAMPLES[name]) for name in SHIPPED},
}
QUICK = ("8 devices",)
# The most that any of these was apart, in ulp: gradients, losses, parameters, optimizer state. The decoder's are in
# `agreement.MEASURED`; a first moment of the mlp over positions, of many small gradients, is further apart than any.
MEASURED = {"attention": (18, 3, 7, 22), "mlp": (26, 3, 15, 73)}


@functools.cache
def one_device(model, steps):
    return agreement.run(bind(model, ONE_DEVICE, BATCHES[0]), BATCHES[:steps])


@pytest.mark.covers("M06", "M07", "M16", "N12")
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in QUICK)) for n in CASES])
def test_numbers_do_not_depend_on_the_strategy(name):
    """Rows halt, take new puzzles and explore meanwhile; puzzles recur on several chips; all of it in float32."""
    (model, example), steps = CASES[name], QUICK_STEPS if name in QUICK else len(BATCHES)
    found = agreement.compare(
        agreement.run(bind(model, example, BATCHES[0]), BATCHES[:steps]), one_device(model, steps)
    )
    limits = agreement.limits(MEASURED[model.mixer])
    assert not {part: apart for part, apart in found.items() if apart.ulp > limits[part]}


def test_a_pipeline_cannot_hold_a_network_that_is_applied_again_and_again():
    with pytest.raises(
        ValueError, match="strategy 'pipeline' on v4-32:\n  gpipe: the model has no layer stack to split"
    ):
        bind(RECURSIVE, Example("v4-32", strategies.pipeline()), BATCHES[0])


def test_rows_that_carry_states_cannot_be_cut_into_microbatches():
    with pytest.raises(ValueError, match="accum_steps = 2: a model whose carry belongs to the rows of a batch cannot"):
        bind(RECURSIVE, EXAMPLES["fsdp"], BATCHES[0], accum_steps=2)


def test_a_batch_that_does_not_divide_is_refused():
    odd = {k: a[:12] for k, a in BATCHES[0].items()}
    with pytest.raises(ValueError, match="batch_size = 12 does not divide over 16 groups of chips"):
        bind(RECURSIVE, EXAMPLES["fsdp"], odd)


def test_carry_and_table_are_split():
    program = bind(RECURSIVE, EXAMPLES["fsdp"], BATCHES[0])
    state = program.abstract_state
    assert state.carry.trained.ndim == 0
    for leaf in jax.tree.leaves(state.carry._replace(trained=())):
        assert leaf.sharding.shard_shape(leaf.shape) == (leaf.shape[0] // 16, *leaf.shape[1:])
    table = state.params["~"]["puzzle_table"]
    assert table.sharding.shard_shape(table.shape) == (3, 64)
    text = program.lower_train_step().compile().as_text()
    gathers = [line.split(" all-gather(")[0] for line in text.splitlines() if " all-gather(" in line]
    assert gathers
    assert not [shape for shape in gathers if "f32[48,64]" in shape]  # rows travel, never the table


@pytest.mark.slow  # tests/launch/test_puzzle_resume.py has a quick run that resumes
@pytest.mark.covers("C06", "C07")
def test_a_resume_is_exact_and_may_change_the_strategy(tmp_path):
    program = bind(RECURSIVE, Example("v4-8", strategies.fsdp()), BATCHES[0])
    state, losses = program.init(), []
    checkpoints = Checkpoints(str(tmp_path), keep=1)
    for number, batch in enumerate(BATCHES[:6]):
        if number == 3:
            checkpoints.save(3, state=state, data={}, meta={})
            checkpoints.wait()
        state, metrics = program.train_step(state, program.put(batch))
        losses.append(float(metrics["loss"]))
    again, _, _ = checkpoints.restore(3, program.abstract_state)
    assert isinstance(again, step.TrainState)
    assert len(np.unique(jax.device_get(again.carry.steps))) > 1  # in the middle of puzzles
    repeated = []
    for batch in BATCHES[3:6]:
        again, metrics = program.train_step(again, program.put(batch))
        repeated.append(float(metrics["loss"]))
    assert repeated == losses[3:]
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(again), jax.device_get(state))
    other = bind(RECURSIVE, EXAMPLES["zero1"], BATCHES[0])
    moved, _, _ = checkpoints.restore(3, other.abstract_state)
    checkpoints.close()
    rows = moved.carry.states.z_h
    assert rows.sharding.shard_shape(rows.shape)[0] == 1
    kept, _, _ = Checkpoints(str(tmp_path), keep=1, read_only=True).restore(3, program.abstract_state)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(moved), jax.device_get(kept))
