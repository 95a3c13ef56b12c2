"""Each hook on its own; reports go to a list."""

import math

import jax
import numpy as np
import pytest

from core.checkpoints.writing import Cost, WriteFailedError
from core.hosts import activity, interrupt
from core.training import compilation, hooks, run_lock, trainer
from core.training.trainer import StepReport
from core.types import WeightedSum


def report(step, *, seconds=0.5, wait=0.1, device=0.0, sums=(), **metrics):
    return StepReport(step, {"loss": 2.0, **metrics}, dict(sums), seconds, wait, device)


def test_log_writes_the_first_step_and_means_over_each_interval():
    written = []
    log = hooks.Log(lambda step, values: written.append((step, values)), every=3, items_per_step=100)
    for step, seconds in [(1, 9.0), (2, 1.0), (3, 3.0), (4, 2.0), (5, 2.0), (6, 2.0)]:
        log.after_step(report(step, seconds=seconds, wait=seconds / 4))
    assert [step for step, _ in written] == [1, 3, 6]
    assert [v["step_seconds"] for _, v in written] == [9.0, 2.0, 2.0]  # the first, which compiled, spoils no mean
    assert [v["tokens_per_second"] for _, v in written] == [pytest.approx(100 / 9), 50.0, 50.0]
    assert written[1][1]["input_wait_seconds"] == 0.5
    assert written[1][1]["loss"] == 2.0


def test_log_divides_once_per_interval_and_omits_metrics_without_weight():
    written = []
    log = hooks.Log(lambda step, values: written.append(values), every=3, items_per_step=1)
    for step, (total, weight) in enumerate([(0, 0), (3, 4), (0, 0), (1, 1), (0, 0), (0, 0), (0, 0), (0, 0), (0, 0)], 1):
        sums = {"right": WeightedSum(np.float32(total), np.float32(weight)), "all": WeightedSum(step, 1)}
        log.after_step(report(step, sums=sums, loss=float(step)))
    assert [v.get("right") for v in written] == [None, 0.75, 1.0, None]  # nobody's step is a zero
    assert [v["all"] for v in written] == [1.0, 2.5, 5.0, 8.0]
    assert [v["loss"] for v in written] == [1.0, 3.0, 6.0, 9.0]  # of the step, as it is


def test_log_takes_no_metrics_of_updates_that_were_left_out_and_none_from_before_a_rollback():
    written = []
    log = hooks.Log(
        lambda step, values: written.append((step, values.get("entropy"), values["step_seconds"])),
        every=4,
        items_per_step=1,
    )

    def after(step, entropy, *, seconds=1.0, skipped=0.0):
        sums = {"entropy": WeightedSum(np.float32(entropy), np.float32(1))}
        log.after_step(report(step, seconds=seconds, sums=sums, **{hooks.SKIPPED: skipped}))

    after(1, 1.0)
    after(2, 2.0)
    after(3, math.nan, skipped=1.0)
    after(4, 4.0)
    after(5, 100.0, seconds=9.0)
    after(5, 5.0)  # the run went back to step 4
    after(6, 6.0)
    after(7, 7.0)
    after(8, 8.0)
    assert written == [(1, 1.0, 1.0), (4, 3.0, 1.0), (8, 6.5, 1.0)]


def test_log_takes_metrics_that_only_some_steps_have():
    written = []
    log = hooks.Log(lambda step, values: written.append(values), every=4, items_per_step=1)
    for step in range(1, 9):
        sums = {"accuracy": WeightedSum(np.float32(step), np.float32(1))}
        log.after_step(report(step, sums=sums | ({"update": WeightedSum(step, 1)} if step % 3 == 0 else {})))
    assert [values["accuracy"] for values in written] == [1.0, 3.0, 6.5]
    assert [values.get("update") for values in written] == [None, 3.0, 6.0]


@pytest.mark.covers("O03")
def test_a_step_is_split_into_waiting_for_data_the_devices_and_the_hosts_own_work():
    written = []
    log = hooks.Log(lambda step, values: written.append(values), every=2, items_per_step=1)
    for step, wait, device in [(1, 0.0, 1.0), (2, 0.25, 0.5), (3, 0.0, 1.0), (4, 0.5, 0.25)]:
        log.after_step(report(step, seconds=1.0, wait=wait, device=device))
    parts = [(v["input_wait_seconds"], v["device_seconds"], v["host_seconds"]) for v in written]
    assert parts == [(0.0, 1.0, 0.0), (0.25, 0.5, 0.25), (0.25, 0.625, 0.125)]


@pytest.mark.covers("T10")
def test_stop_checks_only_loss_and_gradient():
    stop = hooks.Stop()
    stop.after_step(report(1, gradient_norm=1.0, entropy=math.nan))
    with pytest.raises(hooks.NonFiniteLossError, match="step 2: gradient_norm = inf"):
        stop.after_step(report(2, gradient_norm=math.inf))


