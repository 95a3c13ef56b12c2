"""The validation results that a run prints."""

import math
import types

import jax
import pytest

from core import slices, units
from launch.config import loader
from launch.hosts.cluster import Host
from launch.runs import progress, smoke
from parallel import mesh

MEANS = {"validation/loss": 0.25, "validation/exact_accuracy": 0.75, "validation/exact_accuracy_step_01": 0.5}


def shown(**task):
    return progress._validated(of(**task), MEANS)


def of(*, eval_batches=3, **task):
    return types.SimpleNamespace(
        task=types.SimpleNamespace(**task),
        evaluation=types.SimpleNamespace(eval_batches=eval_batches),
        batch_size=2,
        unit="token",
    )


def test_text_has_its_loss():
    assert shown() == "validation loss 0.2500 nats per token"


def test_puzzles_have_all_means_and_their_rows():
    assert shown(evaluated_on=lambda most: f"{most} of 9 puzzles, drawn with seed 0").splitlines() == [
        "validation on 6 of 9 puzzles, drawn with seed 0",
        "exact_accuracy 0.7500  loss 0.2500",
        "exact_accuracy by step: 0.500",
    ]


def test_the_rows_of_a_score_are_at_most_those_of_the_evaluation():
    def said(most):
        return f"at most {most}"

    assert progress.evaluated_on(of(evaluated_on=said, eval_batches=5)) == "at most 10"
    assert progress.evaluated_on(of(evaluated_on=said, eval_batches=0)) == ""
    assert progress.evaluated_on(of()) == ""


@pytest.mark.parametrize(
    ("accum_steps", "gather_once", "is_gathered"), [(2, True, True), (2, False, False), (1, True, False)]
)
def test_the_summary_has_the_memory_of_gathering_once(accum_steps, gather_once, is_gathered):
    bindings = (
        "STRATEGY = @strategies.fsdp()",
        f"ACCUM_STEPS = {accum_steps}",
        f"experiment.Experiment.gather_once = {gather_once}",
    )
    run = smoke.shrink(loader.load("gin/quickstart.gin", bindings=bindings, slice_name="v4-8").build())
    bound = run.bind(mesh.topology_devices(slices.get("v4-8")))
    shown = progress.rows(run, bound, host=Host(0, 1, simulated=True))
    assert ("gathered" in shown) == is_gathered
    if is_gathered:
        leaves = jax.tree.leaves(bound.abstract_state.params)
        held = sum(math.prod(a.sharding.shard_shape(a.shape)) for a in leaves)
        more = 2 * 4 * (sum(math.prod(a.shape) for a in leaves) - held)  # parameters and gradients, float32
        assert shown["gathered"].startswith(f"{units.size(more)} more per chip")
