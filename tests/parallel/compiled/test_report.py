"""Bytes per chip, against arithmetic and against the arrays themselves."""

import math

import jax
import pytest

from core import optimizers, slices
from models.decoder import transformer
from parallel import strategies
from parallel.compiled import report
from parallel.partitioner import Partitioner
from tasks import streams

ADAMW = optimizers.adamw(learning_rate=optimizers.constant(1e-3))
TINY = transformer.preset("tiny")
SPEC = streams.batch_spec(16, length=8)


def program(tables, slice_name, model=TINY, devices=None):
    return Partitioner(tables, slice=slices.get(slice_name), devices=devices or jax.devices()).program(
        model, ADAMW, SPEC, seed=0
    )


@pytest.mark.covers("M17")
def test_bytes_of_every_array_are_those_on_the_first_device():
    bound = program(strategies.fsdp_tensor(tensor=2), "v4-8")
    state = bound.init()
    rows = report.rows(bound)
    arrays = jax.tree.leaves((state.params, state.opt_state, state.carry))
    assert len(rows) == len(arrays)
    assert [r.bytes_per_chip for r in rows] == [a.addressable_shards[0].data.nbytes for a in arrays]
    assert [r.replicated for r in rows] == [a.is_fully_replicated for a in arrays]
    assert [r.shape for r in rows] == [a.shape for a in arrays]


@pytest.mark.covers("M07", "M08")
def test_fsdp_divides_the_state_and_data_parallel_does_not():
    split, whole = (
        report.totals(program(strategies.fsdp(), "v4-32")),
        report.totals(program(strategies.data_parallel(), "v4-32")),
    )
    assert whole.everything == pytest.approx(whole.whole, rel=1e-4)  # but for the step, which is no row
    norms = 4 * (2 * 2 * 64 + 64)  # two norms in each of two layers and a final one, held whole
    assert split.params == (whole.params - norms) // 16 + norms
    assert split.opt_state == (whole.opt_state - 2 * norms - 8) // 16 + 2 * norms + 8
    assert split.everything == split.params + split.opt_state + split.carry


def test_valkyrie_7b_on_v4_32(tpu_topology):
    bound = program(strategies.fsdp(), "v4-32", transformer.preset("7b"), tpu_topology("v4-32"))
    rows = [r for r in report.rows(bound) if r.path.startswith("params/")]
    assert sum(math.prod(r.shape) for r in rows) == 6_738_415_616
    sizes = report.totals(bound)
    assert sizes.params / 2**30 == pytest.approx(6_738_415_616 * 4 / 16 / 2**30, rel=1e-3)
    assert sizes.opt_state == pytest.approx(2 * sizes.params, rel=1e-6)
    query = next(r for r in rows if r.path == "params/layers/block/query")
    assert str(query.axes) == "(layers, embed, heads, head_dim)"
    assert query.spec == "(-, fsdp, -, -)"
    assert not query.replicated
