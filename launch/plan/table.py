"""Prints a plan: the ranked table, refused candidates with their reasons, and the cost of training with the winner."""

from __future__ import annotations

import collections
import datetime
import io
import itertools
from collections.abc import Mapping, Sequence

from rich.table import Table
from rich.text import Text

from core import units
from core.slices import GIB
from launch import terminal
from launch.plan import records
from launch.plan.search import Compiled, Option, Question
from parallel.planning import selection
from parallel.planning.candidate_metrics import CandidateMetrics, Range
from parallel.planning.cost import AxisTime

PIPED_WIDTH = 190
_LEAST_GIB_SENT = 0.005
_HEADINGS = ("", "layout", "rows", "HBM GiB", "free", "step s", "scheduled", "tokens/s", "MFU %", "bubble")
_HEADINGS += ("sent, GiB a chip and step", "hours", "compiled in s")
_TEXT = ("layout", "sent, GiB a chip and step")
_NARROW = ("", "layout", "rows", "HBM GiB", "step s", "tokens/s")  # what fits into 80 columns
_OF_COMPILED = ("scheduled", "compiled in s")
_BAR_COLUMNS = 60
_COLOURS = ("blue", "red", "green", "magenta", "cyan", "yellow")


def show(rows: Sequence[CandidateMetrics], *, title: str, label: str, wide: bool) -> None:
    """Prints ranked candidates. Ranges are from all traffic hidden to none hidden, smaller number first.

    Rows are ranked by `scheduled`, the step time that counts as hidden the traffic that the compiler overlapped. With
    `wide` the table has all columns.
    """
    terminal.console(PIPED_WIDTH).print(_table(rows, title=title, wide=wide))
    terminal.say(f"{label}.")
    if not wide:
        terminal.say("--wide shows all columns, --json FILE writes all figures.")


def _table(rows: Sequence[CandidateMetrics], *, title: str, wide: bool) -> Table:
    compiled = any(row.compile_seconds is not None for row in rows)
    wanted = _HEADINGS if wide else _NARROW
    shown = [heading in wanted and (compiled or heading not in _OF_COMPILED) for heading in _HEADINGS]
    lines = [itertools.compress([str(number), *cells(row)], shown) for number, row in enumerate(rows, 1)]
    return terminal.markdown(list(itertools.compress(_HEADINGS, shown)), lines, text=_TEXT, title=title)


def html(question: Question, rows: Sequence[CandidateMetrics], *, label: str, price: float | None) -> str:
    """Returns an HTML page with the full table, the cost of training, and bars of time and traffic for each candidate.

    Bars are for equal numbers of rows, because candidates with smaller batches run more steps.
    """
    page = terminal.console(PIPED_WIDTH, file=io.StringIO(), record=True)
    page.print(_table(rows, title=f"{question.config.experiment} on {question.slice.name}", wide=True))
    page.print(f"{label}. Ranges are between all traffic hidden and none.\n")
    for line in (f"best: {rows[0].name}", *outlook(question, rows[0], price=price, now=datetime.datetime.now())):
        page.print(line)
    unit = units.counted(rows[0].rows, "row")
    page.print(_bars([_times(row, rows[0].rows) for row in rows], title=f"seconds for {unit} by kind, nothing hidden"))
    page.print(
        _bars([_sent(row, rows[0].rows) for row in rows], title=f"GiB that one chip sends for {unit}, by mesh axes")
    )
    return page.export_html(inline_styles=True)


def _times(row: CandidateMetrics, rows: int) -> Mapping[str, float]:
    """Returns the seconds of so many rows by kind, traffic by network."""
    parts = collections.Counter({"computation": row.time.compute, "kernels": row.time.kernels})
    for axis in row.time.traffic:
        parts[f"traffic over {axis.network}"] += axis.seconds
    return {kind: seconds * rows / row.rows for kind, seconds in parts.items() if seconds}


def _sent(row: CandidateMetrics, rows: int) -> Mapping[str, float]:
    """Returns the GiB that one chip sends for so many rows, by mesh axes."""
    return {" ".join(axis.axes) or "-": axis.wire_bytes / GIB * rows / row.rows for axis in row.time.traffic}


