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
from launch.experiments import results, results_page, suites

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
    titles = ["Accuracy and parameters", "Accuracy and compute", "Accuracy by step"]
    assert [title for chart in drawn for title in titles if title in texts(chart)] == titles  # only what varies
    assert {"exp01a", "exp01b"} <= set(texts(drawn[0]))
    assert "20.00%" in text
    empty = results_page.page(table(entries[4:], tmp_path / "none")[:0], title="t", note="")
    assert "No charts: no run has a score yet" in empty


def test_a_quantity_that_varies_by_less_than_a_hundredth_is_not_drawn():
    rows = [{"eflop": x, "group": "g", "run": f"r{x}"} for x in (2.1360, 2.1355)]  # steps rounded differently
    assert results_page.varying(rows, "eflop") == []


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
