"""Attributes the HBM of a compiled step to named allocations.

The kind of a temporary is guessed from its shape and from JAX's name of the operation that makes it.
"""

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from core import computed_share, logical
from parallel.compiled import report
from parallel.compiled.hlo import program
from parallel.compiled.hlo.program import Array, Instruction, Module
from parallel.partitioner import Program
from parallel.planning import buffers, model_trace
from parallel.planning.buffers import Buffers

KINDS = (
    "parameters",
    "optimizer",
    "carry",
    "batch",
    "gradients",
    "saved activations",
    "gathered weights",
    "logits",
    "temporaries",
)
_STATE = {"params": "parameters", "opt_state": "optimizer", "carry": "carry"}


class Allocation(NamedTuple):
    """A named part of the HBM in use at the peak.

    Attributes:
      kind: one of KINDS; empty if it is not known.
      name: path of an argument, or the operation that makes a temporary.
      shape: dtype and shape on one chip; ends with ` x 3` if it stands for three allocations.
    """

    kind: str
    name: str
    shape: str
    bytes: float


def allocations(bound: Program, module: Module, found: Buffers) -> list[Allocation]:
    """Returns the arguments and temporaries in HBM at the peak, largest first."""
    entry = module.computations[module.entry]
    parameters = {int(at.argument): at for at in entry.values() if at.opcode == "parameter"}
    by_name = {at.name: at for computation in module.computations.values() for at in computation.values()}
    kinds = _Kinds(bound)
    named = [_argument(parameters.get(number), size) for number, size in found.arguments.items()]
    for temporary in of_temporaries(found):
        at = by_name.get(temporary.name)
        op_name = at.op_name if at else ""
        array = next(iter(program.arrays_of(temporary.shape)), None)
        named.append(temporary._replace(kind=kinds.of(array, op_name), name=place(op_name) or temporary.name))
    return sorted(_merged(named), key=lambda one: -one.bytes)


def _argument(at: Instruction | None, size: int) -> Allocation:
    op_name = at.op_name if at else ""
    parts = re.findall(r"\w[\w/~.]*|~", op_name.replace("['", " ").replace("']", " "))
    joined = "/".join(part.strip(".") for part in parts if part != "~")
    part = next((kind for key, kind in _STATE.items() if f"state.{key}" in op_name), "batch")
    name = joined.replace("state.", "") or "argument"
    return Allocation(part, name, str(at.arrays[0]) if at and at.arrays else "", size)


def place(op_name: str) -> str:
    """Shortens JAX's name of an operation; "" stays empty.

    `jit(run)/transpose(jvp(layers))/while/body/block/_mlp/dot_general` becomes `backward block/_mlp/dot_general`.
    """
    if not op_name:
        return ""
    side = "backward " if "transpose(" in op_name else "forward " if "jvp(" in op_name else ""
    again = "again " if "rematted" in op_name or ("checkpoint" in op_name and "transpose(" in op_name) else ""
    bare = re.sub(
        r"\b(?:jit|transpose|jvp|vmap|checkpoint|remat\d?|rematted_computation|shard_map|custom_vjp_call)\b|[()]",
        "",
        op_name,
    )
    skipped = {"", "run", "while", "body", "cond", "branch_1_fun", "closed_call", "main"}
    parts = [part for part in bare.split("/") if part not in skipped and computed_share.of(part) is None]
    distinct = [part for i, part in enumerate(parts) if part not in parts[:i]]
    return (side + again + "/".join(distinct[-3:])).strip()


class _Kinds:
    def __init__(self, bound: Program):
        self._weights = report.Weights(bound)
        shape = bound.partitioner.shape
        leaves = model_trace.leaves(bound.abstract_state.params, bound.axes.params)
        self._stored = {tuple(sorted(d for d in leaf.sharding.shard_shape(leaf.shape) if d > 1)) for leaf, _ in leaves}
        self._layers = {leaf.sharding.shard_shape(leaf.shape)[0] for leaf, of in leaves if of.names[:1] == ("layers",)}
        pieces = logical.shards(bound.partitioner.strategy.activation_rules["vocab"], shape)
        self._vocab = {
            n // pieces for leaf, of in leaves for n, name in zip(leaf.shape, of.names, strict=True) if name == "vocab"
        }

    def of(self, array: Array | None, op_name: str) -> str:
        if array is None:
            return "temporaries"
        dims = tuple(d for d in array.dims if d > 1)
        if array.dtype == "f32" and tuple(sorted(dims)) in self._stored:
            return "gradients"
        if len(dims) < 4 and self._weights.path_of(dims):
            return "gradients" if "transpose(" in op_name and "all-gather" not in op_name else "gathered weights"
        if self._weights.path_of(dims):
            return "gathered weights"
        if self._vocab & set(dims):
            return "logits"
        if len(dims) > 2 and dims[0] in self._layers:
            return "saved activations"
        return "temporaries"


def _merged(named: Sequence[Allocation]) -> Iterator[Allocation]:
    totals: dict[tuple[str, str, str], list[float]] = {}
    for one in named:
        totals.setdefault(one[:3], []).append(one.bytes)
    for (kind, name, shape), sizes in totals.items():
        times = f" x {len(sizes)}" if len(sizes) > 1 else ""
        yield Allocation(kind, name, shape + times, sum(sizes))


def by_kind(found: Sequence[Allocation]) -> dict[str, float]:
    """Returns the total bytes of each of KINDS that occurs."""
    totals = {kind: sum(one.bytes for one in found if one.kind == kind) for kind in KINDS}
    return {kind: total for kind, total in totals.items() if total}


_SIZES = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40, "": 1}
_ALLOCATION = re.compile(
    r"\n\s*\d+\. Size: (?P<size>[\d.]+)(?P<unit>[KMGT]?)B?\n(?P<rest>.*?)(?=\n\s*\d+\. Size:|={10,}|\Z)", re.S
)


def of_message(message: str) -> list[Allocation]:
    """Returns the allocations that the compiler lists in its out-of-memory error."""
    found = []
    for match in _ALLOCATION.finditer(message):
        rest = match["rest"]
        fields = ("Operator", "Shape", "Allocation type", "XLA label")
        operator, shape, kind, label = (_field(rest, name) for name in fields)
        op_name = re.search(r'op_name="([^"]*)"', operator or label)
        name = place(op_name[1]) if op_name else label.partition(" =")[0].lstrip("%") or kind
        text = f"{re.sub(r'{.*', '', shape)} {kind}".strip()
        found.append(Allocation("", name, text, float(match["size"]) * _SIZES[match["unit"]]))
    return found


def of_temporaries(found: Buffers) -> list[Allocation]:
    """Returns the temporaries in HBM at the peak, largest first."""
    return [Allocation("", value.name, str(value.array or "pointers"), n) for value, n in buffers.fullest(found.values)]


def _field(text: str, name: str) -> str:
    found = re.search(rf"{name}: (.*)", text)
    return found[1].strip() if found else ""
