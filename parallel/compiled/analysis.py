"""Analyzes a compiled step: memory, estimated cycles, traffic, findings of the lints, and compiler warnings."""

from typing import Any, NamedTuple

from parallel.compiled import compiling, lints, traffic
from parallel.compiled.compiling import Compiled
from parallel.compiled.hlo import costs, executions, program
from parallel.compiled.hlo.costs import Costs
from parallel.compiled.hlo.messages import compiler_messages, warnings
from parallel.compiled.lints import Finding
from parallel.compiled.traffic import Collective
from parallel.partitioner import Program


class Analysis(NamedTuple):
    """The analysis of one compiled training step; findings that match `lints.KNOWN` come last."""

    compiled: Compiled
    costs: Costs
    collectives: list[Collective]
    findings: list[Finding]
    warnings: list[str]


def analyze(bound: Program, *, dump_to: str | None = None) -> Analysis:
    """Compiles the training step of a program for its slice, and analyzes it.

    `dump_to` is a folder for the compiler's dump files; None: no dump.

    Raises:
      OutOfHbmError: the step does not fit into HBM.
    """
    with compiler_messages() as messages:
        result = compiling.compile_for_slice(bound, dump_to=dump_to)
    return read(bound, result, messages.text)


def read(bound: Program, result: Compiled, messages: str = "") -> Analysis:
    """Analyzes a compiled step; `messages` is the compiler's output to stderr."""
    module = program.parse(result.hlo)
    run = executions.walk(module)
    collectives = traffic.collectives(module, run, traffic.grid(bound.partitioner.mesh))
    context = lints.LintContext(bound, result.peak_bytes, collectives, messages)
    return Analysis(result, costs.summarize(run), collectives, lints.check(context), warnings(messages))


def as_json(bound: Program, found: Analysis) -> dict[str, Any]:
    """Converts an analysis to JSON values."""
    memory, costs_ = found.compiled, found.costs
    return {
        "slice": memory.slice.name,
        "strategy": bound.partitioner.strategy.name,
        "mesh": dict(bound.partitioner.shape),
        "accum_steps": bound.accum_steps,
        "memory": {
            "peak_bytes": memory.peak_bytes,
            **({"peak_is_bound": True} if memory.peak_is_bound else {}),
            "argument_bytes": memory.argument_bytes,
            "temp_bytes": memory.temp_bytes,
            "usable_bytes": memory.slice.chip.usable_hbm_bytes,
        },
        "cycles": {"total": costs_.total_cycles, "by_kind": dict(sorted(costs_.cycles.items()))},
        "without_estimate": {
            "kernels": sorted(_kernel(k) for k in costs_.kernels),
            "custom_calls": dict(costs_.custom_calls),
            "opcodes": dict(costs_.unpriced),
            "unknown_opcodes": dict(costs_.unknown),
        },
        "loops": [{"op_name": loop.op_name, "trips": loop.trips} for loop in costs_.loops],
        "wire_bytes_by_axes": {
            " ".join(axes) or "none": count for axes, count in traffic.wire_bytes_by_axes(found.collectives).items()
        },
        "traffic": [row._asdict() for row in traffic.table(found.collectives)],
        "findings": [_finding(f) for f in found.findings],
        "warnings": found.warnings,
    }


def _kernel(kernel: costs.Kernel) -> list[Any]:
    return [kernel.op_name.split("/")[-2:], list(kernel.operands), list(kernel.results), kernel.times]


def _finding(finding: Finding) -> dict[str, Any]:
    return {"lint": finding.lint, "what": finding.what, "fix": finding.fix, "known_because": finding.reason}
