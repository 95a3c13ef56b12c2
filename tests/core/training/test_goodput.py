"""The share of time in steps that count, over starts, losses and idle weeks."""

import json
import time

import pytest

from core.training import goodput
from core.training.trainer import StepReport


class Clock:
    """Seconds that pass when it is called, and a time of day that can be set."""

    def __init__(self):
        self.monotonic, self.time = 1000.0, 1500.0

    def __call__(self, seconds):
        self.monotonic += seconds
        self.time += seconds

    def set(self, by):
        self.time += by


@pytest.fixture
def clock(monkeypatch):
    """The clock of processes that have just started."""
    clock = Clock()
    monkeypatch.setattr(time, "time", lambda: clock.time)
    monkeypatch.setattr(time, "monotonic", lambda: clock.monotonic)
    monkeypatch.setattr(goodput, "process_seconds", lambda: 0.0)
    return clock


class Run:
    """Starts of one run, with what they say."""

    def __init__(self, folder, clock, last_step=10):
        self.folder, self.clock, self.last_step = folder, clock, last_step
        self.said, self.scalars = [], {}

    def start(self, first_step, steps, *, seconds=10.0, waits=0.0, killed=False, continues=False):
        bounds = {"first_step": first_step, "last_step": self.last_step, "every": 1, "continues": continues}
        write = lambda step, values: self.scalars.update({step: values["goodput"]})  # noqa: E731
        hook = goodput.Goodput(str(self.folder), **bounds, write=write, say=self.said.append)
        for step in steps:
            self.clock(seconds)
            hook.after_step(StepReport(step, {}, {}, seconds, waits))
        if not killed:
            hook.close()

    @property
    def share(self):
        return goodput.share(goodput.read(str(self.folder)))


@pytest.mark.covers("O13")
def test_repeated_steps_down_time_compiling_and_waiting_do_not_count(tmp_path, clock):
    run = Run(tmp_path, clock)
    run.start(0, range(1, 6), waits=2.5, killed=True)  # 50 s, 4 steps of 7.5 s, 5 counted as made
    assert run.scalars[5] == pytest.approx(30 / 50)
    clock(50)  # down
    run.start(2, range(3, 11))  # of the 30 s the share of 3 of 5 steps is lost; 8 steps, the first compiles
    assert run.share == pytest.approx((30 * 2 / 5 + 70) / (50 + 50 + 80))
    assert run.said == ["goodput 12.0 % over 2 starts; 3 steps were repeated; continues from step 2", run.said[-1]]
    assert run.said[-1] == "goodput 45.6 % over 2 starts; 3 steps were repeated"
    first, second = goodput.read(str(tmp_path))
    assert (first.lost_steps, first.finished, second.first_step, second.finished) == (3, False, 2, True)


def test_a_run_that_reached_its_end_was_not_down_until_somebody_wanted_more(tmp_path, clock):
    run = Run(tmp_path, clock, last_step=5)
    run.start(0, range(1, 6))
    clock(7 * 24 * 3600)
    run.last_step = 10
    run.start(5, range(6, 11))
    assert run.share == pytest.approx(80 / 100)


def test_steps_from_which_a_run_rolled_back_are_lost(tmp_path, clock):
    run = Run(tmp_path, clock)
    run.start(0, [1, 2, 3, 4, 5, 3, 4, 5, 6])
    (session,) = goodput.read(str(tmp_path))
    assert (session.lost_steps, session.last_step) == (3, 6)
    assert session.useful_seconds == pytest.approx(40 * 2 / 5 + 40)


@pytest.mark.parametrize("by", [-86400, 86400])
def test_a_time_of_day_that_is_set_while_a_run_trains_changes_nothing(tmp_path, clock, by):
    run = Run(tmp_path, clock)
    hook = goodput.Goodput(
        str(tmp_path), first_step=0, last_step=5, every=1, write=lambda *_: None, say=run.said.append, started=990.0
    )
    for step in range(1, 6):
        clock(10)
        clock.set(by if step % 2 else -by)
        hook.after_step(StepReport(step, {}, {}, 10, 0))
    hook.close()
    (session,) = goodput.read(str(tmp_path))
    assert (session.started, session.seen) == (1490, 1550)
    assert run.share == pytest.approx(40 / 60)


def test_a_time_of_day_that_is_set_back_between_starts_counts_both(tmp_path, clock):
    run = Run(tmp_path, clock)
    run.start(0, range(1, 6), killed=True)
    clock.set(-86400)
    run.start(5, range(6, 11))
    assert run.share == pytest.approx(80 / 100)


@pytest.mark.parametrize("by", [0, -86400, 86400])
def test_phases_of_one_process_are_one_start(tmp_path, clock, monkeypatch, by):
    run = Run(tmp_path, clock, last_step=None)
    run.start(0, range(1, 6))
    clock.set(by)
    run.last_step = 10
    monkeypatch.setattr(goodput, "process_seconds", lambda: 50.0)
    run.start(5, range(6, 11), continues=True)
    assert run.share == pytest.approx(80 / 100)
    assert run.said == ["goodput 80.0 % over 1 start"] * 2
    (session,) = goodput.read(str(tmp_path))
    assert (session.first_step, session.last_step, session.lost_steps, session.finished) == (0, 10, 0, True)


def test_a_machine_that_is_lost_between_phases_was_down(tmp_path, clock):
    run = Run(tmp_path, clock, last_step=None)
    run.start(0, range(1, 6))
    clock(900)
    run.last_step = 10
    run.start(5, range(6, 11))
    assert run.share == pytest.approx(80 / 1000)


def test_a_phase_continues_where_nothing_could_be_written_before(tmp_path, clock):
    Run(tmp_path, clock).start(5, range(6, 11), continues=True)
    assert [session.last_step for session in goodput.read(str(tmp_path))] == [10]


def test_a_truncated_line_loses_only_that_session(tmp_path, clock):
    run = Run(tmp_path, clock)
    run.start(0, range(1, 6))
    with (tmp_path / goodput.FILE).open("a") as file:
        file.write('{"started": 3')
    run.start(5, range(6, 11))
    assert len([json.loads(line) for line in (tmp_path / goodput.FILE).read_text().splitlines()]) == 2


def test_a_place_that_cannot_be_written_costs_a_warning(tmp_path, clock, capsys):
    folder = tmp_path / "run"
    folder.write_text("in the way")
    run = Run(folder, clock)
    run.start(0, range(1, 6))
    assert capsys.readouterr().out.count("sessions.jsonl could not be written") == 1
    assert run.said == ["goodput 80.0 % over 1 start"]


def test_a_process_knows_when_it_started():
    assert 0 < time.time() - goodput.process_started() < 3600
