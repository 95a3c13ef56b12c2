"""The results of a suite as one HTML page: charts, scaling laws and the table; readable without a network."""

from __future__ import annotations

import html
import io
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter, PercentFormatter

from launch.experiments import scaling_law
from launch.experiments.results import ResultRow

_ONLY_IN_CSV = ("group", "same_as", "total_eflop", "rows", "validation_loss", "run", "curve")
_SHARES = ("mean_of_seeds", "spread_of_seeds", "gap")  # shown as percentages, as every accuracy
_CHARTS = (  # column, title, x axis, logarithmic
    ("parameters", "Accuracy and parameters", "trained parameters without the puzzle table", True),
    ("depth", "Accuracy and depth", "layers in sequence per step: outer x (inner + 1) x layers", False),
    ("puzzles", "Accuracy and data", "training puzzles", True),
    ("copies", "Accuracy and augmentation", "copies of each training puzzle", True),
    ("batch", "Accuracy and batch size", "rows per batch", True),
)
_EQUAL = 1.01  # two quantities closer than this factor count as one
_MOST_NAMES = 24  # points with their names beside them
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<style>body {{ font-family: sans-serif; margin: 2em }} td, th {{ padding: 2px 8px; text-align: right }}</style></head>
<body><h1>{title}</h1><p>{note}</p>{charts}{laws}{table}</body></html>
"""


def page(table: Sequence[ResultRow], *, title: str, note: str) -> str:
    """Returns the page.

    Args:
      table: from `results.rows`.
      title: heading of the page.
      note: a sentence below the heading.
    """
    laws = scaling_law.of_groups(table)
    lines = (f"{group}: {law if isinstance(law, str) else law.describe()}" for group, law in laws.items())
    return _PAGE.format(
        title=html.escape(title),
        note=html.escape(note),
        charts="\n".join(charts(table)) or "<p>No charts: no run has a score yet.</p>",
        laws="".join(f"<p>{html.escape(line)}.</p>" for line in lines),
        table=_table(table),
    )


def charts(table: Sequence[ResultRow]) -> list[str]:
    """Draws exact accuracy against each quantity that varies, against compute and by step, as SVG.

    A chart against a quantity shows only the groups that vary it: other groups would be a column of points at the value
    of the baseline.
    """
    scored = [row for row in table if row["exact_accuracy"] is not None]
    distinct = [row for row in scored if not row["same_as"]]
    laws = {group: law for group, law in scaling_law.of_groups(table).items() if not isinstance(law, str)}
    lines = {group: law.line() for group, law in laws.items()}
    found = [
        scatter(varying(scored, column), column, title, x_label, log=log, lines=lines if column == "parameters" else {})
        for column, title, x_label, log in _CHARTS
    ]
    compute = "Accuracy and compute, with the Pareto frontier"
    found.append(scatter(distinct, "eflop", compute, "training EFLOP", log=True, frontier=True))
    curves = {row["experiment"]: row["curve"] for row in distinct if len(row["curve"]) > 1}
    if curves:
        figure, axes = _axes("Accuracy by step", "training step")
        for name, points in curves.items():
            axes.plot(*zip(*points, strict=True), label=name, linewidth=1.2)
        found.append(_svg(figure, axes))
    return list(filter(None, found))


def varying(rows: Sequence[ResultRow], column: str) -> list[ResultRow]:
    """Returns the rows of groups in which a column has more than one value; rows of the same run appear once."""
    once: dict[str, ResultRow] = {}
    for group in dict.fromkeys(row["group"] for row in rows):
        members = [row for row in rows if row["group"] == group and row[column] is not None]
        if _varies(members, column):
            for row in members:
                once.setdefault(row["run"], row)
    return list(once.values())


def _varies(rows: Sequence[ResultRow], column: str) -> bool:
    values = [row[column] for row in rows]
    return bool(values) and max(values) > _EQUAL * min(values)


def scatter(
    rows: Sequence[ResultRow],
    column: str,
    title: str,
    x_label: str,
    *,
    log: bool = False,
    frontier: bool = False,
    lines: Mapping[str, Sequence[tuple[float, float]]] = MappingProxyType({}),
) -> str:
    """Draws exact accuracy against a column; "" if the column does not vary.

    Args:
      rows: points; those of a group share a color.
      column: the column shown on the x axis.
      title, x_label: title and x label of the chart.
      log: use a logarithmic x axis.
      frontier: draw a line through the points for which no other has both less x and more accuracy.
      lines: fitted curves, by group.
    """
    rows = [row for row in rows if row[column] is not None]
    if not _varies(rows, column):
        return ""
    figure, axes = _axes(title, x_label)
    if log:
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_minor_formatter(NullFormatter())
    points = [(row[column], row["exact_accuracy"]) for row in rows]
    if frontier:
        axes.step(*zip(*pareto(points), strict=True), where="post", color="gray", linestyle="--", linewidth=1)
    for number, group in enumerate(dict.fromkeys(row["group"] for row in rows)):
        members = [point for point, row in zip(points, rows, strict=True) if row["group"] == group]
        axes.scatter(*zip(*members, strict=True), s=24, color=f"C{number}", label=group)
        if group in lines:
            axes.plot(*zip(*lines[group], strict=True), "--", color=f"C{number}", label=f"law of {group}", linewidth=1)
    if len(rows) <= _MOST_NAMES:
        for point, row in zip(points, rows, strict=True):
            axes.annotate(row["experiment"], point, xytext=(4, 4), textcoords="offset points", fontsize=6)
    return _svg(figure, axes)


def pareto(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Returns the points that no other point beats: by ascending x, each with more y than all before it."""
    best: list[tuple[float, float]] = []
    for x, y in sorted(points, key=lambda point: (point[0], -point[1])):
        if not best or y > best[-1][1]:
            best.append((x, y))
    return best


def _axes(title: str, x_label: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(6.0, 3.6), layout="constrained")
    axes = figure.subplots()
    axes.set_title(title, fontsize=10)
    axes.set_xlabel(x_label, fontsize=8)
    axes.tick_params(labelsize=7)
    axes.grid(visible=True, color="#e4e4e4")
    axes.margins(x=0.1)
    return figure, axes


def _svg(figure: Figure, axes: Axes) -> str:
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.legend(fontsize=6)
    out = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none"}):  # text stays text
        figure.savefig(out, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    return out.getvalue()[out.getvalue().index("<svg") :]


def _table(rows: Sequence[ResultRow]) -> str:
    names = [name for name in (rows[0] if rows else ()) if name not in _ONLY_IN_CSV]
    filled = [name for name in names if any(row[name] not in (None, "") for row in rows)]
    lines = [filled, *([_cell(name, row[name]) for name in filled] for row in rows)]
    cells = ("".join(f"<td>{html.escape(cell)}</td>" for cell in line) for line in lines)
    return f"<table>{''.join(f'<tr>{line}</tr>' for line in cells)}</table>"


def _cell(column: str, value: object) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    if column in _SHARES or column.endswith("accuracy"):
        return f"{value:.2%}"
    return f"{value:,}" if isinstance(value, int) else f"{value:.3g}"
