"""One experiment compiled under one strategy after the other: the table that says what each costs a chip.

A layout that does not fit, or that this slice cannot have, is a row too, with its reason: what cannot be had is worth
as much to know as what can.
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


class Row(NamedTuple):
    """What became of one strategy.

    Attributes:
      choice: the gin file or binding that chose it.
      program: None where it was refused before compiling.
      found: None where there is no compiled step.
      problem: why not; else empty.
      needed: HBM per chip as the compiler writes it, where that is the problem.
    """

    choice: str
    program: Program | None
    found: Analysis | None
    problem: str = ""
    needed: str = ""


def files(folder: str = FOLDER) -> list[str]:
    """A gin file for each strategy, in alphabetical order."""
    return sorted(str(path) for path in Path(folder).glob("*.gin"))


def rows(experiment: str, choices: Iterable[str], *, bindings: Sequence[str], slice_name: str) -> Iterator[Row]:
    """Compiles the experiment under every choice, each as soon as it is asked for.

    Args:
      experiment: a gin file.
      choices: gin files that bind STRATEGY, or bindings of it.
      bindings: further bindings, which win over the choice.
      slice_name: to compile for.

    Raises:
      ValueError: the experiment as it stands is wrong, or a choice is not a file that can be read.
    """
    configuration.load(experiment, bindings=bindings, slice_name=slice_name).build()
    for choice in choices:
        yield _row(experiment, choice, [*bindings_of(choice), *bindings], slice_name)


def bindings_of(choice: str) -> list[str]:
    """The gin statements that make a choice: an include, or what stands between its semicolons.

    Raises:
      ValueError: a gin file that is not there.
    """
    if not choice.endswith(".gin"):
        return [part.strip() for part in choice.split(";")]
    if not Path(choice).is_file():
        raise UserError(f"--strategies {choice}: no such file; {FOLDER}/ has {', '.join(files()) or 'none'}")
    return [f"include '{choice}'"]


def _row(experiment: str, choice: str, bindings: Sequence[str], slice_name: str) -> Row:
    try:
        built = configuration.load(experiment, bindings=bindings, slice_name=slice_name).build()
        program = built.bind(compiled.devices_of(slices.get(built.slice)))
    except ValueError as error:
        return Row(choice, None, None, problem=" ".join(str(error).split()))
    try:
        with compiler_messages(pass_on=False):  # two hundred lines on what does not fit
            return Row(choice, program, analysis.analyze(program))
    except OutOfHbmError as error:
        problem = f"does not fit: needs {error.needed} of {error.present}"
        return Row(choice, program, None, problem=problem, needed=error.needed.removesuffix("GiB"))


def show(found: Sequence[Row], *, slice_name: str) -> None:
    """Prints the table as Markdown, what needs least first, and below it why a row has none of the figures."""
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


def cells(row: Row) -> list[str]:
    """A row of the table as text."""
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


def _peak_bytes(row: Row) -> float:
    if row.found:
        return row.found.compiled.peak_bytes
    return float(row.needed or "inf") * GIB


def name(row: Row) -> str:
    """The strategy's name, or what was asked for."""
    if row.program:
        return row.program.partitioner.strategy.name
    return Path(row.choice).stem if row.choice.endswith(".gin") else row.choice


def as_json(found: Sequence[Row]) -> list[dict[str, Any]]:
    """Every row as plain values: what `analysis.as_json` says, or the problem."""
    return [
        analysis.as_json(row.program, row.found) if row.found else {"strategy": name(row), "problem": row.problem}
        for row in found
    ]


def _gib(count: float) -> str:
    return _short(count / GIB)


def _short(number: float) -> str:
    return f"{number:,.2f}" if number >= 1 else f"{number:.2g}"
