"""Lints for a compiled program: find causes of unnecessary time or memory, and name a fix.

Findings that match a row of `KNOWN` are accepted, and reported last.
"""

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from core import logical, units
from core.logical import Rules
from core.types import ChoosesDtype, can
from parallel import accumulation
from parallel.compiled import report
from parallel.compiled.traffic import Collective
from parallel.partitioner import Program

MIB = 2**20
LARGE_BYTES = MIB  # per execution; smaller collectives are bound by latency, not bandwidth
LARGE_DCN_BYTES = 64 * MIB  # per step and chip
LARGE_REPLICATED_BYTES = 16 * MIB


@dataclasses.dataclass(frozen=True)
class LintContext:
    """The input of the lints; `messages` is the compiler's output to stderr."""

    program: Program
    peak_bytes: int
    collectives: Sequence[Collective]
    messages: str = ""


@dataclasses.dataclass(frozen=True)
class Finding:
    """One problem found by a lint.

    Attributes:
      labels: properties that are compared with those of known exceptions.
      reason: why it is accepted; None if it is not.
    """

    lint: str
    what: str
    fix: str
    labels: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    reason: str | None = None


@dataclasses.dataclass(frozen=True)
class KnownException:
    """Accepts findings of `lint` whose labels contain these."""

    lint: str
    labels: Mapping[str, Any]
    reason: str


KNOWN: tuple[KnownException, ...] = (
    KnownException(
        "all-reduce instead of reduce-scatter",
        {"topology": "2x2x4", "group_size": 16, "shards": "one shard per chip of the group"},
        "libtpu compiles 16-way reduce-scatters on 2x2x4 as an all-reduce and a slice, even explicit ones; a mesh "
        "whose fsdp axis is 4 gets reduce-scatters",
    ),
    KnownException(
        "all-reduce instead of reduce-scatter",
        {"group_size": 4, "shards": "one shard per chip of the group"},
        "over 4 chips libtpu 0.0.42.1 uses a reduce-scatter only for arrays sharded along one of the last two "
        "dimensions, with shards of 256 or more along the last; for other arrays it uses an all-reduce and a slice, "
        "even where the program has a reduce-scatter",
    ),
    KnownException(
        "all-reduce instead of reduce-scatter",
        {"shards": "shards replicated within the group"},
        "gradients are summed over replicas and shards at once: the partitioner does not split the sum into a "
        "reduce-scatter over shards and an all-reduce over replicas",
    ),
    KnownException(
        "large collective on DCN",
        {"kind": "all-reduce", "axes": ("data",), "place": "once"},
        "replicas on different slices must sum their gradients once per step",
    ),
    KnownException(
        "large collective on DCN",
        {"kind": "all-reduce", "axes": ("data",), "place": "backward loop over layers"},
        "replicas on different slices must sum their gradients once per step; they do so layer by layer, overlapped "
        "with the computation of the next layer",
    ),
    KnownException(
        "large collective on DCN",
        {"kind": "collective-permute", "axes": ("stage",)},
        "stages on different slices send activations forward and their gradients back",
    ),
    KnownException(
        "float32 gather of weights",
        {"of": "updated parameters"},
        "the optimizer updates shards of replicated parameters, and the updated parameters are gathered; a narrower "
        "type would round them",
    ),
    KnownException(
        "float32 gather of weights",
        {"computes_in": "float32"},
        "the model computes in float32",
    ),
    KnownException(
        "large replicated array",
        {"table": "replicated"},
        "the strategy replicates all arrays of this part by design",
    ),
)


def check(context: LintContext) -> list[Finding]:
    """Returns the findings of all lints; those that match `KNOWN` come last."""
    found = [_with_reason(finding) for lint in LINTS for finding in lint(context)]
    return sorted(found, key=lambda f: (f.reason is not None, f.lint, f.what))


def _with_reason(finding: Finding) -> Finding:
    for known in KNOWN:
        if known.lint == finding.lint and known.labels.items() <= finding.labels.items():
            return dataclasses.replace(finding, reason=known.reason)
    return finding


def _accumulated_gathers(context: LintContext) -> Iterator[Finding]:
    if context.program.gather_once:
        return
    steps, weights = context.program.accum_steps, report.Weights(context.program)
    inside = [c for c in context.collectives if _in_accumulation(c, steps) and _gathered(c, weights)]
    if not inside:
        return
    at = context.program.partitioner
    more = context.program.bytes_of_gathering(accumulation.manual_axes(at.strategy, at.shape, gather_once=True))
    usable = at.slice.chip.usable_hbm_bytes
    if context.peak_bytes + more <= usable:
        yield Finding(
            "weights gathered in the accumulation loop",
            f"{len(inside)} gathers run in each of {steps} microbatches, "
            f"{units.size(_wire(inside))} sent per chip and step; "
            f"whole parameters and gradients take {units.size(more)} more and would fit: "
            f"{units.size(context.peak_bytes)} of {units.size(usable)} in use",
            "experiment.Experiment.gather_once = True (the run summary shows its memory); or fewer accum_steps",
        )


