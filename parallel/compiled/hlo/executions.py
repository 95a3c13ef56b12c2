"""Computes how often each instruction of an optimized HLO program runs on a chip.

The body of a loop counts as often as its trip count, or once if that is unknown. Of the branches of a conditional only
the most expensive one counts.
"""

from collections.abc import Iterator
from typing import NamedTuple

from parallel.compiled.hlo import decisions
from parallel.compiled.hlo.program import Computation, Instruction, Module
from parallel.compiled.hlo.trip_counts import Scope, TripCounts

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
CONTAINERS = ("while", "conditional", "call", "async-start", "call-start")  # not counted: their contents are


class Loop(NamedTuple):
    """A loop around an instruction.

    Attributes:
      op_name: such as `jit(run)/jvp()/while`.
      trips: None if unknown.
    """

    name: str
    op_name: str
    trips: int | None


class Branch(NamedTuple):
    """A branch around an instruction.

    Attributes:
      op_name: such as `jit(run)/cond`.
      depends_on: what decides which branch runs, one of `decisions.KINDS`.
    """

    name: str
    op_name: str
    depends_on: str


class Executed(NamedTuple):
    """An instruction at one place of the program.

    Attributes:
      times: executions in a step; 0 in branches that do not count.
      loops, branches, wrappers: around it, outermost first; wrappers are fusions and asynchronous starts.
      schedule: the computation whose schedule contains it, or its outermost wrapper.
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
        """The compiler's estimate for all executions; 0 if there is none, or it counts elsewhere."""
        is_counted = not self.wrappers and self.instruction.opcode not in CONTAINERS
        return (self.instruction.estimated_cycles or 0) * self.times if is_counted else 0


class _Place(NamedTuple):
    scope: Scope
    times: int = 1
    loops: tuple[Loop, ...] = ()
    branches: tuple[Branch, ...] = ()
    wrappers: tuple[Instruction, ...] = ()
    schedule: Computation | None = None  # set if there are wrappers


def walk(module: Module) -> list[Executed]:
    """Returns the instructions of a program in schedule order, with loops, calls, fusions and branches expanded."""
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
        names = [n for n in at.called() if n in self._module.computations]
        taken = Branch(at.name, at.op_name, decisions.decided_by(self._module, place.scope, at.operands[0]))
        inner = place._replace(branches=(*place.branches, taken))
        runs = [list(self._call(at, name, inner)) for name in names]
        costliest = max(range(len(runs)), key=lambda i: (_weight(runs[i]), len(runs[i])), default=None)
        for i, run in enumerate(runs):
            yield from run if i == costliest else (e._replace(times=0) for e in run)


def _weight(run: list[Executed]) -> float:
    unpriced = [e for e in run if base_opcode(e.instruction) in COLLECTIVES or is_kernel(e.instruction)]
    moved = sum(a.bytes * e.times for e in unpriced for a in e.instruction.arrays)
    return sum(e.cycles for e in run) + moved / _LINK_BYTES_PER_CYCLE


def base_opcode(instruction: Instruction) -> str:
    """Returns the opcode without `-start`: `all-gather` for `all-gather-start`."""
    return instruction.opcode.removesuffix("-start")


def is_kernel(instruction: Instruction) -> bool:
    """Returns whether an instruction is a Mosaic kernel."""
    return instruction.opcode == "custom-call" and instruction.attribute("custom_call_target") == MOSAIC
