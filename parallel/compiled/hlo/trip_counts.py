"""Computes the trip count of a loop in an optimized HLO program.

The count follows from the comparison in the condition, the increment in the body, and the initial value, if these can
be traced to constants.

    start + k * step < limit   for k = 0, 1, …   runs ceil((limit - start) / step) times
"""

from __future__ import annotations

import math
import re
from typing import NamedTuple

from parallel.compiled.hlo.program import Computation, Instruction, Module, root

_TRANSPARENT = ("copy", "bitcast", "convert", "reshape", "optimization-barrier", "copy-done", "copy-start")
_MIRRORED = {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE", "NE": "NE", "EQ": "EQ"}


class Scope(NamedTuple):
    """A computation and the place that it is called from.

    Attributes:
      caller, call: scope and instruction of the call; None for the entry, or to keep the state of a loop symbolic.
    """

    computation: str
    caller: Scope | None = None
    call: Instruction | None = None

    @property
    def outer(self) -> Scope:
        """The scope of the caller; the computation must have one."""
        assert self.caller is not None, self.computation
        return self.caller


class Value(NamedTuple):
    """The constant `offset` if `element` is None; else that element of a loop's state, plus `offset`."""

    element: int | None
    offset: int


class TripCounts:
    """Trip counts of the loops of one module."""

    def __init__(self, module: Module):
        self._module = module

    def of(self, loop: Instruction, scope: Scope) -> int | None:
        """Returns how often the body of a `while` in `scope` runs; None if unknown."""
        compared = self._comparison(loop)
        if compared is None:
            return None
        left, right, direction = compared
        if left.element is None or self._is_constant_state(loop, left.element):
            left, right, direction = right, left, _MIRRORED[direction]
        if left.element is None:
            return None
        step = self.step(loop, left.element)
        start = self._element(scope, loop.operands[0], left.element)
        limit = right if right.element is None else self._invariant(loop, scope, right)
        if step is None or start is None or start.element is not None or limit is None or limit.element is not None:
            return None
        return _count(start.offset + left.offset, limit.offset, step, direction)

    def _comparison(self, loop: Instruction) -> tuple[Value, Value, str] | None:
        scope = Scope(loop.required("condition"))
        condition = root(self._computation(scope))
        while condition.opcode in (*_TRANSPARENT, "fusion"):
            if condition.opcode == "fusion":
                scope = Scope(condition.required("calls"), scope, condition)
                condition = root(self._computation(scope))
            else:
                condition = self._computation(scope)[condition.operands[0]]
        if condition.opcode != "compare":
            return None
        left, right = (self._value(scope, name) for name in condition.operands)
        return None if left is None or right is None else (left, right, condition.required("direction"))

    def step(self, loop: Instruction, element: int) -> int | None:
        """Returns what an iteration adds to an element of the loop's state; None if unknown."""
        scope = Scope(loop.required("body"))
        after = self._element(scope, root(self._computation(scope)).name, element)
        return None if after is None or after.element != element else after.offset

    def _is_constant_state(self, loop: Instruction, element: int) -> bool:
        return self.step(loop, element) == 0

    def _invariant(self, loop: Instruction, scope: Scope, value: Value) -> Value | None:
        if value.element is None or not self._is_constant_state(loop, value.element):
            return None
        before = self._element(scope, loop.operands[0], value.element)
        return None if before is None else Value(before.element, before.offset + value.offset)

    def _computation(self, scope: Scope) -> Computation:
        return self._module.computations[scope.computation]

    def _value(self, scope: Scope, name: str) -> Value | None:
        at = self._computation(scope).get(name)
        if at is None:
            return None
        if at.opcode == "constant":
            found = re.search(r"-?\d+", at.argument)
            return Value(None, int(found[0])) if found else None
        if at.opcode in _TRANSPARENT:
            return self._value(scope, at.operands[0])
        if at.opcode in ("add", "subtract"):
            return _combined(at.opcode, *(self._value(scope, operand) for operand in at.operands))
        if at.opcode == "get-tuple-element":
            return self._element(scope, at.operands[0], int(at.required("index")))
        if at.opcode in ("fusion", "call"):
            inner = Scope(at.attribute("calls") or at.required("to_apply"), scope, at)
            return self._value(inner, root(self._computation(inner)).name)
        if at.opcode == "parameter" and scope.call is not None and scope.call.opcode != "while":
            return self._value(scope.outer, scope.call.operands[int(at.argument)])
        return None

    def _element(self, scope: Scope, name: str, index: int) -> Value | None:
        at = self._computation(scope).get(name)
        if at is None:
            return None
        if at.opcode == "tuple":
            return self._value(scope, at.operands[index])
        if at.opcode in _TRANSPARENT:
            return self._element(scope, at.operands[0], index)
        if at.opcode in ("fusion", "call"):
            inner = Scope(at.attribute("calls") or at.required("to_apply"), scope, at)
            return self._element(inner, root(self._computation(inner)).name, index)
        if at.opcode == "while":
            return self._invariant(at, scope, Value(index, 0))
        if at.opcode == "parameter":
            return self._argument(scope, at, index)
        return None

    def _argument(self, scope: Scope, parameter: Instruction, index: int) -> Value | None:
        if scope.call is None:
            return Value(index, 0)
        if scope.call.opcode == "while":
            return self._invariant(scope.call, scope.outer, Value(index, 0))
        return self._element(scope.outer, scope.call.operands[int(parameter.argument)], index)


def _combined(opcode: str, left: Value | None, right: Value | None) -> Value | None:
    if left is None or right is None:
        return None
    if right.element is not None and (opcode == "subtract" or left.element is not None):
        return None
    sign = 1 if opcode == "add" else -1
    return Value(right.element if left.element is None else left.element, left.offset + sign * right.offset)


def _count(start: int, limit: int, step: int, direction: str) -> int | None:
    """Returns the iterations until `start + k * step` fails the comparison; None if never or unknown."""
    if direction in ("LE", "GE"):
        limit, direction = limit + (1 if direction == "LE" else -1), {"LE": "LT", "GE": "GT"}[direction]
    if direction == "NE":
        exact = step != 0 and (limit - start) % step == 0 and (limit - start) // step >= 0
        return (limit - start) // step if exact else None
    distance, pace = (limit - start, step) if direction == "LT" else (start - limit, -step)
    if direction not in ("LT", "GT"):
        return None
    return 0 if distance <= 0 else math.ceil(distance / pace) if pace > 0 else None
