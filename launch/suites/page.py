"""One page of HTML with the table and the pictures: it opens anywhere, and asks nothing of a network."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

from launch.suites import analysis, plots
from launch.suites.plots import Point
from launch.suites.results import Row

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 1180px; padding: 0 1em; }
body { color: #222; background: #fff; }
table { border-collapse: collapse; font-size: 13px; width: 100%; }
th, td { padding: 3px 8px; border-bottom: 1px solid #e4e4e4; text-align: right; white-space: nowrap; }
th { position: sticky; top: 0; background: #f6f6f6; } td.text, th.text { text-align: left; white-space: normal; }
tr.same { color: #888; } tr.bad td.status { color: #b00020; } .scroll { overflow-x: auto; }
.pictures { display: flex; flex-wrap: wrap; gap: 18px; } svg { border: 1px solid #e4e4e4; max-width: 100%; }
.title { font-size: 14px; font-weight: 600; } .axis, .tick { font-size: 11px; fill: #555; }
.name { font-size: 10px; fill: #333; }
"""
_COLUMNS = (  # column of the table, heading, how it is shown
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
    ("train_steps_per_puzzle", "steps a puzzle", "number"),
    ("step_seconds", "s/step", "number"),
    ("evaluated", "scores are of", "text"),
)
_PICTURES = (  # x column, title, x axis, logarithmic, frontier
    ("parameters", "Accuracy and parameters", "trained parameters without the puzzle table", True, False),
    ("depth", "Accuracy and depth", "layers in a row in one step: outer x (inner + 1) x layers", False, False),
    ("puzzles", "Accuracy and data", "training puzzles", True, False),
    ("copies", "Accuracy and augmentation", "copies of each training puzzle", True, False),
    ("batch", "Accuracy and batch", "rows of a batch", True, False),
    ("eflop", "Accuracy and compute, with what nothing beats in both", "training, EFLOP", True, True),
)


def page(table: Sequence[Row], *, title: str, note: str) -> str:
    """The page.

    Args:
      table: of `results.rows`.
      title: what it is of.
      note: where and how it was made.
    """
    drawn = [picture for picture in pictures(table) if picture]
    shown = "\n".join(drawn) or "<p>Nothing to draw yet: no run has a score.</p>"
    laws = "".join(f"<p>{html.escape(f'{group}: {_said(law)}')}.</p>" for group, law in analysis.laws(table).items())
    heads = "".join(f'<th class="{form}">{name}</th>' for _, name, form in _COLUMNS)
    return "\n".join(
        [
            "<!doctype html>",
            f'<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>',
            f"<style>{_STYLE}</style></head><body>",
            f"<h1>{html.escape(title)}</h1><p>{html.escape(note)}</p>",
            f'<div class="pictures">{shown}</div>{laws}',
            f'<h2>Table</h2><div class="scroll"><table><thead><tr>{heads}</tr></thead><tbody>',
            *(_row(row) for row in table),
            "</tbody></table></div></body></html>\n",
        ]
    )


def pictures(table: Sequence[Row]) -> list[str]:
    """Exact accuracy against what varies, with compute, and by step; '' for one that has nothing to show.

    Against a quantity stand the groups that vary it: the others would be a column of points at the baseline's.
    """
    scored = [row for row in table if row["exact_accuracy"] is not None]
    distinct = [row for row in scored if not row["same_as"]]
    laws = {group: law for group, law in analysis.laws(table).items() if isinstance(law, analysis.Law)}
    found = []
    for column, title, x_label, log, frontier in _PICTURES:
        points = [
            Point(row[column], row["exact_accuracy"], row["experiment"], row["group"])
            for row in (distinct if frontier else _varying(scored, column))
            if row[column] is not None
        ]
        lines = {group: law.line() for group, law in laws.items()} if column == "parameters" else {}
        found.append(plots.scatter(points, title=title, x_label=x_label, log=log, frontier=frontier, laws=lines))
    by_step = {row["experiment"]: row["curve"] for row in distinct}
    return [*found, plots.curves(by_step, title="Accuracy by step", x_label="training step")]


def _varying(rows: Sequence[Row], column: str) -> list[Row]:
    """Rows of the groups in which a column has more than one value, each run once."""
    once: dict[str, Row] = {}
    for group in dict.fromkeys(row["group"] for row in rows):
        members = [row for row in rows if row["group"] == group and row[column] is not None]
        values = [row[column] for row in members]
        if values and max(values) > plots.SAME * min(values):
            for row in members:
                once.setdefault(row["run"], row)
    return list(once.values())


def _said(law: analysis.Law | str) -> str:
    return law if isinstance(law, str) else law.describe()


def _row(row: Row) -> str:
    bad = str(row["status"]).startswith(("failed", "refused"))
    kind = "same" if row["same_as"] else "bad" if bad else ""
    cells = "".join(f'<td class="{form} {column}">{_cell(row, column, form)}</td>' for column, _, form in _COLUMNS)
    return f'<tr class="{kind}">{cells}</tr>'


def _cell(row: Mapping[str, Any], column: str, form: str) -> str:
    value = row[column]
    if value is None or value == "":
        return ""
    if form == "share":
        return f"{value:.2%}"
    if form == "count":
        return f"{value:,}"
    return f"{value:.3g}" if form == "number" else html.escape(str(value))