def _gathered(c: Collective, weights: report.Weights) -> str | None:
    if c.kind != "all-gather":
        return None
    return next((path for a in c.arrays if (path := weights.path_of(a.dims))), None)


def _in_accumulation(c: Collective, accum_steps: int) -> bool:
    return accum_steps > 1 and any(re.fullmatch(r"jit\([^)]*\)(/shard_map)?/while", loop.op_name) for loop in c.loops)


def _dcn(context: LintContext) -> Iterator[Finding]:
    for c in context.collectives:
        if c.network == "DCN" and c.wire_bytes * c.times >= LARGE_DCN_BYTES:
            yield Finding(
                "large collective on DCN",
                f"{_described(c)} crosses slices: {units.size(_wire([c]))} per chip and step",
                "let only the data axis span slices, as strategies.multislice does"
                if c.axes != ("data",)
                else "send only gradients across slices, each once per step",
                {"kind": c.kind, "axes": c.axes, "place": _place(c, context.program.accum_steps)},
            )


def _place(c: Collective, accum_steps: int) -> str:
    if not c.loops:
        return "once"
    if _in_accumulation(c, accum_steps):
        return "loop over microbatches"
    return "backward loop over layers" if "transpose(" in c.loops[-1].op_name else "another loop"


def _float32_gathers(context: LintContext) -> Iterator[Finding]:
    weights = report.Weights(context.program)
    model = context.program.model
    dtype = model.dtype if can(model, ChoosesDtype) else None
    tables = context.program.partitioner.strategy
    updated = _stored_over(tables.stored_optimizer_rules) - _stored_over(tables.param_rules)
    for c in context.collectives:
        path = _gathered(c, weights) if c.dtype == "f32" and c.payload_bytes >= LARGE_BYTES else None
        is_update = set(c.axes) <= updated and not c.loops
        if path is not None:
            yield Finding(
                "float32 gather of weights",
                f"{path}: {_described(c)} sends float32, {units.size(_wire([c]))} per chip and step",
                "cast before the gather: logical.param(..., compute_dtype=...) casts, then constrains the layout"
                if not is_update
                else "shard parameters too (strategies.fsdp), so that each layer gathers them in the compute dtype",
                {"computes_in": dtype, "of": "updated parameters" if is_update else "weights"},
            )


def _stored_over(rules: Rules) -> set[str]:
    return {axis for axes in rules.values() for axis in logical.mesh_axes(axes)}


def _unscattered_reductions(context: LintContext) -> Iterator[Finding]:
    slice_ = context.program.partitioner.slice
    groups: dict[tuple[tuple[str, ...], int], list[Collective]] = {}
    for c in context.collectives:
        if c.sliced_bytes >= LARGE_BYTES:
            groups.setdefault((c.axes, c.group_size), []).append(c)
    for (axes, size), found in groups.items():
        shards = _shards_in_group(axes, context)
        wasted = sum(round(c.sliced_bytes * (size - 1) / size) * c.times for c in found)
        yield Finding(
            "all-reduce instead of reduce-scatter",
            f"{len(found)} all-reduces over {' x '.join(axes)} ({size} chips) of which only slices are read: "
            f"reduce-scatters would send {units.size(wasted)} less per chip and step; the largest is "
            f"{_described(max(found, key=lambda c: c.sliced_bytes))}",
            _how_to_scatter(shards, size),
            {"topology": slice_.topology_name, "group_size": size, "shards": shards},
        )


def _how_to_scatter(shards: str, chips: int) -> str:
    if shards == "shards replicated within the group":
        return (
            "fewer replicas (fsdp or fsdp_tensor over all chips); with accum_steps above 1, gradients are scattered "
            "per microbatch and summed over replicas once per step"
        )
    if chips > 4:
        return (
            "reduce over a mesh axis of 4 chips, where libtpu mostly scatters; or reduce less often (fewer accum_steps)"
        )
    return "a wider model, or fewer chips on the axis; or reduce less often (fewer accum_steps)"


