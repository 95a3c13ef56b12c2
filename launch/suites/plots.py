"""Pictures of a table of results as inline SVG: points with a label each, and curves by step.

The one idea: a picture is a function from numbers to text; nothing has to be installed, fetched or run to see it.
"""

from __future__ import annotations

import html
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

WIDTH, HEIGHT = 560, 340
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 16, 34, 48
SAME, _APART = 1.01, 36  # so near are two numbers alike; pixels between two ticks
_LETTER, _LINE = 6.0, 11.0  # of a name, at most
COLOURS = ("#3366aa", "#cc5533", "#2f8f5b", "#8a5aa8", "#b8860b", "#3a9aa8", "#a83a6b", "#667722", "#555555")


class Point(NamedTuple):
    """One experiment in a picture; y is a share of 1."""

    x: float
    y: float
    label: str
    group: str


class _Name(NamedTuple):
    """Text at a place, which is its end where it `ends` there."""

    x: float
    y: float
    text: str
    ends: bool


class _Axis(NamedTuple):
    low: float
    high: float
    place: Callable[[float], float]
    ticks: tuple[float, ...]


def scatter(
    points: Sequence[Point],
    *,
    title: str,
    x_label: str,
    log: bool = False,
    frontier: bool = False,
    laws: Mapping[str, Sequence[tuple[float, float]]] = MappingProxyType({}),
) -> str:
    """Accuracy against something; empty where all x are one and the same, to a hundredth.

    Args:
      points: what is drawn; those of a group have one colour.
      title, x_label: said in words.
      log: the x axis is logarithmic.
      frontier: a line through the points that no other beats in both: less x and more y.
      laws: curves fitted to groups of points, by group.
    """
    points = [p for p in points if math.isfinite(p.x) and math.isfinite(p.y) and (p.x > 0 or not log)]
    if not points or max(p.x for p in points) <= SAME * min(p.x for p in points):
        return ""
    across, up = _across([p.x for p in points], log=log), _up([p.y for p in points])
    colours = _colours(p.group for p in points)
    body = [_line(_staircase(pareto(points)), across, up, colour="#999999", dashed=True)] if frontier else []
    body += [
        _line(curve, across, up, colour=colours.get(group, "#999999"), dashed=True, name=f"law of {group}")
        for group, curve in laws.items()
    ]
    names = []
    for p in points:
        x, y = across.place(p.x), up.place(p.y)
        said = html.escape(f"{p.label}: {p.y:.2%} at {number(p.x)}")
        body.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5" fill="{colours[p.group]}"><title>{said}</title></circle>'
        )
        ends = x > (_LEFT + WIDTH) / 2  # a name in the right half ends at its point
        names.append(_Name(x - 6 if ends else x + 6, y - 6, p.label, ends))
    return _picture(title, x_label, across, up, [*body, *_legible(names)])


def curves(series: Mapping[str, Sequence[tuple[float, float]]], *, title: str, x_label: str) -> str:
    """Accuracy by step, a line for each run; empty where no run has two points."""
    series = {name: points for name, points in series.items() if len(points) > 1}
    if not series:
        return ""
    every = [point for points in series.values() for point in points]
    across, up = _across([x for x, _ in every], log=False), _up([y for _, y in every])
    body, names = [], []
    for (name, points), colour in zip(series.items(), COLOURS * len(series), strict=False):
        x, y = across.place(points[-1][0]), up.place(points[-1][1])
        body.append(_line(points, across, up, colour=colour, name=name))
        names.append(_Name(x - 4, y - 5, name, True))
    return _picture(title, x_label, across, up, [*body, *_legible(names)])


def pareto(points: Sequence[Point]) -> list[Point]:
    """The points that no other beats: by ascending x, each higher than all before it."""
    best: list[Point] = []
    for point in sorted(points, key=lambda p: (p.x, -p.y)):
        if not best or point.y > best[-1].y:
            best.append(point)
    return best


def number(value: float) -> str:
    """A number as one says it: 5.03M, 8,138, 0.25."""
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if abs(value) >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.3g}"


