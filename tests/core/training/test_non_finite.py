"""Non-finite losses: each policy on its own, and the step that skips the update."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from core import optimizers, step
from core.checkpoints.writing import WriteFailedError
from core.hosts import exit_codes
from core.parameters import ParamSpec
from core.training import hooks, trainer
from core.training.trainer import StepReport
from core.types import LossOutput


def report(number, loss=1.0, skipped=0.0):
    return StepReport(number, {"loss": loss, "gradient_norm": 1.0, hooks.SKIPPED: skipped}, {}, 0.1, 0.0)


@pytest.mark.covers("T10")
def test_every_policy_ends_with_its_own_exit_code():
    assert hooks.NonFiniteLossError.exit_code == exit_codes.NON_FINITE
    with pytest.raises(hooks.NonFiniteLossError, match="step 3: loss = inf"):
        hooks.Stop().after_step(report(3, math.inf))


@pytest.mark.parametrize(
    ("newest", "says"), [(None, "No checkpoint was saved before"), (2, "The checkpoint of step 2")]
)
def test_the_advice_names_the_checkpoint_that_there_is(newest, says):
    with pytest.raises(hooks.NonFiniteLossError, match=says) as raised:
        hooks.Stop(newest=lambda: newest).after_step(report(3, math.nan))
    assert raised.value.says_all  # no traceback: the message says what to do


def test_a_run_that_ends_waits_for_the_checkpoint_that_is_being_written():
    saved = []
    stop = hooks.Stop(newest=lambda: max(saved, default=None), wait=lambda: saved.append(2))
    with pytest.raises(hooks.NonFiniteLossError, match="The checkpoint of step 2 precedes it"):
        stop.after_step(report(3, math.nan))

    def fails():
        raise WriteFailedError("saving the checkpoint of step 2 failed: OSError: No space left on device")

    with pytest.raises(hooks.NonFiniteLossError, match="No checkpoint was saved before") as raised:
        hooks.Stop(wait=fails).after_step(report(3, math.nan))
    assert raised.value.__notes__ == ["saving the checkpoint of step 2 failed: OSError: No space left on device"]


def test_skip_reports_each_update_and_ends_after_too_many():
    said = []
    skip = hooks.Skip(lambda *words: said.append(words))
    for number in range(1, 30):  # never so many in a row
        skip.after_step(report(number, math.nan if number % 10 else 1.0, float(number % 10 > 0)))
    assert len(said) == 27
    assert said[0] == (1, "skipped_updates", "step 1: loss = nan; its update is left out")
    skip.after_step(report(30))
    for number in range(31, 50):
        skip.after_step(report(number, math.nan, 1.0))
    with pytest.raises(hooks.NonFiniteLossError, match="step 50: loss = nan, as in the 19 steps before"):
        skip.after_step(report(50, math.nan, 1.0))


def test_roll_back_ends_without_progress():
    said, newest = [], []
    policy = hooks.RollBack(lambda *words: said.append(words), newest=lambda: max(newest, default=None))

    def fails_at(number):
        with pytest.raises(trainer.RollBackError):
            policy.after_step(report(number, math.nan))

    for number in (7, 6):
        fails_at(number)
    assert said[-1][-1].endswith("Back to the start, because there is no checkpoint, with the data after this.")
    newest.append(5)
    fails_at(7)
    assert said[-1][-1].endswith("Back to the checkpoint of step 5, with the data after this.")
    policy.after_step(report(8))  # further than ever
    for number in (9, 9, 9):
        fails_at(number)
    with pytest.raises(hooks.NonFiniteLossError, match="Rolled back 3 times and got no further than step 9"):
        policy.after_step(report(9, math.nan))
    assert [words[:2] for words in said] == [(n, "rolled_back") for n in (7, 7, 7, 9, 9, 9)]


SPECS = {"~": {"w": ParamSpec(())}}


class Line:
    """y = w x; the carry counts steps."""

    def loss(self, params, carry, rng, batch, *, is_training):
        errors = (params["~"]["w"] * batch["x"]) ** 2
        return carry + 1, LossOutput(jnp.sum(errors), jnp.float32(errors.size), {})


@pytest.mark.covers("T10")
@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e30, 1e10])  # of the last, only the gradient's norm overflows
def test_a_skipped_step_keeps_everything_but_its_number(bad):
    optimizer = optimizers.adamw(learning_rate=optimizers.constant(0.1), no_decay=()).bound(SPECS)
    params = {"~": {"w": jnp.float32(2.0)}}
    before = step.TrainState(jnp.int32(4), params, optimizer.init(params), jnp.float32(0))
    run = jax.jit(step.train_step(Line(), optimizer, seed=0, skip_non_finite=True))
    good, metrics = run(before, {"x": jnp.ones(3)})
    assert metrics["skipped_updates"] == 0
    assert (int(good.step), float(good.carry)) == (5, 1.0)
    assert float(good.params["~"]["w"]) < 2.0
    after, metrics = run(good, {"x": jnp.array([1.0, bad, 1.0], jnp.float32)})
    assert metrics["skipped_updates"] == 1
    assert np.isfinite(metrics["loss"]) == (bad == 1e10)
    assert int(after.step) == 6
    for kept, was in zip(jax.tree.leaves(after._replace(step=0)), jax.tree.leaves(good._replace(step=0)), strict=True):
        np.testing.assert_array_equal(kept, was)
    again, metrics = run(after, {"x": jnp.ones(3)})
    assert metrics["skipped_updates"] == 0
    assert float(again.params["~"]["w"]) < float(after.params["~"]["w"])


class Still:
    """A gradient of exactly 1, so that plain SGD moves `w` by the learning rate."""

    def loss(self, params, carry, rng, batch, *, is_training):
        return carry, LossOutput(params["~"]["w"] * jnp.sum(batch["x"]), jnp.float32(batch["x"].size), {})


def test_the_reported_learning_rate_is_the_applied_one_after_skipped_updates():
    schedule = optimizers.warmup_linear(peak=0.5, warmup_steps=5, total_steps=100)
    plain = optimizers.Optimizer(lambda _: optax.sgd(schedule), schedule)
    optimizer = optimizers.averaged(optimizer=plain).bound(SPECS)
    params = {"~": {"w": jnp.float32(2.0)}}
    state = step.TrainState(jnp.int32(0), params, optimizer.init(params), ())
    run = jax.jit(step.train_step(Still(), optimizer, seed=0, skip_non_finite=True))
    reported, applied = [], []
    for x in (1.0, np.nan, np.nan, np.nan, 1.0, 1.0):
        after, metrics = run(state, {"x": jnp.full(3, x, jnp.float32)})
        reported.append(float(metrics["learning_rate"]))
        applied.append(float(state.params["~"]["w"] - after.params["~"]["w"]))
        state = after
    np.testing.assert_allclose(applied, [0.1, 0.0, 0.0, 0.0, 0.2, 0.3], atol=1e-6)
    np.testing.assert_allclose(reported, [0.1, 0.2, 0.2, 0.2, 0.2, 0.3], rtol=1e-6)


def test_a_run_that_stops_has_the_step_that_it_always_had():
    optimizer = optimizers.adamw(learning_rate=optimizers.constant(0.1), no_decay=()).bound(SPECS)
    params = {"~": {"w": jnp.float32(2.0)}}
    state = step.TrainState(jnp.int32(4), params, optimizer.init(params), jnp.float32(0))
    text = {
        skip: str(
            jax.make_jaxpr(step.train_step(Line(), optimizer, seed=0, skip_non_finite=skip))(state, {"x": jnp.ones(3)})
        )
        for skip in (False, True)
    }
    assert "is_finite" not in text[False]
    assert "is_finite" in text[True]
