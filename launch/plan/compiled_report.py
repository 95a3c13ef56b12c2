"""The command `report`: prints the layout and memory of a training step, and compares strategies."""

import argparse
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
from rich.table import Table

from core import slices, units, versions
from core.errors import UserError
from core.hosts import exit_codes
from core.slices import GIB
from launch import flags, scaling, terminal
from launch.check import chip_memory
from launch.config import loader, sources
from launch.experiment import Experiment
from launch.plan import search
from parallel import prediction, strategy
from parallel.compiled import analysis, compiling, report, traffic
from parallel.compiled.analysis import Analysis
from parallel.compiled.compiling import OutOfHbmError
from parallel.compiled.hlo.costs import Costs
from parallel.compiled.hlo.messages import compiler_messages
from parallel.compiled.traffic import Collective
from parallel.partitioner import Program
from parallel.pipeline import drawing
from parallel.planning import calibration, cost
from parallel.planning.cost import StepTime

COMMAND = ("layouts", "report")
HELP = "print the layout of every parameter and its bytes per chip; --compile adds the results of the real TPU compiler"
EXAMPLE = """launch/run report v4-32 gin/valkyrie_7b.gin --compile --json report.json
  launch/run report v4-32 gin/valkyrie_7b.gin --strategies
  launch/run report v4-32 gin/valkyrie_7b.gin --strategies gin/strategies/fsdp.gin mine.gin"""

_HEADINGS = ("strategy", "mesh", "state GiB", "peak GiB", "M cycles", "step s", "wire GiB", "by axis", "compile s")


def show(found: Analysis) -> None:
    """Prints memory, estimated cycles, traffic, findings and the compiler's warnings."""
    result = found.compiled
    at_most = "at most " if result.peak_is_bound else ""
    print(
        f"compiled for {result.slice.name} (not run): peak {at_most}{units.size(result.peak_bytes, digits=4)} of "
        f"{units.size(result.slice.chip.usable_hbm_bytes, digits=4)} per {result.slice.chip.unit}, "
        f"of which state and batch {units.size(result.argument_bytes, digits=4)}; "
        f"{result.compile_seconds:.0f} s to compile"
    )
    _print_cycles(found.costs, per=result.slice.chip.unit)
    _print_traffic(found.collectives, per=result.slice.chip.unit)
    print("\nfindings: " + ("" if found.findings else "none"))
    for finding in found.findings:
        print(f"* {finding.lint}: {finding.what}\n    fix: {finding.fix}")
        if finding.reason:
            print(f"    known: {finding.reason}")
    print_warnings(found.warnings)


def _print_cycles(costs: Costs, *, per: str) -> None:
    kinds = ", ".join(f"{kind} {count / 1e6:,.2f}" for kind, count in costs.cycles.items() if count >= 1e4)
    print(f"\nestimated by the compiler, per {per} and step: {costs.total_cycles / 1e6:,.2f} million cycles ({kinds})")
    loops = ", ".join(
        f"{loop.op_name or loop.name} x {'?' if loop.trips is None else loop.trips}" for loop in costs.loops
    )
    print(f"  loops: {loops or 'none'}" + ("; ? depends on data, counted once" if "x ?" in loops else ""))
    for kernel in costs.kernels:
        name, shapes = kernel.op_name.split("/")[-2:][0] or kernel.name, ", ".join(dict.fromkeys(kernel.results))
        print(f"  not included: Mosaic kernel {name} x {kernel.times} -> {shapes}")
    print(f"  not included: {_counted(costs.unpriced) or 'nothing'} (executions that the compiler does not estimate)")
    print(f"  custom calls: {_counted(costs.custom_calls) or 'none'}")
    if costs.unknown:
        print(f"  operations unknown to this report: {_counted(costs.unknown)}")


def _counted(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} x {count}" for name, count in counts.items())


