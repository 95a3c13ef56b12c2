"""Runs the command `plan`: looks up records, compiles missing ones, and prints the ranking."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import datetime
import json
import re
import sys
from collections.abc import Iterator, Sequence

from core import paths, units
from core.errors import UserError
from core.health import exit_codes
from launch import terminal
from launch.plan import candidate_bindings, compiling, records, search, table
from launch.plan.compiling import Job
from launch.plan.records import Record, Store
from launch.plan.search import Option, Question
from parallel.planning import arithmetic, calibration, selection
from parallel.planning.candidate_metrics import CandidateMetrics

QUICK, DEFAULT = 10, 16  # candidates that compile
_ARITHMETIC_ROWS = 20
_TRIES = 8  # at most this many times as many candidates are compiled as are wanted; those that do not fit are quick


def run(args: argparse.Namespace) -> int:
    """Makes a plan and prints it. Returns 1 if no layout fits; 130 after Ctrl-C, which prints the results so far."""
    question = search.ask(args.experiment, slice_name=args.slice, bindings=args.gin, batch_sizes=args.batch)
    options = search.options(question, only=args.only)
    possible = [one for one in options if not one.reason]
    cannot = len(options) - len(possible)
    counted = units.counted(len(options), "candidate")
    print(f"{counted} for {question.slice.name}: {len(possible)} may fit, {cannot} cannot")
    if not possible or args.arithmetic:
        return _by_arithmetic(question, options, args)
    wanted = args.compile or (QUICK if args.quick else DEFAULT)
    session = _Session(question, options, Store(), wanted, is_fresh=args.fresh)
    try:
        session.look_up()
        if not args.cached:
            session.compile_missing()
    except KeyboardInterrupt:
        print("\ninterrupted; finished compilations are kept, run the same command to resume", file=sys.stderr)
        _show(question, session, args, is_partial=True)
        return exit_codes.INTERRUPTED
    return _show(question, session, args)


class _Session:
    """Finds or makes the records of candidates.

    Attributes:
      found: candidates with their records, in the order in which they were looked at.
    """

    def __init__(self, question: Question, options: Sequence[Option], store: Store, wanted: int, *, is_fresh: bool):
        self.question, self.options, self.store = question, options, store
        self.found: list[tuple[Option, Record]] = []
        self._wanted, self._is_fresh = wanted, is_fresh
        self._usable = question.slice.chip.usable_hbm_bytes
        ordered = selection.order(options, wanted=wanted, usable_bytes=self._usable)
        programs: dict[str, Option] = {}
        for one in ordered:
            programs.setdefault(one.text, one)  # two ways to write one program are compiled once
        self._left = list(programs.values())[: _TRIES * wanted]

    def _still_wanted(self) -> int:
        return self._wanted - sum(record.time is not None for _, record in self.found)

    def _take(self, one: Option, record: Record) -> None:
        self.found.append((one, record.within(self._usable)))

    def _known(self, one: Option) -> Record | None:
        return None if self._is_fresh else self.store.find(one.text)

    def look_up(self) -> None:
        """Takes existing records in order, until enough fit or would fit with those that must be compiled."""
        missing: list[Option] = []
        while self._left and self._still_wanted() > len(missing):
            one = self._left.pop(0)
            if record := self._known(one):
                self._take(one, record)
            else:
                missing.append(one)
        self._left = [*missing, *self._left]

    def compile_missing(self) -> None:
        """Compiles until enough candidates fit, or none are left."""
        if self._still_wanted() <= 0 or not self._left:
            return
        try:
            paths.require_writable(self.store.folder)
        except UserError as error:
            raise UserError(f"the cache of plans: {error} with XDG_CACHE_HOME") from error
        options = {self.store.path(one.text): one for one in self._left}
        running: list[str] = []
        console = terminal.console(120, stderr=True)
        with console.status("") as status:  # on a terminal alone

            def started(job: Job) -> None:
                running.append(job.name)
                fitting = self._wanted - self._still_wanted()
                status.update(f"{fitting} of {self._wanted} fit; compiling {' and '.join(running)}")

            for job, record in compiling.compile_all(self._jobs(), wanted=self._still_wanted, on_start=started):
                self._take(options[job.record], record)
                running.remove(job.name)
                result = f"{record.time.scheduled:.3g} s a step" if record.time else f"{record.status}: {record.reason}"
                console.print(f"  {job.name}: {result}; {record.compile_seconds:.0f} s", soft_wrap=True, markup=False)

    def _jobs(self) -> Iterator[Job]:
        for one in self._left:
            if self._still_wanted() <= 0:
                return
            if record := self._known(one):
                self._take(one, record)
            else:
                bindings = (*self.question.bindings, *one.bindings)
                path = self.store.path(one.text)
                yield Job(one.name, self.question.path, self.question.slice.name, bindings, path)


def _by_arithmetic(question: Question, options: Sequence[Option], args: argparse.Namespace) -> int:
    options = _without_known_misfits(options, Store())
    possible = [one for one in options if not one.reason]
    rows = [search.metrics(question, one) for one in possible]
    label = f"{arithmetic.LABEL}; of compiled steps: {calibration.label()}"
    if rows:
        shown = f"the likely best {min(len(rows), _ARITHMETIC_ROWS)} of {len(rows)}"
        title = f"{question.config.experiment} on {question.slice.name}: {shown}"
        table.show(
            rows[:_ARITHMETIC_ROWS],
            title=title,
            label=f"{label}; ranked by tokens/s half-way between both",
            wide=args.wide,
        )
    table.rejected(options, [], every=args.rejected)
    if not rows:
        kind = selection.by_reason(options)[0][0]
        fix = (
            "take a larger slice, a smaller batch, or accumulation"
            if kind.startswith("too much HBM")
            else f"most often: {kind}; the reasons above say which numbers do"
        )
        print(f"\nno candidate fits {question.slice.name}: {fix}")
        return 1
    _finish(question, possible[0], rows, args, label=label)
    return 0


def _without_known_misfits(options: Sequence[Option], store: Store) -> list[Option]:
    """Refuses candidates that may fit by arithmetic and have a record of not fitting."""
    found = [(one, None if one.reason else store.find(one.text)) for one in options]
    return [
        dataclasses.replace(one, kind="too much HBM as compiled", reason=f"compiled, does not fit: {record.reason}")
        if record is not None and record.status == records.TOO_MUCH
        else one
        for one, record in found
    ]


def _show(question: Question, session: _Session, args: argparse.Namespace, *, is_partial: bool = False) -> int:
    ranked = search.ranked(session.found)
    label = calibration.label()
    fit = {one.text for one, _ in ranked}  # whatever arithmetic said
    rejected = [one for one in session.options if one.text not in fit]
    if not ranked:
        table.rejected(rejected, session.found, every=args.rejected)
        none = "nothing was compiled before" if args.cached else "nothing that was compiled fits"
        print(f"\n{none} for {question.slice.name}" + (" yet" if is_partial else ""))
        return 1
    rows = [search.metrics(question, one, record) for one, record in ranked]
    title = f"{question.config.experiment} on {question.slice.name}" + (", so far" if is_partial else "")
    print()
    ranking = f"{label}; ranked by tokens/s, counting as hidden the traffic that the compiler overlapped"
    table.show(rows, title=title, label=ranking, wide=args.wide)
    for note in (*_provenance(ranked), *_compiler_warnings(ranked)):
        terminal.say(note)
    table.rejected(rejected, session.found, every=args.rejected)
    if args.record and is_partial:
        print(f"not written: {args.record}; a record is of a whole plan, and this one was interrupted")
    elif args.record:
        records.commit(args.record, ((one.text, record) for one, record in session.found))
        print(f"written: {args.record}")
    _finish(question, ranked[0][0], rows, args, label=label)
    return 0


def _compiler_warnings(found: search.Compiled) -> list[str]:
    """Returns the compiler's warnings, each once, with the layouts that caused it."""
    layouts: dict[str, list[str]] = {}
    for one, record in found:
        for warning in record.warnings:
            layouts.setdefault(warning, []).append(one.name)
    named = {warning: ", ".join(units.shortened(names, most=3)) for warning, names in layouts.items()}
    return [f"compiler warning ({names}): {warning}" for warning, names in named.items()]


