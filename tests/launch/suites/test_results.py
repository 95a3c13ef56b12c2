"""Metrics that a run left, the table of them, and pictures that open anywhere."""

import csv
import io
import itertools
import json
import xml.etree.ElementTree

import pytest

from core import metrics
from core.training import hooks
from launch.suites import measured, page, plan, plots, results

PATHS = [plan.HOME / "exp01" / f"exp01{i}.gin" for i in "abc"]


@pytest.fixture(scope="module")
def entries():
    return plan.plan(PATHS, check_data=False, seeds=2)


def write(folder, lines):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("\n".join(lines))
    return str(folder)


def score(step, value, **more):
    return json.dumps({"step": step, "time_seconds": 1.0, "validation/exact_accuracy": value, **more})


def test_the_name_of_the_score_is_the_one_that_runs_write(tmp_path):
    written = {}
    evaluate = hooks.Evaluate(
        lambda state: {"exact_accuracy": 0.5}, lambda step, values: written.update(values), every=1, last_step=1
    )
    evaluate.at_boundary(1, None)
    assert list(written) == [measured.SCORE]


def test_metrics_are_read_as_they_were_meant(tmp_path):
    """The later of two lines holds; texts, cut lines and what is no number are left out."""
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
    found = measured.read(run)
    assert found.step == 30
    assert found.curve(measured.SCORE) == [(10, 0.1), (20, 0.3), (30, 0.3)]
    assert found.best(measured.SCORE) == (20, 0.3)
    assert found.last("loss") == 3.0
    assert found.median("step_seconds") == pytest.approx(0.3)
    assert measured.read(str(tmp_path / "nothing")) == measured.Measured()


def table(entries, tmp_path):
    dirs, scores = {}, iter((0.2, 0.3, 0.5, 0.7))
    for entry in entries:
        value = next(scores, None)
        last = {"validation/accuracy": 0.9, "exact_accuracy": 0.95}
        lines = [] if value is None else [score(100, value / 2), score(8138, value, **last)]
        of = {"step": 0, "time_seconds": 1.0, "tag": metrics.EVALUATED_ON, "text": "8,192 of 9,000"}
        lines += [] if value is None else [json.dumps(of)]
        dirs[entry.id] = write(tmp_path / entry.name, lines)
    return results.rows(entries, status=dict.fromkeys(dirs, "done"), run_dirs=dirs)


@pytest.mark.covers("E04", "T15")
def test_a_row_says_what_it_is_what_it_cost_and_how_good_it_was(entries, tmp_path):
    rows = table(entries, tmp_path)
    first, last = rows[0], rows[-1]
    assert (first["parameters"], first["depth"], first["puzzles"], first["copies"]) == (1_483_778, 42, 1000, 1000)
    assert first["eflop"] == first["total_eflop"] == pytest.approx(0.67, abs=0.01)
    assert (first["exact_accuracy"], first["best_step"], first["cell_accuracy"]) == (0.2, 8138, 0.9)
    assert first["gap"] == pytest.approx(0.75)
    assert first["evaluated"] == "8,192 of 9,000"  # as the run said
    assert last["evaluated"] == "at most 8,192 held-out puzzles, seed 0"
    assert (last["gap"], last["goal_step"]) == (None, None)
    assert first["mean_of_seeds"] == pytest.approx(0.25)
    assert first["spread_of_seeds"] == pytest.approx(0.1)
    assert (last["steps"], last["exact_accuracy"], last["mean_of_seeds"], last["eflop"]) == (0, None, None, 0)
    read = list(csv.DictReader(io.StringIO(results.as_csv(rows))))
    assert [row["experiment"] for row in read] == [row["experiment"] for row in rows]
    assert float(read[0]["exact_accuracy"]) == 0.2
    assert read[-1]["exact_accuracy"] == ""


def test_the_page_is_whole_and_needs_nothing_else(entries, tmp_path):
    rows = table(entries, tmp_path)
    text = page.page(rows, title="Suite <exp01>", note="here")
    assert "http" not in text.replace("http://www.w3.org", "")
    assert "<script" not in text
    assert "Suite &lt;exp01&gt;" in text
    pictures = [picture for picture in page.pictures(rows) if picture]
    titles = [xml.etree.ElementTree.fromstring(picture).attrib["aria-label"] for picture in pictures]
    assert titles == [
        "Accuracy and parameters",
        "Accuracy and compute, with what nothing beats in both",
        "Accuracy by step",
    ]  # what does not vary is not drawn
    (parameters, *_) = pictures
    assert parameters.count("<circle") == 4
    assert "exp01a: 20.00% at 1.48M" in parameters
    assert "exp01: no law a - b N^-c: 2 sizes are done, and its three numbers need at least 4." in text
    empty = page.page(table(entries[4:], tmp_path / "none")[:0], title="t", note="")
    assert "Nothing to draw yet" in empty


def test_the_frontier_is_what_nothing_beats_in_both():
    points = [plots.Point(x, y, f"{x}", "g") for x, y in ((1, 0.2), (2, 0.1), (2, 0.5), (3, 0.5), (4, 0.9), (5, 0.8))]
    assert [(p.x, p.y) for p in plots.pareto(points)] == [(1, 0.2), (2, 0.5), (4, 0.9)]