def _print_traffic(collectives: Sequence[Collective], *, per: str) -> None:
    print(f"\ntraffic per {per} and step (payload: whole arrays; wire: what a {per} sends around a ring)")
    table = Table("mesh axes", "network", "collective", "dtype", "where", "when", box=None)
    for heading in ("in text", "executions", "payload MiB", "wire MiB"):
        table.add_column(heading, justify="right")
    for row in traffic.table(collectives):
        where, when = "loop" if row.in_loop else "once", "overlapped" if row.is_overlapped else "exposed"
        sizes = (f"{size / 2**20:,.1f}" for size in (row.payload_bytes, row.wire_bytes))
        labels = (" ".join(row.axes) or "-", row.network, row.kind, row.dtype, where, when)
        table.add_row(*labels, str(row.count), str(row.times), *sizes)
    terminal.console(140).print(table)
    totals = traffic.wire_bytes_by_axes(collectives).items()
    wire = ", ".join(f"{' '.join(axes) or '-'} {units.size(size, digits=4)}" for axes, size in totals)
    print(f"wire by mesh axes: {wire or 'none'}")


def print_warnings(warnings: Sequence[str]) -> None:
    """Prints the compiler's warnings."""
    print("\ncompiler warnings: " + ("" if warnings else "none"))
    for warning in warnings:
        print(f"* {warning}")


class StrategyResult(NamedTuple):
    """The result of compiling an experiment under one strategy."""

    choice: str  # the gin file, or the bindings, that set the strategy
    program: Program | None  # None if it could not be built
    found: Analysis | None  # None if it was not compiled
    problem: str = ""  # why it was not compiled; otherwise ""
    needed_bytes: float | None = None  # HBM per chip if it does not fit

    @property
    def name(self) -> str:
        """The strategy's name; if it could not be built, what set it."""
        if self.program:
            return self.program.partitioner.strategy.name
        return Path(self.choice).stem if self.choice.endswith(".gin") else self.choice

    @property
    def peak_bytes(self) -> float:
        """Peak HBM per chip in bytes; infinite if unknown."""
        if self.found:
            return self.found.compiled.peak_bytes
        return float("inf") if self.needed_bytes is None else self.needed_bytes

    def cells(self) -> list[str]:
        """Returns the strategy's cells in the table."""
        if self.program is None:
            return [self.name, "refused", *["–"] * 7]
        bound = self.program.partitioner
        mesh = strategy.mesh_text(bound.shape, dcn_shape=bound.strategy.dcn_shape)
        if self.found is None:
            state = report.totals(self.program).everything
            return [self.name, mesh, _short(state / GIB), f"{_short(self.peak_bytes / GIB)}, too much", *["–"] * 5]
        by_axes = traffic.wire_bytes_by_axes(self.found.collectives)
        shares = (f"{' '.join(axes) or '-'} {_short(size / GIB)}" for axes, size in by_axes.items() if size > 0)
        memory = self.found.compiled
        peak = ("≤ " if memory.peak_is_bound else "") + _short(memory.peak_bytes / GIB)
        cycles, seconds = self.found.costs.total_cycles / 1e6, cost.step_time(self.found, self.program).scheduled
        numbers = map(_short, (cycles, seconds, sum(by_axes.values()) / GIB))
        by_axis, compiled_in = ", ".join(shares) or "none", f"{memory.compile_seconds:.0f}"
        return [self.name, mesh, _short(memory.argument_bytes / GIB), peak, *numbers, by_axis, compiled_in]

    def as_json(self) -> dict[str, Any]:
        """Returns the compiler's figures, or the problem, as JSON values."""
        if self.program and self.found:
            return analysis.as_json(self.program, self.found)
        return {"strategy": self.name, "problem": self.problem}


def _short(number: float) -> str:
    return f"{number:,.2f}" if number >= 1 else f"{number:.2g}"


def strategy_files() -> list[str]:
    """Returns the workspace's gin files of strategies, in alphabetical order."""
    return sorted(map(sources.display, (sources.WORKSPACE / "gin/strategies").glob("*.gin")))