class Checkpoints:
    def __init__(self):
        self.saved, self.waited, self.checked, self.finished = [], 0, 0, []

    def check(self):
        self.checked += 1

    def costs(self):
        finished, self.finished = self.finished, []
        return finished

    def save(self, step, *, state, data, meta):
        self.saved.append((step, state, dict(data), dict(meta)))

    def wait(self):
        self.waited += 1
        self.finished.append(Cost(self.saved[-1][0] if self.saved else 0, 0.0, 0.0, 0))


class Costs:
    def __init__(self):
        self.told = []

    def add(self, cost):
        self.told.append(cost)

    def end(self):
        self.told.append("end")


@pytest.mark.covers("C04")
def test_save_takes_the_position_at_that_moment():
    checkpoints, place, costs = Checkpoints(), {"stream 0": b"1"}, Costs()

    def due(step):
        return step % 5 == 0 or step == 12

    save = hooks.Save(checkpoints, lambda: place, {"seed": 7}, due=due, costs=costs)
    assert [s for s in range(1, 13) if save.needs_state(s)] == [5, 10, 12]
    save.at_boundary(5, "state 5")
    place["stream 0"] = b"2"
    save.at_boundary(10, "state 10")
    assert checkpoints.saved == [
        (5, "state 5", {"stream 0": b"1"}, {"seed": 7}),
        (10, "state 10", {"stream 0": b"2"}, {"seed": 7}),
    ]
    first, last = (Cost(step, 0.0, 0.0, 0) for step in (5, 10))
    of_parameters = Cost(11, 0.0, 0.0, 0, alone=True)
    checkpoints.finished[:], costs.told[:] = [first], []
    save.before_step(11)
    assert (checkpoints.checked, costs.told) == (1, [first])
    save.close()
    assert checkpoints.waited == 3
    assert costs.told == [first, last, "end"]
    assert interrupt._saved == 10
    save.at_boundary(11, "state 11")
    checkpoints.finished[:] = [of_parameters]
    save.before_step(12)
    assert interrupt._saved == 10  # the whole state of step 11 is not complete yet


def test_what_comes_before_a_save_is_done_when_it_begins_and_not_where_it_is_forbidden():
    order, forbidden = [], []

    class Ordered(Checkpoints):
        def save(self, step, **what):
            order.append(f"save {step}")

    def check():
        if forbidden:
            raise RuntimeError("another run holds the lock")

    save = hooks.Save(Ordered(), dict, {}, due=bool, costs=Costs(), check=check, before=lambda: order.append("before"))
    save.at_boundary(5, "state 5")
    assert order == ["before", "save 5"]
    forbidden.append(True)
    with pytest.raises(RuntimeError, match="holds the lock"):
        save.at_boundary(6, "state 6")
    assert order == ["before", "save 5"]


@pytest.mark.covers("T14")
def test_hosts_meet_before_they_evaluate_or_save_and_say_what_for(monkeypatch):
    class Due(trainer.Hook):
        def __init__(self, every):
            self.every = every

        def needs_state(self, step):
            return step % self.every == 0

    met = []
    monkeypatch.setattr(
        hooks.distributed, "barrier", lambda *args, **limit: met.append((activity.place().activity, *args, limit))
    )
    meet = hooks.Meet({"checkpoint": Due(3), "evaluation": Due(2)}, timeout_seconds=50.0)
    assert [step for step in range(1, 7) if meet.needs_state(step)] == [2, 3, 4, 6]
    meet.at_boundary(2, None)
    meet.at_boundary(6, None)
    assert [name for _, name, _ in met] == [
        "evaluation after step 2 (meeting 1)",
        "checkpoint and evaluation after step 6 (meeting 2)",
    ]
    assert met[0][0] == activity.MEETING
    assert met[0][2] == {"timeout_seconds": 50.0}


@pytest.mark.covers("O09")
def test_compilations_are_reported_whenever_there_are_new_ones(monkeypatch):
    totals, written = compilation.Totals(3, 1, 2.0), []
    monkeypatch.setattr(compilation, "totals", lambda: totals)
    compiled = hooks.Compiled(lambda *args: written.append(args))
    compiled.after_step(report(1))
    compiled.after_step(report(2))
    totals = compilation.Totals(4, 1, 2.5)  # such as the evaluation
    compiled.after_step(report(3))
    assert written == [(1, (3, 1, 2.0)), (3, (4, 1, 2.5))]


@pytest.mark.covers("C15")
def test_parameters_are_saved_alone_as_they_are_evaluated():
    checkpoints, alone = Checkpoints(), []
    checkpoints.save_params = lambda *args: alone.append((checkpoints.waited, *args))
    save = hooks.SaveParams(checkpoints, lambda state: f"average of {state}", {"seed": 7}, due=lambda step: step == 4)
    assert [step for step in range(1, 9) if save.needs_state(step)] == [4]
    save.at_boundary(4, "state 4")
    assert alone == [(1, 4, "average of state 4", {"seed": 7})]


