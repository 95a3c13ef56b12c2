"""Recorded metrics, the table of results, and its page with charts."""

import csv
import io
import json
import pathlib
import re
import types
import xml.etree.ElementTree

import pytest

from core.training import evaluation, metrics
from core.types import WeightedSum
from launch import environment
from launch.experiments import results, results_page, suites

pytestmark = pytest.mark.part("trm")
SVG = "{http://www.w3.org/2000/svg}"
PATHS = [suites.HOME / "exp01" / f"exp01{i}.gin" for i in "abc"]


@pytest.fixture(scope="module")
def entries():
    return suites.load(PATHS, check_data=False, seeds=range(2))


def write(folder, lines):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("\n".join(lines))
    return str(folder)


def score(step, value, **more):
    return json.dumps({"step": step, "time_seconds": 1.0, "validation/exact_accuracy": value, **more})


def test_the_names_of_the_scores_are_those_that_runs_write(tmp_path):
    written = {}
    sums = {"exact_accuracy": WeightedSum(1.0, 2.0), "loss": WeightedSum(3.0, 2.0)}
    program = types.SimpleNamespace(put=lambda batch: batch, eval_step=lambda state, batch: sums)
    batches = evaluation.FirstBatches([{}], 1)
    hook = evaluation.Evaluate(
        program, lambda: batches, lambda step, values: written.update(values), every=1, last_step=1
    )
    hook.at_boundary(1, None)
    assert written == {results.SCORE: 0.5, results.LOSS: 1.5}


def table(entries, tmp_path):
    dirs, scores = {}, iter((0.2, 0.3, 0.5, 0.7))
    for entry in entries:
        value = next(scores, None)
        last = {"validation/accuracy": 0.9, "exact_accuracy": 0.95}
        lines = [] if value is None else [score(100, value / 2), score(8138, value, **last)]
        of = {"step": 0, "time_seconds": 1.0, "tag": metrics.EVALUATED_ON, "text": "8,192 of 9,000"}
        lines += [] if value is None else [json.dumps(of)]
        dirs[entry.id] = write(tmp_path / entry.name, lines)
    return results.rows(entries, status=dict.fromkeys(dirs, suites.Status(suites.State.DONE, "done")), run_dirs=dirs)


def test_only_finished_runs_have_a_mean_and_a_refused_one_has_no_scores_of_another_experiment(tmp_path):
    every = suites.load(PATHS[:1], check_data=False, seeds=range(4))
    first = [entry for entry in every if entry.path == every[0].path]
    dirs = {e.id: write(tmp_path / str(n), [score(100, 0.2 * (n + 1))]) for n, e in enumerate(first)}
    states = (suites.State.DONE, suites.State.DONE, suites.State.UNFINISHED, suites.State.REFUSED)
    status = {e.id: suites.Status(state, state.value) for e, state in zip(first, states, strict=True)}
    found = results.rows(first, status=status, run_dirs=dirs)
    assert [row["exact_accuracy"] for row in found] == [0.2, 0.4, pytest.approx(0.6), None]
    assert [row.get("mean_of_seeds") for row in found] == [pytest.approx(0.3), pytest.approx(0.3), None, None]


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


TEXT = """from __gin__ import dynamic_registration
include 'gin/quickstart.gin'
SLICE = 'v4-8'
LEARNING_RATE = {rate}
"""


@pytest.fixture(scope="module")
def text_suite(tmp_path_factory):
    """Two text experiments with two seeds, of which the last has no run."""
    folder = tmp_path_factory.mktemp("suite") / "sweep"
    folder.mkdir()
    for name, rate in (("low", "1e-3"), ("high", "4e-3")):
        (folder / f"{name}.gin").write_text(TEXT.format(rate=rate))
    root = folder.parent / "runs"
    entries = suites.load(suites.files(str(folder)), root=str(root), seeds=range(2), check_data=False)
    for number, entry in enumerate(entries[:-1]):
        steps = (100, 3.0 + number), (200, 2.0 + number)
        lines = [json.dumps({"step": s, "loss": x, "validation/loss": x + 0.125}) for s, x in steps]
        write(pathlib.Path(entry.run_dir), lines)
        (pathlib.Path(entry.run_dir) / "config.gin").write_text(entry.text)
    suite = suites.Suite(entries, mode=suites.Mode(), root=str(root), logs=folder)
    suite.gather()
    return suite


