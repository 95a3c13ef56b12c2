"""`plan … --explain`: one layout in depth. What holds HBM, what takes time, what is sent, and which of them binds.

Where a layout does not fit: by how much, what took it, and the nearest one that does.
"""

from __future__ import annotations

import dataclasses
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.table import Table

from core.errors import UserError
from core.slices import GIB, Slice
from launch import terminal
from launch.plans import facts, memory, planning, records, table
from launch.plans.planning import Question, Tried
from launch.reports import compiled_step, side_by_side
from parallel import analysis, compiled, strategy
from parallel.analysis import Analysis
from parallel.compiled import OutOfHbmError
from parallel.hlo import executions, program
from parallel.hlo.executions import Executed
from parallel.hlo.messages import compiler_messages
from parallel.hlo.program import Array, Instruction
from parallel.partitioner import Program
from parallel.planning import arithmetic, buffers, cost
from parallel.planning import label as labels
from parallel.planning.cost import CLOCK_HZ, StepTime
from parallel.planning.placed import Placed, step_of
from parallel.strategy import Strategy

TOP_BUFFERS, TOP_OPERATIONS, TOP_ALLOCATIONS, NEAREST = 20, 15, 10, 3


def explain(path: str, choice: str, *, slice_name: str, bindings: Sequence[str]) -> int:
    """Compiles one layout and says what binds it; 1 where it does not fit.

    Raises:
      ValueError: no such file, a mistake in the configuration, a layout that the slice cannot have.
    """
    if "=" not in choice and not choice.endswith(".gin"):
        raise UserError(
            f"--explain {choice}: expected a gin file, such as gin/strategies/fsdp.gin, or bindings of STRATEGY, "
            'such as "STRATEGY = @strategies.fsdp()"'
        )
    try:
        chosen = side_by_side.bindings_of(choice)
    except ValueError as error:
        raise UserError(str(error).replace("--strategies", "--explain")) from error
    question = planning.ask(path, slice_name=slice_name, bindings=[*chosen, *bindings])
    bound = question.experiment.bind(compiled.devices_of(question.slice))
    shape = strategy.mesh_text(bound.partitioner.shape)
    print(f"{bound.partitioner.strategy.name} ({shape}) on {question.slice.name}; compiling …", flush=True)
    with tempfile.TemporaryDirectory(prefix="renga-explain-") as folder:
        try:
            with compiler_messages(pass_on=False):
                found = analysis.analyze(bound, dump_to=folder)
        except OutOfHbmError as error:
            _too_much(question, bound, error, Path(folder))
            return 1
        held = buffers.read(Path(folder))
    module = program.parse(found.compiled.hlo)
    _memory(bound, found, memory.holders(bound, module, held))
    time = cost.step_time(found, bound)
    run = executions.walk(module)
    _operations(run, found, time, clock=CLOCK_HZ[question.slice.generation])
    _traffic(time)
    _roofline(question, bound, run, time)
    compiled_step.print_warnings(found.warnings)
    print(f"\n{labels.label()}.")
    return 0


def _memory(bound: Program, found: Analysis, held: Sequence[memory.Holder]) -> None:
    have, peak = bound.partitioner.slice.chip.usable_hbm_bytes, found.compiled.peak_bytes
    print(f"\nHBM: {peak / GIB:.2f} GiB of {have / GIB:.2f} per chip at the peak, {(have - peak) / GIB:.2f} free")
    for kind, total in memory.by_kind(held).items():
        print(f"  {kind:<18}{memory.gigabytes(total):>8}")
    rest = peak - sum(holder.bytes for holder in held)
    print(f"  {'gaps and constants':<18}{memory.gigabytes(rest):>8}\n")
    rows = [(h.kind, h.name, h.what, memory.gigabytes(h.bytes)) for h in held[:TOP_BUFFERS]]
    _print(("kind", "where", "on one chip", "GiB"), rows)


