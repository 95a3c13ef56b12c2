"""Runs the command `plan`: looks up records, compiles missing ones, and prints the ranking."""

import argparse
import collections
import dataclasses
import datetime
import json
import re
import sys
from collections.abc import Iterator, Sequence

from core import units
from core.errors import UserError
from core.files import paths
from core.hosts import exit_codes
from launch import flags, program_identity, terminal
from launch.config import loader
from launch.experiment import Span
from launch.plan import (
    compiled_report,
    compiling,
    explain,
    generation_report,
    ranking,
    search,
    slice_ranking,
    winner_bars,
)
from launch.plan.compiling import Job
from launch.plan.search import Option, Question
from parallel.planning import arithmetic, calibration, candidates, records, selection
from parallel.planning.candidate_metrics import CandidateMetrics
from parallel.planning.records import Record, Store

COMMAND = ("layouts", "plan")
HELP = "find the fastest layout of an experiment that fits a slice, by compiling candidates; --explain analyzes one"
EXAMPLE = """launch/run plan v4-32 gin/valkyrie_7b.gin --quick --price 3.22
  launch/run plan v4-32 gin/valkyrie_7b.gin --batch-size 32 64 --write mine.gin
  launch/run plan v4-32,v5p-32,v6e-32 gin/valkyrie_7b.gin --arithmetic --price 3.22,4.2,2.7
  launch/run plan v4-32 gin/valkyrie_7b.gin --explain gin/strategies/hsdp.gin
  launch/run plan v4-8 gin/llama_3_1_8b.gin --gin "STRATEGY = @strategies.tensor()" --generate --batch-size 8"""

QUICK, DEFAULT = 10, 16  # wanted compiled candidates that fit
_ARITHMETIC_ROWS = 20
_TRIES = 8  # at most this multiple of the wanted candidates is compiled; compiling those that do not fit is quick


def _plan(args: argparse.Namespace, spans: Sequence[Span]) -> int:
    names = slice_ranking.names(args.slice)
    if len(names) > 1:
        if len(spans) > 1:
            raise UserError(f'{args.experiment} has {len(spans)} phases: add --gin "PHASE = N" to compare slices')
        label = (
            f"{arithmetic.LABEL}; of compiled steps: {calibration.label()}" if args.arithmetic else calibration.label()
        )
        return slice_ranking.rank(args, names, lambda question: _best(question, args), label=label)
    if len(spans) == 1:
        return _plan_one(args)
    if args.batch_size:
        raise UserError(
            f"--batch-size: {args.experiment} has {len(spans)} phases, and each has its own batch size: leave it out"
        )
    if given := [name for name in ("write", "json", "record") if getattr(args, name)]:
        raise UserError(
            f'--{given[0]} is for one phase, and {args.experiment} has {len(spans)}: add --gin "PHASE = N" with 1 to '
            f"{len(spans)}"
        )
    code, planned = exit_codes.DONE, 0
    for span in spans:
        print(f"\n{span}, after step {span.first_step:,} to {span.last_step:,}\n")
        phase = argparse.Namespace(**{**vars(args), "gin": [*args.gin, f"PHASE = {span.number}"]})
        try:
            code = max(code, _plan_one(phase))
            planned += 1
        except search.PhaseSetsLayoutError as error:
            print(f"not planned: {error}")
        if code == exit_codes.INTERRUPTED:
            break
    return code if planned else 1


def _plan_one(args: argparse.Namespace) -> int:
    question = search.ask(args.experiment, slice_name=args.slice, bindings=args.gin, batch_sizes=args.batch_size)
    options = search.options(question, only=args.only)
    if not options:
        raise UserError(
            f"{question.slice.name} has no layout of these strategies (--only, and what --gin binds): some need "
            "several slices, or more chips"
        )
    possible = [one for one in options if not one.reason]
    cannot = len(options) - len(possible)
    counted = units.counted(len(options), "candidate")
    print(f"{counted} for {question.slice.name}: {len(possible)} may fit, {cannot} cannot")
    if not possible or args.arithmetic:
        return _by_arithmetic(question, options, args)
    session = _Session(question, options, Store(), _wanted(args), is_fresh=args.fresh)
    try:
        session.look_up(compiles=not args.cached)
        if not args.cached:
            session.compile_missing()
    except KeyboardInterrupt:
        same = "the same command" + (" without --fresh" if args.fresh else "")
        print(f"\ninterrupted; finished compilations are kept, run {same} to resume", file=sys.stderr)
        _show(question, session, args, is_partial=True)
        return exit_codes.INTERRUPTED
    return _show(question, session, args)


