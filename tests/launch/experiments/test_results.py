"""Recorded metrics, the table of results, and its page with charts."""

import csv
import io
import json
import re
import types
import xml.etree.ElementTree

import pytest

from core import metrics
from core.training import evaluation
from core.types import WeightedSum
from launch.experiments import results, results_page, scaling_law, suites

SVG = "{http://www.w3.org/2000/svg}"
PATHS = [suites.HOME / "exp01" / f"exp01{i}.gin" for i in "abc"]


@pytest.fixture(scope="module")
def entries():
    return suites.load(PATHS, check_data=False, seeds=2)


def write(folder, lines):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("\n".join(lines))
    return str(folder)


def score(step, value, **more):
    return json.dumps({"step": step, "time_seconds": 1.0, "validation/exact_accuracy": value, **more})


def test_the_name_of_the_score_is_the_one_that_runs_write(tmp_path):
    written = {}
    program = types.SimpleNamespace(
        put=lambda batch: batch, eval_step=lambda state, batch: {"exact_accuracy": WeightedSum(1.0, 2.0)}
    )
    hook = evaluation.Evaluate(program, lambda: [{}], lambda step, values: written.update(values), every=1, last_step=1)
    hook.at_boundary(1, None)
    assert list(written) == [results.SCORE]


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
def test_a_row_has_configuration_cost_and_scores(entries, tmp_path):
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


def texts(chart):
    """What is written in a chart."""
    return ["".join(node.itertext()) for node in xml.etree.ElementTree.fromstring(chart).iter(f"{SVG}text")]


def test_the_page_contains_charts_and_table_and_loads_nothing(entries, tmp_path):
    rows = table(entries, tmp_path)
    text = results_page.page(rows, title="Suite <exp01>", note="here")
    assert "<script" not in text
    assert not re.search(r"""(src|href)=["']?http|url\(http|@import""", text.replace("http://www.w3.org", ""))
    assert "Suite &lt;exp01&gt;" in text
    drawn = results_page.charts(rows)
    titles = ["Accuracy and parameters", "Accuracy and compute, with the Pareto frontier", "Accuracy by step"]
    assert [title for chart in drawn for title in titles if title in texts(chart)] == titles  # only what varies
    assert {"exp01a", "exp01b"} <= set(texts(drawn[0]))
    assert "exp01: no law a - b N^-c fitted: 2 sizes are done, at least 4 are needed." in text
    assert "20.00%" in text
    empty = results_page.page(table(entries[4:], tmp_path / "none")[:0], title="t", note="")
    assert "No charts: no run has a score yet" in empty


def test_the_frontier_contains_the_points_that_no_other_beats():
    points = ((1, 0.2), (2, 0.1), (2, 0.5), (3, 0.5), (4, 0.9), (5, 0.8))
    assert results_page.pareto(points) == [(1, 0.2), (2, 0.5), (4, 0.9)]


def test_a_chart_is_drawn_only_if_its_quantity_varies():
    rows = [{"eflop": 10.0**i, "exact_accuracy": 0.1 * i, "experiment": f"p{i}", "group": "g"} for i in range(1, 5)]
    drawn = results_page.scatter(rows, "eflop", "title", "x", log=True)
    assert {"p1", "p2", "p3", "p4", "g", "title"} <= set(texts(drawn))
    assert results_page.scatter(rows[:1], "eflop", "title", "x") == ""
    alike = [rows[0] | {"eflop": x} for x in (2.1360, 2.1355)]  # steps rounded differently
    assert results_page.scatter(alike, "eflop", "title", "x") == ""


def test_a_law_is_drawn_and_described_with_its_error():
    """Results of four widths and one duplicate."""
    column = {"status": "done", "same_as": "", "curve": [], "group": "wide", "depth": 42}
    sizes = (1e6, 2e6, 4e6, 8e6)
    rows = [
        {**dict.fromkeys((*scaling_law._SAME_IN_GROUP, "steps", "eflop")), **column}
        | {"experiment": f"w{i}", "run": f"r{i}", "parameters": n, "exact_accuracy": 0.9 - 0.3 * (n / 1e6) ** -0.7}
        for i, n in enumerate(sizes)
    ]
    rows.append({**rows[-1], "experiment": "copy", "same_as": "w3"})
    text = results_page.page(rows, title="t", note="")
    said = "wide: accuracy = 0.900 - 0.3 N^-0.70, N in millions of parameters; error of 4 points of 4 sizes: 0.00"
    assert said in text
    (chart,) = (c for c in results_page.charts(rows) if "Accuracy and parameters" in texts(c))
    assert "law of wide" in texts(chart)


def test_a_chart_shows_the_groups_that_vary_its_quantity():
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
    assert [r["experiment"] for r in results_page.varying(rows, "puzzles")] == ["c", "base"]