def test_experiments_of_text_have_losses_and_what_they_differ_in(text_suite):
    rows = results.rows(text_suite.entries, status=text_suite.status, run_dirs=text_suite.run_dirs)
    assert [row["experiment"] for row in rows] == ["high", "high_seed1", "low", "low_seed1"]
    assert [row["settings"] for row in rows] == [f"LEARNING_RATE = {rate}" for rate in (0.004, 0.004, 0.001, 0.001)]
    assert [row["loss"] for row in rows] == [2.0, 3.0, 4.0, None]
    assert [row["validation_loss"] for row in rows] == [2.125, 3.125, 4.125, None]
    assert (rows[0]["mean_of_seeds"], rows[0]["spread_of_seeds"]) == (2.625, 1.0)
    assert rows[2]["mean_of_seeds"] is None
    one, other, *_ = text_suite.run_dirs
    same = {**text_suite.run_dirs, other: text_suite.run_dirs[one]}  # as if the file had seed 1, too
    alike = results.rows(text_suite.entries, status=text_suite.status, run_dirs=same)
    assert alike[0]["mean_of_seeds"] is None
    text = results_page.page(rows, title="t", note="")
    assert all(f"<td>{cell}</td>" in text for cell in ("LEARNING_RATE = 0.001", "2.0000", "2.1250", "2.62"))
    assert "accuracy" not in text
    (chart,) = results_page.charts(rows)
    assert {"Validation loss by step", "high", "high_seed1", "low"} <= set(texts(chart))
    assert not [label for label in texts(chart) if "%" in label]


def test_rows_and_cost_are_those_of_each_phase(tmp_path):
    text = f"from __gin__ import dynamic_registration\ninclude '{environment.WORKSPACE}/gin/quickstart_phases.gin'\n"
    (tmp_path / "phased.gin").write_text(text + "SLICE = 'v4-16'\n")
    (entry,) = suites.load([tmp_path / "phased.gin"], check_data=False)
    run_dir = write(tmp_path / "run", [json.dumps({"step": 180, "loss": 1.0})])
    status = {entry.id: suites.Status(suites.State.DONE, "done")}
    (row,) = results.rows([entry], status=status, run_dirs={entry.id: run_dir})
    first, second = (span.experiment for span in entry.experiment.spans())
    assert row["rows"] == 150 * 16 + 30 * 8
    assert first.flops_per_step != second.flops_per_step
    wanted = [150 * first.flops_per_step + n * second.flops_per_step for n in (30, 50)]
    assert [row["eflop"], row["total_eflop"]] == pytest.approx([flops / 1e18 for flops in wanted])


def test_the_printed_table_has_the_scores_that_runs_have_and_the_settings(text_suite):
    columns = {column.header: list(column.cells) for column in results._table(text_suite).columns}
    assert columns["loss"] == ["2.0000", "3.0000", "4.0000", ""]
    assert columns["validation loss"] == ["2.1250", "3.1250", "4.1250", ""]
    assert columns["settings"][::2] == ["LEARNING_RATE = 0.004", "LEARNING_RATE = 0.001"]
    assert "exact" not in columns


def test_a_quantity_that_varies_by_less_than_a_hundredth_is_not_drawn():
    rows = [{"eflop": x, "group": "g", "run": f"r{x}"} for x in (2.1360, 2.1355)]  # steps rounded differently
    assert results_page.varying(rows, "eflop") == []


def test_a_chart_shows_an_experiment_without_copies():
    base = {"group": "exp", "score": "exact_accuracy", "same_as": "", "curve": [], "parameters": 5, "depth": 2}
    base |= {"puzzles": None, "batch": 8, "eflop": None}
    named = {"none": 0, "ten": 10, "hundred": 100}
    rows = [{**base, "experiment": n, "copies": c, "run": n, "exact_accuracy": 0.5} for n, c in named.items()]
    (chart,) = results_page.charts(rows)
    assert not [name for name in named if f">{name}<" not in chart]


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
