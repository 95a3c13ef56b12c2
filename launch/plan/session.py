"""The command `plan` from arguments to exit code: looks up records, compiles what is missing, prints the ranking."""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import datetime
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

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
    """Plans. Returns 130 after Ctrl-C, with what is known by then; 1 if nothing fits."""
    question = search.ask(args.experiment, slice_name=args.slice, bindings=args.gin, batch_sizes=args.batch)
    options = search.options(question, only=args.only)
    possible = [one for one in options if not one.reason]
    cannot = len(options) - len(possible)
    counted = units.counted(len(options), "candidate")
    print(f"{counted} for {question.slice.name}: {len(possible)} may fit, {cannot} cannot")
    if not possible or args.arithmetic:
        return _by_arithmetic(question, options, args)
    wanted = args.compile or (QUICK if args.quick else DEFAULT)
    session = _Session(question, options, Store(with_committed=not args.fresh), wanted, is_fresh=args.fresh)
    try:
        session.look_up()
        if not args.cached:
            session.compile_missing()
        if args.record:
            session.look_beyond(compiles=not args.cached)
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
        self._order = list(selection.order(options, wanted=wanted, usable_bytes=self._usable))[: _TRIES * wanted]
        self._missing: list[Option] = []

    @property
    def fitting(self) -> int:
        """The number of candidates that were compiled and fit."""
        return sum(record.time is not None for _, record in self.found)

    def _still_wanted(self) -> int:
        return self._wanted - self.fitting

    def _take(self, one: Option, record: Record) -> None:
        self.found.append((one, record.within(self._usable)))

    def look_up(self) -> None:
        """Takes existing records in order, until enough fit or would fit with those that must be compiled."""
        missing = 0
        for one in self._order:
            if self._still_wanted() - missing <= 0:
                break
            record = None if self._is_fresh else self.store.find(one.text)
            if record is None:
                missing += 1
                self._missing.append(one)
            else:
                self._take(one, record)
        seen = {id(one) for one, _ in self.found} | {id(one) for one in self._missing}
        self._missing += [one for one in self._order if id(one) not in seen]

    def compile_missing(self) -> None:
        """Compiles until enough candidates fit, or none are left."""
        if self._still_wanted() > 0 and self._missing:
            self._compile(wanted=self._still_wanted)

    def look_beyond(self, *, compiles: bool) -> None:
        """Takes the records of candidates that arithmetic refuses, and compiles those a little too large."""
        near = selection.beyond(self.options, usable_bytes=self._usable)
        refused = [] if self._is_fresh else [one for one in self.options if one.estimate and one.reason]
        known = [(one, self.store.find(one.text)) for one in refused]
        for one, record in known:
            if record is not None:
                self._take(one, record)
        seen, missing = {one.text for one, _ in self.found}, dict[str, Option]()
        for one in near:
            if one.text not in seen:
                missing.setdefault(one.text, one)
        self._missing = list(missing.values())
        if compiles and self._missing:
            layouts = units.counted(len(self._missing), "candidate")
            print(f"compiling {layouts} a little too large by arithmetic too, to see where HBM ends")
            self._compile(wanted=lambda: len(near))

    def _compile(self, *, wanted: Callable[[], int]) -> None:
        """Compiles missing candidates as far as they are wanted."""
        _require_writable(self.store)
        options: dict[Path, Option] = {}
        with _progress(self._wanted, self.fitting) as report:
            jobs = self._jobs(options)
            for done in compiling.compile_all(jobs, wanted=wanted, on_start=report.started):
                self._take(options[done.job.record], done.record)
                report.ended(done, fitting=self.fitting)

    def _jobs(self, options: dict[Path, Option]) -> Iterator[Job]:
        for one in self._missing:
            path = self.store.path(one.text)
            known = self.store.find(one.text) if path in options or not self._is_fresh else None
            if known is not None:
                self._take(one, known)
                continue
            options[path] = one
            bindings = (*self.question.bindings, *one.bindings)
            yield Job(one.name, self.question.path, self.question.slice.name, bindings, path)


def _require_writable(store: Store) -> None:
    """Checks the cache before anything is compiled.

    Raises:
      UserError: it cannot be written.
    """
    try:
        paths.require_writable(store.folder)
    except UserError as error:
        raise UserError(f"the cache of plans: {error} with XDG_CACHE_HOME") from error


class _Report:
    """Shows what is being compiled: a bar on a terminal, otherwise one line for each finished candidate."""

    def __init__(self, progress: Progress, wanted: int, fitting: int):
        self._progress = progress
        self._task = progress.add_task("", total=wanted, completed=fitting)
        self._running: list[str] = []

    def started(self, job: Job) -> None:
        self._running.append(job.name)
        self._update()

    def ended(self, done: compiling.Done, *, fitting: int) -> None:
        self._running.remove(done.job.name)
        record = done.record
        result = f"{record.time.scheduled:.3g} s a step" if record.time else f"{record.status}: {record.reason}"
        line = f"  {done.job.name}: {result}; {record.compile_seconds:.0f} s"
        self._progress.console.print(line, highlight=False, soft_wrap=True)
        self._progress.update(self._task, completed=fitting)
        self._update()

    def _update(self) -> None:
        self._progress.update(self._task, description="compiling " + " and ".join(self._running))


@contextlib.contextmanager
def _progress(wanted: int, fitting: int) -> Iterator[_Report]:
    columns = (BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
    with Progress(*columns, console=terminal.console(120, stderr=True), transient=True) as progress:
        yield _Report(progress, wanted, fitting)


def _by_arithmetic(question: Question, options: Sequence[Option], args: argparse.Namespace) -> int:
    options = _without_known_misfits(options, Store(with_committed=not args.fresh))
    possible = [one for one in options if not one.reason]
    rows = [search.metrics(question, one) for one in possible]
    label = f"{arithmetic.LABEL}; of compiled steps: {calibration.label()}"
    if rows:
        shown = f"the likely best {min(len(rows), _ARITHMETIC_ROWS)} of {len(rows)}"
        title = f"{question.config.experiment} on {question.slice.name}: {shown}"
        ranked = f"{label}; ranked by tokens/s half-way between both"
        table.show(rows[:_ARITHMETIC_ROWS], title=title, label=ranked, wide=args.wide)
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
        records.commit(Path(args.record), ((one.text, record) for one, record in session.found))
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
        texts[args.json] = json.dumps(table.as_json(rows), indent=1) + "\n"
    if args.html:
        texts[args.html] = table.html(question, rows[:_ARITHMETIC_ROWS], label=label, price=args.price)
    for path, text in texts.items():
        Path(path).write_text(text)
        print(f"written: {path}")
