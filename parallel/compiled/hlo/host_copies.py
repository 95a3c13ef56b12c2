"""Recognizes copies between the memory of a chip and that of its host."""

from typing import NamedTuple

from parallel.compiled.hlo import executions, program
from parallel.compiled.hlo.executions import Executed
from parallel.compiled.hlo.program import Array

# Opcodes that copy, and the direction that they imply. Slices are listed with one because the type of an asynchronous
# start names its operands before its result; a `copy` goes both ways, and names its destination first.
_DIRECTIONS = {"copy": None, "dynamic-slice": "from host", "dynamic-update-slice": "to host"}


class HostCopy(NamedTuple):
    """A transfer between HBM and host memory; `direction` is `to host` or `from host`."""

    direction: str
    array: Array


def find(executed: Executed) -> HostCopy | None:
    """Returns the copy between HBM and host memory that an instruction starts, or None."""
    at, computation = executed.instruction, executed.computation
    if (opcode := executions.base_opcode(at)) not in _DIRECTIONS:
        return None
    types = [at.type, *(computation[name].type for name in at.operands if name in computation)]
    places = [placed for text in types for placed in program.placed_arrays(text) if placed[0].dims]
    on_chip = [array for array, on_host in places if not on_host]
    if not on_chip or len(on_chip) == len(places):
        return None
    moved = min(on_chip, key=lambda array: array.bytes)  # of an update of an array on the host, the part that changes
    _, ends_on_host = places[0]
    return HostCopy(_DIRECTIONS[opcode] or ("to host" if ends_on_host else "from host"), moved)
