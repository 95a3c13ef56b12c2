"""HBM by name: what every buffer of a compiled step is to the person who chose model and strategy.

The one idea: an argument is named by the program's own signature, a temporary by its shape and by where in the source
the compiler says it comes from. Shapes of parameters, of the vocabulary and of a layer stack tell the kinds apart.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from core import logical
from parallel import report
from parallel.hlo.program import Array, Instruction, Module
from parallel.partitioner import Program
from parallel.planning import buffers
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


class Holder(NamedTuple):
    """Something that holds HBM at the fullest moment.

    Attributes:
      kind: one of KINDS.
      name: module path of a parameter, or the operation that made a temporary.
      what: its shape on one chip.
      bytes: of HBM.
    """

    kind: str
    name: str
    what: str
    bytes: int


def holders(bound: Program, module: Module, found: Buffers) -> list[Holder]:
    """Everything that holds HBM at the fullest moment, largest first."""
    entry = module.computations[module.entry]
    parameters = {int(at.argument): at for at in entry.values() if at.opcode == "parameter"}
    by_name = {at.name: at for computation in module.computations.values() for at in computation.values()}
    kinds = _Kinds(bound)
    named = [_argument(parameters.get(argument.number), argument.size) for argument in found.arguments]
    for held in buffers.fullest(found):
        at = by_name.get(held.value.name)
        op_name = at.op_name if at else ""
        kind = kinds.of(held.value.array, op_name)
        shape = str(held.value.array) if held.value.array else "pointers"
        named.append(Holder(kind, place(op_name) or held.value.name, shape, held.bytes))
    return sorted(_merged(named), key=lambda holder: -holder.bytes)


def _argument(at: Instruction | None, size: int) -> Holder:
    op_name = at.op_name if at else ""
    parts = re.findall(r"\w[\w/~.]*|~", op_name.replace("['", " ").replace("']", " "))
    joined = "/".join(part.strip(".") for part in parts if part != "~")
    part = next((kind for key, kind in _STATE.items() if f"state.{key}" in op_name), "batch")
    name = joined.replace("state.", "") or "argument"
    return Holder(part, name, str(at.arrays[0]) if at and at.arrays else "", size)


def place(op_name: str) -> str:
    """`backward layers/block/_mlp dot_general` of `jit(run)/transpose(jvp(layers))/while/body/…/_mlp/dot_general`."""
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
    parts = [part for part in bare.split("/") if part not in skipped]
    distinct = [part for i, part in enumerate(parts) if part not in parts[:i]]
    return (side + again + "/".join(distinct[-3:])).strip()


class _Kinds:
    """Tells temporaries apart by their shape."""

    def __init__(self, bound: Program):
        self._weights = report.Weights(bound)
        shape = bound.partitioner.shape
        pairs = list(zip(bound.abstract_state.params.values(), bound.axes.params.values(), strict=True))
        leaves = [(leaf, axes.get(name)) for tree, axes in pairs for name, leaf in tree.items()]
        self._stored = {tuple(sorted(d for d in leaf.sharding.shard_shape(leaf.shape) if d > 1)) for leaf, _ in leaves}
        self._layers = {leaf.sharding.shard_shape(leaf.shape)[0] for leaf, of in leaves if of.names[:1] == ("layers",)}
        pieces = logical.shards(bound.partitioner.strategy.activation_rules["vocab"], shape)
        self._vocab = {
            n // pieces for leaf, of in leaves for n, name in zip(leaf.shape, of.names, strict=True) if name == "vocab"
        }

    def of(self, array: Array | None, op_name: str) -> str:
        """One of KINDS."""
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


def _merged(named: Sequence[Holder]) -> Iterator[Holder]:
    """One row for all that have kind, name and shape in common."""
    totals: dict[tuple[str, str, str], list[int]] = {}
    for holder in named:
        totals.setdefault(holder[:3], []).append(holder.bytes)
    for (kind, name, what), sizes in totals.items():
        times = f" x {len(sizes)}" if len(sizes) > 1 else ""
        yield Holder(kind, name, what + times, sum(sizes))


def by_kind(found: Sequence[Holder]) -> dict[str, int]:
    """Bytes of each kind that there is."""
    totals = {kind: sum(h.bytes for h in found if h.kind == kind) for kind in KINDS}
    return {kind: total for kind, total in totals.items() if total}


class Allocation(NamedTuple):
    """One of the largest allocations that the compiler names when a program does not fit.

    Attributes:
      bytes: of HBM.
      name: where in the source.
      what: shape and type of allocation.
    """

    bytes: float
    name: str
    what: str


_SIZES = {"K": 2**10, "M": 2**20, "G": 2**30, "": 1}
_ALLOCATION = re.compile(
    r"\n\s*\d+\. Size: (?P<size>[\d.]+)(?P<unit>[KMG]?)B?\n(?P<rest>.*?)(?=\n\s*\d+\. Size:|={10,}|\Z)", re.S
)


def allocations(message: str) -> list[Allocation]:
    """What the compiler's message on a program that does not fit says took most.

    It lists that where the program as a whole is too much ("Used … of … hbm"). Where temporaries alone are, it gives
    their sum and no list.
    """
    found = []
    for match in _ALLOCATION.finditer(message):
        rest = match["rest"]
        operator, shape, kind, label = (_said(rest, w) for w in ("Operator", "Shape", "Allocation type", "XLA label"))
        op_name = re.search(r'op_name="([^"]*)"', operator or label)
        name = place(op_name[1]) if op_name else label.partition(" =")[0].lstrip("%") or kind
        what = f"{re.sub(r'{.*', '', shape)} {kind}".strip()
        found.append(Allocation(float(match["size"]) * _SIZES[match["unit"]], name, what))
    return found


def _said(text: str, what: str) -> str:
    found = re.search(rf"{what}: (.*)", text)
    return found[1].strip() if found else ""


def gigabytes(count: float) -> str:
    """`1.25`."""
    return f"{count / 2**30:,.2f}" if math.isfinite(count) else "–"