def _shards_in_group(axes: Sequence[str], context: LintContext) -> str:
    shape = context.program.partitioner.shape
    rules = context.program.partitioner.strategy.stored_optimizer_rules
    stored = [{a for a in logical.mesh_axes(entry) if shape[a] > 1} for entry in rules.values()]
    if any(set(axes) == entry for entry in stored):
        return "one shard per chip of the group"
    return "shards replicated within the group" if any(entry & set(axes) for entry in stored) else "not sharded"


def _replicated(context: LintContext) -> Iterator[Finding]:
    tables = context.program.partitioner.strategy
    parts = {"params": tables.param_rules, "opt_state": tables.stored_optimizer_rules, "carry": tables.activation_rules}
    alone = context.program.partitioner.mesh.size == 1
    for row in report.rows(context.program):
        if row.replicated and not alone and row.bytes_per_chip >= LARGE_REPLICATED_BYTES:
            all_replicated = not any(parts[row.path.split("/")[0]].values())
            yield Finding(
                "large replicated array",
                f"{row.path} {list(row.shape)}: {units.size(row.bytes_per_chip)}, replicated on every chip",
                f"shard one of its axes {row.axes} in the strategy's table",
                {"table": "replicated" if all_replicated else "sharded"},
            )


def rematerialized(context: LintContext) -> Iterator[Finding]:
    """Finds the partitioner's warnings about arrays that it replicates to reshard them."""
    lines = [line for line in context.messages.splitlines() if "nvoluntary full remat" in line]
    for line in dict.fromkeys(_between_layouts(line) for line in lines):
        yield Finding(
            "involuntary full rematerialization",
            line,
            "constrain the array to an intermediate layout (logical.constrain), or shard producer and consumer alike",
        )


def _between_layouts(line: str) -> str:
    found = re.search(r"go from sharding (\{.*?\}) to (\{.*?\}) ", line)
    name = re.search(r"for HLO operation:? %?[\w.\-]+ = ([\w\[\],]+)", line)
    where = re.search(r'op_name="([^"]*)"', line)
    if found is None:
        return line.split("] ")[-1][:200]
    return f"{name[1] if name else 'an array'} goes from {found[1]} to {found[2]}" + (
        f" at {where[1]}" if where else ""
    )


def _idle_axes(context: LintContext) -> Iterator[Finding]:
    program = context.program
    layouts = [*jax.tree.leaves(program.state_shardings), *program.batch_shardings.values()]
    used = {axis for sharding in layouts for entry in sharding.spec for axis in logical.mesh_axes(entry)}
    shape = context.program.partitioner.shape
    all_axes = tuple(axis for axis, degree in shape.items() if degree > 1)  # sums of metrics reduce over all of them
    used |= {axis for c in context.collectives if c.axes != all_axes for axis in c.axes}
    for axis, degree in shape.items():
        if degree > 1 and axis not in used:
            yield Finding(
                "mesh axis that shards nothing",
                f"{axis} = {degree}, but no array of the state or of the batch is sharded over it: its {degree} chips "
                "do the same work",
                f"set {axis} to 1, or shard an axis of this model over it in the strategy's table",
            )


def _divergent_collectives(context: LintContext) -> Iterator[Finding]:
    """Finds collectives that only some chips may execute; a choice by slice matters only on DCN."""
    for c in context.collectives:
        may_differ = ("data", "chip", "slice") if c.network == "DCN" else ("data", "chip")
        places = [f"one branch of {b.op_name or b.name}" for b in c.branches if b.depends_on in may_differ]
        places += [
            f"{loop.op_name or loop.name}, whose trip count depends on data" for loop in c.loops if loop.trips is None
        ]
        for place in places[:1]:
            yield Finding(
                "collective under a data-dependent branch",
                f"{_described(c)} runs in {place}: chips that take different branches wait for each other forever",
                "compute both branches and select (jnp.where), or branch on a value that is equal on all chips",
            )


LINTS: tuple[Callable[[LintContext], Iterator[Finding]], ...] = (
    _accumulated_gathers,
    _dcn,
    _float32_gathers,
    _unscattered_reductions,
    _replicated,
    rematerialized,
    _idle_axes,
    _divergent_collectives,
)


def _described(c: Collective) -> str:
    arrays = ", ".join(units.shortened([str(array) for array in c.arrays], most=2))
    times = f", {c.times} times" if c.times > 1 else ""
    where = "/".join(c.op_name.split("/")[-3:])
    return f"{c.kind} {arrays} over {' x '.join(c.axes) or 'nothing'}{times}" + (f", at {where}" if where else "")


def _wire(found: Sequence[Collective]) -> int:
    return sum(c.wire_bytes * c.times for c in found)