def bindings_of(choice: str, *, flag: str = "--strategies") -> list[str]:
    """Returns the gin statements of a choice: a gin file, or statements separated by semicolons.

    `flag` is named in errors.
    """
    if "=" not in choice and not choice.endswith(".gin"):
        raise UserError(
            f"{flag} {choice}: expected a gin file, such as gin/strategies/fsdp.gin, or bindings of STRATEGY, such as "
            '"STRATEGY = @strategies.fsdp()"'
        )
    if not choice.endswith(".gin"):
        return [part.strip() for part in choice.split(";")]
    if not sources.find(choice, folders=(sources.WORKSPACE, Path.cwd())):
        raise UserError(f"{flag} {choice}: no such file; the workspace has {', '.join(strategy_files())}")
    return [f"include '{choice}'"]


def compile_strategies(
    experiment: str, choices: Iterable[str], *, bindings: Sequence[str], slice_name: str
) -> Iterator[StrategyResult]:
    """Compiles the experiment with each strategy, and yields the results one by one.

    Args:
      choices: gin files, or bindings of STRATEGY separated by semicolons.
      bindings: gin bindings that override the experiment and the choice; `PHASE = N` chooses another phase than 1.

    Raises:
      UserError: the experiment has mistakes, or the chosen phase sets its own strategy.
    """
    config = loader.load(experiment, bindings=bindings, slice_name=slice_name)
    own = config.build()
    where: dict[str, Any] = {"bindings": bindings, "slice_name": slice_name}
    search.require_bindable(experiment, config, own, **where, names=["strategy"])
    for note in (*config.notes, *phase_notes(own)):
        print(f"note: {note}")
    for choice in choices:
        yield _compiled(experiment, choice, [*bindings_of(choice), *bindings], slice_name)


def phase_notes(experiment: Experiment) -> list[str]:
    """Says which phase is meant if the experiment has several."""
    count = len(experiment.spans())
    return [f'this is phase 1 of {count}; --gin "PHASE = N" chooses another'] if count > 1 else []


def _compiled(experiment: str, choice: str, bindings: Sequence[str], slice_name: str) -> StrategyResult:
    try:
        built = loader.load(experiment, bindings=bindings, slice_name=slice_name).build()
        program = built.bind(compiling.devices_of(slices.get(built.slice)))
    except UserError as error:
        return StrategyResult(choice, None, None, problem=" ".join(str(error).split()))
    try:
        with compiler_messages(pass_on=False):  # the compiler writes hundreds of lines if it does not fit
            return StrategyResult(choice, program, analysis.analyze(program))
    except OutOfHbmError as error:
        problem = f"does not fit: needs {error.needed} of {error.present}"
        return StrategyResult(choice, program, None, problem=problem, needed_bytes=error.needed_bytes)
    except jax.errors.JaxRuntimeError as error:
        return StrategyResult(choice, program, None, problem=f"the compiler failed: {str(error).partition(chr(10))[0]}")


