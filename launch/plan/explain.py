"""`launch/run plan --explain`: compiles one layout and prints what limits its memory and speed."""

import contextlib
import tempfile
from collections.abc import Sequence
from pathlib import Path

from core.slices import GIB
from launch import terminal
from launch.plan import compiled_report, search
from launch.plan.search import Question
from parallel import strategy
from parallel.compiled import analysis, compiling
from parallel.compiled.analysis import Analysis
from parallel.compiled.compiling import OutOfHbmError
from parallel.compiled.hlo import executions, program
from parallel.compiled.hlo.executions import Executed
from parallel.compiled.hlo.messages import compiler_messages
from parallel.partitioner import Program
from parallel.planning import arithmetic, buffers, calibration, cost, hbm_allocations, selection
from parallel.planning.candidate_metrics import between
from parallel.planning.cost import CLOCK_HZ, StepTime
from parallel.planning.hbm_allocations import Allocation
from parallel.planning.roofline import Roofline, roofline

TOP_BUFFERS, TOP_OPERATIONS, TOP_ALLOCATIONS, NEAREST = 20, 15, 10, 3
_TEXT = ("kind", "where", "on one chip", "hottest operations", "mesh axes", "network", "what", "")  # left-aligned


def explain(path: str, choice: str, *, slice_name: str, bindings: Sequence[str]) -> int:
    """Compiles one layout and prints what limits it; returns 1 if it does not fit.

    Args:
      choice: the layout, as a gin file or as bindings of STRATEGY.
      bindings: gin bindings that override both.
    """
    chosen = compiled_report.bindings_of(choice, flag="--explain")
    question = search.ask(path, slice_name=slice_name, bindings=bindings, chosen=chosen)
    bound = question.experiment.bind(compiling.devices_of(question.slice))
    mesh = strategy.mesh_text(bound.partitioner.shape)
    print(f"{bound.partitioner.strategy.name} ({mesh}) on {question.slice.name}; compiling …", flush=True)
    with tempfile.TemporaryDirectory(prefix="renga-explain-") as folder:
        try:
            with compiler_messages(pass_on=False):
                found = analysis.analyze(bound, dump_to=folder)
        except OutOfHbmError as error:
            _print_misfit(question, bound, error, Path(folder))
            return 1
        held = buffers.read(Path(folder))
    module = program.parse(found.compiled.hlo)
    _print_memory(bound, found, hbm_allocations.allocations(bound, module, held))
    time = cost.step_time(found, bound)
    executed = executions.walk(module)
    _print_operations(executed, found, time, clock=CLOCK_HZ[question.slice.generation])
    _print_axis_times(time)
    flops = arithmetic.product_flops(*arithmetic.place(bound))
    _print_roofline(question, roofline(time, product_flops=flops, executed=executed, chip=question.slice.chip))
    compiled_report.print_warnings(found.warnings)
    print(f"\n{calibration.label()}.")
    return int(found.compiled.peak_bytes > question.slice.chip.usable_hbm_bytes)


def _print_memory(bound: Program, found: Analysis, held: Sequence[Allocation]) -> None:
    chip, peak = bound.partitioner.slice.chip, found.compiled.peak_bytes
    have, at_most = chip.usable_hbm_bytes, "at most " if found.compiled.peak_is_bound else ""
    said = f"{at_most}{peak / GIB:.2f} GiB of {have / GIB:.2f} per {chip.unit} at the peak"
    print(f"\nHBM: {said}, {(have - peak) / GIB:.2f} free")
    for kind, total in hbm_allocations.by_kind(held).items():
        print(f"  {kind:<18}{_gib(total):>8}")
    rest = peak - sum(one.bytes for one in held)
    print(f"  {'gaps and constants':<18}{_gib(rest):>8}\n")
    rows = [(one.kind, one.name, one.shape, _gib(one.bytes)) for one in held[:TOP_BUFFERS]]
    _print(("kind", "where", f"on one {chip.unit}", "GiB"), rows)