def _operations(run: Sequence[Executed], found: Analysis, time: StepTime, *, clock: float) -> None:
    totals: dict[str, list[float]] = {}
    for executed in run:
        if executed.cycles:
            name = memory.place(executed.instruction.op_name) or executed.instruction.opcode
            total = totals.setdefault(name, [0.0, 0])
            total[0] += executed.cycles
            total[1] += executed.times
    ranked = sorted(totals.items(), key=lambda item: -item[1][0])[:TOP_OPERATIONS]
    print(f"\ntime: {time.compute:.3g} s of computation as the compiler estimates it, {time.kernels:.3g} s of kernels")
    whole = found.costs.total_cycles or 1
    rows = [(n, f"{t:,}", f"{c / 1e6:,.1f}", f"{c / clock * 1e3:,.1f}", f"{c / whole:.1%}") for n, (c, t) in ranked]
    _print(("hottest operations", "times", "M cycles", "ms", "of computation"), rows)
    for unpriced in time.unpriced:
        print(f"  without an estimate: {unpriced}")


def _traffic(time: StepTime) -> None:
    print(f"\ntraffic: {time.traffic_seconds:.3g} s by itself")
    rows = [
        (" ".join(a.axes) or "-", a.network, f"{a.wire_bytes / GIB:.2f}", f"{a.seconds:.3g}", f"{a.beside:.3g}")
        for a in time.traffic
    ]
    _print(("mesh axes", "network", "GiB sent", "seconds", "beside computation"), rows)


def _roofline(question: Question, bound: Program, run: Sequence[Executed], time: StepTime) -> None:
    chip = question.slice.chip
    placed = Placed(bound.partitioner.strategy, facts.facts(question.experiment))
    products = arithmetic.product_flops(placed, step_of(bound)) / chip.peak_flops
    touched = sum(map(_touched_bytes, run))
    hbm = touched / chip.hbm_bytes_per_second
    by_network = _by_network(time)
    rows = [
        ("matrix products at the chip's peak", f"{products:.3g}"),
        ("computation and kernels, estimated", f"{time.busy:.3g}"),
        (f"HBM: {touched / GIB:,.0f} GiB read and written, at most", f"{hbm:.3g}"),
        *((f"{network} links", f"{seconds:.3g}") for network, seconds in by_network.items() if seconds),
    ]
    print("\nroofline, seconds a step")
    _print(("", "s"), rows)
    binds = binding(time, products=products, hbm=hbm)
    hidden, exposed = time.hidden, time.exposed
    print(
        f"{binds} binds: a step takes {hidden:.3g} s with all traffic hidden, {exposed:.3g} s with none, "
        f"{time.scheduled:.3g} s as it is scheduled"
    )
    if flops := question.flops(question.experiment.batch_size):
        shares = [question.slice.mfu(flops, seconds=seconds) for seconds in (hidden, exposed)]
        print(f"MFU {table.between((shares[0], shares[1]), '{:.1f}', 100)} %")


def _by_network(time: StepTime) -> dict[str, float]:
    return {n: sum(a.seconds for a in time.traffic if a.network == n) for n in ("ICI", "DCN")}


def binding(time: StepTime, *, products: float, hbm: float) -> str:
    """What takes longest of what can run at once: "ICI" or "DCN", "HBM", or "computation".

    The compiler's seconds of computation hold its waits for HBM, so that they say whether traffic or the chip is
    slower, and not what the chip waits for. That say the products at best pace and the kernels: where HBM takes
    longer than these, it binds.

    Args:
      time: of a compiled step.
      products: seconds of its matrix products at the chip's peak.
      hbm: seconds of its bytes, at most; they cannot take longer than the computation that they are part of.
    """
    if time.traffic_seconds > time.busy:
        by_network = _by_network(time)
        return max(by_network, key=lambda network: by_network[network])
    return "HBM" if min(hbm, time.compute) > products + time.kernels else "computation"


_MOVES = ("copy-start", "slice-start", "dynamic-slice-start")
_PLACED = re.compile(r"\b([a-z]\w*\[[\d,]*\])(\{[^}]*\})?")


def _touched_bytes(executed: Executed) -> float:
    """Operands and results of what is scheduled by itself; of a stack that a loop walks through, a layer."""
    at = executed.instruction
    if executed.wrappers:
        return 0.0
    if at.opcode in _MOVES:
        return _moved_bytes(at) * executed.times
    if not at.estimated_cycles:
        return 0.0
    trips = next((loop.trips for loop in reversed(executed.loops) if loop.trips), 0)
    types = [at.type, *(executed.computation[o].type for o in at.operands if o in executed.computation)]
    in_hbm = (array for type_ in types for array, is_in_hbm in _arrays(type_) if is_in_hbm)
    return executed.times * sum(a.bytes / (trips if trips and a.dims[:1] == (trips,) else 1) for a in in_hbm)