def _legible(names: Sequence[_Name]) -> list[str]:
    """The names that lie on none before them; the others are said where one points at theirs."""
    taken: list[tuple[float, float, float]] = []
    drawn = []
    for x, y, text, ends in names:
        width = _LETTER * len(text)
        left = x - width if ends else x
        if any(left < x0 + w and x0 < left + width and abs(y - y0) < _LINE for x0, w, y0 in taken):
            continue
        taken.append((left, width, y))
        anchor = ' text-anchor="end"' if ends else ""
        drawn.append(f'<text class="name" x="{x:.1f}" y="{y:.1f}"{anchor}>{html.escape(text)}</text>')
    return drawn


def _staircase(points: Sequence[Point]) -> list[tuple[float, float]]:
    steps = [(points[0].x, points[0].y)]
    for before, after in itertools.pairwise(points):
        steps += [(after.x, before.y), (after.x, after.y)]
    return steps


def _across(values: Sequence[float], *, log: bool) -> _Axis:
    turn = math.log10 if log else float
    low, high = turn(min(values)), turn(max(values))
    margin = 0.06 * (high - low) or 0.5
    low, high = low - margin, high + margin
    scale = (WIDTH - _LEFT - _RIGHT) / (high - low)

    def place(value: float) -> float:
        return _LEFT + (turn(value) - low) * scale

    if log and len(set(values)) <= 8:
        return _Axis(low, high, place, tuple(sorted(set(values))))
    return _Axis(low, high, place, _decimal_ticks(low, high) if log else _round_ticks(low, high))


def _up(values: Sequence[float]) -> _Axis:
    low, high = max(0.0, min(values) - 0.05), min(1.0, max(values) + 0.05)
    high = max(high, low + 0.1)
    scale = (HEIGHT - _TOP - _BOTTOM) / (high - low)
    return _Axis(low, high, lambda value: HEIGHT - _BOTTOM - (value - low) * scale, _round_ticks(low, high))


def _round_ticks(low: float, high: float) -> tuple[float, ...]:
    """Four to ten round numbers between two."""
    size = 10 ** math.floor(math.log10(high - low))
    step = next(size * part for part in (0.1, 0.2, 0.5, 1, 2) if (high - low) / (size * part) <= 8)
    first = math.ceil(low / step)
    return tuple(i * step for i in range(first, math.floor(high / step) + 1))


def _decimal_ticks(low: float, high: float) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, … between two powers of ten; round numbers where these would be fewer than three."""
    powers = range(math.floor(low), math.ceil(high) + 1)
    ticks = tuple(m * 10.0**k for k in powers for m in (1, 2, 5) if 10**low <= m * 10.0**k <= 10**high)
    return ticks if len(ticks) >= 3 else _round_ticks(10**low, 10**high)


def _line(points, across: _Axis, up: _Axis, *, colour: str, dashed: bool = False, name: str = "") -> str:
    path = " ".join(f"{across.place(x):.1f},{up.place(y):.1f}" for x, y in points)
    dash = ' stroke-dasharray="4 3"' if dashed else ""
    title = f"<title>{html.escape(name)}</title>" if name else ""
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.6"{dash}>{title}</polyline>'


def _colours(names) -> dict[str, str]:
    return {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(dict.fromkeys(names))}


def _picture(title: str, x_label: str, across: _Axis, up: _Axis, body: Sequence[str]) -> str:
    bottom, right = HEIGHT - _BOTTOM, WIDTH - _RIGHT
    middle = f'x="{(_LEFT + right) / 2}" y="{HEIGHT - 10}" text-anchor="middle"'
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" role="img" aria-label="{html.escape(title)}">',
        f'<text class="title" x="{_LEFT}" y="20">{html.escape(title)}</text>',
        f'<text class="axis" {middle}>{html.escape(x_label)}</text>',
    ]
    for tick in up.ticks:
        y = up.place(tick)
        parts.append(f'<line x1="{_LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e4e4e4"/>')
        parts.append(f'<text class="tick" x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:.0%}</text>')
    said = -math.inf
    for tick in across.ticks:
        x = across.place(tick)
        if x - said < _APART:  # its number would run into the one before
            continue
        said = x
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{bottom}" y2="{bottom + 4}" stroke="#888888"/>')
        parts.append(f'<text class="tick" x="{x:.1f}" y="{bottom + 17}" text-anchor="middle">{number(tick)}</text>')
    parts.append(f'<line x1="{_LEFT}" x2="{right}" y1="{bottom}" y2="{bottom}" stroke="#888888"/>')
    return "\n".join([*parts, *body, "</svg>"])
