"""`launch/run report`: what a layout costs a chip, array by array, and, if asked, what the compiler says."""

from __future__ import annotations

import argparse
import json
import os
import pathlib

from rich.console import Console
from rich.table import Table

HELP = "print where every array lives and what it costs a chip; --compile asks the real TPU compiler"
EXAMPLE = "launch/run report v4-32 gin/valkyrie_7b.gin --compile --json report.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what a report takes."""
    parser.add_argument("slice", metavar="SLICE")
    parser.add_argument("experiment", metavar="EXPERIMENT.gin")
    parser.add_argument(
        "--gin", metavar="BINDING", action="append", default=[], help="overrides one binding; repeatable"
    )
    parser.add_argument(
        "--compile",
        action="store_true",
        help="compile the step for the slice (7B: about a minute): memory, estimated cycles, traffic, lints",
    )
    parser.add_argument("--json", metavar="FILE", help="write what --compile found to FILE; implies --compile")


def run(args: argparse.Namespace) -> int:
    """Prints the tables."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    from core import slices
    from launch import configuration
    from parallel import analysis, compiled, lints

    os.environ.update(lints.AUDIBLE_WARNINGS)
    config = configuration.load(args.experiment, bindings=args.gin, slice_name=args.slice)
    for note in config.notes:
        print(f"note: {note}")
    experiment = config.build()
    slice_ = slices.get(experiment.slice)
    program = experiment.bind(compiled.devices_of(slice_))
    _print_arrays(program)
    if args.compile or args.json:
        found = analysis.analyze(program)
        _print_analysis(found)
        if args.json:
            text = json.dumps(analysis.as_json(program, found), indent=1, sort_keys=True)
            pathlib.Path(args.json).write_text(text + "\n")
    return 0


def _print_arrays(program) -> None:
    from parallel import report

    table = Table("array", "shape", "logical axes", "mesh axes", "MiB per chip", box=None)
    for row in report.rows(program):
        if row.path.startswith("params/"):
            shape = "x".join(map(str, row.shape))
            table.add_row(row.path, shape, str(row.axes), row.spec, f"{row.bytes_per_chip / 2**20:,.2f}")
    Console(width=140).print(table)
    sizes = report.totals(program)
    print(
        f"per chip: parameters {_mib(sizes.params)}, optimizer state {_mib(sizes.opt_state)}, "
        f"carry {_mib(sizes.carry)}; all of it unsplit: {_mib(sizes.whole)}"
    )
    whole = [row.path for row in report.rows(program) if row.replicated and row.bytes_per_chip >= 2**20]
    print(f"held whole by every chip, 1 MiB or more: {', '.join(whole) or 'nothing'}")


def _mib(count: int) -> str:
    return f"{count / 2**20:,.1f} MiB"


def _print_analysis(found) -> None:
    _print_memory(found.compiled)
    _print_cycles(found.costs)
    _print_traffic(found.collectives)
    _print_findings(found.findings)


def _print_memory(result) -> None:
    from parallel.compiled import gib

    print(
        f"compiled for {result.slice.name} (not run): peak {gib(result.peak_bytes)} of "
        f"{gib(result.slice.chip.usable_hbm_bytes)} per chip, of which state and batch {gib(result.argument_bytes)}; "
        f"{result.compile_seconds:.0f} s to compile"
    )


def _print_cycles(costs) -> None:
    kinds = ", ".join(f"{kind} {count / 1e6:,.2f}" for kind, count in costs.cycles.items() if count >= 1e4)
    print(f"\nestimated by the compiler, per chip and step: {costs.total_cycles / 1e6:,.2f} million cycles ({kinds})")
    loops = ", ".join(
        f"{loop.op_name or loop.name} x {'?' if loop.trips is None else loop.trips}" for loop in costs.loops
    )
    print(f"  loops: {loops or 'none'}" + ("; ? depends on data, counted once" if "x ?" in loops else ""))
    for kernel in costs.kernels:
        name, shapes = kernel.op_name.split("/")[-2:][0] or kernel.name, ", ".join(dict.fromkeys(kernel.results))
        print(f"  not in it: Mosaic kernel {name} x {kernel.times} -> {shapes}")
    print(f"  not in it: {_counted(costs.unpriced) or 'nothing'} (executions that the compiler does not estimate)")
    print(f"  custom calls: {_counted(costs.custom_calls) or 'none'}")
    if costs.unknown:
        print(f"  operations that this report does not know: {_counted(costs.unknown)}")


def _counted(counts) -> str:
    return ", ".join(f"{name} x {count}" for name, count in counts.items())


def _print_traffic(collectives) -> None:
    from parallel import traffic
    from parallel.compiled import gib

    print("\ntraffic per chip and step (payload: whole arrays; wire: what a chip sends around a ring)")
    table = Table("mesh axes", "network", "collective", "dtype", "where", "when", box=None)
    for heading in ("in text", "executions", "payload MiB", "wire MiB"):
        table.add_column(heading, justify="right")
    for row in traffic.table(collectives):
        where, when = "loop" if row.in_loop else "once", "beside computation" if row.is_overlapped else "by itself"
        sizes = (f"{size / 2**20:,.1f}" for size in (row.payload_bytes, row.wire_bytes))
        labels = (" ".join(row.axes) or "-", row.network, row.kind, row.dtype, where, when)
        table.add_row(*labels, str(row.count), str(row.times), *sizes)
    Console(width=140).print(table)
    totals = traffic.wire_bytes_by_axes(collectives).items()
    print(
        "wire by mesh axes: " + (", ".join(f"{' '.join(axes) or '-'} {gib(size)}" for axes, size in totals) or "none")
    )


def _print_findings(findings) -> None:
    print("\nworth a look: " + ("" if findings else "nothing"))
    for finding in findings:
        print(f"* {finding.lint}: {finding.what}\n    fix: {finding.fix}")
        if finding.reason:
            print(f"    known: {finding.reason}")