def _bars(rows: Sequence[Mapping[str, float]], *, title: str) -> Table:
    """Returns a stacked bar for each candidate, in the order of the table."""
    colours = dict(zip(dict.fromkeys(kind for row in rows for kind in row), itertools.cycle(_COLOURS), strict=False))
    largest = max([sum(row.values()) for row in rows] + [1e-12])
    table = Table(box=None, title=f"\n{title}", title_justify="left")
    table.add_column("", justify="right")
    table.add_column(Text("  ").join(Text(f"■ {kind}", colour) for kind, colour in colours.items()))
    table.add_column("", justify="right")
    for number, row in enumerate(rows, 1):
        parts = [("█" * round(_BAR_COLUMNS * size / largest), colours[kind]) for kind, size in row.items()]
        table.add_row(str(number), Text.assemble(*parts), f"{sum(row.values()):.3g}")
    return table


def cells(row: CandidateMetrics) -> list[str]:
    """Returns the cells of a row, without its number."""
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
        sent(row.time.traffic) or "nothing",
        " – ".join(dict.fromkeys(map(units.significant, row.hours))),
        "–" if row.compile_seconds is None else f"{row.compile_seconds:.0f}",
    ]


def between(pair: Range, form: str, factor: float = 1) -> str:
    """Formats a range, smaller number first: `0.61 – 0.94`, or one number if both are equal."""
    low, high = (form.format(value * factor) for value in sorted(pair))
    return low if low == high else f"{low} – {high}"


def sent(traffic: Sequence[AxisTime]) -> str:
    """Formats traffic as `fsdp 47.1; data 0.8 over DCN`, without amounts that round to 0."""
    parts = []
    for axis in traffic:
        amount = axis.wire_bytes / GIB
        if amount < _LEAST_GIB_SENT:
            continue
        text = f"{amount:.1f}" if amount >= 0.1 else f"{amount:.1g}"
        parts.append(f"{' '.join(axis.axes) or '-'} {text}" + (" over DCN" if axis.network == "DCN" else ""))
    return "; ".join(parts)


def rejected(options: Sequence[Option], found: Compiled, *, every: bool) -> None:
    """Prints why candidates are not in the table: each one, or for each reason a count and an example."""
    for kind, group in selection.by_reason(options):
        terminal.say(f"\nrejected, {kind}: {len(group)}")
        shown = group if every else sorted(group, key=lambda one: len(one.name))[:1]
        for one in shown:
            terminal.say(f"  {_with_rows(one)}: {one.reason}")
    for one, record in found:
        if record.time is None:
            reason = f"compiled, does not fit: {record.reason}" if record.status == records.TOO_MUCH else record.reason
            estimated = ""
            if record.status == records.TOO_MUCH and one.estimate:
                estimated = f" (by arithmetic {one.estimate.peak_bytes / GIB:.2f} GiB)"
            terminal.say(f"\n{record.status}: {_with_rows(one)}: {reason}{estimated}")


def _with_rows(option: Option) -> str:
    return f"{option.name}, {units.counted(option.candidate.batch_size, 'row')}"


def outlook(question: Question, best: CandidateMetrics, *, price: float | None, now: datetime.datetime) -> list[str]:
    """Describes the cost of training with the winner: hours, chip-hours, end date and US dollars."""
    tokens = question.total_tokens
    chip_hours = (best.hours[0] * question.slice.chips, best.hours[1] * question.slice.chips)
    ends = [(now + datetime.timedelta(hours=h)).strftime("%Y-%m-%d %H:%M") for h in best.hours]
    steps = f"{units.counted(question.steps(best.rows), 'step')} of {units.counted(best.rows, 'row')}"
    spent = f"{between(best.hours, '{:,.1f}')} hours, {between(chip_hours, '{:,.0f}')} chip-hours"
    when = " – ".join(dict.fromkeys(ends))
    lines = [f"{units.significant(tokens / 1e9)}B tokens ({steps}): {spent}; started now it ends {when}"]
    if price is not None:
        lines.append(f"at {price:g} USD per chip-hour: {between(chip_hours, '{:,.0f}', price)} USD")
    return lines


def header(question: Question, best: CandidateMetrics, *, label: str) -> list[str]:
    """Returns the header of the winner's gin file."""
    mfu = f", MFU {between(best.mfu, '{:.1f}', 100)} %" if best.mfu else ""
    tokens = units.counted(best.tokens // best.rows, "token")
    return [
        f"{best.name}: the fastest of a plan for {question.slice.name}, for {question.config.experiment}.",
        f"{units.counted(best.rows, 'row')} x {tokens}: "
        f"{best.used_bytes / GIB:.2f} GiB of {question.slice.chip.usable_hbm_bytes / GIB:.2f} per chip, "
        f"{between(best.step_seconds, '{:.3g}')} s a step{mfu}",
        f"(between all traffic hidden and none; {label}).",
        "Include it after the experiment's own choices, or give it as --gin \"include 'FILE'\".",
    ]
