"""The table of published runs is written between its marks."""

import json

import pytest

from parallel.planning import calibration
from tests.lab import recorded_predictions
from tests.parallel.planning.test_calibration import PREDICTED, ROWS


@pytest.fixture
def kept(monkeypatch, tmp_path):
    monkeypatch.setattr(calibration, "FILE", tmp_path / "published.json")
    monkeypatch.setattr(recorded_predictions, "README", tmp_path / "README.md")
    marks = f"{recorded_predictions._BEGIN}\nbefore this\n{recorded_predictions._END}"
    recorded_predictions.README.write_text(f"# Title\n\n{marks}\n\nafter\n")
    calibration.FILE.write_text(json.dumps(ROWS))


def test_only_the_table_between_its_marks_is_written(kept):
    recorded_predictions.write_published({"a": PREDICTED["a"]})
    recorded_predictions.write_published({})
    text = recorded_predictions.README.read_text()
    assert text.startswith("# Title\n")
    assert text.endswith("\n\nafter\n")
    assert "before this" not in text
    assert "| A | v4-8 | 100 tokens/s | 100 | 120 | 110 | 90 | 1.20 / 1.10 / 0.90 |" in text
    assert "| B | v4-8 | 2,000 tokens/s | 2,000 | – | – | – | – |" in text


def test_the_committed_table_is_that_of_the_committed_rows():
    rows = calibration.rows()
    assert recorded_predictions.table(rows) in recorded_predictions.README.read_text()
    assert all(row["source"] and row["tokens_per_second_per_chip"] > 0 for row in rows)
