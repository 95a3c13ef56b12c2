"""The order of events in the training loop, recorded by a program."""

import jax.numpy as jnp
import numpy as np
import pytest

from core.step import TrainState
from core.training import goodput, hooks, trainer
from core.types import WeightedSum


class Metric:
    """A device scalar that notes when the host reads it."""

    def __init__(self, value, note):
        self._value, self._note = value, note

    def __array__(self, dtype=None, copy=None):
        self._note()
        return np.asarray(self._value, dtype)


class Program:
    def __init__(self, events, losses=None):
        self.events, self.losses = events, losses or {}

    def train_step(self, state, batch):
        step = int(state.step) + 1
        assert batch == f"batch {step}"
        self.events.append(f"dispatch {step}")
        loss = Metric(self.losses.get(step, 1.0 / step), lambda: self.events.append(f"read {step}"))
        return state._replace(step=jnp.int32(step)), {"loss": loss, "right": WeightedSum(2.0, float(step))}


class Batches:
    def __init__(self, first=1):
        self.next, self.input_wait_seconds = first, 0.0

    def __next__(self):
        self.next += 1
        self.input_wait_seconds = 0.25
        return f"batch {self.next - 1}"


class Recorder(trainer.Hook):
    def __init__(self, events, boundaries=()):
        self.events, self.boundaries, self.reports = events, boundaries, []

    def before_step(self, step):
        self.events.append(f"before {step}")

    def after_step(self, report):
        self.reports.append(report)
        self.events.append(f"after {report.step}")

    def needs_state(self, step):
        return step in self.boundaries

    def at_boundary(self, step, state):
        assert int(state.step) == step
        self.events.append(f"boundary {step}")

    def close(self):
        self.events.append("close")


def state_at(step):
    return TrainState(jnp.int32(step), {}, (), ())


def run(events, *, start=0, total=4, boundaries=(), losses=None, also=()):
    recorder = Recorder(events, boundaries)
    state = trainer.train(
        Program(events, losses).train_step,
        Batches(start + 1),
        state_at(start),
        total_steps=total,
        hooks=[*also, recorder],
    )
    return state, recorder


def test_metrics_of_a_step_are_read_after_the_next_is_dispatched():
    events = []
    state, recorder = run(events, total=3)
    assert events == [
        *("before 1", "dispatch 1"),
        *("before 2", "dispatch 2", "read 1", "after 1"),
        *("before 3", "dispatch 3", "read 2", "after 2", "read 3", "after 3"),
        "close",
    ]
    assert int(state.step) == 3
    assert [r.metrics for r in recorder.reports] == [{"loss": 1.0}, {"loss": 0.5}, {"loss": pytest.approx(1 / 3)}]
    assert [r.sums for r in recorder.reports] == [{"right": (2.0, n)} for n in (1, 2, 3)]
    assert all(r.seconds > 0 for r in recorder.reports)


class Clock:
    """A clock that work moves forward."""

    def __init__(self):
        self.now = 0.0

    def work(self, seconds):
        self.now += seconds

    def perf_counter(self):
        return self.now


@pytest.mark.parametrize("boundaries", [(), (5, 6), tuple(range(1, 21))])
def test_a_wait_for_data_is_part_of_the_time_in_which_it_lies(monkeypatch, tmp_path, boundaries):
    """Every fourth batch is 0.8 s late, and a step takes 0.1 s."""
    clock, lines, shares = Clock(), [], []
    monkeypatch.setattr(trainer, "time", clock)

    class Bursts(Batches):
        def __next__(self):
            batch = super().__next__()
            self.input_wait_seconds = 0.8 if self.next % 4 == 1 else 0.0
            clock.work(self.input_wait_seconds)
            return batch

    def train_step(state, batch):
        clock.work(0.04)
        return state._replace(step=state.step + 1), {"loss": Metric(1.0, lambda: clock.work(0.06))}

    log = hooks.Log(lambda step, values: lines.append(values), every=1, items_per_step=1)
    told = {"first_step": 0, "last_step": 20, "every": 100, "write": lambda *_: None, "say": shares.append}
    useful = goodput.Goodput(str(tmp_path), **told)
    recorder = Recorder([], boundaries)
    trainer.train(train_step, Bursts(), state_at(0), total_steps=20, hooks=[log, useful, recorder])
    for report in recorder.reports:
        assert report.seconds == pytest.approx(report.input_wait_seconds + report.device_seconds)
    for line in lines:
        parts = [line[f"{name}_seconds"] for name in ("input_wait", "device", "host")]
        assert sum(parts) == pytest.approx(line["step_seconds"])
    assert sum(report.input_wait_seconds for report in recorder.reports) == pytest.approx(5 * 0.8)
    assert goodput.read(str(tmp_path))[0].useful_seconds == pytest.approx(
        2.0 - recorder.reports[0].device_seconds
    )  # that compiles


def test_at_a_boundary_the_step_is_read_before_the_state_is_used():
    events = []
    run(events, total=3, boundaries=(2,))
    at = events.index
    assert at("dispatch 2") < at("read 1") < at("read 2") < at("after 2") < at("boundary 2") < at("dispatch 3")


