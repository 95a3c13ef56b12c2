"""The error of predicted seconds is computed from published steps, and stated identically everywhere."""

import json

import pytest

from core import versions
from parallel.planning import calibration


def row(published, **changes):
    """A step of 8 chips that computes for 10 s and sends for 3 s, of which 1 s overlaps; published: `published` s."""
    predicted = {
        "compute": 8.0,
        "kernels": 2.0,
        "traffic": {"ICI": {"all": 2.0, "beside": 1.0}, "DCN": {"all": 1.0, "beside": 0.0}},
        "tokens_per_step": 8000,
    }
    speed = {"slice": "v5e-8", "family": "A", "tokens_per_second_per_chip": 1000 / published}
    return {**speed, "predicted": predicted, **changes}


def test_predicted_and_published_seconds_of_a_step():
    assert calibration.predicted_seconds(row(10.0)) == pytest.approx(12.0)
    assert calibration.predicted_seconds(row(10.0, kernel_work=1.5)) == pytest.approx(13.0)
    assert calibration.published_seconds(row(10.0)) == pytest.approx(10.0)
    assert calibration.ratio(row(10.0)) == pytest.approx(10 / 12)


def test_overlapped_traffic_hides_behind_no_more_than_computation():
    found = row(10.0)
    found["predicted"]["traffic"]["ICI"] = {"all": 30.0, "beside": 25.0}
    assert calibration.predicted_seconds(found) == pytest.approx(10.0 + 31.0 - 10.0)


def test_seconds_of_a_chip_with_two_devices_are_those_of_the_chip():
    assert calibration.published_seconds(row(5.0, slice="tpu7x-16")) == pytest.approx(5.0)


def test_the_error_over_steps():
    rows = [row(12.0 * ratio) for ratio in (0.8, 0.9, 1.0, 1.1, 1.25)]
    found = calibration.error([*rows, {"name": "not compiled"}])
    assert found.runs == 5
    assert found.median == pytest.approx(1 / 0.9 - 1)
    assert found.largest == pytest.approx(0.25)
    assert found.nine_in_ten == pytest.approx(0.25)
    assert (found.shortest, found.longest) == (pytest.approx(0.82), pytest.approx(1.22))
    assert calibration.error([]) is None


@pytest.fixture
def kept(monkeypatch, tmp_path):
    monkeypatch.setattr(calibration, "FILE", tmp_path / "published.json")
    calibration.known_error.cache_clear()
    yield lambda rows: calibration.FILE.write_text(json.dumps(rows))
    calibration.known_error.cache_clear()


def test_the_label_names_the_compiler_and_the_error(kept):
    kept([row(12.0), row(15.0)])
    installed = versions.version("libtpu")
    assert calibration.label() == f"compiled by libtpu {installed}; intervals from 2 published steps"
    assert calibration.interval(2.0) == (pytest.approx(2.025), pytest.approx(2.475))


def test_without_published_steps_nothing_is_claimed(kept):
    kept([])
    assert calibration.label(libtpu="9.9") == "compiled by libtpu 9.9, not compared with published steps"
    assert calibration.interval(2.0) == (2.0, 2.0)
