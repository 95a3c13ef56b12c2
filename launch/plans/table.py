"""A plan as a person reads it in a terminal: the ranked table, what was left out and why, and what the winner costs."""

from __future__ import annotations

import datetime
import itertools
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.table import Table

from core import units
from core.slices import GIB
from launch import terminal
from launch.plans import figures, planning, records
from launch.plans.figures import Figures, Pair
from launch.plans.planning import Question, Tried
from launch.plans.records import Record

WIDTH = 190  # in a pipe
_LEAST_GIB_SENT = 0.005
_HEADINGS = ("", "layout", "rows", "HBM GiB", "free", "step s", "scheduled", "tokens/s", "MFU %", "bubble")
_HEADINGS += ("sent, GiB a chip and step", "hours", "compiled in s")
_TEXT = ("layout", "sent, GiB a chip and step")  # left-aligned, and wrapped where they are long
_NARROW = ("", "layout", "rows", "HBM GiB", "step s", "tokens/s")  # what 80 columns have room for
_OF_COMPILED = ("scheduled", "compiled in s")


def show(rows: Sequence[Figures], *, title: str, label: str, wide: bool) -> None:
    """Prints ranked rows; ranges are between all traffic hidden and none, smaller number first.

    `scheduled` are the seconds of a step with that traffic hidden which the compiler hid: what rows are ranked by. The
    table has few columns, or with `wide` all.
    """
    table = Table(box=box.MARKDOWN, title=title, title_justify="left")
    compiled = any(row.compile_seconds is not None for row in rows)
    wanted = _HEADINGS if wide else _NARROW
    shown = [heading in wanted and (compiled or heading not in _OF_COMPILED) for heading in _HEADINGS]
    for heading in itertools.compress(_HEADINGS, shown):
        is_text = heading in _TEXT
        table.add_column(heading, justify="left" if is_text else "right", no_wrap=not is_text)
    for number, row in enumerate(rows, 1):
        table.add_row(*itertools.compress([str(number), *cells(row)], shown))
    terminal.console(WIDTH).print(table)
    terminal.say(f"{label}.")
    if not wide:
        terminal.say("--wide shows all columns, --json FILE writes all figures.")


def as_json(rows: Sequence[Figures]) -> list[dict[str, Any]]:
    """All figures of ranked rows as plain values; pairs are with all traffic hidden and with none."""
    return [
        {**row._asdict(), "time": {**row.time._asdict(), "traffic": [axis._asdict() for axis in row.traffic]}}
        for row in rows
    ]


def cells(row: Figures) -> list[str]:
    """A row as text, without its place."""
    return [
        row.name + (" (as written)" if row.is_as_written and not row.name.startswith("as written") else ""),
        str(row.rows),
        f"{row.used_bytes / GIB:.2f}",
        f"{row.free_bytes / GIB:.2f}",
        between(row.step_seconds, "{:.3g}"),
        "–" if row.scheduled_seconds is None else f"{row.scheduled_seconds:.3g}",
        between(row.tokens_per_second, "{:,.0f}"),
        between(row.mfu, "{:.1f}", 100) if row.mfu else "–",
        f"{row.bubble:.0%}" if row.bubble else "–",
        sent(row) or "nothing",
        " – ".join(dict.fromkeys(map(units.significant, row.hours))),
        "–" if row.compile_seconds is None else f"{row.compile_seconds:.0f}",
    ]


def between(pair: Pair, form: str, factor: float = 1) -> str:
    """Formats a pair, smaller first: `0.61 – 0.94`, or one number where both are alike."""
    low, high = (form.format(value * factor) for value in sorted(pair))
    return low if low == high else f"{low} – {high}"


def sent(row: Figures) -> str:
    """`fsdp 47.1; data 0.8 over DCN`; sums of a few numbers are left out."""
    said = []
    for axis in row.traffic:
        amount = axis.wire_bytes / GIB
        if amount < _LEAST_GIB_SENT:
            continue
        text = f"{amount:.1f}" if amount >= 0.1 else f"{amount:.1g}"
        said.append(f"{' '.join(axis.axes) or '-'} {text}" + (" over DCN" if axis.network == "DCN" else ""))
    return "; ".join(said)


def left_out(tried: Sequence[Tried], found: Sequence[tuple[Tried, Record]], *, every: bool) -> None:
    """Prints why candidates are not in the table: all of them, or for each reason how many and an example."""
    for kind, group in planning.by_reason(tried):
        terminal.say(f"\nleft out, {kind}: {len(group)}")
        shown = group if every else sorted(group, key=lambda t: len(t.name))[:1]
        for one in shown:
            terminal.say(f"  {one.name}, {units.counted(one.candidate.batch_size, 'row')}: {one.reason}")
    for one, record in found:
        if record.time is None:
            said = f"compiled, does not fit: {record.reason}" if record.status == records.TOO_MUCH else record.reason
            over = _over(one, record)
            terminal.say(
                f"\n{record.status}: {one.name}, {units.counted(one.candidate.batch_size, 'row')}: {said}{over}"
            )


def _over(tried: Tried, record: Record) -> str:
    if record.status != records.TOO_MUCH or tried.estimate is None:
        return ""
    return f" (arithmetic said {tried.estimate.peak_bytes / GIB:.2f} GiB)"


def outlook(question: Question, best: Figures, *, price: float | None, now: datetime.datetime) -> list[str]:
    """What training costs with the winner: hours, chip-hours, the day it ends, dollars."""
    tokens = question.total_tokens
    total = figures.chip_hours(best.hours, question.slice)
    ends = [(now + datetime.timedelta(hours=h)).strftime("%Y-%m-%d %H:%M") for h in best.hours]
    steps = f"{units.counted(question.steps(best.rows), 'step')} of {units.counted(best.rows, 'row')}"
    spent = f"{between(best.hours, '{:,.1f}')} hours, {between(total, '{:,.0f}')} chip-hours"
    when = " – ".join(dict.fromkeys(ends))
    said = [f"{units.significant(tokens / 1e9)}B tokens ({steps}): {spent}; started now it ends {when}"]
    if price is not None:
        dollars = total[0] * price, total[1] * price
        said.append(f"at {price:g} USD per chip-hour: {between(dollars, '{:,.0f}')} USD")
    return said


def header(question: Question, best: Figures, *, label: str) -> list[str]:
    """Lines that the winner's gin file opens with."""
    mfu = f", MFU {between(best.mfu, '{:.1f}', 100)} %" if best.mfu else ""
    return [
        f"{best.name}: the quickest of a plan for {question.slice.name}, for {question.config.experiment}.",
        f"{units.counted(best.rows, 'row')} x {units.counted(question.tokens_per_row, 'token')}: "
        f"{best.used_bytes / GIB:.2f} GiB of {question.slice.chip.usable_hbm_bytes / GIB:.2f} per chip, "
        f"{between(best.step_seconds, '{:.3g}')} s a step{mfu}",
        f"(between all traffic hidden and none; {label}).",
        "Include it behind the file's own choices, or give it to --gin \"include 'FILE'\".",
    ]
