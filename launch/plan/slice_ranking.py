"""Ranks slices for one experiment: `launch/run plan SLICE,SLICE EXPERIMENT.gin`."""

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Sequence

from core import slices, units
from core.errors import UserError
from core.hosts import exit_codes
from core.slices import GIB
from launch import flags, terminal
from launch.plan import search
from launch.plan.ranking import PIPED_WIDTH
from launch.plan.search import Question
from parallel.planning.candidate_metrics import CandidateMetrics, Range, between

_HEADINGS = ("slice", "chips", "layout", "rows", "HBM GiB", "step s", "hours", "chip-hours", "USD")
_TEXT = ("slice", "layout")
_FOR_ONE_SLICE = ("rejected", "wide", "write", "record", "explain", "generate")

Planned = tuple[CandidateMetrics | None, str]  # the best layout of a slice or None, and why there is none


@dataclasses.dataclass(frozen=True)
class Choice:
    """The best layout of one slice; `price` in US dollars per chip-hour, None if not given."""

    best: CandidateMetrics
    price: float | None

    @property
    def chip_hours(self) -> Range:
        """The least and the most chip-hours expected for the run."""
        fast, slow = self.best.hours
        return fast * self.best.slice.chips, slow * self.best.slice.chips

    @property
    def dollars(self) -> Range | None:
        """The least and the most US dollars expected for the run; None without a price."""
        if self.price is None:
            return None
        fast, slow = self.chip_hours
        return fast * self.price, slow * self.price

    def cells(self) -> list[str]:
        """Returns the slice's cells in the table."""
        best = self.best
        return [
            best.slice.name,
            str(best.slice.chips),
            best.name,
            str(best.rows),
            f"{best.used('{:.1f}')} of {best.slice.chip.usable_hbm_bytes / GIB:.4g}",
            between(best.step_seconds, "{:.3g}"),
            between(best.hours, "{:,.1f}"),
            between(self.chip_hours, "{:,.0f}"),
            "–" if self.dollars is None else between(self.dollars, "{:,.0f}"),
        ]


def names(text: str) -> list[str]:
    """Returns the names of the slices in text such as `v4-32,v5p-32`.

    Raises:
      UserError: a name is not that of a TPU slice, or is given twice.
    """
    given = [one.strip() for one in text.split(",")]
    if "" in given:
        raise UserError(f"SLICE = {text!r}: a name is empty; expected a slice, or several such as v4-32,v5p-32")
    found = [slices.require_tpu(one, what="plans").name for one in given]
    if twice := [name for name in found if found.count(name) > 1]:
        raise UserError(f"SLICE = {text!r} names {twice[0]} twice; expected each slice once")
    return found


def prices(text: str) -> list[float]:
    """Returns prices in US dollars per chip-hour from text such as `3.22,4.2`."""
    return [flags.positive(one.strip()) for one in text.split(",")]


def require_fitting(args: argparse.Namespace, names: Sequence[str]) -> None:
    """Raises UserError if options or prices do not suit several slices."""
    if given := [name for name in _FOR_ONE_SLICE if getattr(args, name)]:
        raise UserError(
            f"--{given[0]} needs one slice, and SLICE = {args.slice!r} names {len(names)}: name one, or leave out "
            f"--{given[0]}"
        )
    if args.price and len(args.price) not in (1, len(names)):
        raise UserError(
            f"--price has {len(args.price)} prices, and SLICE = {args.slice!r} names {len(names)} slices: give one for "
            "all, or one for each in this order, separated by commas"
        )


def rank(args: argparse.Namespace, names: Sequence[str], plan: Callable[[Question], Planned], *, label: str) -> int:
    """Plans each slice, and prints the best layouts in one table, from the fewest hours.

    Args:
      plan: returns the best layout, or why there is none.
      label: a sentence below the table, without its period.

    Returns:
      0; 1 if no slice has a layout that fits; 130 after Ctrl-C.
    """
    given = args.price or [None]
    questions = [
        search.ask(args.experiment, slice_name=name, bindings=args.gin, batch_sizes=args.batch_size) for name in names
    ]
    choices: list[Choice] = []
    without: list[str] = []
    is_interrupted = False
    for question, price in zip(questions, given * (len(names) // len(given)), strict=True):
        name = question.slice.name
        print(f"planning {name}", file=sys.stderr)
        try:
            best, reason = (None, "not planned: interrupted") if is_interrupted else plan(question)
        except KeyboardInterrupt:
            is_interrupted, best, reason = True, None, "interrupted; finished compilations are kept"
        except UserError as error:
            best, reason = None, str(error)
        if best is None:
            without.append(f"{name}: {reason}")
        else:
            choices.append(Choice(best, price))
    choices.sort(key=lambda one: sum(one.best.hours))
    if choices:
        first = questions[0]
        headings = _HEADINGS if args.price else _HEADINGS[:-1]
        tokens = units.significant(first.total_tokens / 1e9)
        title = f"{first.config.experiment}, {tokens}B tokens, with the best layout of each slice"
        rows = [one.cells()[: len(headings)] for one in choices]
        terminal.console(PIPED_WIDTH).print(terminal.markdown(headings, rows, text=_TEXT, title=title))
        terminal.say(f"{label}.")
    for line in (*without, *_cheapest(choices)):
        terminal.say(line)
    if args.json:
        found = [one.best.as_json() | {"slice": one.best.slice.name, "dollars": one.dollars} for one in choices]
        args.json.write_text(json.dumps(found, indent=1) + "\n")
        print(f"written: {args.json}")
    if is_interrupted:
        return exit_codes.INTERRUPTED
    return exit_codes.DONE if choices else 1


def _cheapest(choices: Sequence[Choice]) -> list[str]:
    priced = [(one.dollars, one) for one in choices if one.dollars is not None]
    if not priced:
        return []
    dollars, cheapest = min(priced, key=lambda each: sum(each[0]))
    if cheapest is choices[0]:
        return []
    return [f"cheapest: {cheapest.best.slice.name}, {between(dollars, '{:,.0f}')} USD"]