def _moved_bytes(at: Instruction) -> float:
    """Of a copy between memories: what arrives, for each side in HBM. A slice's type names its whole operand too."""
    sides = [(array, is_in_hbm) for array, is_in_hbm in _arrays(at.type) if array.dims]
    return min((array.bytes for array, _ in sides), default=0) * sum(is_in_hbm for _, is_in_hbm in sides)


def _arrays(type_: str) -> list[tuple[Array, bool]]:
    """The arrays of a type, and whether they lie in HBM."""
    found = _PLACED.findall(type_)
    return [
        (array, not re.search(r"S\([1-9]", layout)) for shape, layout in found for array in program.arrays_of(shape)
    ]


def _too_much(question: Question, bound: Program, error: OutOfHbmError, folder: Path) -> None:
    needed, have = (records.gib_of(text) for text in (error.needed, error.present))
    over = f"{memory.gigabytes(needed - have)} GiB too much"
    print(f"\ndoes not fit: needs {error.needed} of {error.present} per chip, {over}")
    took = memory.allocations(str(error.__cause__)) or _written_down(folder)
    if took:
        print("what took it, as the compiler says")
        rows = [(memory.gigabytes(a.bytes), a.name, a.what) for a in took[:TOP_ALLOCATIONS]]
        _print(("GiB", "where", "what"), rows)
    placed = Placed(bound.partitioner.strategy, facts.facts(question.experiment))
    by_name = sorted(arithmetic.estimate(placed, step_of(bound)).hbm.items(), key=lambda part: -part[1])
    said = ", ".join(f"{name} {memory.gigabytes(count)}" for name, count in by_name if count >= 2**20)
    print(f"by arithmetic: {said}")
    print("\nnearest that may fit, by arithmetic (launch/run plan without --explain finds the quickest)")
    for one in nearest(planning.consider(question), bound)[:NEAREST]:
        print(f"  {one.name}: {memory.gigabytes(one.estimate.peak_bytes)} GiB\n    " + "; ".join(one.bindings))


def _written_down(folder: Path) -> list[memory.Allocation]:
    """The largest buffers of a program that the compiler gave up on, from what it had written by then."""
    try:
        held = buffers.fullest(buffers.read(folder))
    except ValueError:  # it gave up before
        return []
    return [memory.Allocation(h.bytes, h.value.name, str(h.value.array or "pointers")) for h in held]


def nearest(tried: Sequence[Tried], bound: Program) -> list[Tried]:
    """Those that may fit, by how little of the layout they change, then by how quick they are likely to be.

    The layout itself is none of them, which has been compiled.
    """
    own = _resolved(bound.partitioner.strategy, bound.partitioner.slice)
    step = step_of(bound)
    ranked = []
    for one in tried:
        candidate = one.candidate
        if one.reason:
            continue
        tables = _resolved(candidate.layout.strategy(), bound.partitioner.slice) if candidate.layout else own
        changed = (
            tables.mesh_shape != own.mesh_shape,
            tables.pipeline != own.pipeline,
            candidate.remat not in (None, step.remat),
            candidate.accum_steps != step.accum_steps,
        )
        if tables != own or any(changed):
            ranked.append((2 * (tables.name != own.name) + sum(changed), planning.rank(one), one))
    return [one for *_, one in sorted(ranked, key=lambda item: item[:2])]


def _resolved(tables: Strategy, slice: Slice) -> Strategy:
    """With a degree for every axis, of all slices: tables that write the same mesh in two ways are equal then."""
    return dataclasses.replace(tables, mesh_shape=strategy.resolve(tables, slice))


def _print(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    text = ("kind", "where", "on one chip", "hottest operations", "mesh axes", "network", "what", "")
    printed = Table(box=box.MARKDOWN)
    for heading in headings:
        printed.add_column(heading, justify="left" if heading in text else "right")
    for row in rows:
        printed.add_row(*row)
    terminal.console(160).print(printed)