def _provenance(found: search.Compiled) -> list[str]:
    """Returns a note about committed records: their revisions, and whether the sources have changed since."""
    committed = [record for _, record in found if record.is_committed]
    if not committed:
        return []
    revisions = collections.Counter(_short(record.made_with.get("revision") or "unknown") for record in committed)
    made = ", ".join(f"{revision} ({count})" for revision, count in revisions.most_common())
    changed = any(record.made_with.get("sources") != records.sources_digest() for record in committed)
    note = f"{len(committed)} of {len(found)} rows were compiled before, at {made}; + means uncommitted changes"
    return [note + ("; core/, models/ or parallel/ have changed since: --fresh compiles again" if changed else "")]


def _short(revision: str) -> str:
    """Returns `3bfc0fd0c2+` for a whole git revision with uncommitted changes."""
    return re.sub(r"(?<=[0-9a-f]{10})[0-9a-f]+", "", revision).replace("-dirty", "+")


def _finish(
    question: Question, best: Option, rows: Sequence[CandidateMetrics], args: argparse.Namespace, *, label: str
) -> None:
    """Prints the outlook, and writes the requested files."""
    print(f"\nbest: {best.name}")
    for line in table.outlook(question, rows[0], price=args.price, now=datetime.datetime.now()):
        terminal.say(f"  {line}")
    for binding in best.bindings:
        print(f"  {binding}")
    texts = {}
    if args.write:
        writer = candidate_bindings.Writer(question.config, question.experiment)
        texts[args.write] = writer.file(best.candidate, table.header(question, rows[0], label=label))
    if args.json:
        texts[args.json] = json.dumps([row.as_json() for row in rows], indent=1) + "\n"
    if args.html:
        texts[args.html] = table.html(question, rows[:_ARITHMETIC_ROWS], label=label, price=args.price)
    for path, text in texts.items():
        path.write_text(text)
        print(f"written: {path}")
