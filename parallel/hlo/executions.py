"""How often each instruction of an optimized HLO program runs on a chip.

The one idea: the program is walked as it runs. A loop's body runs as often as the loop turns, the most expensive branch
of a conditional each time and the others never, and the pieces of a fusion with the fusion.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from parallel.hlo import decisions
from parallel.hlo.program import Computation, Instruction, Module
from parallel.hlo.trip_counts import Scope, TripCounts

COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
MOSAIC = "tpu_custom_call"
_LINK_BYTES_PER_CYCLE = 64
WHOLES = ("while", "conditional", "call", "async-start", "call-start")  # what is inside is counted, so they are not


class Loop(NamedTuple):
    """A loop that something runs in.

    Attributes:
      name: of the `while`.
      op_name: where in the source it comes from.
      trips: how often it turns; None where that depends on data.
    """

    name: str
    op_name: str
    trips: int | None


class Branch(NamedTuple):
    """A branch that something runs in.

    Attributes:
      name: of the `conditional`.
      op_name: where in the source it comes from.
      depends_on: what decides, one of `decisions.KINDS`.
    """

    name: str
    op_name: str
    depends_on: str


class Executed(NamedTuple):
    """An instruction in one place of the program.

    Attributes:
      instruction: itself.
      computation: the one that it stands in.
      times: how often it runs in a step; a loop whose count is not known is taken to turn once.
      loops: around it, outermost first.
      branches: around it, outermost first.
      wrappers: fusions and asynchronous starts around it, outermost first; empty: it is scheduled by itself.
      schedule: the computation in whose schedule it, or its outermost wrapper, stands.
    """

    instruction: Instruction
    computation: Computation
    times: int
    loops: tuple[Loop, ...]
    branches: tuple[Branch, ...]
    wrappers: tuple[Instruction, ...]
    schedule: Computation

    @property
    def cycles(self) -> int:
        """The compiler's estimate for all executions; 0 for what is counted with its wrapper or by its parts."""
        is_counted = not self.wrappers and self.instruction.opcode not in WHOLES
        return (self.instruction.estimated_cycles or 0) * self.times if is_counted else 0


class _Place(NamedTuple):
    scope: Scope
    times: int = 1
    loops: tuple[Loop, ...] = ()
    branches: tuple[Branch, ...] = ()
    wrappers: tuple[Instruction, ...] = ()
    schedule: Computation | None = None  # where there are wrappers


def walk(module: Module) -> list[Executed]:
    """Every instruction that runs, in the order of the schedule, loops and calls in place."""
    return list(_Walk(module).run(_Place(Scope(module.entry))))


class _Walk:
    def __init__(self, module: Module):
        self._module = module
        self._trips = TripCounts(module)

    def run(self, place: _Place) -> Iterator[Executed]:
        computation = self._module.computations[place.scope.computation]
        for instruction in computation.values():
            yield Executed(instruction, computation, *place[1:-1], schedule=place.schedule or computation)
            yield from self._inside(instruction, place)

    def _inside(self, at: Instruction, place: _Place) -> Iterator[Executed]:
        if at.opcode == "while":
            trips = self._trips.of(at, place.scope)
            loop = Loop(at.name, at.op_name, trips)
            inner = place._replace(times=place.times * (1 if trips is None else trips), loops=(*place.loops, loop))
            yield from self._call(at, at.required("condition"), inner)
            yield from self._call(at, at.required("body"), inner)
        elif at.opcode == "conditional":
            yield from self._branch(at, place)
        elif at.opcode in ("fusion", "async-start", "call-start"):
            schedule = place.schedule or self._module.computations[place.scope.computation]
            inner = place._replace(wrappers=(*place.wrappers, at), schedule=schedule)
            for name in at.called():
                yield from self._call(at, name, inner)
        elif at.opcode == "call":
            yield from self._call(at, at.attribute("to_apply") or at.required("calls"), place)

    def _call(self, at: Instruction, name: str, place: _Place) -> Iterator[Executed]:
        yield from self.run(place._replace(scope=Scope(name, place.scope, at)))

    def _branch(self, at: Instruction, place: _Place) -> Iterator[Executed]:
        """Every branch; the one that costs most is taken each time, the others never."""
        names = [n for n in at.called() if n in self._module.computations]
        taken = Branch(at.name, at.op_name, decisions.decided_by(self._module, place.scope, at.operands[0]))
        inner = place._replace(branches=(*place.branches, taken))
        runs = [list(self._call(at, name, inner)) for name in names]
        dearest = max(range(len(runs)), key=lambda i: (_weight(runs[i]), len(runs[i])), default=None)
        for i, run in enumerate(runs):
            yield from run if i == dearest else (e._replace(times=0) for e in run)


def _weight(run: list[Executed]) -> float:
    """Cycles; what the compiler gives no estimate for counts by its bytes, at about the pace of a chip's links."""
    unpriced = [e for e in run if base_opcode(e.instruction) in COLLECTIVES or is_kernel(e.instruction)]
    moved = sum(a.bytes * e.times for e in unpriced for a in e.instruction.arrays)
    return sum(e.cycles for e in run) + moved / _LINK_BYTES_PER_CYCLE


def base_opcode(instruction: Instruction) -> str:
    """`all-gather` for `all-gather-start`, and the opcode itself for everything else."""
    return instruction.opcode.removesuffix("-start")


def is_kernel(instruction: Instruction) -> bool:
    """Whether this is a Mosaic kernel."""
    return instruction.opcode == "custom-call" and instruction.attribute("custom_call_target") == MOSAIC
