"""The table, the picture and the page of published steps are made from their file."""

import json

import pytest

from core import slices
from launch.config import loader
from launch.environment import WORKSPACE
from parallel.planning import calibration
from parallel.planning.cost import AxisTime, StepTime
from tests.lab import published
from tests.parallel.planning.test_calibration import row

NAMES = sorted(path.stem for path in (WORKSPACE / "gin" / "published").glob("*.gin"))


def test_the_committed_page_has_the_committed_rows():
    rows = calibration.rows()
    assert "\n".join(published.table(rows)) in published.PAGE.read_text()
    assert all(published.summary(rows) in page.read_text() for page in published.SUMMARIZING)
    assert all(row["source"] and row["tokens_per_second_per_chip"] > 0 for row in rows)
    assert sorted(row["name"] for row in rows) == NAMES
    assert all("kernel_note" in row for row in rows if "kernel_work" in row)


@pytest.mark.parametrize("name", NAMES)
def test_a_file_of_a_published_step_has_its_slice_and_tokens(name):
    experiment = loader.load(f"gin/published/{name}.gin").build()
    found = next(row for row in calibration.rows() if row["name"] == name)
    assert experiment.slice == found["slice"]
    if "predicted" in found:
        assert experiment.tokens_per_step == found["predicted"]["tokens_per_step"]
    assert experiment.batch_size % slices.get(experiment.slice).hosts == 0


def test_parts_of_a_step_by_network():
    axes = (
        AxisTime(("fsdp",), "ICI", 2.0, 1.0, 1),
        AxisTime(("tensor",), "ICI", 1.0, 0.25, 1),
        AxisTime(("data",), "DCN", 0.123456, 0.0, 1),
    )
    assert published.parts(StepTime(8.0, 2.0, axes, ())) == {
        "compute": 8.0,
        "kernels": 2.0,
        "traffic": {"ICI": {"all": 3.0, "beside": 1.25}, "DCN": {"all": 0.1235, "beside": 0.0}},
    }


def test_the_table_has_steps_sources_and_the_error_of_all():
    named = {"of": "Tiny", "name": "tiny"}
    lines = published.table(
        [row(10.0, **named), row(12.0, family="B", **named), {**named, "slice": "v4-8", "family": "C"}]
    )
    assert "| Tiny | v5e-8 | 10 | 12 | +20.0% | 8.00 | 2.00 | 2.00 |  |" in lines
    assert "Restated and not compiled yet: Tiny on v4-8." in lines
    assert "| A | 1 | 20.0% | 20.0% |" in lines
    assert "| all | 2 | 10.0% | 20.0% |" in lines


def test_only_what_is_between_the_marks_of_the_page_changes(monkeypatch, tmp_path):
    for name, file in (("PAGE", "page.md"), ("PICTURE", "picture.svg")):
        monkeypatch.setattr(published, name, tmp_path / file)
    monkeypatch.setattr(published, "SUMMARIZING", (published.PAGE,))
    monkeypatch.setattr(calibration, "FILE", tmp_path / "published.json")
    monkeypatch.setattr(published.golden, "write_headers", lambda: None)
    published.PAGE.write_text(
        f"# Title\n\n{published._BEGIN}\nbefore this\n{published._END}\n\nafter: {published.summary([row(10.0)])}\n"
    )
    published.write([row(11.0, of="Tiny", name="tiny")])
    text = published.PAGE.read_text()
    assert text.startswith("# Title\n")
    summary = "Over 1 published steps, the median error of predicted times is 9.1%; nine in ten are within 10%."
    assert text.endswith(f"after: {summary}\n")
    assert "before this" not in text
    assert "| Tiny | v5e-8 |" in text
    assert json.loads(calibration.FILE.read_text())[0]["of"] == "Tiny"
    assert "<svg" in published.PICTURE.read_text()
    calibration.known_error.cache_clear()
