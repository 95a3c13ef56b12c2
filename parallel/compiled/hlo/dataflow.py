"""Finds how a collective's result is read, and what is scheduled between its start and its end."""

from collections.abc import Iterator

from parallel.compiled.hlo import executions
from parallel.compiled.hlo.executions import Executed
from parallel.compiled.hlo.program import Computation, Instruction, Module, users

_START, _DONE = "AsyncCollectiveStart", "AsyncCollectiveDone"
_TRANSPARENT = ("get-tuple-element", "bitcast", "copy", "convert", "copy-start", "copy-done", "reshape", "transpose")


def is_start(executed: Executed) -> bool:
    """Returns whether it is a collective in a fusion and feeds the custom call that starts it."""
    if not executed.wrappers or executed.instruction.opcode not in executions.COLLECTIVES:
        return False
    return any(
        executed.instruction.name in i.operands and i.attribute("custom_call_target") == _START
        for i in executed.computation.values()
    )


def beside(module: Module, executed: Executed) -> list[Instruction]:
    """Returns the instructions scheduled between a collective's start and end.

    In a loop, the end may belong to the start of the iteration before.
    """
    at = executed.wrappers[0] if executed.wrappers else executed.instruction
    schedule = list(executed.schedule.values())
    ends = [i for i, other in enumerate(schedule) if _ends(module, other, at, executed)]
    if not ends or ends[0] == (start := schedule.index(at)):
        return []
    after = next((e for e in ends if e > start), None)
    return schedule[start + 1 : after] if after else schedule[start + 1 :] + schedule[: ends[0]]


def _ends(module: Module, other: Instruction, start: Instruction, executed: Executed) -> bool:
    if start.opcode.endswith("-start"):
        return other.opcode.endswith("-done") and start.name in _chain(executed.schedule, other)
    if other.opcode != "fusion" or other.name == start.name or not is_start(executed):
        return False
    pieces = module.computations[other.required("calls")]
    opcode, channel = executed.instruction.opcode, executed.instruction.attribute("channel_id")
    own = [i.name for i in pieces.values() if i.opcode == opcode and i.attribute("channel_id") == channel]
    return any(i.attribute("custom_call_target") == _DONE and set(own) & set(i.operands) for i in pieces.values())


def _chain(computation: Computation, done: Instruction) -> Iterator[str]:
    while done.operands and done.operands[0] in computation:
        done = computation[done.operands[0]]
        yield done.name
        if done.opcode not in ("async-update", "call-update"):
            return


def sliced_bytes(module: Module, executed: Executed) -> int:
    """Returns the bytes of a collective's results of which only slices are read."""
    computation = executed.computation
    at = _result(computation, executed.instruction)
    if not at.type.startswith("("):
        return at.arrays[0].bytes if _is_only_sliced(module, computation, at.name) else 0
    elements = [u for u in users(computation, at.name) if u.opcode == "get-tuple-element"]
    sliced = {int(u.required("index")) for u in elements if _is_only_sliced(module, computation, u.name)}
    return sum(a.bytes for i, a in enumerate(at.arrays) if i in sliced)


def _result(computation: Computation, at: Instruction) -> Instruction:
    ends = [u for u in users(computation, at.name) if u.opcode == at.opcode.removesuffix("-start") + "-done"]
    return ends[0] if ends else at


def _is_only_sliced(module: Module, computation: Computation, name: str) -> bool:
    readers = users(computation, name)
    return bool(readers) and all(_slices(module, computation, r, name) for r in readers)


def _slices(module: Module, computation: Computation, reader: Instruction, name: str) -> bool:
    if reader.opcode == "dynamic-slice":
        return reader.operands[0] == name
    if reader.opcode in _TRANSPARENT:
        return _is_only_sliced(module, computation, reader.name)
    if reader.opcode == "fusion":
        inner = module.computations[reader.required("calls")]
        read = {str(i) for i, operand in enumerate(reader.operands) if operand == name}
        parameters = [i for i in inner.values() if i.opcode == "parameter" and i.argument in read]
        return all(_is_only_sliced(module, inner, p.name) for p in parameters)
    return False