def test_places_in_a_picture_are_those_of_the_numbers():
    points = [plots.Point(10.0**i, 0.1 * i, f"p{i}", "g") for i in range(1, 5)]
    drawn = xml.etree.ElementTree.fromstring(plots.scatter(points, title="t", x_label="x", log=True))
    circles = [(float(c.attrib["cx"]), float(c.attrib["cy"])) for c in drawn.iter("circle")]
    across = [b[0] - a[0] for a, b in itertools.pairwise(circles)]
    up = [a[1] - b[1] for a, b in itertools.pairwise(circles)]
    assert max(across) - min(across) < 0.2  # a factor of ten each: equal distances
    assert min(across) > 50
    assert max(up) - min(up) < 0.2
    assert min(up) > 20
    assert plots.scatter(points[:1], title="t", x_label="x") == ""
    alike = [plots.Point(x, 0.5, "p", "g") for x in (2.1360, 2.1355)]  # steps rounded differently
    assert plots.scatter(alike, title="t", x_label="x") == ""
    names = [t for t in drawn.iter("text") if t.attrib["class"] == "name"]
    assert [t.attrib.get("text-anchor") for t in names] == [None, None, "end", "end"]  # none runs out of the picture


@pytest.mark.parametrize(
    ("value", "said"),
    [(5_028_866, "5.03M"), (8138, "8,138"), (0.25, "0.25"), (16, "16"), (2.1e12, "2.1T"), (1.5, "1.5")],
)
def test_numbers_are_said_shortly(value, said):
    assert plots.number(value) == said


def test_the_first_step_at_a_goal(tmp_path):
    lines = [score(step, value) for step, value in ((10, 0.7), (20, 0.8), (30, 0.75), (40, 0.9))]
    found = measured.read(write(tmp_path / "run", lines))
    assert found.first_at(measured.SCORE, least=results.GOAL) == 20
    assert found.first_at(measured.SCORE, least=0.95) is None


def test_a_law_is_drawn_and_said_with_its_residual():
    """What an evaluation of four widths and one duplicate would give."""
    column = {"status": "done", "same_as": "", "curve": [], "group": "wide", "depth": 42}
    sizes = (1e6, 2e6, 4e6, 8e6)
    rows = [
        {**dict.fromkeys(name for name, *_ in page._COLUMNS), **column}
        | {"experiment": f"w{i}", "run": f"r{i}", "parameters": n, "exact_accuracy": 0.9 - 0.3 * (n / 1e6) ** -0.7}
        for i, n in enumerate(sizes)
    ]
    rows.append({**rows[-1], "experiment": "copy", "same_as": "w3"})
    text = page.page(rows, title="t", note="")
    said = "wide: accuracy = 0.900 - 0.3 N^-0.70, N in millions of parameters; 4 points of 4 sizes lie 0.00 percentage"
    assert said in text
    (picture,) = (p for p in page.pictures(rows) if "Accuracy and parameters" in p)
    drawn = xml.etree.ElementTree.fromstring(picture)
    (law,) = drawn.iter("polyline")
    assert law.find("title").text == "law of wide"
    first, *_, last = (tuple(map(float, pair.split(","))) for pair in law.attrib["points"].split())
    circles = [(float(c.attrib["cx"]), float(c.attrib["cy"])) for c in drawn.iter("circle")]
    assert first == pytest.approx(circles[0], abs=0.2)
    assert last == pytest.approx(circles[-1], abs=0.2)


def test_names_that_would_lie_on_others_are_left_to_the_pointer():
    points = [plots.Point(1.0 + i / 1000, 0.5, f"experiment{i}", "g") for i in range(9)]
    points += [plots.Point(9.0, 0.9, "far", "g")]
    drawn = xml.etree.ElementTree.fromstring(plots.scatter(points, title="t", x_label="x"))
    assert [t.text for t in drawn.iter("text") if t.attrib["class"] == "name"] == ["experiment0", "far"]
    said = [circle.find("title").text.split(":")[0] for circle in drawn.iter("circle")]
    assert said == [p.label for p in points]


def test_a_picture_has_the_groups_that_vary_what_it_is_of():
    def row(group, name, puzzles, run, same_as=""):
        return {"group": group, "experiment": name, "puzzles": puzzles, "run": run, "same_as": same_as}

    rows = [
        row("exp01", "a", 1000, "r/a"),
        row("exp01", "b", 1000, "r/b"),
        row("exp04", "c", 100, "r/c"),
        row("exp04", "base", 1000, "r/a", same_as="exp01/a"),  # a point of this group though it is run in another
        row("exp05", "base", 1000, "r/a", same_as="exp01/a"),
        row("exp05", "none", None, "r/n"),
    ]
    assert [r["experiment"] for r in page._varying(rows, "puzzles")] == ["c", "base"]


@pytest.mark.parametrize(("low", "high"), [(1.4e6, 4e7), (0.6, 13), (3, 3.2)])
def test_ticks_of_a_logarithmic_axis_are_round(low, high):
    values = [low + (high - low) * i / 11 for i in range(12)]
    drawn = xml.etree.ElementTree.fromstring(
        plots.scatter([plots.Point(v, 0.5, "", "g") for v in values], title="t", x_label="x", log=True)
    )
    ticks = [t.text for t in drawn.iter("text") if t.attrib["class"] == "tick" and "%" not in t.text]
    assert len(ticks) >= 3
    assert all(len(t.strip("MTG0.").replace(".", "")) <= 3 for t in ticks), ticks
