"""Rolling back to the newest checkpoint and continuing, with a program whose third batch gives a loss of NaN."""

import math

import jax.numpy as jnp
import pytest

from core.step import TrainState
from core.training import hooks, metrics, trainer


class Program:
    """Counts steps; the loss is NaN for the batches in `bad`."""

    def __init__(self, bad=(3,)):
        self.bad, self.trained = bad, []

    def train_step(self, state, batch):
        step = int(state.step) + 1
        self.trained.append((step, batch))
        return state._replace(step=jnp.int32(step)), {"loss": math.nan if batch in self.bad else 1.0}


class Batches:
    input_wait_seconds = 0.0

    def __init__(self):
        self.next = 0

    def __next__(self):
        self.next += 1
        return self.next


def state(step):
    return TrainState(jnp.int32(step), (), (), ())


def train(policy, program, *also):
    warnings = []
    hook = hooks.policy_hook(policy, warn=warnings.append, writers=metrics.Writers())
    end = trainer.train(
        program.train_step, Batches(), state(0), restore=lambda: state(2), total_steps=4, hooks=[hook, *also]
    )
    return int(end.step), warnings


def test_rolling_back_drops_the_bad_batch_and_the_one_after_it():
    program = Program()
    assert train("roll_back", program)[0] == 4
    assert program.trained == [(1, 1), (2, 2), (3, 3), (4, 4), (3, 5), (4, 6)]


def test_every_rollback_is_reported_and_their_number_is_limited():
    with pytest.raises(hooks.NonFiniteLossError, match="Rolled back 3 times and got no further than step 3"):
        train("roll_back", Program(bad=range(3, 100)))
    _, warnings = train("roll_back", Program())
    assert len(warnings) == 1
    assert warnings[0].startswith("step 3: loss = nan")


def test_records_of_lost_steps_are_lost_and_that_of_the_rollback_is_not():
    calls = []

    class Writer:
        def __getattr__(self, name):
            return lambda *args, **_: calls.append((name, *args))

    hook = hooks.policy_hook("roll_back", warn=lambda _: None, writers=metrics.Writers([Writer()]), newest=lambda: 2)
    trainer.train(Program().train_step, Batches(), state(0), restore=lambda: state(2), total_steps=4, hooks=[hook])
    mark = ("scalars", 3, {"rolled_back": 1.0})
    assert calls == [mark, ("flush",), ("lost_after", 2), mark]


def test_without_a_rollback_hook_the_loop_raises():
    program = Program()
    with pytest.raises(hooks.NonFiniteLossError, match="step 3: loss = nan"):
        train("stop", program)
    assert program.trained[-1] == (4, 4)


class Told(trainer.Hook):
    def __init__(self):
        self.calls = []

    def after_step(self, report):
        self.calls.append(report.step)

    def on_error(self, error, last):
        self.calls.append((type(error), last.state))

    def close(self):
        self.calls.append("closed")


def test_hooks_stay_open_while_the_loop_rolls_back():
    told = Told()
    train("roll_back", Program(), told)
    assert told.calls == [1, 2, 3, 4, "closed"]


def test_an_error_while_restoring_leaves_no_state_to_save():
    told, batches = Told(), Batches()

    def restore():
        raise OSError("the bucket is away")

    how = {"total_steps": 4, "hooks": [hooks.RollBack(lambda *_: None), told], "restore": restore}
    with pytest.raises(OSError, match="the bucket is away"):
        trainer.train(Program().train_step, batches, state(0), **how)
    assert told.calls == [1, 2, (OSError, None), "closed"]