def _wanted(args: argparse.Namespace) -> int:
    return args.compile or (QUICK if args.quick else DEFAULT)


def _best(question: Question, args: argparse.Namespace) -> slice_ranking.Planned:
    options = search.options(question, only=args.only)
    if args.arithmetic:
        options = _without_known_misfits(options, Store())
        if first := next((one for one in options if not one.reason), None):
            return search.metrics(question, first), ""
    else:
        session = _Session(question, options, Store(), _wanted(args), is_fresh=args.fresh)
        session.look_up(compiles=not args.cached)
        if not args.cached:
            session.compile_missing()
        if ranked := search.ranked(session.found):
            return search.metrics(question, *ranked[0]), ""
        if any(not one.reason for one in options):
            return None, session.none
    reasons = selection.by_reason(options)
    return None, f"no layout fits; most often {reasons[0][0]}" if reasons else "it has no layout of these strategies"


class _Session:
    """Looks up or compiles the records (memory and time) of a plan's candidates."""

    def __init__(self, question: Question, options: Sequence[Option], store: Store, wanted: int, *, is_fresh: bool):
        self.question, self.options, self.store = question, options, store
        self.found: list[tuple[Option, Record]] = []
        self._wanted, self._is_fresh = wanted, is_fresh
        self._usable = question.slice.chip.usable_hbm_bytes
        ordered = selection.order(options, wanted=wanted, usable_bytes=self._usable)
        programs: dict[str, Option] = {}
        for one in ordered:
            programs.setdefault(one.text, one)  # candidates that are the same program are compiled once
            if len(programs) == _TRIES * wanted:
                break
        self._left = list(programs.values())

    @property
    def none(self) -> str:
        """Says why there is no result."""
        return "nothing that was compiled fits" if self.found else "nothing was compiled"

    def _still_wanted(self) -> int:
        return self._wanted - sum(record.time is not None for _, record in self.found)

    def _take(self, one: Option, record: Record) -> None:
        self.found.append((one, record.within(self._usable)))

    def _known(self, one: Option) -> Record | None:
        return None if self._is_fresh else self.store.find(one.text)

    def look_up(self, *, compiles: bool) -> None:
        """Finds earlier records; those not found are left for `compile_missing` if `compiles`."""
        missing: list[Option] = []
        while self._left and self._still_wanted() > (len(missing) if compiles else 0):
            one = self._left.pop(0)
            if record := self._known(one):
                self._take(one, record)
            else:
                missing.append(one)
        self._left = [*missing, *self._left]

    def compile_missing(self) -> None:
        if self._still_wanted() <= 0 or not self._left:
            return
        try:
            paths.require_writable(self.store.folder)
        except UserError as error:
            raise UserError(f"the cache of plans: {error} with XDG_CACHE_HOME") from error
        options = {self.store.path(one.text): one for one in self._left}
        running: list[str] = []
        console = terminal.console(120, stderr=True)
        with console.status("") as status:  # shown only on a terminal

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
                asked, program = self.question, program_identity.layout_text(one.made)
                path = self.store.path(one.text)
                yield Job(one.name, asked.path, asked.slice.name, asked.bindings, one.bindings, program, path)


def _by_arithmetic(question: Question, options: Sequence[Option], args: argparse.Namespace) -> int:
    options = _without_known_misfits(options, Store())
    possible = [one for one in options if not one.reason]
    rows = [search.metrics(question, one) for one in possible]
    label = f"{arithmetic.LABEL}; of compiled steps: {calibration.label()}"
    if rows:
        shown = f"the likely best {min(len(rows), _ARITHMETIC_ROWS)} of {len(rows)}"
        title = f"{question.config.experiment} on {question.slice.name}: {shown}"
        ranking.show(
            rows[:_ARITHMETIC_ROWS],
            title=title,
            label=f"{label}; ranked by tokens/s half-way between both",
            wide=args.wide,
        )
    ranking.print_rejected(options, [], every=args.rejected)
    if not rows:
        kind = selection.by_reason(options)[0][0]
        fix = (
            "take a larger slice, a smaller batch, or accumulation"
            if kind.startswith("too much HBM")
            else f"most often: {kind}; the reasons above say which numbers do"
        )
        print(f"\nno candidate fits {question.slice.name}: {fix}")
        _say_not_written(args)
        return 1
    _finish(question, possible[0], options, rows, args, label=label)
    return 0


