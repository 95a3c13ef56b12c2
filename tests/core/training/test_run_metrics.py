"""Reading recorded metrics from a run directory."""

import json
import math

import pytest

from core.training import metrics

SCORE = "validation/exact_accuracy"


def write(folder, lines):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("\n".join(lines))
    return str(folder)


def score(step, value):
    return json.dumps({"step": step, "time_seconds": 1.0, SCORE: value})


def test_metrics_are_read_from_a_run_directory(tmp_path):
    """The later of two lines of a step wins; incomplete lines are skipped."""
    run = write(
        tmp_path / "run",
        [
            json.dumps({"step": 0, "tag": "config", "text": "…"}),
            json.dumps({"step": 10, "time_seconds": 1.0, "loss": 3.0, "step_seconds": 0.2}),
            score(10, 0.1),
            score(20, 0.9),
            json.dumps({"step": 20, "loss": "nan", "step_seconds": 0.4}),
            score(20, 0.3),
            score(30, 0.3),
            '{"step": 40, "val',
        ],
    )
    found = metrics.read(run)
    assert found.step == 30
    assert found.curve(SCORE) == [(10, 0.1), (20, 0.3), (30, 0.3)]
    assert found.best(SCORE) == (20, 0.3)
    assert found.median("step_seconds") == pytest.approx(0.3)
    assert metrics.read(str(tmp_path / "nothing")) == metrics.RunMetrics()


def test_a_last_value_that_is_not_finite_is_not_replaced_by_an_earlier_one(tmp_path):
    lines = [score(10, 0.7), score(20, 0.9), score(20, "nan"), score(30, 0.8), score(40, "-inf"), score(50, "three")]
    found = metrics.read(write(tmp_path / "run", lines))
    assert found.last(SCORE) == -math.inf
    assert math.isnan(found.by_step[20][SCORE])  # the later line
    assert found.curve(SCORE) == [(10, 0.7), (30, 0.8)]
    assert found.best(SCORE) == (30, 0.8)
    assert found.first_at(SCORE, least=0.75) == 30
    assert found.median(SCORE) == pytest.approx(0.75)
    assert [step for step in (0, 10, 20, 40, 50, 60) if found.has_evaluation(step)] == [10, 20, 40]


def test_the_first_step_at_a_goal(tmp_path):
    lines = [score(step, value) for step, value in ((10, 0.7), (20, 0.8), (30, 0.75), (40, 0.9))]
    found = metrics.read(write(tmp_path / "run", lines))
    assert found.first_at(SCORE, least=0.8) == 20
    assert found.first_at(SCORE, least=0.95) is None
