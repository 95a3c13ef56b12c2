"""Pictures of a plan as inline SVG: time against HBM, and bars in parts, one for each candidate.

Candidates are told apart by their place in the table, which stands beside each mark: names are long, and many.
"""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

COLOURS = ("#3366aa", "#cc5533", "#2f8f5b", "#8a5aa8", "#b8860b", "#3a9aa8", "#a83a6b", "#667722", "#555555")
WIDTH, HEIGHT = 560, 340
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 20, 34, 48
_BAR, _GAP, _LEGEND = 15, 6, 22
_APART, _SHOWN = 26, 3  # pixels between marks with a line of their own; places in a line
_LETTER = 6.2  # pixels of a letter in a legend


class Mark(NamedTuple):
    """One candidate between two times.

    Attributes:
      place: in the table, from 1.
      name: said where one points at it.
      x: across.
      low, high: up.
    """

    place: int
    name: str
    x: float
    low: float
    high: float


class Bar(NamedTuple):
    """One candidate in parts; a part has a name and a size."""

    place: int
    name: str
    parts: Mapping[str, float]


def ranges(marks: Sequence[Mark], *, title: str, x_label: str, y_label: str, limit: float) -> str:
    """A line from low to high for each candidate, with what no x may pass as a dashed line."""
    across = _ticks(0.0, max([limit, *(m.x for m in marks)]) * 1.04)
    up = _ticks(0.0, max(m.high for m in marks) * 1.12)
    right, bottom = WIDTH - _RIGHT, HEIGHT - _BOTTOM

    def x_of(value: float) -> float:
        return _LEFT + value / across[-1] * (right - _LEFT)

    def y_of(value: float) -> float:
        return bottom - value / up[-1] * (bottom - _TOP)

    body = [_line(_LEFT, right, y_of(t), y_of(t), "#e4e4e4") for t in up]
    body += [_text(_LEFT - 6, y_of(t) + 4, f"{t:g}", "tick", "end") for t in up]
    body += [_text(x_of(t), bottom + 17, f"{t:g}", "tick", "middle") for t in across]
    body += [_line(x_of(limit), x_of(limit), _TOP, bottom, "#b00020", dashed=True)]
    body.append(_text(x_of(limit) - 5, _TOP + 10, f"a chip has {limit:.4g}", "tick", "end"))
    for mark in marks:
        colour = COLOURS[(mark.place - 1) % len(COLOURS)]
        x, low, high = x_of(mark.x), y_of(mark.low), y_of(mark.high)
        said = html.escape(f"{mark.place}. {mark.name}: {mark.low:.3g} to {mark.high:.3g}, {mark.x:.2f}")
        body.append(
            f'<g><title>{said}</title><line x1="{x:.1f}" x2="{x:.1f}" y1="{low:.1f}" y2="{high:.1f}" '
            f'stroke="{colour}" stroke-width="3"/><circle cx="{x:.1f}" cy="{low:.1f}" r="4" fill="{colour}"/>'
            f'<circle cx="{x:.1f}" cy="{high:.1f}" r="4" fill="#fff" stroke="{colour}" stroke-width="2"/></g>'
        )
    body += _places(marks, x_of, y_of)
    return _picture(title, x_label, y_label, body, HEIGHT)


def _places(marks: Sequence[Mark], x_of, y_of) -> list[str]:
    """Places above the marks; those that stand side by side share a line, the others are said where one points."""
    groups: list[list[Mark]] = []
    for mark in sorted(marks, key=lambda m: m.x):
        if groups and x_of(mark.x) - x_of(groups[-1][0].x) < _APART:
            groups[-1].append(mark)
        else:
            groups.append([mark])
    said = []
    for group in groups:
        places = sorted(mark.place for mark in group)
        text = ", ".join(map(str, places[:_SHOWN])) + (" …" if len(places) > _SHOWN else "")
        middle = sum(x_of(mark.x) for mark in group) / len(group)
        said.append(_text(middle, min(y_of(mark.high) for mark in group) - 8, text, "name", "middle"))
    return said


