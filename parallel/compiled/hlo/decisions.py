"""Finds what a value in an optimized HLO program depends on, to show whether all chips take the same branch.

A value's kind is that of its least certain source, the last in `KINDS`. An element of a loop's state that starts as a
constant and changes by a constant is a counter.
"""

from collections.abc import Iterable

from parallel.compiled.hlo.program import Instruction, Module, root
from parallel.compiled.hlo.trip_counts import Scope, TripCounts

KINDS = ("constant", "counter", "slice", "chip", "data")  # from equal on all chips to possibly different on each
_SLICE = "SliceId"  # the custom call by which a compiler chooses what chips of a slice do between slices
_ELEMENTWISE = ("copy", "copy-start", "copy-done", "bitcast", "optimization-barrier")  # on tuples, per element


def decided_by(module: Module, scope: Scope, name: str) -> str:
    """Returns what the value `name` in `scope` can depend on, one of `KINDS`."""
    return _Sources(module).of(scope, name)


def _worst(kinds: Iterable[str]) -> str:
    return max(kinds, key=KINDS.index, default="data")


class _Sources:
    def __init__(self, module: Module):
        self._module = module
        self._trips = TripCounts(module)
        self._seen: set[tuple[Scope, str]] = set()

    def of(self, scope: Scope, name: str) -> str:
        at = self._at(scope, name)
        if at is None:
            return "data"
        if (scope, name) in self._seen or at.opcode in ("constant", "iota"):
            return "constant"
        self._seen.add((scope, name))
        if at.opcode in ("partition-id", "replica-id"):
            return "chip"
        if at.opcode == "custom-call" and at.attribute("custom_call_target") == _SLICE:
            return "slice"
        if at.opcode == "get-tuple-element":
            return self._element(scope, at.operands[0], int(at.required("index")))
        if at.opcode == "parameter":
            outside = _argument(scope, at)
            return "data" if outside is None else self.of(*outside)
        if at.opcode in ("fusion", "call"):
            return _worst(self.of(inner, root(self._module.computations[inner.computation]).name)
                          for inner in _inside(scope, at))  # fmt: skip
        return "data" if at.opcode in ("while", "conditional") else _worst(self.of(scope, o) for o in at.operands)

    def _element(self, scope: Scope, name: str, index: int) -> str:
        at = self._at(scope, name)
        if at is None:
            return "data"
        if at.opcode == "tuple":
            return self.of(scope, at.operands[index])
        if at.opcode in _ELEMENTWISE:
            return self._element(scope, at.operands[0], index)
        if at.opcode == "while":
            return self._state(scope, at, index) if self._trips.of(at, scope) is not None else "data"
        if at.opcode == "parameter":
            if scope.call is not None and scope.call.opcode == "while":
                return self._state(scope.outer, scope.call, index)
            outside = _argument(scope, at)
            return "data" if outside is None else self._element(*outside, index)
        return self.of(scope, name)

    def _state(self, scope: Scope, loop: Instruction, index: int) -> str:
        step = self._trips.step(loop, index)
        if step is None:
            return "data"
        start = self._element(scope, loop.operands[0], index)
        return start if step == 0 else _worst(("counter", start))

    def _at(self, scope: Scope, name: str) -> Instruction | None:
        return self._module.computations[scope.computation].get(name)


def _inside(scope: Scope, at: Instruction) -> list[Scope]:
    return [Scope(name, scope, at) for name in at.called()]


def _argument(scope: Scope, parameter: Instruction) -> tuple[Scope, str] | None:
    if scope.call is None or scope.call.opcode not in ("fusion", "call"):
        return None
    return scope.outer, scope.call.operands[int(parameter.argument)]
