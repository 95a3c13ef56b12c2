"""Gates: the recorded trace, rows in order, states that continue, and rules that rank."""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from core.errors import UserError
from models.ttt import gates
from models.ttt.gates import Signals

TRACE = np.load(pathlib.Path(__file__).parents[1] / "fixtures" / "ttt_parity.npz")
SIGNAL = TRACE["gating/signal"]
PAPER = gates.Reconstruction(budget=2.0)


def signals(values):
    values = jnp.asarray(values)
    return Signals(values, values, values, 0.5 * values)


@functools.partial(jax.jit, static_argnums=0)
def decide(gate, state, values, real=None):
    real = jnp.ones(len(values), bool) if real is None else real
    return gates.decide_rows(gate, state, signals(values), real, jax.random.key(0), numbers=jnp.arange(len(real)))


@pytest.mark.covers("N05")
def test_the_gate_of_the_paper_has_its_recorded_trace_bit_for_bit():
    """Operation by operation, because a compiler may fuse a product and a sum, which rounds once instead of twice."""
    with jax.enable_x64(True):
        state, decisions, thresholds = PAPER.init(), [], []
        for value in SIGNAL:
            state, updates = PAPER.decide(state, signals(value), jax.random.key(0))
            decisions.append(bool(updates))
            thresholds.append(float(state["threshold"]))
    assert decisions == TRACE["gating/decision"].tolist()
    assert thresholds[15:] == TRACE["gating/threshold_after"][15:].tolist()
    assert TRACE["gating/hyper"].tolist() == [PAPER.rate, PAPER.alpha, PAPER.calibration, PAPER.floor, PAPER.least]


@pytest.mark.covers("N05")
def test_decisions_do_not_depend_on_how_chunks_are_batched():
    """Also in float32; the state of the middle continues, and rows without tokens change nothing."""
    values = SIGNAL.astype(np.float32)
    end, whole = decide(PAPER, PAPER.init(), values)
    assert whole.tolist() == TRACE["gating/decision"].tolist()
    middle, first = decide(PAPER, PAPER.init(), values[:48])
    other, second = decide(PAPER, middle, values[48:])
    assert [*first, *second] == whole.tolist()
    assert jax.tree.all(jax.tree.map(lambda a, b: bool(a == b), end, other))
    real = np.arange(48) < 24
    state, found = decide(PAPER, PAPER.init(), values[:48], real)
    assert found.tolist() == (np.asarray(first) & real).tolist()
    assert int(state["chunks"]) == 24


def test_budgets_are_held():
    drawn = np.random.default_rng(0).lognormal(size=2000).astype(np.float32)
    for budget, rate in ((1.4, 0.2), (2.6, 0.8)):
        gate = gates.Reconstruction(budget=budget)
        _, found = jax.jit(
            lambda v, gate=gate: gates.decide_rows(gate, gate.init(), signals(v), v > 0, _key(), numbers=_numbers(v))
        )(drawn)
        assert np.mean(found[16:]) == pytest.approx(rate, abs=0.05)


@pytest.mark.parametrize(
    ("budget", "chunks", "below"), [(2.8, 10, 1), (2.4, 10, 3), (2.0, 16, 8), (2.2, 5, 2), (3.0, 4, 0)]
)
def test_the_first_threshold_is_above_the_share_of_chunks_that_the_budget_leaves_out(budget, chunks, below):
    gate = gates.Reconstruction(budget=budget, calibration=chunks, alpha=0.0)
    values = np.arange(1.0, chunks + 1, dtype=np.float32)
    state, _ = decide(gate, gate.init(), values)
    assert float(state["threshold"]) == values[below]


def _key():
    return jax.random.key(3)


def _numbers(values):
    return jnp.arange(len(values))


def test_rules_by_threshold_average_and_chance():
    values = jnp.asarray([1.0, 3.0, 2.0, 2.5])
    rows = functools.partial(
        gates.decide_rows, signals=signals(values), real=jnp.ones(4, bool), key=_key(), numbers=jnp.arange(4)
    )
    assert rows(gates.LossThreshold(2.2), ())[1].tolist() == [False, True, False, True]
    average = gates.Average(decay=0.5)  # averages before each chunk: -, 1, 2, 2
    state, found = rows(average, average.init())
    assert found.tolist() == [True, True, False, True]
    assert float(state["average"]) == 2.25
    for gate, updates in ((gates.Constant(True), 4), (gates.Constant(False), 0), (gates.Random(0.0), 0)):
        assert rows(gate, ())[1].sum() == updates
    assert not rows(gates.LossThreshold(2.2), (), per_batch=True)[1].any()
    assert rows(gates.LossThreshold(2.1), (), per_batch=True)[1].all()


@pytest.mark.parametrize("per_batch", [True, False])
def test_rows_that_do_not_count_leave_the_state_as_it_is(per_batch):
    average, values = gates.Average(decay=0.5), signals(jnp.asarray([4.0, 8.0]))
    decide = functools.partial(
        gates.decide_rows, average, signals=values, key=_key(), numbers=jnp.arange(2), per_batch=per_batch
    )
    state, _ = decide(state=average.init(), real=jnp.array([True, False]))
    assert float(state["average"]) == 4.0
    after, found = decide(state=state, real=jnp.zeros(2, bool))
    assert float(after["average"]) == 4.0
    assert not found.any()


def test_chance_has_its_probability_and_depends_on_the_key():
    values = jnp.ones(2000)
    draw = jax.jit(
        lambda key: gates.decide_rows(
            gates.Random(0.3), (), signals(values), values > 0, key, numbers=_numbers(values)
        )[1]
    )
    first, again, other = (np.asarray(draw(jax.random.key(seed))) for seed in (0, 0, 1))
    assert np.mean(first) == pytest.approx(0.3, abs=0.05)
    assert (first == again).all()
    assert 0.3 < np.mean(first != other) < 0.55  # independent draws differ in 0.42


def test_rules_that_rank_all_chunks():
    advantage = np.asarray([0.1, -0.2, 0.3, 0.0])
    found = signals([4.0, 1.0, 2.0, 3.0])
    assert gates.Oracle(0.5).decide_all(found, advantage).tolist() == [True, False, True, False]
    assert gates.Oracle(None).decide_all(found, advantage).tolist() == [True, False, True, False]
    assert gates.Improvement(0.5).decide_all(found, advantage).tolist() == [True, False, False, True]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: gates.Reconstruction(budget=3.5), "budget = 3.5: expected a number from 1 to 3"),
        (lambda: gates.named("reconstruction", budget=0.5), "budget = 0.5: expected a number from 1 to 3"),
        (lambda: gates.named("recall"), "no gate 'recall': expected some of skip, update"),
        (lambda: gates.Random(1.5), "expected a number from 0 to 1"),
        (lambda: gates.Average("x"), "expected 'loss' or 'reconstruction'"),
        (lambda: gates.Reconstruction(calibration=0), "calibration = 0: expected an integer of at least 1"),
        (lambda: gates.Reconstruction(calibration=2.5), "calibration = 2.5: expected an integer of at least 1"),
        (lambda: gates.LossThreshold("x"), "LossThreshold.threshold = 'x': expected a finite number"),
        (lambda: gates.Oracle(2.0), "Oracle.rate = 2.0: expected a number from 0 to 1"),
        (lambda: gates.Improvement(float("nan")), "Improvement.rate = nan: expected a number from 0 to 1"),
    ],
)
def test_settings_out_of_range_are_refused(make, words):
    with pytest.raises(UserError, match=words):
        make()