@pytest.mark.covers("X12")
@pytest.mark.parametrize(("begin", "due"), [(0, [2, 4]), (3, [4])])
def test_the_step_of_statistics_replaces_every_second_step(begin, due):
    """Counted from the start of training, so that a resumed run computes them after the same steps."""
    program, found = Program([]), []

    def with_statistics(state, batch):
        found.append(int(state.step) + 1)
        return program.train_step(state, batch)

    trainer.train(
        program.train_step,
        Batches(begin + 1),
        state_at(begin),
        total_steps=5,
        hooks=[],
        statistics=trainer.StatisticsStep(with_statistics, interval=2),
    )
    assert found == due
    assert [event for event in program.events if event.startswith("dispatch")] == [
        f"dispatch {step}" for step in range(begin + 1, 6)
    ]


def test_training_continues_from_the_step_of_the_state():
    events = []
    state, _ = run(events, start=7, total=9)
    assert [e for e in events if e.startswith("dispatch")] == ["dispatch 8", "dispatch 9"]
    assert int(state.step) == 9
    events = []
    state, _ = run(events, start=9, total=9)
    assert events == ["close"]


@pytest.mark.covers("T10")
@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_ends_the_run_before_it_is_saved(loss):
    events = []
    with pytest.raises(hooks.NonFiniteLossError, match=r"step 3: loss = (nan|inf)\. No checkpoint was saved before"):
        run(events, total=6, boundaries=(2, 3), losses={3: loss}, also=[hooks.Stop()])
    assert "boundary 2" in events
    assert "boundary 3" not in events
    assert events[-1] == "close"  # hooks end in any case
    assert "dispatch 4" not in events


def test_without_a_boundary_the_stop_comes_one_step_later():
    events = []
    with pytest.raises(hooks.NonFiniteLossError, match="step 3"):
        run(events, total=6, losses={3: float("nan")}, also=[hooks.Stop()])
    assert [e for e in events if e.startswith("dispatch")][-1] == "dispatch 4"


def test_hooks_are_closed_when_the_data_ends():
    class Short(Batches):
        def __next__(self):
            if self.next == 3:
                raise StopIteration
            return super().__next__()

    events = []
    with pytest.raises(StopIteration):
        trainer.train(Program(events).train_step, Short(), state_at(0), total_steps=5, hooks=[Recorder(events)])
    assert events[-1] == "close"


def test_every_hook_is_closed_if_one_fails_and_the_first_error_is_raised():
    class Failing(trainer.Hook):
        def close(self):
            raise OSError("disk full")

    events = []
    with pytest.raises(hooks.NonFiniteLossError, match="step 2") as error:
        run(events, losses={2: float("nan")}, also=[hooks.Stop(), Failing()])
    assert events[-1] == "close"
    assert error.value.__notes__ == ["then, in Failing: OSError: disk full"]
    with pytest.raises(OSError, match="disk full") as error:
        run(events := [], also=[Failing(), Failing()])
    assert events[-1] == "close"
    assert error.value.__notes__ == ["then, in Failing: OSError: disk full"]


class Faulty(trainer.Hook):
    """Raises before a step, and keeps what it is told of the last step."""

    def __init__(self, at):
        self.at, self.told = at, None

    def before_step(self, step):
        if step == self.at:
            raise OverflowError("a bug")

    def on_error(self, error, last):
        self.told = str(error), last.step, last.state and int(last.state.step), dict(last.metrics())
        raise PermissionError("read-only")


@pytest.mark.covers("C11")
def test_after_an_error_hooks_get_the_last_step_and_hide_nothing():
    with pytest.raises(OverflowError, match="a bug") as error:
        run([], also=[faulty := Faulty(at=3)])
    assert faulty.told == ("a bug", 2, 2, {"loss": 0.5})
    assert error.value.__notes__ == ["then, in Faulty: PermissionError: read-only"]
    with pytest.raises(OverflowError):
        run([], start=7, total=9, also=[faulty := Faulty(at=8)])
    assert faulty.told == ("a bug", 7, 7, {})


@pytest.mark.covers("C11")
def test_there_is_no_state_to_save_once_the_data_is_ahead_of_it():
    def fails(state, batch):
        raise RuntimeError("out of memory")

    faulty = Faulty(at=0)
    with pytest.raises(RuntimeError, match="out of memory"):
        trainer.train(fails, Batches(), state_at(0), total_steps=3, hooks=[faulty])
    assert faulty.told == ("out of memory", 0, None, {})


def test_sums_are_added_in_double_precision():
    total = {}
    for _ in range(3):
        total = trainer.add_sums(total, {"a": WeightedSum(np.float32(2**24 + 2), np.float32(0.5))})
    assert total == {"a": (3 * (2**24 + 2), 1.5)}
    more = trainer.add_sums(total, {"b": WeightedSum(1.0, 2.0)})  # as a step with statistics brings
    assert more == trainer.add_sums({"b": WeightedSum(1.0, 2.0)}, total) == {**total, "b": (1.0, 2.0)}
    assert trainer.means(total | {"nothing": WeightedSum(0.0, 0.0)}) == {"a": 2.0 * (2**24 + 2)}
