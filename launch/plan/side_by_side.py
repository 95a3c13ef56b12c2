"""Compiles one experiment under several strategies in turn, for a table of what each costs a chip.

A layout that does not fit, or that the slice cannot have, is a row with its reason.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich import box
from rich.table import Table

from core import slices
from core.errors import UserError
from core.slices import GIB
from launch import configuration, terminal
from parallel import analysis, compiled, report, strategy, traffic
from parallel.analysis import Analysis
from parallel.compiled import OutOfHbmError
from parallel.hlo.messages import compiler_messages
from parallel.partitioner import Program

FOLDER = "gin/strategies"


class StrategyResult(NamedTuple):
    """The result of compiling an experiment under one strategy.

    Attributes:
      choice: the gin file or bindings that chose the strategy.
      program: None if it was refused before compiling.
      found: None if there is no compiled step.
      problem: why there is none; otherwise empty.
      needed: HBM per chip as the compiler writes it, if it does not fit; otherwise empty.
    """

    choice: str
    program: Program | None
    found: Analysis | None
    problem: str = ""
    needed: str = ""


def files(folder: str = FOLDER) -> list[str]:
    """Returns the gin files of all strategies, in alphabetical order."""
    return sorted(str(path) for path in Path(folder).glob("*.gin"))


def rows(
    experiment: str, choices: Iterable[str], *, bindings: Sequence[str], slice_name: str
) -> Iterator[StrategyResult]:
    """Compiles the experiment under each choice, yielding results one by one.

    Args:
      experiment: a gin file.
      choices: gin files that bind STRATEGY, or bindings of it.
      bindings: further bindings, which override the choice.
      slice_name: to compile for.

    Raises:
      UserError: a mistake in the experiment, or no such file.
    """
    configuration.load(experiment, bindings=bindings, slice_name=slice_name).build()
    for choice in choices:
        yield _row(experiment, choice, [*bindings_of(choice), *bindings], slice_name)


def bindings_of(choice: str, *, flag: str = "--strategies") -> list[str]:
    """Returns the gin statements of a choice: an include of a gin file, or statements separated by semicolons.

    Args:
      choice: a gin file or statements.
      flag: where the choice was given, for the error.

    Raises:
      UserError: there is no such gin file.
    """
    if not choice.endswith(".gin"):
        return [part.strip() for part in choice.split(";")]
    if not Path(choice).is_file():
        raise UserError(f"{flag} {choice}: no such file; {FOLDER}/ has {', '.join(files()) or 'none'}")
    return [f"include '{choice}'"]


def _row(experiment: str, choice: str, bindings: Sequence[str], slice_name: str) -> StrategyResult:
    try:
        built = configuration.load(experiment, bindings=bindings, slice_name=slice_name).build()
        program = built.bind(compiled.devices_of(slices.get(built.slice)))
    except UserError as error:
        return StrategyResult(choice, None, None, problem=" ".join(str(error).split()))
    try:
        with compiler_messages(pass_on=False):  # hundreds of lines if it does not fit
            return StrategyResult(choice, program, analysis.analyze(program))
    except OutOfHbmError as error:
        problem = f"does not fit: needs {error.needed} of {error.present}"
        return StrategyResult(choice, program, None, problem=problem, needed=error.needed.removesuffix("GiB"))


def show(found: Sequence[StrategyResult], *, slice_name: str) -> None:
    """Prints the table as Markdown, least memory first, then the problems and compiler warnings."""
    chip = slices.get(slice_name).chip
    print(f"\ncompiled for {slice_name} by libtpu on this machine's CPU (not run), per chip and step;")
    print(f"a chip has {chip.usable_hbm_bytes / GIB:.2f} GiB; wire: what a chip sends, by mesh axis\n")
    table = Table(box=box.MARKDOWN)
    headings = ("strategy", "mesh", "state GiB", "peak GiB", "M cycles", "wire GiB", "by axis", "compile s")
    for heading in headings:
        table.add_column(heading, justify="right" if heading.split()[-1] in ("GiB", "cycles", "s") else "left")
    for row in sorted(found, key=_peak_bytes):
        table.add_row(*cells(row))
    terminal.console(200).print(table)
    for row in found:
        if row.problem:
            print(f"{name(row)}: {row.problem}")
        for warning in row.found.warnings if row.found else ():
            print(f"{name(row)}: compiler warning: {warning}")


def cells(row: StrategyResult) -> list[str]:
    """Returns the cells of a row of the table."""
    if row.program is None:
        return [name(row), "refused", *["–"] * 6]
    bound = row.program.partitioner
    mesh = strategy.mesh_text(bound.shape, dcn_shape=bound.strategy.dcn_shape)
    if row.found is None:
        state = report.totals(row.program).everything
        return [name(row), mesh, _gib(state), f"{row.needed}, too much", *["–"] * 4]
    by_axes = traffic.wire_bytes_by_axes(row.found.collectives)
    shares = ", ".join(f"{' '.join(axes) or '-'} {_gib(size)}" for axes, size in by_axes.items() if size > 0)
    memory = row.found.compiled
    return [
        name(row),
        mesh,
        _gib(memory.argument_bytes),
        _gib(memory.peak_bytes),
        _short(row.found.costs.total_cycles / 1e6),
        _gib(sum(by_axes.values())),
        shares or "none",
        f"{memory.compile_seconds:.0f}",
    ]


def _peak_bytes(row: StrategyResult) -> float:
    if row.found:
        return row.found.compiled.peak_bytes
    return float(row.needed or "inf") * GIB


def name(row: StrategyResult) -> str:
    """Returns the strategy's name, or the choice if it was refused."""
    if row.program:
        return row.program.partitioner.strategy.name
    return Path(row.choice).stem if row.choice.endswith(".gin") else row.choice


def as_json(found: Sequence[StrategyResult]) -> list[dict[str, Any]]:
    """Returns each result as plain values: `analysis.as_json`, or the problem."""
    return [
        analysis.as_json(row.program, row.found) if row.found else {"strategy": name(row), "problem": row.problem}
        for row in found
    ]


def _gib(count: float) -> str:
    return _short(count / GIB)


def _short(number: float) -> str:
    return f"{number:,.2f}" if number >= 1 else f"{number:.2g}"
