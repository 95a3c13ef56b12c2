"""Prints every parameter of a program with its layout, and the bytes of its state, computed from shapes."""

from __future__ import annotations

import io

from rich.table import Table

from core import units
from launch import terminal
from parallel import report
from parallel.partitioner import Program

_WIDTH = 140


def show(program: Program) -> None:
    """Prints every parameter with its mesh axes, the bytes of each part of the state, and the pipeline's schedule."""
    terminal.console(_WIDTH).print(_table(program))
    print(_sizes(program))
    replicated = [row.path for row in report.rows(program) if row.replicated and row.bytes_per_chip >= 2**20]
    print(f"replicated arrays of 1 MiB or more: {', '.join(replicated) or 'none'}")
    if schedule := program.partitioner.pipeline:
        from parallel.pipeline import drawing

        print("\n" + drawing.text(schedule, stages=program.partitioner.shape["stage"]))


def text(program: Program) -> str:
    """Returns every parameter with its mesh axes, and the sizes, as plain text."""
    page = io.StringIO()
    terminal.console(_WIDTH, file=page).print(_table(program))
    lines = [line.rstrip() for line in page.getvalue().splitlines()]
    return "\n".join([*lines, "", _sizes(program)])


def _table(program: Program) -> Table:
    table = Table("array", "shape", "logical axes", "mesh axes", "MiB per chip", box=None)
    for row in report.rows(program):
        if row.path.startswith("params/"):
            shape = "x".join(map(str, row.shape))
            table.add_row(row.path, shape, str(row.axes), row.spec, f"{row.bytes_per_chip / 2**20:,.2f}")
    return table


def _sizes(program: Program) -> str:
    sizes = report.totals(program)
    return (
        f"per chip: parameters {units.size(sizes.params)}, optimizer state {units.size(sizes.opt_state)}, "
        f"carry {units.size(sizes.carry)}; all of it unsharded: {units.size(sizes.whole)}"
    )
