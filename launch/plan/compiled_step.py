"""Prints what the TPU compiler says about one training step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.table import Table

from core import units
from launch import terminal
from parallel import traffic
from parallel.analysis import Analysis
from parallel.compiled import Compiled
from parallel.hlo.costs import Costs
from parallel.lints import Finding
from parallel.traffic import Collective


def show(found: Analysis) -> None:
    """Prints memory, estimated cycles, traffic, findings and the compiler's warnings."""
    _print_memory(found.compiled)
    _print_cycles(found.costs)
    _print_traffic(found.collectives)
    _print_findings(found.findings)
    print_warnings(found.warnings)


def _print_memory(result: Compiled) -> None:
    print(
        f"compiled for {result.slice.name} (not run): peak {units.size(result.peak_bytes, digits=4)} of "
        f"{units.size(result.slice.chip.usable_hbm_bytes, digits=4)} per chip, "
        f"of which state and batch {units.size(result.argument_bytes, digits=4)}; "
        f"{result.compile_seconds:.0f} s to compile"
    )


def _print_cycles(costs: Costs) -> None:
    kinds = ", ".join(f"{kind} {count / 1e6:,.2f}" for kind, count in costs.cycles.items() if count >= 1e4)
    print(f"\nestimated by the compiler, per chip and step: {costs.total_cycles / 1e6:,.2f} million cycles ({kinds})")
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


def _print_traffic(collectives: Sequence[Collective]) -> None:
    print("\ntraffic per chip and step (payload: whole arrays; wire: what a chip sends around a ring)")
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
    print(
        "wire by mesh axes: "
        + (", ".join(f"{' '.join(axes) or '-'} {units.size(size, digits=4)}" for axes, size in totals) or "none")
    )


def _print_findings(findings: Sequence[Finding]) -> None:
    print("\nfindings: " + ("" if findings else "none"))
    for finding in findings:
        print(f"* {finding.lint}: {finding.what}\n    fix: {finding.fix}")
        if finding.reason:
            print(f"    known: {finding.reason}")


def print_warnings(warnings: Sequence[str]) -> None:
    """Prints the compiler's warnings, without those known to be harmless."""
    print("\ncompiler warnings: " + ("" if warnings else "none"))
    for warning in warnings:
        print(f"* {warning}")
