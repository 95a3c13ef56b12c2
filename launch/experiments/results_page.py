"""Writes the results of a suite as one HTML page with charts and the table, which needs no network."""

import html
import io
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, PercentFormatter

ResultRow = Mapping[str, Any]

_ONLY_IN_CSV = ("group", "same_as", "total_eflop", "rows", "score", "run", "curve")
_OF_SCORES = ("mean_of_seeds", "spread_of_seeds", "gap")
_SCORES = {"exact_accuracy": "Accuracy", "validation_loss": "Validation loss"}
_CHARTS = (  # column, name in the title, label of the x axis, scale
    ("parameters", "parameters", "trained parameters without puzzle tables", "log"),
    ("depth", "depth", "layers in sequence per step", "linear"),
    ("puzzles", "data", "training puzzles", "log"),
    ("copies", "augmentation", "copies of each training puzzle", "log"),
    ("batch", "batch size", "rows per batch", "log"),
    ("eflop", "compute", "training EFLOP", "log"),
)
_EQUAL = 1.01  # quantities within this factor of each other count as equal
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<style>body {{ font-family: sans-serif; margin: 2em }} td, th {{ padding: 2px 8px; text-align: right }}</style></head>
<body><h1>{title}</h1><p>{note}</p>{charts}{table}</body></html>
"""


def page(table: Sequence[ResultRow], *, title: str, note: str) -> str:
    """Returns the HTML page; `table` has the rows of `results.rows`."""
    return _PAGE.format(
        title=html.escape(title),
        note=html.escape(note),
        charts="\n".join(charts(table)) or "<p>No charts: no run has a score yet.</p>",
        table=_table(table),
    )


def charts(table: Sequence[ResultRow]) -> list[str]:
    """Returns SVG charts of scores, against quantities that vary and by training step."""
    return [chart for score in _SCORES for chart in _charts([row for row in table if row["score"] == score], score)]


def _charts(table: Sequence[ResultRow], score: str) -> list[str]:
    name = _SCORES[score]
    scored = [row for row in table if row[score] is not None]
    found = []
    for column, quantity, x_label, scale in _CHARTS:
        if rows := varying(scored, column):
            figure, axes = _axes(f"{name} and {quantity}", x_label)
            axes.set_xscale("symlog" if scale == "log" and any(row[column] == 0 for row in rows) else scale)
            for group in dict.fromkeys(row["group"] for row in rows):
                points = [(row[column], row[score]) for row in rows if row["group"] == group]
                across, up = zip(*points, strict=True)
                axes.scatter(across, up, s=24, label=group)
            for row in rows:
                at = (row[column], row[score])
                axes.annotate(row["experiment"], at, xytext=(4, 4), textcoords="offset points", fontsize=6)
            found.append(_svg(figure, axes, score))
    curves = {row["experiment"]: row["curve"] for row in scored if not row["same_as"] and len(row["curve"]) > 1}
    if curves:
        figure, axes = _axes(f"{name} by step", "training step")
        for experiment, points in curves.items():
            axes.plot(*zip(*points, strict=True), label=experiment, linewidth=1.2)
        found.append(_svg(figure, axes, score))
    return found


def varying(rows: Sequence[ResultRow], column: str) -> list[ResultRow]:
    """Returns the rows of groups in which the numbers of a column vary by more than 1%.

    There is one row for each run. Rows without a number in the column are dropped.
    """
    once: dict[str, ResultRow] = {}
    for group in dict.fromkeys(row["group"] for row in rows):
        members = [row for row in rows if row["group"] == group and row[column] is not None]
        values = [row[column] for row in members]
        if values and max(values) > _EQUAL * min(values):
            for row in members:
                once.setdefault(row["run"], row)
    return list(once.values())


def _axes(title: str, x_label: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(6.0, 3.6), layout="constrained")
    axes = figure.subplots()
    axes.set_title(title, fontsize=10)
    axes.set_xlabel(x_label, fontsize=8)
    axes.grid(visible=True, color="#e4e4e4")
    return figure, axes


def _svg(figure: Figure, axes: Axes, score: str) -> str:
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    if score == "exact_accuracy":
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.tick_params(labelsize=7)
    axes.legend(fontsize=6)
    out = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none"}):  # keep text as text, not as paths
        figure.savefig(out, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    return out.getvalue()[out.getvalue().index("<svg") :]


def _table(rows: Sequence[ResultRow]) -> str:
    names = [name for name in (rows[0] if rows else ()) if name not in _ONLY_IN_CSV]
    filled = [name for name in names if any(row[name] not in (None, "") for row in rows)]
    lines = [filled, *([_cell(name, row) for name in filled] for row in rows)]
    cells = ("".join(f"<td>{html.escape(cell)}</td>" for cell in line) for line in lines)
    return f"<table>{''.join(f'<tr>{line}</tr>' for line in cells)}</table>"


def _cell(column: str, row: ResultRow) -> str:
    value = row[column]
    if value is None or isinstance(value, str):
        return value or ""
    if column.endswith("accuracy") or (column in _OF_SCORES and row["score"] == "exact_accuracy"):
        return f"{value:.2%}"
    if column.endswith("loss"):
        return f"{value:.4f}"
    return f"{value:,}" if isinstance(value, int) else f"{value:.3g}"