def _without_known_misfits(options: Sequence[Option], store: Store) -> list[Option]:
    """Marks candidates that did not fit when they were compiled; looks no further than the table shows."""
    found, shown = list(options), 0
    for i, one in enumerate(options):
        record = None if one.reason else store.find(one.text)
        record = record and record.within(one.question.slice.chip.usable_hbm_bytes)
        if record is not None and record.status == records.TOO_MUCH:
            reason = f"compiled, does not fit: {record.reason}"
            found[i] = dataclasses.replace(one, kind="too much HBM as compiled", reason=reason)
        else:
            shown += not one.reason
        if shown == _ARITHMETIC_ROWS:
            break
    return found


def _show(question: Question, session: _Session, args: argparse.Namespace, *, is_partial: bool = False) -> int:
    ranked = search.ranked(session.found)
    label = calibration.label()
    fit = {one.candidate for one, _ in ranked}  # an order that does not depend on the estimate
    rejected = [one for one in session.options if one.candidate not in fit]
    if not ranked:
        ranking.print_rejected(rejected, session.found, every=args.rejected)
        print(f"\n{session.none} for {question.slice.name}" + (" yet" if is_partial else ""))
        _say_not_written(args)
        return 1
    rows = [search.metrics(question, one, record) for one, record in ranked]
    title = f"{question.config.experiment} on {question.slice.name}" + (", so far" if is_partial else "")
    print()
    about = f"{label}; ranked by tokens/s, counting as hidden the traffic that the compiler overlapped"
    ranking.show(rows, title=title, label=about, wide=args.wide)
    for note in (*_provenance(ranked), *_compiler_warnings(ranked)):
        terminal.say(note)
    ranking.print_rejected(rejected, session.found, every=args.rejected)
    if args.record and is_partial:
        print(f"not written: {args.record}; a record is of a whole plan, and this one was interrupted")
    elif args.record:
        records.commit(args.record, ((one.text, record) for one, record in session.found))
        print(f"written: {args.record}")
    misfits = {one.candidate for one, record in session.found if record.time is None}
    others = [one for one in session.options if one.candidate not in misfits]
    _finish(question, ranked[0][0], others, rows, args, label=label)
    return 0


def _say_not_written(args: argparse.Namespace) -> None:
    for path in filter(None, (args.write, args.json, args.record)):
        print(f"not written, because no layout was found to fit: {path}")


def _compiler_warnings(found: search.Compiled) -> list[str]:
    layouts: dict[str, list[str]] = {}
    for one, record in found:
        for warning in record.warnings:
            layouts.setdefault(warning, []).append(one.name)
    named = {warning: ", ".join(units.shortened(names, most=3)) for warning, names in layouts.items()}
    return [f"compiler warning ({names}): {warning}" for warning, names in named.items()]


def _provenance(found: search.Compiled) -> list[str]:
    committed = [record for _, record in found if record.is_committed]
    if not committed:
        return []
    revisions = collections.Counter(_short(record.made_with.get("revision") or "unknown") for record in committed)
    made = ", ".join(f"{revision} ({count})" for revision, count in revisions.most_common())
    changed = any(record.made_with.get("sources") != records.sources_digest() for record in committed)
    note = f"{len(committed)} of {len(found)} rows were compiled before, at {made}; + means uncommitted changes"
    return [note + ("; core/, models/ or parallel/ have changed since: --fresh compiles again" if changed else "")]


def _short(revision: str) -> str:
    return re.sub(r"(?<=[0-9a-f]{10})[0-9a-f]+", "", revision).replace("-dirty", "+")


def _finish(
    question: Question,
    best: Option,
    options: Sequence[Option],
    rows: Sequence[CandidateMetrics],
    args: argparse.Namespace,
    *,
    label: str,
) -> None:
    print(f"\nbest: {best.name}")
    price = args.price[0] if args.price else None
    for line in ranking.outlook(question, rows[0], price=price, now=datetime.datetime.now()):
        terminal.say(f"  {line}")
    if best.estimate is not None:
        for line in winner_bars.lines(rows[0], best.estimate.hbm):
            terminal.say(f"  {line}")
    for binding in best.bindings:
        print(f"  {binding}")
    for line in ranking.against_pipelines(best, options):
        terminal.say(line)
    texts = {}
    if args.write:
        writer = search.Writer(question.config, question.experiment)
        texts[args.write] = writer.file(best.candidate, ranking.header(question, rows[0], label=label))
    if args.json:
        texts[args.json] = json.dumps([row.as_json() for row in rows], indent=1) + "\n"
    for path, text in texts.items():
        path.write_text(text)
        print(f"written: {path}")


