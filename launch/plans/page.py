"""A plan as one page of HTML, with its table and pictures: it opens anywhere, and asks nothing of a network."""

from __future__ import annotations

import datetime
import html
from collections.abc import Sequence

from core.slices import GIB
from launch.plans import pictures, table
from launch.plans.figures import Figures
from launch.plans.pictures import Bar, Mark
from launch.plans.planning import Question

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 1180px; padding: 0 1em; }
body { color: #222; background: #fff; }
table { border-collapse: collapse; font-size: 13px; width: 100%; }
th, td { padding: 3px 8px; border-bottom: 1px solid #e4e4e4; text-align: right; white-space: nowrap; }
th { background: #f6f6f6; } td.text, th.text { text-align: left; white-space: normal; } .scroll { overflow-x: auto; }
.pictures { display: flex; flex-wrap: wrap; gap: 18px; align-items: flex-start; }
svg { border: 1px solid #e4e4e4; max-width: 100%; background: #fff; }
.title { font-size: 14px; font-weight: 600; } .axis, .tick { font-size: 11px; fill: #555; }
.name { font-size: 11px; fill: #333; } code { font-size: 13px; }
"""
_HEADINGS = (
    ("", "number"),
    ("layout", "text"),
    ("rows", "number"),
    ("HBM GiB", "number"),
    ("free", "number"),
    ("step, s", "number"),
    ("scheduled", "number"),
    ("tokens/s", "number"),
    ("MFU, %", "number"),
    ("bubble", "number"),
    ("sent, GiB a chip and step", "text"),
    ("hours", "number"),
    ("compiled in s", "number"),
)


def page(question: Question, rows: Sequence[Figures], *, label: str, price: float | None) -> str:
    """The page.

    Args:
      question: what was asked.
      rows: ranked.
      label: what the figures are, said beside them.
      price: of a chip-hour in dollars, where it is known.
    """
    title = f"{question.config.experiment} on {question.slice.name}"
    outlook = table.outlook(question, rows[0], price=price, now=datetime.datetime.now())
    said = "".join(f"<li>{html.escape(line)}</li>" for line in (f"best: {rows[0].name}", *outlook))
    heads = "".join(f'<th class="{form}">{html.escape(name)}</th>' for name, form in _HEADINGS)
    return "\n".join(
        [
            "<!doctype html>",
            f'<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>',
            f"<style>{_STYLE}</style></head><body>",
            f"<h1>{html.escape(title)}</h1>",
            f"<p>{html.escape(label)}. Ranges are between all traffic hidden and none of it, smaller number first.</p>",
            f"<ul>{said}</ul>",
            f'<div class="pictures">{"".join(_pictures(question, rows))}</div>',
            f'<h2>Table</h2><div class="scroll"><table><thead><tr>{heads}</tr></thead><tbody>',
            *(_row(number, row) for number, row in enumerate(rows, 1)),
            "</tbody></table></div></body></html>\n",
        ]
    )


def _pictures(question: Question, rows: Sequence[Figures]) -> list[str]:
    numbered = list(enumerate(rows, 1))
    per_row = rows[0].rows if len({row.rows for row in rows}) == 1 else 0
    shares = [1.0 if per_row else rows[0].rows / row.rows for row in rows]
    unit = "s a step" if per_row else f"s for {rows[0].rows} rows"
    marks = [
        Mark(n, row.name, row.used_bytes / GIB, row.step_seconds[0] * share, row.step_seconds[1] * share)
        for (n, row), share in zip(numbered, shares, strict=True)
    ]
    limit = question.slice.chip.usable_hbm_bytes / GIB
    times = [Bar(n, row.name, _times(row, share)) for (n, row), share in zip(numbered, shares, strict=True)]
    sent = [
        Bar(n, row.name, {_axis(axis): axis.wire_bytes / GIB * share for axis in row.traffic})
        for (n, row), share in zip(numbered, shares, strict=True)
    ]
    return [
        pictures.ranges(
            marks,
            title="Time against HBM: dot all traffic hidden, ring none",
            x_label="GiB of HBM per chip at the peak",
            y_label=unit,
            limit=limit,
        ),
        pictures.bars(times, title="Time by kind, nothing hidden", x_label=unit),
        pictures.bars(sent, title="Sent by one chip, by mesh axes", x_label=f"GiB in {unit[2:]}", form="{:.1f}"),
    ]


def _times(row: Figures, share: float) -> dict[str, float]:
    """Seconds by kind; traffic by network."""
    parts = {"computation": row.time.compute, "kernels": row.time.kernels}
    for axis in row.traffic:
        kind = f"traffic over {axis.network}"
        parts[kind] = parts.get(kind, 0.0) + axis.seconds
    return {kind: seconds * share for kind, seconds in parts.items() if seconds}


def _axis(axis) -> str:
    return " ".join(axis.axes) + (" (DCN)" if axis.network == "DCN" else "") or "-"


def _row(number: int, row: Figures) -> str:
    cells = [str(number), *table.cells(row)]
    return (
        "<tr>"
        + "".join(
            f'<td class="{form}">{html.escape(cell)}</td>' for cell, (_, form) in zip(cells, _HEADINGS, strict=True)
        )
        + "</tr>"
    )
