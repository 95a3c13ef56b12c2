"""The layouts nearest to one that does not fit."""

import types

import jax
import jax.numpy as jnp
import pytest

from core import optimizers, slices
from core.batches import Field
from models.decoder import transformer
from parallel import strategies
from parallel.partitioner import Partitioner
from parallel.pipeline import schedules
from parallel.planning import selection
from parallel.planning.arithmetic import Estimate
from parallel.planning.candidates import Candidate, Choice, Layout
from parallel.planning.cost import StepTime
from parallel.planning.selection import JudgedCandidate
from parallel.planning.sharded_state import Step, step_of
from tasks import streams

MODEL = transformer.Transformer(
    vocab_size=512, num_layers=4, embed_dim=64, mlp_dim=96, num_heads=2, num_kv_heads=2, remat="full"
)


def bound(tables, *, slice_name="v4-32"):
    slice_ = slices.get(slice_name)
    spec = streams.batch_spec(16, length=16)
    played = Partitioner(tables, slice=slice_, devices=jax.devices()[: slice_.devices])
    return played.program(MODEL, optimizers.adamw(learning_rate=optimizers.constant(1e-4)), spec, seed=0)


def tried(name, layout, remat="full", accum_steps=1, *, seconds=1.0, reason=""):
    estimate = Estimate({}, StepTime(seconds, 0.0, (), ()), 0.0)
    return JudgedCandidate(Candidate(layout, remat, accum_steps, 16), name, estimate=estimate, reason=reason)


def mesh3d(data, tensor):
    return Layout("mesh3d", (("data", data), ("fsdp", -1), ("tensor", tensor)))


def test_the_nearest_layouts_differ_least_and_exclude_the_layout_itself():
    found = selection.nearest(
        [
            tried("another", Layout("fsdp", (("fsdp", -1),)), seconds=0.1),
            tried("mesh and accum", mesh3d(4, 2), accum_steps=2, seconds=0.1),
            tried("mesh", mesh3d(4, 2), seconds=0.2),
            tried("accum", mesh3d(2, 2), accum_steps=2, seconds=0.3),
            tried("itself", mesh3d(2, 2), seconds=0.1),
            tried("as written", None, seconds=0.1),
            tried("too large", mesh3d(2, 2), "none", seconds=0.1, reason="needs more"),
        ],
        bound(strategies.mesh3d(data=2, fsdp=4, tensor=2)),
    )
    assert [one.name for one in found] == ["mesh", "accum", "mesh and accum", "another"]


def test_a_degree_is_not_one_that_begins_with_its_digits():
    """fsdp 2 is not fsdp 256, whatever a candidate is called."""
    asked = types.SimpleNamespace(
        partitioner=types.SimpleNamespace(strategy=strategies.hsdp(data=256), slice=slices.get("v5p-1024")),
        model=MODEL,
        spec={"inputs": Field((512, 16), jnp.int32, ("batch", "length"))},
        accum_steps=1,
        gather_once=True,
    )
    (far, near) = (
        tried("hsdp: data 2 x fsdp 256", Layout("hsdp", (("data", 2), ("fsdp", -1))), "dots", seconds=0.1),
        tried("hsdp: data 256 x fsdp 2", Layout("hsdp", (("data", 256), ("fsdp", -1))), "dots", seconds=0.2),
    )
    assert step_of(asked) == Step("full", 512, 1, gather_once=True)
    assert selection.nearest([far, near], asked) == [near, far]


@pytest.mark.parametrize("first", [False, True])
def test_a_ring_is_judged_by_its_own_tables(trace_of, first):
    """A row of 132 positions divides over 4 chips, but not into the 8 chunks of a ring."""
    known = trace_of(MODEL, slice_name="v4-8", rows=16, length=132, remats=["full"])
    judge = selection.Judge(known, strategies.fsdp(), num_streams=1)
    found = {
        ring: judge.judge(Candidate(Layout("context", (("sequence", 4), ("fsdp", -1)), ring=ring), "full", 1, 16)).kind
        for ring in (first, not first)
    }
    assert found == {False: "", True: "positions do not divide"}


def test_another_schedule_is_another_layout():
    def layout(constructor, microbatches):
        return Layout(
            "pipeline", (("stage", 4), ("data", -1)), Choice(constructor, (("num_microbatches", microbatches),))
        )

    written = strategies.pipeline(stage=4, data=1, schedule=schedules.gpipe(num_microbatches=4))
    found = selection.nearest(
        [tried("itself", layout("gpipe", 4), None), tried("1F1B", layout("one_f_one_b", 4), None)],
        bound(written, slice_name="v4-8"),
    )
    assert [one.name for one in found] == ["1F1B"]


def test_pipelines_have_at_most_half_of_the_first_places():
    piped = [Layout("pipeline", (("stage", n),), Choice("gpipe", (("num_microbatches", n),))) for n in (2, 4, 8, 16)]
    fast = [tried(f"pipeline {n}", layout, seconds=0.1 * n) for n, layout in enumerate(piped, 1)]
    others = [tried(f"mesh {n}", mesh3d(n, 2), seconds=n) for n in (1, 2, 4)]
    ordered = [one.name for one in selection.order([*fast, *others], wanted=4, usable_bytes=1.0)]
    assert ordered == ["pipeline 1", "pipeline 2", "mesh 1", "mesh 2", "mesh 4", "pipeline 3", "pipeline 4"]
