"""Parses the text of an optimized HLO program into computations and instructions.

An instruction ends where its brackets and quotes are closed, which may be several lines later: Mosaic kernels contain
literal newlines.

    %name = type opcode(operands), attribute=value, metadata={op_name="jit(run)/..."}, backend_config={...}
"""

import math
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

_BITS = {"pred": 8, "bf16": 16, "token": 0, "opaque": 0}
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.S)
_HEADER = re.compile(r"(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) (?:\(.*\) -> .*)?\{", re.S)
_NAMED = re.compile(r"\s+(?P<root>ROOT )?%?(?P<name>[\w.\-]+) = (?P<rest>.*)", re.S)
_END = re.compile(r"\s*\}(, execution_thread=\"\w+\")?\s*")
_NO_ESTIMATE = 2**63 - 1  # the compiler's placeholder for a missing estimate
_ON_HOST = "S(5)"  # the memory space in a layout
_OPENING, _CLOSING = "([{", ")]}"


class Array(NamedTuple):
    """Shape and dtype of an array on one chip; `dtype` is HLO's name, such as `bf16`."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Size in bytes, without padding."""
        return math.ceil(math.prod(self.dims) * _bits(self.dtype) / 8)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


def _bits(dtype: str) -> int:
    if dtype in _BITS:
        return _BITS[dtype]
    found = re.match(r"[a-z]+(\d+)", dtype)
    return int(found[1]) if found else 0


class Instruction(NamedTuple):
    """One instruction.

    Attributes:
      name: unique in its computation.
      type: type of the result, as written.
      argument: text between the brackets: operands, a literal, or a parameter's number.
      attributes: text after the brackets.
    """

    name: str
    opcode: str
    type: str
    argument: str
    attributes: str
    is_root: bool

    @property
    def operands(self) -> list[str]:
        """Names of the instructions that it reads; none for constants and parameters."""
        if self.opcode in ("constant", "parameter"):
            return []
        return [part.split()[-1].lstrip("%") for part in _split(self.argument) if part.strip()]

    @property
    def arrays(self) -> list[Array]:
        """The arrays of the result, flattened."""
        return arrays_of(self.type)

    @property
    def op_name(self) -> str:
        """JAX's name of the operation, such as `jit(run)/jvp()/while/body/dot_general`; "" without one."""
        found = re.search(r'metadata=\{[^}]*?op_name="((?:[^"\\]|\\.)*)"', self.attributes)
        return found[1] if found else ""

    @property
    def estimated_cycles(self) -> int | None:
        """The compiler's estimate for one execution; None without one."""
        found = re.search(r'"estimated_cycles":"(\d+)"', self.attributes)
        return int(found[1]) if found and int(found[1]) != _NO_ESTIMATE else None

    def attribute(self, name: str) -> str | None:
        """Returns the word after `name=`, without % and quotes; None if absent."""
        found = re.search(rf'(?:^|[\s,{{]){name}=%?"?([\w.\-]+)', self.attributes)
        return found[1] if found else None

    def required(self, name: str) -> str:
        """Returns an attribute that must be present; raises RuntimeError if it is missing."""
        if (found := self.attribute(name)) is None:
            raise RuntimeError(f"the program's %{self.name} = {self.opcode}(...) has no attribute {name}")
        return found

    def called(self) -> list[str]:
        """Returns the names of the computations that it calls."""
        names = []
        for single in ("calls", "to_apply", "condition", "body", "true_computation", "false_computation"):
            if (name := self.attribute(single)) is not None:
                names.append(name)
        for several in ("branch_computations", "called_computations"):
            found = re.search(rf"(?:^|[\s,]){several}=\{{([^}}]*)\}}", self.attributes)
            names += [n.strip().lstrip("%") for n in found[1].split(",")] if found else []
        return names


Computation = Mapping[str, Instruction]  # by name, in the order of the schedule


class Module(NamedTuple):
    """An HLO program: its computations by name, and the name of the entry."""

    computations: Mapping[str, Computation]
    entry: str