def show_strategies(found: Sequence[StrategyResult], *, slice_name: str) -> None:
    """Prints the results as a Markdown table, least memory first, then problems and warnings."""
    chip = slices.get(slice_name).chip
    print(f"\ncompiled for {slice_name} by libtpu on this machine's CPU (not run), per {chip.unit} and step;")
    usable = chip.usable_hbm_bytes / GIB
    print(f"a {chip.unit} has {usable:.2f} GiB; wire: what a {chip.unit} sends, by mesh axis")
    print(f"step s: predicted, {calibration.label()}\n")
    rows = [row.cells() for row in sorted(found, key=lambda row: row.peak_bytes)]
    terminal.console(200).print(terminal.markdown(_HEADINGS, rows, text=("strategy", "mesh", "by axis")))
    for row in found:
        if row.problem:
            print(f"{row.name}: {row.problem}")
        for warning in row.found.warnings if row.found else ():
            print(f"{row.name}: compiler warning: {warning}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `report`."""
    flags.add(parser, "SLICE", "EXPERIMENT.gin", "--gin", "--scale-from")
    parser.add_argument(
        "--compile",
        action="store_true",
        help="compile the step for the slice (7B: about a minute): memory, cycles, predicted time, traffic, lints",
    )
    parser.add_argument(
        "--strategies",
        nargs="*",
        metavar="CHOICE",
        help="instead, compile under several strategies in turn and print one table: gin files, or bindings of "
        "STRATEGY separated by ;, or nothing for all of gin/strategies",
    )
    flags.add(parser, "--json", help="write the compiler's figures to FILE; implies --compile")
    flags.add(parser, "--overwrite")


def run(args: argparse.Namespace) -> int:
    """Prints the tables; returns 1 if an uncompiled step does not seem to fit, otherwise 0.

    Raises UserError if options contradict each other.
    """
    if args.compile and args.strategies is not None:
        raise UserError("--compile reports one program, --strategies compares several: give only one of them")
    if args.scale_from:
        found = scaling.bindings(args.experiment, slice_name=args.slice, scale_from=args.scale_from, given=args.gin)
        print(f"as on {args.scale_from}, with the same rows for each device: {', '.join(found)}")
        args.gin = [*args.gin, *found]
    written, fits = _one_program(args) if args.strategies is None else (_every_strategy(args), True)
    if args.json:
        args.json.write_text(json.dumps(written, indent=1, sort_keys=True) + "\n")
        print(f"written: {args.json}")
    return exit_codes.DONE if fits else exit_codes.FAILED


def _one_program(args: argparse.Namespace) -> tuple[Any, bool]:
    config = loader.load(args.experiment, bindings=args.gin, slice_name=args.slice)
    for note in config.notes:
        print(f"note: {note}")
    written, fits, shown = [], True, ""
    for span in config.build().spans():
        own = span.experiment
        if span.count > 1:
            length = f" x {units.counted(own.row_length, 'token')}" if own.unit == "token" else ""
            rows = units.counted(own.batch_size, "row") + length
            print(f"\n{span}, steps {span.first_step + 1:,} to {span.last_step:,}: {own.strategy.name}, {rows}\n")
        program = own.bind(compiling.devices_of(slices.get(own.slice)))
        table = report.table(program)
        print(table if table != shown else "arrays: as in the phase before")
        shown = table
        figures, is_fitting = _described(program, own, is_compiled=bool(args.compile or args.json))
        written.append(figures)
        fits &= is_fitting
    return written if len(written) > 1 else written[0], fits


def _described(program: Program, experiment: Experiment, *, is_compiled: bool) -> tuple[Any, bool]:
    replicated = [row.path for row in report.rows(program) if row.replicated and row.bytes_per_chip >= 2**20]
    print(f"replicated arrays of 1 MiB or more: {', '.join(replicated) or 'none'}")
    if schedule := program.partitioner.pipeline:
        print("\n" + drawing.text(schedule, stages=program.partitioner.shape["stage"]))
    memory = chip_memory.check(program, *chip_memory.estimate(program))
    terminal.say(f"\nmemory: {'' if memory.ok else 'DOES NOT FIT: '}{memory.detail}")
    if not is_compiled:
        return None, memory.ok
    found = analysis.analyze(program)
    show(found)
    time = cost.step_time(found, program)
    figures = analysis.as_json(program, found) | {
        "predicted": cost.predicted(time, found.compiled.slice, experiment.flops_per_step),
        "versions": versions.installed(versions.COMPILER),
    }
    _print_prediction(figures, time)
    return figures, True


def _print_prediction(record: prediction.Prediction, time: StepTime) -> None:
    parts = {"computation": time.compute, "kernels": time.kernels, "exposed traffic": time.exposed_traffic}
    print(f"\npredicted: {prediction.line(record)}")
    print("  " + ", ".join(f"{name} {units.seconds(part)}" for name, part in parts.items()))
    for unpriced in time.unpriced:
        print(f"  without an estimate: {unpriced}")


def _every_strategy(args: argparse.Namespace) -> Any:
    choices = args.strategies or strategy_files()
    for choice in choices:
        bindings_of(choice)  # raises UserError for a missing file before anything is compiled
    found = []
    where = {"bindings": args.gin, "slice_name": args.slice}
    for row in compile_strategies(args.experiment, choices, **where):
        found.append(row)
        print(f"{len(found)} of {len(choices)}: {' | '.join(row.cells())}", flush=True)
    show_strategies(found, slice_name=args.slice)
    return [row.as_json() for row in found]
