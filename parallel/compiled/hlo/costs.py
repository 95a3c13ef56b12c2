"""Adds up the compiler's cost estimates of a step.

An instruction counts as often as it runs (`executions`); `compiled.cost_analysis()` counts the body of a loop once.
Estimates are in cycles of TensorCores; collectives and Mosaic kernels have none.
"""

import collections
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from parallel.compiled.hlo import executions, host_copies
from parallel.compiled.hlo.executions import Executed, Loop
from parallel.compiled.hlo.program import Instruction

# Takes no time, or its time is counted with another instruction.
_FREE = frozenset(
    """
    parameter constant tuple get-tuple-element bitcast after-all partition-id replica-id optimization-barrier domain
    add-dependency async-update async-done call-done call-update all-reduce-done all-gather-done
    all-to-all-done collective-permute-done copy-done slice-done dynamic-slice-done dynamic-update-slice-done
    send-done recv-done while conditional call async-start call-start fusion
    """.split()  # noqa: SIM905 (a list literal has a line for each word)
)
# Takes time; the compiler's estimate, if any, is in the instruction itself.
_PRICED = frozenset(
    """
    abs add and atan2 bitcast-convert broadcast cbrt ceil cholesky clamp clz compare complex concatenate convert
    convolution copy copy-start cosine divide dot dynamic-reshape dynamic-slice dynamic-slice-start
    dynamic-update-slice dynamic-update-slice-start erf exponential exponential-minus-one expm1 fft floor gather
    get-dimension-size imag infeed iota is-finite log log-plus-one logistic map maximum minimum multiply negate not
    or outfeed pad popcnt power real recv reduce reduce-precision reduce-window remainder reshape reverse rng
    rng-bit-generator rng-get-and-update-state round-nearest-afz round-nearest-even rsqrt scatter select
    select-and-scatter send set-dimension-size shift-left shift-right-arithmetic shift-right-logical sign sine slice
    slice-start sort sqrt subtract tan tanh topk transpose triangular-solve xor custom-call
    """.split()  # noqa: SIM905 (a list literal has a line for each word)
)


class Kernel(NamedTuple):
    """A Mosaic kernel, which has no estimate.

    Attributes:
      op_name: such as `jit(run)/while/body/pallas_call`.
      operands, results: such as `bf16[2,2048]`, on one chip.
    """

    name: str
    op_name: str
    operands: tuple[str, ...]
    results: tuple[str, ...]
    times: int


class Costs(NamedTuple):
    """Estimated costs of a step.

    Attributes:
      cycles: by kind of instruction (`fusion kOutput`, `copy`), largest first.
      custom_calls: executions of custom calls other than Mosaic kernels, by target.
      loops: all loops, once for each place that they are called from.
      unknown: executions of unknown opcodes, by opcode.
      unpriced: executions of other instructions that take time but have no estimate, by kind; not of collectives.
    """

    cycles: Mapping[str, int]
    kernels: list[Kernel]
    custom_calls: Mapping[str, int]
    loops: list[Loop]
    unknown: Mapping[str, int]
    unpriced: Mapping[str, int]

    @property
    def total_cycles(self) -> int:
        """The sum of all estimates."""
        return sum(self.cycles.values())


def summarize(run: Sequence[Executed]) -> Costs:
    """Adds up estimated cycles by kind, and lists what has no estimate."""
    cycles: collections.Counter[str] = collections.Counter()
    calls: collections.Counter[str] = collections.Counter()
    unknown: collections.Counter[str] = collections.Counter()
    unpriced: collections.Counter[str] = collections.Counter()
    communicating = {id(i) for e in run if _is_transfer(e) for i in (*e.wrappers, e.instruction)}
    for executed in run:
        at, times = executed.instruction, executed.times
        kind = executions.base_opcode(at)
        if not (kind in _FREE or kind in _PRICED or kind in executions.COLLECTIVES or at.opcode in _FREE):
            unknown[at.opcode] += times
        elif at.opcode == "custom-call" and not executions.is_kernel(at):
            calls[at.required("custom_call_target")] += times
        if at.opcode == "call-start" and not executed.wrappers:  # runs concurrently with the TensorCore
            unpriced[f"call on {at.attribute('async_execution_thread')}"] += times
        if executed.wrappers or at.opcode in executions.CONTAINERS:
            continue
        if at.estimated_cycles is not None:
            cycles[_kind(at)] += executed.cycles
        elif _takes_time(at) and id(at) not in communicating:
            unpriced[_kind(at)] += times
    return Costs(
        cycles={kind: count for kind, count in cycles.most_common() if count},
        kernels=[_kernel(e) for e in run if executions.is_kernel(e.instruction)],
        custom_calls=dict(sorted(calls.items())),
        loops=[loops[-1] for loops in dict.fromkeys(e.loops for e in run) if loops],
        unknown=dict(sorted(unknown.items())),
        unpriced={kind: count for kind, count in sorted(unpriced.items()) if count},
    )


def _is_transfer(executed: Executed) -> bool:
    kind = executions.base_opcode(executed.instruction)
    return kind in executions.COLLECTIVES or host_copies.find(executed) is not None


def _takes_time(at: Instruction) -> bool:
    """Scalar arithmetic does not count: it runs on the scalar core, in parallel."""
    is_work = executions.base_opcode(at) in _PRICED and at.opcode != "custom-call"
    return at.opcode == "fusion" or (is_work and any(a.dims for a in at.arrays))


def _kind(at: Instruction) -> str:
    return f"fusion {at.attribute('kind')}" if at.opcode == "fusion" else at.opcode


def _kernel(executed: Executed) -> Kernel:
    at, computation = executed.instruction, executed.computation
    operands = [str(a) for o in at.operands if o in computation for a in computation[o].arrays]
    return Kernel(at.name, at.op_name, tuple(operands), tuple(map(str, at.arrays)), executed.times)