def last_step(step, **metrics):
    return trainer.LastStep(step, f"state {step}", lambda: metrics)


@pytest.mark.covers("C11")
def test_an_error_saves_the_last_complete_step_once():
    checkpoints, said = Checkpoints(), []
    save = hooks.Save(checkpoints, lambda: {"stream 0": b"7"}, {}, due=bool, costs=Costs(), say=said.append)
    save.before_step(3)
    save.on_error(ValueError("bad record"), last_step(2, loss=1.0))  # where the run started
    save.on_error(ValueError("bad record"), last_step(7, loss=1.0)._replace(state=None))
    save.on_error(hooks.NonFiniteLossError(7, "loss = nan"), last_step(7, loss=1.0))
    assert checkpoints.saved == []
    for _ in range(2):
        save.on_error(ValueError("bad record"), last_step(7, loss=1.0))
    assert checkpoints.saved == [(7, "state 7", {"stream 0": b"7"}, {})]
    assert checkpoints.waited == 2  # for the save before, and for this one to be complete
    assert said == ["step 7: saved a checkpoint after ValueError; the same command resumes from it"]
    with pytest.raises(RuntimeError, match="no checkpoint of step 9 was saved: gradient_norm = inf"):
        save.on_error(ValueError("bad record"), last_step(9, loss=1.0, gradient_norm=math.inf))


@pytest.mark.covers("C11")
def test_an_error_after_a_skipped_update_saves_the_finite_state():
    checkpoints = Checkpoints()
    save = hooks.Save(checkpoints, dict, {}, due=bool, costs=Costs())
    with pytest.raises(RuntimeError, match="no checkpoint of step 7 was saved: loss = nan"):
        save.on_error(ValueError("bad record"), last_step(7, loss=math.nan, skipped_updates=0.0))
    save.on_error(ValueError("bad record"), last_step(7, loss=math.nan, skipped_updates=1.0))
    assert [step for step, *_ in checkpoints.saved] == [7]


@pytest.mark.covers("C11")
def test_an_error_of_one_host_alone_saves_nothing(monkeypatch):
    """The others wait in a collective, so that a save, which needs all hosts, would wait for them for ever."""
    patience = []

    def nobody_comes(name, *, timeout_seconds):
        patience.append(timeout_seconds)
        raise TimeoutError("host 1 did not come")

    monkeypatch.setattr(hooks.distributed, "barrier", nobody_comes)
    checkpoints = Checkpoints()
    save = hooks.Save(checkpoints, dict, {}, due=bool, costs=Costs())
    save.after_step(report(7, seconds=2.0))
    with pytest.raises(RuntimeError, match="step 7 was saved, which needs all hosts: host 1 did not come"):
        save.on_error(ValueError("bad record"), last_step(7, loss=1.0))
    monkeypatch.setattr(hooks.distributed, "process_count", lambda: 2)
    save.on_error(jax.errors.JaxRuntimeError("connection reset"), last_step(7, loss=1.0))
    assert (checkpoints.saved, patience) == ([], [9.0])


@pytest.mark.covers("C04")
def test_nothing_is_saved_after_the_lock_of_the_run_was_taken_over(tmp_path):
    """Though the lock was read less than a second before, and is taken over while the save before is awaited."""
    lock = run_lock.RunLock.acquire(str(tmp_path / "run"), say=print, clock=lambda: 0.0)
    checkpoints = Checkpoints()
    save = hooks.Save(checkpoints, dict, {}, due=bool, costs=Costs(), check=lambda: lock.check(now=True))
    save.at_boundary(5, "state 5")
    wait = checkpoints.wait

    def taken_over_meanwhile():
        wait()
        (tmp_path / "run" / run_lock.FILE).write_text("{}")

    checkpoints.wait = taken_over_meanwhile
    lock.check()
    with pytest.raises(run_lock.LockLostError, match="was taken over"):
        save.at_boundary(10, "state 10")
    assert [step for step, *_ in checkpoints.saved] == [5]
    lock.release()


def failing_wait():
    raise WriteFailedError("saving the checkpoint of step 7 failed: OSError: No space left on device")


@pytest.mark.covers("C08")
def test_a_preempted_run_says_that_it_saved_only_when_the_save_is_complete():
    waited = []
    stop = hooks.StopWhenPreempted(lambda step: step == 7, wait=lambda: waited.append(activity.place().activity))
    stop.before_step(6)
    assert not stop.needs_state(6)
    stop.before_step(7)
    assert stop.needs_state(7)
    with pytest.raises(hooks.PreemptedError, match="saved a checkpoint at step 7"):
        stop.at_boundary(7, None)
    assert waited == [activity.SAVING]
    stop = hooks.StopWhenPreempted(bool, wait=failing_wait)
    stop.before_step(7)
    with pytest.raises(WriteFailedError, match="No space left"):
        stop.at_boundary(7, None)
