"""The spread of predictions is stated identically everywhere."""

import json

import pytest

from core import versions
from parallel.planning import calibration

ROWS = [
    {"name": "a", "of": "A", "slice": "v4-8", "printed": "100 tokens/s", "tokens_per_second_per_chip": 100},
    {"name": "b", "of": "B", "slice": "v4-8", "printed": "2,000 tokens/s", "tokens_per_second_per_chip": 2000},
]
PREDICTED = {
    "a": {"hidden": 120, "scheduled": 110, "exposed": 90, "libtpu": "1"},
    "b": {"hidden": 1800, "scheduled": 1700, "exposed": 1400, "libtpu": "1"},
}


@pytest.fixture
def kept(monkeypatch, tmp_path):
    monkeypatch.setattr(calibration, "FILE", tmp_path / "published.json")
    calibration.FILE.write_text(json.dumps(ROWS))


def test_the_spread_is_from_the_least_to_the_most_that_was_ever_predicted():
    rows = [row | {"predicted": PREDICTED[row["name"]]} for row in ROWS]
    assert calibration.ratios(rows[0]) == [1.2, 1.1, 0.9]
    assert calibration.spread(rows) == (0.7, 1.2)
    assert calibration.spread(ROWS) is None
    assert calibration.spread([rows[0], ROWS[1]]) == (0.9, 1.2)


def test_the_label_names_the_compiler_and_the_spread(kept):
    assert calibration.label(libtpu="9.9") == "compiled by libtpu 9.9, uncalibrated, spread not known"
    calibration.FILE.write_text(json.dumps([row | {"predicted": PREDICTED[row["name"]]} for row in ROWS]))
    installed = versions.version("libtpu")
    assert calibration.label() == f"compiled by libtpu {installed}, uncalibrated, spread 0.70 to 1.20 of published"