def _print_operations(executed: Sequence[Executed], found: Analysis, time: StepTime, *, clock: float) -> None:
    totals: dict[str, tuple[float, int]] = {}
    for one in executed:
        if one.cycles:
            name = hbm_allocations.place(one.instruction.op_name) or one.instruction.opcode
            cycles, times = totals.get(name, (0.0, 0))
            totals[name] = cycles + one.cycles, times + one.times
    ranked = sorted(totals.items(), key=lambda item: -item[1][0])[:TOP_OPERATIONS]
    print(f"\ntime: {time.compute:.3g} s of computation as estimated by the compiler, {time.kernels:.3g} s of kernels")
    whole = found.costs.total_cycles or 1
    rows = [(n, f"{t:,}", f"{c / 1e6:,.1f}", f"{c / clock * 1e3:,.1f}", f"{c / whole:.1%}") for n, (c, t) in ranked]
    _print(("hottest operations", "times", "M cycles", "ms", "of computation"), rows)
    for unpriced in time.unpriced:
        print(f"  without an estimate: {unpriced}")


def _print_axis_times(time: StepTime) -> None:
    print(f"\ntraffic: {time.traffic_seconds:.3g} s if nothing overlaps it")
    rows = [
        (" ".join(a.axes) or "-", a.network, f"{a.wire_bytes / GIB:.2f}", f"{a.seconds:.3g}", f"{a.beside:.3g}")
        for a in time.traffic
    ]
    _print(("mesh axes", "network", "GiB sent", "seconds", "overlapped"), rows)


def _print_roofline(question: Question, found: Roofline) -> None:
    time = found.time
    rows = [
        ("matrix products at the chip's peak", f"{found.products:.3g}"),
        ("computation and kernels, estimated", f"{time.busy:.3g}"),
        (f"HBM: {found.hbm_bytes / GIB:,.0f} GiB read and written, at most", f"{found.hbm:.3g}"),
        *((f"{network} links", f"{seconds:.3g}") for network, seconds in found.networks.items() if seconds),
    ]
    print("\nroofline, seconds a step")
    _print(("", "s"), rows)
    print(
        f"limited by {found.binds}: a step takes {time.hidden:.3g} s with all traffic hidden, {time.exposed:.3g} s "
        "with none"
    )
    expected = between(calibration.interval(time.scheduled), "{:.3g}")
    print(f"predicted, as the compiler scheduled it: {time.scheduled:.3g} s a step ({expected})")
    if flops := question.experiment.flops_per_step:
        print(f"MFU {100 * question.slice.share_of_peak(flops, seconds=time.scheduled):.1f} %")


def _print_misfit(question: Question, bound: Program, error: OutOfHbmError, folder: Path) -> None:
    over = f"{_gib(error.needed_bytes - error.present_bytes)} GiB too much"
    per = question.slice.chip.unit
    print(f"\ndoes not fit: needs {error.needed} of {error.present} per {per}, {over}")
    largest = hbm_allocations.of_message(str(error.__cause__))
    with contextlib.suppress(FileNotFoundError):  # the compiler gave up before it wrote its buffer assignment
        largest = largest or hbm_allocations.of_temporaries(buffers.read(folder))
    if largest:
        print("largest allocations, as listed by the compiler")
        _print(("GiB", "where", "what"), [(_gib(a.bytes), a.name, a.shape) for a in largest[:TOP_ALLOCATIONS]])
    parts = sorted(arithmetic.estimate(*arithmetic.place(bound)).hbm.items(), key=lambda part: -part[1])
    print("by arithmetic: " + ", ".join(f"{name} {_gib(count)}" for name, count in parts if count >= 2**20))
    print("\nnearest that may fit, by arithmetic (launch/run plan without --explain finds the fastest)")
    for one in selection.nearest(search.options(question), bound)[:NEAREST]:
        assert one.estimate is not None
        print(f"  {one.name}: {_gib(one.estimate.peak_bytes)} GiB\n    " + "; ".join(one.bindings))


def _gib(count: float) -> str:
    return f"{count / GIB:,.2f}"


def _print(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    terminal.console(160).print(terminal.markdown(headings, rows, text=_TEXT))