def parse(text: str) -> Module:
    """Parses the result of `compiled.as_text()`.

    Raises:
      RuntimeError: `text` is not a complete program.
    """
    computations: dict[str, dict[str, Instruction]] = {}
    entry, current = None, None
    for statement in _statements(text):
        if header := _HEADER.fullmatch(statement.rstrip()):
            current = computations.setdefault(header["name"], {})
            entry = header["name"] if header["entry"] else entry
        elif _END.fullmatch(statement):
            current = None
        elif current is not None and (named := _NAMED.fullmatch(statement)):
            instruction = _instruction(named)
            current[instruction.name] = instruction
    if entry is None:
        raise RuntimeError("HLO text without an ENTRY computation; expected what compiled.as_text() returns")
    return Module(computations, entry)


def _statements(text: str) -> Iterator[str]:
    pending: list[str] = []
    for line in text.split("\n"):
        opens_body = not pending and not line.startswith(" ") and line.endswith("{")
        if opens_body or (not pending and _END.fullmatch(line)):
            yield line
            continue
        pending.append(line)
        whole = "\n".join(pending)
        if _is_closed(whole):
            yield whole
            pending = []
    if pending:
        raise RuntimeError(f"HLO text ends inside: {pending[0].strip()[:100]}")


def _is_closed(text: str) -> bool:
    bare = _STRING.sub("", text)
    return '"' not in bare and sum(map(bare.count, _OPENING)) == sum(map(bare.count, _CLOSING))


def _instruction(named: re.Match) -> Instruction:
    rest = named["rest"]
    end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
    opening = rest.index("(", end)
    closing = _closing(rest, opening)
    return Instruction(
        name=named["name"],
        opcode=rest[end:opening].strip(),
        type=rest[:end],
        argument=re.sub(r"/\*.*?\*/", "", rest[opening + 1 : closing]),
        attributes=rest[closing + 1 :].lstrip(", "),
        is_root=bool(named["root"]),
    )


def _closing(text: str, opening: int) -> int:
    depth, quoted, i = 0, False, opening
    while i < len(text):
        character = text[i]
        if character == '"':
            quoted = not quoted
        elif quoted:
            i += character == "\\"
        elif character in _OPENING:
            depth += 1
        elif character in _CLOSING:
            depth -= 1
            if depth == 0:
                return i
        i += 1
    raise RuntimeError(f"HLO text with an open bracket: {text[opening : opening + 100]}")


def _split(text: str) -> Iterator[str]:
    depth, start = 0, 0
    for i, character in enumerate(text):
        depth += (character in _OPENING) - (character in _CLOSING)
        if character == "," and depth == 0:
            yield text[start:i]
            start = i + 1
    yield text[start:]


def arrays_of(type_: str) -> list[Array]:
    """Parses `bf16[2,3]{1,0:T(8,128)}` as one array, and a tuple as all of its arrays."""
    bare = re.sub(r"\{[^}]*\}|/\*.*?\*/", "", type_)
    return [
        Array(dtype, tuple(int(d.lstrip("<=")) for d in dims.split(",") if d))
        for dtype, dims in re.findall(r"\b([a-z]\w*)\[([\d,<=]*)\]", bare)
    ]


def placed_arrays(type_: str) -> list[tuple[Array, bool]]:
    """Returns the arrays of a type, each with whether it is in host memory, as `bf16[2,3]{1,0:S(5)}` is."""
    written = re.findall(r"\b[a-z]\w*\[[\d,<=]*\](?:\{[^}]*\})?", type_)
    return [(array, _ON_HOST in text) for text in written for array in arrays_of(text)]


def root(computation: Computation) -> Instruction:
    """Returns the instruction whose result is that of the computation."""
    return next((i for i in computation.values() if i.is_root), list(computation.values())[-1])


def users(computation: Computation, name: str) -> list[Instruction]:
    """Returns the instructions of a computation that read `name`."""
    return [i for i in computation.values() if name in i.operands]
