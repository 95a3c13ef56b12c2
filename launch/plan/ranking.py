"""Prints the ranked candidates of a plan, why others were rejected, and the cost of training."""

import datetime
import itertools
from collections.abc import Sequence

from rich.table import Table

from core import units
from core.slices import GIB
from launch import terminal
from launch.plan.search import Compiled, Option, Question
from parallel.planning import records, selection
from parallel.planning.candidate_metrics import CandidateMetrics, between
from parallel.planning.cost import AxisTime

PIPED_WIDTH = 190
_NO_LIMIT = 10_000  # columns in which to measure a table's width
_SENT_WIDTH = 20
_LAYOUT_WIDTH = 44  # to show more columns, layouts are wrapped to this width
_LEAST_GIB_SENT = 0.005
_SENT = "sent, GiB a step"
_HEADINGS: tuple[str, ...] = ("", "layout", "rows", "HBM GiB", "free", "step s", "predicted", "tokens/s", "MFU %")
_HEADINGS += ("bubble", _SENT, "hours", "compiled in s")
_TEXT = ("layout", _SENT)
_NARROW = ("", "layout", "rows", "HBM GiB", "step s", "tokens/s")  # columns that fit in 80 characters
_WIDER = ("MFU %", "bubble", _SENT, "free", "hours")  # added in this order if the width allows
_OF_COMPILED = ("predicted", "compiled in s")


def show(rows: Sequence[CandidateMetrics], *, title: str, label: str, wide: bool) -> None:
    """Prints a table of candidates, with as many columns as the terminal's width allows.

    Args:
      rows: candidates, the best first.
      wide: whether to ignore the terminal's width.
    """
    console, wanted = terminal.console(PIPED_WIDTH), _HEADINGS if wide else _NARROW
    for heading in () if wide else _WIDER:
        one_more = _table(rows, title=title, wanted=(*wanted, heading), layout_width=_LAYOUT_WIDTH)
        if console.measure(one_more, options=console.options.update(max_width=_NO_LIMIT)).maximum <= console.width:
            wanted = (*wanted, heading)
    console.print(_table(rows, title=title, wanted=wanted))
    terminal.say(f"{label}.")
    if not wide:
        terminal.say("--wide shows all columns, --json FILE writes all figures.")


def _table(
    rows: Sequence[CandidateMetrics], *, title: str, wanted: Sequence[str], layout_width: int | None = None
) -> Table:
    compiled = any(row.compile_seconds is not None for row in rows)
    shown = [heading in wanted and (compiled or heading not in _OF_COMPILED) for heading in _HEADINGS]
    lines = [list(itertools.compress([str(number), *cells(row)], shown)) for number, row in enumerate(rows, 1)]
    table = terminal.markdown(list(itertools.compress(_HEADINGS, shown)), lines, text=_TEXT, title=title)
    for column in table.columns if wanted != _HEADINGS else ():  # width at which cells wrap
        column.max_width = {"layout": layout_width, _SENT: _SENT_WIDTH}.get(str(column.header))
    return table


def cells(row: CandidateMetrics) -> list[str]:
    """Returns the cells of a row, without its rank."""
    return [
        row.name + (" (as written)" if row.is_as_written and not row.name.startswith("as written") else ""),
        str(row.rows),
        row.used("{:.2f}"),
        f"{'≥ ' if row.used_is_bound else ''}{row.free_bytes / GIB:.2f}",
        between(row.step_seconds, "{:.3g}"),
        "–" if row.scheduled_seconds is None else f"{row.scheduled_seconds:.3g}",
        between(row.tokens_per_second, "{:,.0f}"),
        between(row.mfu, "{:.1f}", 100) if row.mfu else "–",
        f"{row.bubble:.0%}" if row.bubble else "–",
        sent(row.time.traffic) or "nothing",
        " – ".join(dict.fromkeys(map(units.significant, row.hours))),
        "–" if row.compile_seconds is None else f"{row.compile_seconds:.0f}",
    ]


def sent(traffic: Sequence[AxisTime]) -> str:
    """Formats the GiB that each axis sends, as `fsdp 47.1; data 0.8 over DCN`."""
    parts = []
    for axis in traffic:
        amount = axis.wire_bytes / GIB
        if amount < _LEAST_GIB_SENT:
            continue
        text = f"{amount:.1f}" if amount >= 0.1 else f"{amount:.1g}"
        parts.append(
            f"{' '.join(axis.axes) or '-'} {text}" + ("" if axis.network == "ICI" else f" over {axis.network}")
        )
    return "; ".join(parts)


def print_rejected(options: Sequence[Option], found: Compiled, *, every: bool) -> None:
    """Prints why candidates are not in the table."""
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
    """Describes the cost of training with the winner: hours, chip-hours, end date and US dollars.

    Args:
      price: US dollars per chip-hour; None if unknown.
      now: the time at which the run would start.
    """
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


def against_pipelines(best: Option, options: Sequence[Option]) -> list[str]:
    """Compares the winner with the fastest layout of the other kind, with or without pipeline.

    `options` are ordered from the fastest. Returns [] if there is nothing to compare.
    """
    is_pipeline = _is_pipeline(best)
    other = next((one for one in options if not one.reason and _is_pipeline(one) != is_pipeline), None)
    if other is None or best.estimate is None:
        return []
    kind = "without a pipeline" if is_pipeline else "with a pipeline"
    figures = [
        (f"{what} {its}", own)
        for what, its, own in zip(
            ("ms a row:", "computation and kernels", "traffic", "idle"), _figures(other), _figures(best), strict=True
        )
    ]
    return [
        f"fastest {kind}, by arithmetic: {_with_rows(other)}",
        "  " + "; ".join(f"{text} (best: {own})" for text, own in figures),
    ]


def _is_pipeline(option: Option) -> bool:
    return option.estimate is not None and option.estimate.bubble > 0


def _figures(option: Option) -> tuple[str, ...]:
    """Returns the milliseconds per row of a step, its computation and its traffic; and the bubble."""
    assert option.estimate is not None
    time, ms = option.estimate.time, 1e3 / option.candidate.batch_size
    busy, traffic = (f"{seconds * ms:.3g}" for seconds in (time.busy, time.traffic_seconds))
    return between((time.hidden, time.exposed), "{:.3g}", ms), busy, traffic, f"{option.estimate.bubble:.1%}"


def header(question: Question, best: CandidateMetrics, *, label: str) -> list[str]:
    """Returns the comment at the top of the winner's gin file, line by line."""
    mfu = f", MFU {between(best.mfu, '{:.1f}', 100)} %" if best.mfu else ""
    tokens, chip = units.counted(best.tokens // best.rows, "token"), question.slice.chip
    return [
        f"{best.name}: the fastest of a plan for {question.slice.name}, for {question.config.experiment}.",
        f"{units.counted(best.rows, 'row')} x {tokens}: "
        f"{best.used('{:.2f}')} GiB of {chip.usable_hbm_bytes / GIB:.2f} per {chip.unit}, "
        f"{between(best.step_seconds, '{:.3g}')} s a step{mfu}",
        f"({label}).",
        "Include it after the experiment's own choices, or give it as --gin \"include 'FILE'\".",
    ]