_PLAN_ONLY = ("batch_size", "only", "price", "rejected", "wide", "write", "overwrite", "json", "record", "fresh")
_TAKEN = {"explain": ("--gin",), "generate": ("--gin", "--batch-size", "--json", "--overwrite")}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `plan`."""
    flags.add(parser, "SLICE", help="such as v4-32 (launch/run slices lists them), or several to rank: v4-32,v5p-32")
    flags.add(parser, "EXPERIMENT.gin", "--gin")
    parser.add_argument(
        "--batch-size", metavar="ROWS", type=flags.at_least(1), nargs="+", default=[], help="batch sizes to try"
    )
    parser.add_argument("--only", metavar="STRATEGY", nargs="+", default=[], help="try only these strategies")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--compile", metavar="N", type=flags.at_least(1), help="compile until N fit (default 16)")
    how.add_argument("--quick", action="store_true", help="compile until 10 fit")
    how.add_argument("--arithmetic", action="store_true", help="compile nothing: rough estimates in seconds")
    how.add_argument("--cached", action="store_true", help="compile nothing: show only earlier results")
    how.add_argument("--explain", metavar="CHOICE", help="analyze one layout: a gin file or bindings of STRATEGY")
    how.add_argument(
        "--generate",
        action="store_true",
        help="instead, compile generation under the experiment's STRATEGY, for rows of LENGTH positions: memory and "
        "predicted tokens per second",
    )
    parser.add_argument(
        "--price",
        metavar="USD",
        type=slice_ranking.prices,
        help="price of a chip-hour in US dollars; for several slices one for all, or one for each: 3.22,4.2",
    )
    parser.add_argument("--rejected", action="store_true", help="print every rejected candidate with its reason")
    parser.add_argument("--wide", action="store_true", help="print all columns of the table")
    flags.add(parser, "--overwrite")
    for name, what in {
        "--write": "write the winner as a gin file to include",
        "--json": "write all figures of the table to FILE",
        "--record": "write the records of compiled layouts to FILE, for committing",
    }.items():
        parser.add_argument(name, **flags.OUTPUT, help=what)
    parser.add_argument("--fresh", action="store_true", help="ignore earlier results and compile everything again")


def run(args: argparse.Namespace) -> int:
    """Plans, explains one layout (--explain), or predicts the speed of generation (--generate).

    Raises UserError if options contradict each other.
    """
    names = slice_ranking.names(args.slice)
    candidates.require_known(args.only)
    if len(names) > 1:
        slice_ranking.require_fitting(args, names)
    elif args.price and len(args.price) > 1:
        raise UserError(f"--price has {len(args.price)} prices, and {args.slice} is one slice: give one price")
    given = [f"--{name.replace('_', '-')}" for name in _PLAN_ONLY if getattr(args, name) not in (None, False, [])]
    for name, taken in _TAKEN.items():
        if getattr(args, name) and (idle := [flag for flag in given if flag not in taken]):
            raise UserError(f"{', '.join(idle)}: only for a plan; --{name} takes no option but {', '.join(taken)}")
    if args.arithmetic and args.record:
        raise UserError("--record keeps what was compiled, and --arithmetic compiles nothing: give one of them")
    for name in ("cached", "arithmetic"):
        if args.fresh and getattr(args, name):
            raise UserError(f"--fresh compiles everything again, and --{name} compiles nothing: give one of them")
    config = loader.load(args.experiment, bindings=args.gin, slice_name=names[0])
    experiment = config.build()
    is_of_one_phase = args.explain is not None or args.generate
    for note in (*config.notes, *(compiled_report.phase_notes(experiment) if is_of_one_phase else ())):
        print(f"note: {note}")
    if args.explain is not None:
        return explain.explain(args.experiment, args.explain, slice_name=args.slice, bindings=args.gin)
    if args.generate:
        where = {"slice_name": args.slice, "bindings": args.gin}
        found = generation_report.predict(args.experiment, **where, batch_sizes=args.batch_size)
        if args.json:
            args.json.write_text(json.dumps(found, indent=1) + "\n")
            print(f"written: {args.json}")
        return exit_codes.FAILED if all(generation_report.PROBLEM in one for one in found) else exit_codes.DONE
    return _plan(args, experiment.spans())
