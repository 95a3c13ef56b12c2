"""The results of a suite as one HTML page with charts and a table, readable without a network."""

from __future__ import annotations

import html
import io
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from launch.experiments import charts, scaling_law
from launch.experiments.charts import Point
from launch.experiments.results import ResultRow

_COLUMNS = (  # column, heading, format
    ("experiment", "experiment", "text"),
    ("status", "status", "text"),
    ("seed", "seed", "count"),
    ("parameters", "parameters", "count"),
    ("depth", "depth", "count"),
    ("puzzles", "puzzles", "count"),
    ("copies", "copies", "count"),
    ("batch", "batch", "count"),
    ("steps", "steps done", "count"),
    ("total_steps", "of", "count"),
    ("eflop", "EFLOP", "number"),
    ("exact_accuracy", "exact", "share"),
    ("mean_of_seeds", "mean of seeds", "share"),
    ("spread_of_seeds", "spread", "share"),
    ("best_exact_accuracy", "best", "share"),
    ("best_step", "at step", "count"),
    ("goal_step", "80 % at step", "count"),
    ("cell_accuracy", "cells", "share"),
    ("q_halt_accuracy", "halting", "share"),
    ("train_exact_accuracy", "in training", "share"),
    ("gap", "gap", "share"),
    ("train_steps_per_puzzle", "steps per puzzle", "number"),
    ("step_seconds", "s/step", "number"),
    ("evaluated", "scores are of", "text"),
)
_CHARTS = (  # x column, title, x axis, logarithmic, frontier
    ("parameters", "Accuracy and parameters", "trained parameters without the puzzle table", True, False),
    ("depth", "Accuracy and depth", "layers in sequence per step: outer x (inner + 1) x layers", False, False),
    ("puzzles", "Accuracy and data", "training puzzles", True, False),
    ("copies", "Accuracy and augmentation", "copies of each training puzzle", True, False),
    ("batch", "Accuracy and batch size", "rows per batch", True, False),
    ("eflop", "Accuracy and compute, with the Pareto frontier", "training EFLOP", True, True),
)
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>$TITLE</title></head>
<body style="font-family: sans-serif; margin: 2em">
<h1>$TITLE</h1><p>$NOTE</p>$CHARTS$LAWS
<pre style="font-family: monospace; font-size: 12px; overflow-x: auto">{code}</pre></body></html>
"""
_WIDTH = 480  # columns of the table, which scrolls


def page(table: Sequence[ResultRow], *, title: str, note: str) -> str:
    """Returns the page.

    Args:
      table: from `results.rows`.
      title: heading of the page.
      note: a sentence below the heading.
    """
    drawn = "\n".join(filter(None, drawn_charts(table))) or "<p>No charts: no run has a score yet.</p>"
    laws = {
        group: law if isinstance(law, str) else law.describe() for group, law in scaling_law.of_groups(table).items()
    }
    text = "".join(f"<p>{html.escape(f'{group}: {law}')}.</p>" for group, law in laws.items())
    console = Console(record=True, file=io.StringIO(), width=_WIDTH, force_terminal=False, markup=False, emoji=False)
    console.print(_table(table))
    exported = console.export_html(code_format=_PAGE, inline_styles=True)
    for name, value in {"TITLE": html.escape(title), "NOTE": html.escape(note), "LAWS": text, "CHARTS": drawn}.items():
        exported = exported.replace(f"${name}", value)
    return exported


def drawn_charts(table: Sequence[ResultRow]) -> list[str]:
    """Draws exact accuracy against each quantity, against compute and by step; "" for a chart without content.

    A chart against a quantity shows only the groups that vary it: other groups would be a column of points at the value
    of the baseline.
    """
    scored = [row for row in table if row["exact_accuracy"] is not None]
    distinct = [row for row in scored if not row["same_as"]]
    laws = {group: law for group, law in scaling_law.of_groups(table).items() if not isinstance(law, str)}
    found = []
    for column, title, x_label, log, frontier in _CHARTS:
        points = [
            Point(row[column], row["exact_accuracy"], row["experiment"], row["group"])
            for row in (distinct if frontier else varying(scored, column))
            if row[column] is not None
        ]
        lines = {group: law.line() for group, law in laws.items()} if column == "parameters" else {}
        found.append(charts.scatter(points, title=title, x_label=x_label, log=log, frontier=frontier, laws=lines))
    by_step = {row["experiment"]: row["curve"] for row in distinct}
    return [*found, charts.curves(by_step, title="Accuracy by step", x_label="training step")]


def varying(rows: Sequence[ResultRow], column: str) -> list[ResultRow]:
    """Returns the rows of the groups in which a column has more than one value, each run once."""
    once: dict[str, ResultRow] = {}
    for group in dict.fromkeys(row["group"] for row in rows):
        members = [row for row in rows if row["group"] == group and row[column] is not None]
        values = [row[column] for row in members]
        if values and max(values) > charts.EQUAL * min(values):
            for row in members:
                once.setdefault(row["run"], row)
    return list(once.values())


def _table(rows: Sequence[ResultRow]) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    filled = [column for column in _COLUMNS if any(row[column[0]] not in (None, "") for row in rows)]
    for _, heading, form in filled:
        table.add_column(heading, justify="left" if form == "text" else "right", no_wrap=form != "text")
    for row in rows:
        failed = str(row["status"]).startswith(("failed", "refused"))
        style = "dim" if row["same_as"] else "red" if failed else ""
        table.add_row(*(_cell(row[column], form) for column, _, form in filled), style=style)
    return table


def _cell(value: object, form: str) -> str:
    if value is None or form == "text":
        return str(value or "")
    return {"share": f"{value:.2%}", "count": f"{value:,}", "number": f"{value:.3g}"}[form]
