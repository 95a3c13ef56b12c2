"""Progress lines, and messages about long waits."""

from core.hosts import activity
from launch.hosts.cluster import Host
from launch.runs import progress

VALUES = {"loss": 2.5, "step_seconds": 30.0, "tokens_per_second": 100.0, "input_wait_seconds": 0.0}


def test_the_first_report_has_no_eta(capsys):
    """Its step time is mostly compilation."""
    shown = progress.Progress(100, host=Host(0, 1, simulated=True), unit="token")
    shown.line(41, VALUES)
    shown.line(50, {**VALUES, "step_seconds": 2.0})
    shown.line(100, {**VALUES, "step_seconds": 2.0})
    first, second, last = capsys.readouterr().out.splitlines()
    assert "30 s/step" in first
    assert "ETA" not in first + last
    assert second.endswith("ETA 1:40")


def test_a_start_with_nothing_to_train_names_no_setting(capsys):
    lines = progress.Progress(10, host=Host(0, 1, False), unit="token")
    lines.start(9, evaluates=True)
    lines.start(10, evaluates=True)
    lines.start(12, evaluates=False)
    assert capsys.readouterr().out.splitlines() == [
        "step 10 is done; its evaluation follows",
        "step 12 is done: nothing is left to train",
    ]


def waited(*places):
    said = []
    found = iter(places)
    waiting = progress.Waiting(said.append, place=lambda: activity.Place(1, *next(found)))
    for _ in places:
        waiting.look()
    return said


def test_a_long_wait_is_printed_with_its_duration():
    times = (2, 9.9, 10.2, 10.7, 19, 20.1, 31, 41, 52, 60.4, 61, 119, 120.3, 180.2)
    said = waited(*((activity.COMPILING, seconds) for seconds in times))
    shown = ("0:10", "0:20", "0:31", "0:41", "0:52", "1:00", "2:00", "3:00")
    assert said == [f"compiling the training step, {time}" for time in shown]


def test_a_wait_in_parts_says_which_and_has_one_duration():
    places = [(6.0, 1), (9.0, 1), (2.0, 2), (4.0, 2), (8.0, 2), (0.5, 3), (5.0, 3)]
    said = waited(*((activity.EVALUATING, seconds, 0.0, f"batch {part} of 3") for seconds, part in places))
    assert said == ["evaluating, batch 2 of 3, 0:11", "evaluating, batch 3 of 3, 0:22"]
    again = [
        (activity.EVALUATING, 11.0, 0.0, "batch 3 of 3"),
        (activity.TRAINING, 1.0),
        (activity.EVALUATING, 2.0, 0.0, ""),
    ]
    again = waited(*again, (activity.EVALUATING, 9.0, 0.0, "batch 1 of 3"))
    assert again == ["evaluating, batch 3 of 3, 0:11", "evaluating, batch 1 of 3, 0:11"]


def test_every_wait_has_its_own_time_and_training_is_no_wait():
    places = [(activity.COMPILING, 12.0), (activity.TRAINING, 500.0), (activity.SAVING, 3.0), (activity.SAVING, 11.0)]
    places += [(activity.COMPILING, 1.0), (activity.COMPILING, 10.0)]
    said = waited(*places)
    assert said == [
        "compiling the training step, 0:12",
        "saving a checkpoint, 0:11",
        "compiling the training step, 0:10",
    ]


def test_the_first_wait_for_data_is_said_after_a_second_and_later_ones_after_ten():
    places = [(activity.READING, seconds) for seconds in (0.4, 0.9, 1.4, 1.9, 9.0, 10.2, 20.3)]
    places += [(activity.TRAINING, 2.0), (activity.READING, 3.0), (activity.READING, 11.0)]
    assert waited(*places) == [f"reading data, {time}" for time in ("0:01", "0:10", "0:20", "0:11")]
