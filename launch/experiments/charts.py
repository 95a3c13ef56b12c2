"""Charts of a results table as SVG: accuracy against one quantity, and accuracy by training step."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter, PercentFormatter

EQUAL = 1.01  # two quantities closer than this factor count as one
_MOST_NAMES = 24  # points with their names beside them


class Point(NamedTuple):
    """One experiment in a chart; y is a fraction of 1."""

    x: float
    y: float
    label: str
    group: str


def scatter(
    points: Sequence[Point],
    *,
    title: str,
    x_label: str,
    log: bool = False,
    frontier: bool = False,
    laws: Mapping[str, Sequence[tuple[float, float]]] = MappingProxyType({}),
) -> str:
    """Draws accuracy against a quantity; "" if the quantity does not vary by more than 1 %.

    Args:
      points: the points of a group share a color.
      title, x_label: of the chart.
      log: use a logarithmic x axis.
      frontier: draw a line through the points for which no other has both less x and more y.
      laws: fitted curves, by group.
    """
    points = [p for p in points if math.isfinite(p.x) and math.isfinite(p.y) and (p.x > 0 or not log)]
    if not points or max(p.x for p in points) <= EQUAL * min(p.x for p in points):
        return ""
    figure, axes = _axes(title, x_label)
    if log:
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_minor_formatter(NullFormatter())
    if frontier:
        best = pareto(points)
        axes.step([p.x for p in best], [p.y for p in best], where="post", color="gray", linestyle="--", linewidth=1)
    for number, group in enumerate(dict.fromkeys(p.group for p in points)):
        members = [p for p in points if p.group == group]
        axes.scatter([p.x for p in members], [p.y for p in members], s=24, color=f"C{number}", label=group)
        if group in laws:
            axes.plot(*zip(*laws[group], strict=True), "--", color=f"C{number}", label=f"law of {group}", linewidth=1)
    if len(points) <= _MOST_NAMES:
        for p in points:
            axes.annotate(p.label, (p.x, p.y), xytext=(4, 4), textcoords="offset points", fontsize=6)
    return _svg(figure, axes, title)


def curves(series: Mapping[str, Sequence[tuple[float, float]]], *, title: str, x_label: str) -> str:
    """Draws accuracy by step, one line for each run; "" if no run has two points."""
    series = {name: points for name, points in series.items() if len(points) > 1}
    if not series:
        return ""
    figure, axes = _axes(title, x_label)
    for name, points in series.items():
        axes.plot(*zip(*points, strict=True), label=name, linewidth=1.2)
    return _svg(figure, axes, title)


def pareto(points: Sequence[Point]) -> list[Point]:
    """Returns the points that no other point beats: by ascending x, each with more y than all before it."""
    best: list[Point] = []
    for point in sorted(points, key=lambda p: (p.x, -p.y)):
        if not best or point.y > best[-1].y:
            best.append(point)
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


def _svg(figure: Figure, axes: Axes, title: str) -> str:
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.legend(fontsize=6)
    out = io.StringIO()
    # Text stays text; a salt of its own keeps the ids of several charts in one page apart, and the same at every call.
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": title}):
        figure.savefig(out, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    return out.getvalue()[out.getvalue().index("<svg") :]