def bars(rows: Sequence[Bar], *, title: str, x_label: str, form: str = "{:.3g}") -> str:
    """A bar for each candidate, its parts beside one another, each kind of part in one colour."""
    kinds = list(dict.fromkeys(kind for row in rows for kind in row.parts))
    colours = {kind: COLOURS[i % len(COLOURS)] for i, kind in enumerate(kinds)}
    longest = max([sum(row.parts.values()) for row in rows] + [1e-12])
    ticks = _ticks(0.0, longest * 1.02)
    legend, lines = _legend(colours)
    top = _TOP + lines * _LEGEND
    height = top + len(rows) * (_BAR + _GAP) + _BOTTOM
    bottom, right = height - _BOTTOM, WIDTH - _RIGHT - 40

    def x_of(value: float) -> float:
        return _LEFT + value / ticks[-1] * (right - _LEFT)

    body = [*legend]
    for tick in ticks:
        body.append(_line(x_of(tick), x_of(tick), top - 4, bottom, "#e4e4e4"))
        body.append(_text(x_of(tick), bottom + 17, f"{tick:g}", "tick", "middle"))
    for number, row in enumerate(rows):
        y, start = top + number * (_BAR + _GAP), 0.0
        body.append(_text(_LEFT - 6, y + _BAR - 4, str(row.place), "tick", "end"))
        for kind, size in row.parts.items():
            said = html.escape(f"{row.place}. {row.name}: {kind} {form.format(size)}")
            wide = x_of(start + size) - x_of(start)
            body.append(
                f'<rect x="{x_of(start):.1f}" y="{y}" width="{wide:.1f}" height="{_BAR}" '
                f'fill="{colours[kind]}"><title>{said}</title></rect>'
            )
            start += size
        body.append(_text(x_of(start) + 5, y + _BAR - 4, form.format(start), "tick", "start"))
    return _picture(title, x_label, "", body, height)


def _legend(colours: Mapping[str, str]) -> tuple[list[str], int]:
    """Coloured squares with their names, and how many lines they take."""
    said, x, line = [], float(_LEFT), 0
    for kind, colour in colours.items():
        wide = 18 + _LETTER * len(kind) + 12
        if x + wide > WIDTH - _RIGHT and x > _LEFT:
            x, line = float(_LEFT), line + 1
        y = _TOP + line * _LEGEND
        said.append(f'<rect x="{x:.1f}" y="{y - 4}" width="11" height="11" fill="{colour}"/>')
        said.append(_text(x + 16, y + 6, kind, "name", "start"))
        x += wide
    return said, line + 1


def _ticks(low: float, high: float) -> tuple[float, ...]:
    """Round numbers from `low` to at least `high`, some four to eight."""
    size = 10 ** math.floor(math.log10(max(high - low, 1e-12)))
    step = next(size * part for part in (0.1, 0.2, 0.5, 1, 2) if (high - low) / (size * part) <= 7)
    return tuple(round(low + i * step, 12) for i in range(math.ceil((high - low) / step) + 1))


def _line(x1: float, x2: float, y1: float, y2: float, colour: str, *, dashed: bool = False) -> str:
    dash = ' stroke-dasharray="4 3"' if dashed else ""
    return f'<line x1="{x1:.1f}" x2="{x2:.1f}" y1="{y1:.1f}" y2="{y2:.1f}" stroke="{colour}"{dash}/>'


def _text(x: float, y: float, text: str, kind: str, anchor: str) -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{html.escape(text)}</text>'


def _picture(title: str, x_label: str, y_label: str, body: Sequence[str], height: float) -> str:
    middle = (_LEFT + WIDTH - _RIGHT) / 2
    head = f'<svg viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" role="img" aria-label="{html.escape(title)}">'
    said = [_text(_LEFT, 20, title, "title", "start"), _text(middle, height - 10, x_label, "axis", "middle")]
    if y_label:
        turned = f'transform="rotate(-90 16 {height / 2})"'
        said.append(
            f'<text class="axis" x="16" y="{height / 2}" text-anchor="middle" {turned}>{html.escape(y_label)}</text>'
        )
    return "\n".join([head, *said, *body, "</svg>"])
