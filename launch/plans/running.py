"""The command `plan` from its arguments to its exit code: consider, look up, compile what is missing, show."""

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

from core import listing, paths, units
from core.errors import UserError
from core.watch import exit_codes
from launch import terminal
from launch.plans import compiling, figures, planning, records, table
from launch.plans.compiling import Job
from launch.plans.planning import Question, Tried
from launch.plans.records import Record, Store
from parallel.planning import arithmetic
from parallel.planning import label as labels

_ARITHMETIC_ROWS = 20
_TRIES = 8  # times as many candidates are compiled at most as are wanted: most that do not fit take seconds

Found = list[tuple[Tried, Record]]


def run(args: argparse.Namespace) -> int:
    """Plans. 130 after Ctrl-C, with what is known by then; 1 where nothing fits."""
    question = planning.ask(args.experiment, slice_name=args.slice, bindings=args.gin, batch_sizes=args.batch)
    tried = planning.consider(question, only=args.only)
    possible = [t for t in tried if not t.reason]
    cannot = len(tried) - len(possible)
    print(
        f"{units.counted(len(tried), 'candidate')} for {question.slice.name}: {len(possible)} may fit, {cannot} cannot"
    )
    if not possible or args.arithmetic:
        return _by_arithmetic(question, tried, args)
    wanted = args.compile or (planning.QUICK if args.quick else planning.USUAL)
    store = Store(with_committed=not args.fresh)
    session = _Session(question, tried, store, wanted)
    try:
        session.look_up(fresh=args.fresh)
        if not args.cached:
            session.compile_missing()
        if args.record:
            session.look_beyond(compiles=not args.cached)
    except KeyboardInterrupt:
        print("\ninterrupted; what is compiled is kept, and the same command goes on from there", file=sys.stderr)
        _show(question, session, args, is_partial=True)
        return exit_codes.INTERRUPTED
    return _show(question, session, args)


class _Session:
    """The candidates of a plan on their way to records.

    Attributes:
      found: with their records, in the order in which they were looked at.
    """

    def __init__(self, question: Question, tried: Sequence[Tried], store: Store, wanted: int):
        self.question, self.tried, self.store = question, tried, store
        self.found: Found = []
        self._wanted = wanted
        usable = question.slice.chip.usable_hbm_bytes
        self._order = list(planning.order(tried, wanted=wanted, usable_bytes=usable))[: _TRIES * wanted]
        self._missing: list[Tried] = []
        self._fresh = False

    @property
    def fitting(self) -> int:
        """How many were compiled and fit."""
        return sum(record.time is not None for _, record in self.found)

    @property
    def short(self) -> int:
        """How many more are wanted."""
        return self._wanted - self.fitting

    def _take(self, one: Tried, record: Record) -> None:
        self.found.append((one, record.within(self.question.slice.chip.usable_hbm_bytes)))

    def look_up(self, *, fresh: bool) -> None:
        """Takes the records that there are, in order, until as many fit as are wanted or one must be compiled."""
        self._fresh, missing = fresh, 0
        for one in self._order:
            if self.short - missing <= 0:
                break
            record = None if fresh else self.store.find(one.text)
            if record is None:
                missing += 1
                self._missing.append(one)
            else:
                self._take(one, record)
        seen = {id(t) for t, _ in self.found} | {id(t) for t in self._missing}
        self._missing += [one for one in self._order if id(one) not in seen]

    def compile_missing(self) -> None:
        """Compiles until as many fit as are wanted, or nothing is left to try."""
        if self.short <= 0 or not self._missing:
            return
        self._compile(wanted=lambda: self.short)

    def _compile(self, *, wanted: Callable[[], int]) -> None:
        """Compiles what is missing, as far as it is wanted."""
        _require_writable(self.store)
        names: dict[Path, Tried] = {}
        with _progress(self._wanted, self.fitting) as report:
            jobs = self._jobs(names)
            for done in compiling.compile_all(jobs, wanted=wanted, on_start=report.started):
                self._take(names[done.job.record], done.record)
                report.ended(done, fitting=self.fitting)

    def look_beyond(self, *, compiles: bool) -> None:
        """Takes the records of what arithmetic refuses, and compiles what it finds a little too large."""
        near = planning.beyond(self.tried, usable_bytes=self.question.slice.chip.usable_hbm_bytes)
        refused = [] if self._fresh else [t for t in self.tried if t.estimate and t.reason]
        known = [(one, self.store.find(one.text)) for one in refused]
        for one, record in known:
            if record is not None:
                self._take(one, record)
        seen = {one.text for one, _ in self.found}
        self._missing = [one for one in near if one.text not in seen]
        if compiles and self._missing:
            print(f"{len(self._missing)} a little too large by arithmetic are compiled too, to see where HBM ends")
            self._compile(wanted=lambda: len(near))

    def _jobs(self, names: dict[Path, Tried]) -> Iterator[Job]:
        for one in self._missing:
            path = self.store.path(one.text)
            known = self.store.find(one.text) if path in names or not self._fresh else None
            if known is not None:
                self._take(one, known)
                continue
            names[path] = one
            bindings = (*self.question.bindings, *one.bindings)
            yield Job(one.name, self.question.path, self.question.slice.name, bindings, path)


def _require_writable(store: Store) -> None:
    """Refuses a cache that would lose what is compiled.

    Raises:
      ValueError: it cannot be written.
    """
    try:
        paths.require_writable(store.folder)
    except ValueError as error:
        raise UserError(f"the cache of plans: {error} with XDG_CACHE_HOME") from error


class _Report:
    """Says what is being compiled: as a bar where there is a terminal, else a line for each that is done."""

    def __init__(self, progress: Progress, wanted: int, fitting: int):
        self._progress = progress
        self._task = progress.add_task("", total=wanted, completed=fitting)
        self._running: list[str] = []

    def started(self, job: Job) -> None:
        self._running.append(job.name)
        self._say()

    def ended(self, done: compiling.Done, *, fitting: int) -> None:
        self._running.remove(done.job.name)
        record = done.record
        seconds = f"{record.compile_seconds:.0f} s"
        said = f"{record.time.scheduled:.3g} s a step" if record.time else f"{record.status}: {record.reason}"
        self._progress.console.print(f"  {done.job.name}: {said}; {seconds}", highlight=False, soft_wrap=True)
        self._progress.update(self._task, completed=fitting)
        self._say()

    def _say(self) -> None:
        self._progress.update(self._task, description="compiling " + " and ".join(self._running))


@contextlib.contextmanager
def _progress(wanted: int, fitting: int) -> Iterator[_Report]:
    columns = (BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
    with Progress(*columns, console=terminal.console(120, stderr=True), transient=True) as progress:
        yield _Report(progress, wanted, fitting)


def _by_arithmetic(question: Question, tried: Sequence[Tried], args: argparse.Namespace) -> int:
    tried = _with_what_compiled_too_large(tried, Store(with_committed=not args.fresh))
    possible = [t for t in tried if not t.reason]
    rows = [figures.of(question, one) for one in possible]
    label = f"{arithmetic.LABEL}; of compiled steps: {labels.label()}"
    if rows:
        shown = f"the likely best {min(len(rows), _ARITHMETIC_ROWS)} of {len(rows)}"
        title = f"{question.config.experiment} on {question.slice.name}: {shown}"
        ranked = f"{label}; ranked by tokens/s half-way between both"
        table.show(rows[:_ARITHMETIC_ROWS], title=title, label=ranked, wide=args.wide)
    table.left_out(tried, [], every=args.rejected)
    if not rows:
        kind = planning.by_reason(tried)[0][0]
        fix = (
            "take a larger slice, a smaller batch, or accumulation"
            if kind.startswith("too much HBM")
            else f"most often: {kind}; the reasons above say which numbers do"
        )
        print(f"\nno candidate fits {question.slice.name}: {fix}")
        return 1
    _finish(question, possible[0], rows, args, label=label)
    return 0


def _with_what_compiled_too_large(tried: Sequence[Tried], store: Store) -> list[Tried]:
    """Candidates that may fit by arithmetic, and are known not to, with that as their reason."""
    found = [(one, None if one.reason else store.find(one.text)) for one in tried]
    return [
        dataclasses.replace(one, kind="too much HBM as compiled", reason=f"compiled, does not fit: {record.reason}")
        if record is not None and record.status == records.TOO_MUCH
        else one
        for one, record in found
    ]


def _show(question: Question, session: _Session, args: argparse.Namespace, *, is_partial: bool = False) -> int:
    ranked = planning.ranked(session.found)
    label = labels.label()
    fit = {one.text for one, _ in ranked}  # whatever arithmetic said
    rejected = [t for t in session.tried if t.text not in fit]
    if not ranked:
        table.left_out(rejected, session.found, every=args.rejected)
        none = "nothing was compiled before" if args.cached else "nothing that was compiled fits"
        print(f"\n{none} for {question.slice.name}" + (" yet" if is_partial else ""))
        return 1
    rows = [figures.of(question, one, record) for one, record in ranked]
    title = f"{question.config.experiment} on {question.slice.name}" + (", so far" if is_partial else "")
    print()
    hid = f"{label}; ranked by tokens/s with that traffic hidden which the compiler hid"
    table.show(rows, title=title, label=hid, wide=args.wide)
    for note in (*_provenance(ranked), *_compiler_warnings(ranked)):
        terminal.say(note)
    table.left_out(rejected, session.found, every=args.rejected)
    if args.record and is_partial:
        print(f"not written: {args.record}; a record is of a whole plan, and this one was interrupted")
    elif args.record:
        records.ship(Path(args.record), ((one.text, record) for one, record in session.found))
        print(f"written: {args.record}")
    _finish(question, ranked[0][0], rows, args, label=label)
    return 0


def _compiler_warnings(found: Found) -> list[str]:
    """What the compiler warned of, each once, with the layouts that it warned of."""
    layouts: dict[str, list[str]] = {}
    for one, record in found:
        for warning in record.warnings:
            layouts.setdefault(warning, []).append(one.name)
    named = {said: ", ".join(listing.shortened(names, most=3)) for said, names in layouts.items()}
    return [f"compiler warning ({names}): {said}" for said, names in named.items()]


def _provenance(found: Found) -> list[str]:
    """Where figures come from that were not compiled from the files as they are."""
    shipped = [record for _, record in found if record.is_committed]
    if not shipped:
        return []
    revisions = collections.Counter(_short(record.made_with.get("revision") or "unknown") for record in shipped)
    made = ", ".join(f"{revision} ({count})" for revision, count in revisions.most_common())
    changed = any(record.made_with.get("sources") != records.sources_digest() for record in shipped)
    said = f"{len(shipped)} of {len(found)} rows were compiled before, at {made}; + means uncommitted changes"
    return [said + ("; core/, models/ or parallel/ have changed since: --fresh compiles anew" if changed else "")]


def _short(revision: str) -> str:
    """`3bfc0fd0c2+` of a whole git revision with uncommitted changes."""
    return re.sub(r"(?<=[0-9a-f]{10})[0-9a-f]+", "", revision).replace("-dirty", "+")


def _finish(question: Question, best: Tried, rows: Sequence[figures.Figures], args, *, label: str) -> None:
    """The outlook, and the files that were asked for."""
    print(f"\nbest: {best.name}")
    for line in table.outlook(question, rows[0], price=args.price, now=datetime.datetime.now()):
        terminal.say(f"  {line}")
    for binding in best.bindings:
        print(f"  {binding}")
    if args.write:
        from launch.plans import choices

        writer = choices.Writer(question.config, question.experiment)
        text = writer.file(best.candidate, table.header(question, rows[0], label=label))
        Path(args.write).write_text(text)
        print(f"written: {args.write}")
    if args.json:
        Path(args.json).write_text(json.dumps(table.as_json(rows), indent=1) + "\n")
        print(f"written: {args.json}")
    if args.html:
        from launch.plans import page

        shown = rows[:_ARITHMETIC_ROWS]
        Path(args.html).write_text(page.page(question, shown, label=label, price=args.price))
        print(f"written: {args.html}")
