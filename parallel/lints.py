"""What in a compiled program costs more than it need, what to do about it, and where that is known and accepted.

Each lint answers one way in which users of such systems lost time or memory without being told. The one idea: an
exception is a row of a table with its reason, so that a known finding is still shown, and a new one stands out.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from core import listing, logical, units
from core.logical import Rules
from core.types import ChoosesDtype, can
from parallel import report
from parallel.partitioner import Program
from parallel.traffic import Collective

MIB = 2**20
LARGE_BYTES = MIB  # of one execution; what is smaller costs latency, not bandwidth
LARGE_DCN_BYTES = 64 * MIB  # of a step, per chip
LARGE_REPLICATED_BYTES = 16 * MIB


@dataclasses.dataclass(frozen=True)
class Facts:
    """What lints look at.

    Attributes:
      program: strategy, slice, state.
      peak_bytes: most HBM in use at any time.
      collectives: of the compiled step.
      messages: what the compiler wrote to stderr, its warnings included: see `hlo.messages`.
    """

    program: Program
    peak_bytes: int
    collectives: Sequence[Collective]
    messages: str = ""


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that a lint found.

    Attributes:
      lint: name.
      what: the finding, with its size.
      fix: what to do about it.
      labels: what exceptions are matched against.
      reason: why it is known and accepted; None: it is not.
    """

    lint: str
    what: str
    fix: str
    labels: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    reason: str | None = None


@dataclasses.dataclass(frozen=True)
class KnownException:
    """Findings of `lint` whose labels include `labels` are known, for `reason`."""

    lint: str
    labels: Mapping[str, Any]
    reason: str


KNOWN: tuple[KnownException, ...] = (
    KnownException(
        "all-reduce instead of reduce-scatter",
        {"topology": "2x2x4", "group_size": 16, "pieces": "one on each of these chips"},
        "libtpu turns 16-way reduce-scatters on 2x2x4 into all-reduce and slice, even where one is asked for; a mesh "
        "whose fsdp axis is 4 gets reduce-scatters",
    ),
    KnownException(
        "all-reduce instead of reduce-scatter",
        {"group_size": 4, "pieces": "one on each of these chips"},
        "over 4 chips libtpu 0.0.42.1 scatters what is split along one of its last two dimensions, along the last into "
        "256 or more; of other arrays it makes all-reduce and slice, even where a reduce-scatter is asked for",
    ),
    KnownException(
        "all-reduce instead of reduce-scatter",
        {"pieces": "the same on several of these chips"},
        "gradients of replicas are added up together with those of the chips that hold other pieces: the partitioner "
        "does not make two sums of it, a reduce-scatter over the pieces and an all-reduce of what is left",
    ),
    KnownException(
        "large collective on DCN",
        {"kind": "all-reduce", "axes": ("data",), "place": "once"},
        "replicas on different slices must add up their gradients once per step",
    ),
    KnownException(
        "large collective on DCN",
        {"kind": "all-reduce", "axes": ("data",), "place": "backward loop over layers"},
        "replicas on different slices must add up their gradients once per step, and do it layer by layer, beside the "
        "computation of the next",
    ),
    KnownException(
        "large collective on DCN",
        {"kind": "collective-permute", "axes": ("stage",)},
        "stages on different slices hand on their activations, and back their gradients",
    ),
    KnownException(
        "float32 gather of weights",
        {"of": "updated parameters"},
        "the optimizer updates pieces of parameters that every chip holds whole: what is sent are the parameters "
        "themselves, which a narrower type would round",
    ),
    KnownException(
        "float32 gather of weights",
        {"computes_in": "float32"},
        "the model computes in float32, so there is no narrower form to send",
    ),
    KnownException(
        "large replicated array",
        {"table": "replicated"},
        "the strategy's table keeps all arrays of this part whole: that is what it is for",
    ),
)


def check(facts: Facts) -> list[Finding]:
    """Every finding of every lint, unknown ones first."""
    found = [_with_reason(finding) for lint in LINTS for finding in lint(facts)]
    return sorted(found, key=lambda f: (f.reason is not None, f.lint, f.what))


def _with_reason(finding: Finding) -> Finding:
    for known in KNOWN:
        if known.lint == finding.lint and known.labels.items() <= finding.labels.items():
            return dataclasses.replace(finding, reason=known.reason)
    return finding


def _accumulated_gathers(facts: Facts) -> Iterator[Finding]:
    """Weights gathered once per microbatch although all of them would fit beside what is in use."""
    steps, weights = facts.program.accum_steps, report.Weights(facts.program)
    inside = [c for c in facts.collectives if _in_accumulation(c, steps) and _gathered(c, weights)]
    layers_held = sum(c.payload_bytes * c.times // steps for c in inside if not _is_recomputed(c))
    usable = facts.program.partitioner.slice.chip.usable_hbm_bytes
    if inside and facts.peak_bytes + layers_held <= usable:
        yield Finding(
            "weights gathered in the accumulation loop",
            f"{len(inside)} gathers run in each of {steps} microbatches, "
            f"{units.size(_wire(inside))} sent per chip and step; "
            f"whole weights take {units.size(layers_held)} and would fit: "
            f"{units.size(facts.peak_bytes)} of {units.size(usable)} in use",
            "experiment.Experiment.gather_once = True (its cost is on the card); or fewer accum_steps",
        )


def _gathered(c: Collective, weights: report.Weights) -> str | None:
    """The path of the weight that a gather makes whole; None where it gathers something else."""
    if c.kind != "all-gather":
        return None
    return next((path for a in c.arrays if (path := weights.path_of(a.dims))), None)


def _in_accumulation(c: Collective, accum_steps: int) -> bool:
    """Whether it runs in the loop over microbatches, the only one outside the gradient."""
    return accum_steps > 1 and any(re.fullmatch(r"jit\([^)]*\)(/shard_map)?/while", loop.op_name) for loop in c.loops)


def _is_recomputed(c: Collective) -> bool:
    return "transpose(" in c.op_name


def _dcn(facts: Facts) -> Iterator[Finding]:
    for c in facts.collectives:
        if c.network == "DCN" and c.wire_bytes * c.times >= LARGE_DCN_BYTES:
            yield Finding(
                "large collective on DCN",
                f"{_described(c)} crosses slices: {units.size(_wire([c]))} per chip and step",
                "let only data span slices, as strategies.multislice does"
                if c.axes != ("data",)
                else "send gradients alone across slices, each once per step",
                {"kind": c.kind, "axes": c.axes, "place": _place(c, facts.program.accum_steps)},
            )


def _place(c: Collective, accum_steps: int) -> str:
    """In which loop it runs."""
    if not c.loops:
        return "once"
    if _in_accumulation(c, accum_steps):
        return "loop over microbatches"
    return "backward loop over layers" if "transpose(" in c.loops[-1].op_name else "another loop"


def _float32_gathers(facts: Facts) -> Iterator[Finding]:
    weights = report.Weights(facts.program)
    model = facts.program.model
    dtype = model.dtype if can(model, ChoosesDtype) else None
    tables = facts.program.partitioner.strategy
    updated = _stored_over(tables.stored_optimizer_rules) - _stored_over(tables.param_rules)
    for c in facts.collectives:
        path = _gathered(c, weights) if c.dtype == "f32" and c.payload_bytes >= LARGE_BYTES else None
        is_update = set(c.axes) <= updated and not c.loops
        if path is not None:
            yield Finding(
                "float32 gather of weights",
                f"{path}: {_described(c)} moves float32, {units.size(_wire([c]))} per chip and step",
                "cast before the gather: logical.param(..., compute_dtype=...) constrains what it returns"
                if not is_update
                else "store parameters in pieces too (strategies.fsdp), and gather them as computation needs them",
                {"computes_in": dtype, "of": "updated parameters" if is_update else "weights"},
            )


def _stored_over(rules: Rules) -> set[str]:
    return {axis for axes in rules.values() for axis in logical.mesh_axes(axes)}


def _whole_reductions(facts: Facts) -> Iterator[Finding]:
    slice_ = facts.program.partitioner.slice
    groups: dict[tuple[tuple[str, ...], int], list[Collective]] = {}
    for c in facts.collectives:
        if c.sliced_bytes >= LARGE_BYTES:
            groups.setdefault((c.axes, c.group_size), []).append(c)
    for (axes, size), found in groups.items():
        pieces = _pieces(axes, facts)
        wasted = sum(round(c.sliced_bytes * (size - 1) / size) * c.times for c in found)
        yield Finding(
            "all-reduce instead of reduce-scatter",
            f"{len(found)} all-reduces over {' x '.join(axes)} ({size} chips) whose readers take a slice: "
            f"reduce-scatters would send {units.size(wasted)} less per chip and step; the largest is "
            f"{_described(max(found, key=lambda c: c.sliced_bytes))}",
            _how_to_scatter(pieces, size),
            {"topology": slice_.topology_name, "group_size": size, "pieces": pieces},
        )


def _how_to_scatter(pieces: str, chips: int) -> str:
    if pieces == "the same on several of these chips":
        return (
            "fewer replicas (fsdp or fsdp_tensor over all chips); with accum_steps above 1 every microbatch is "
            "scattered among the pieces, and replicas add them up once per step"
        )
    if chips > 4:
        return "reduce over a mesh axis of 4 chips, where libtpu mostly scatters; or less often (fewer accum_steps)"
    return "a wider model, or fewer chips on the axis; or reduce less often (fewer accum_steps)"


def _pieces(axes: Sequence[str], facts: Facts) -> str:
    """Which pieces of a gradient the chips of a group want that reduce over these axes."""
    shape = facts.program.partitioner.shape
    rules = facts.program.partitioner.strategy.stored_optimizer_rules
    stored = [{a for a in logical.mesh_axes(entry) if shape[a] > 1} for entry in rules.values()]
    if any(set(axes) == entry for entry in stored):
        return "one on each of these chips"
    return "the same on several of these chips" if any(entry & set(axes) for entry in stored) else "whole"


def _replicated(facts: Facts) -> Iterator[Finding]:
    tables = facts.program.partitioner.strategy
    parts = {"params": tables.param_rules, "opt_state": tables.stored_optimizer_rules, "carry": tables.activation_rules}
    alone = facts.program.partitioner.mesh.size == 1
    for row in report.rows(facts.program):
        if row.replicated and not alone and row.bytes_per_chip >= LARGE_REPLICATED_BYTES:
            whole = not any(parts[row.path.split("/")[0]].values())
            yield Finding(
                "large replicated array",
                f"{row.path} {list(row.shape)}: every chip holds all {units.size(row.bytes_per_chip)}",
                f"split one of its axes {row.axes} in the strategy's table",
                {"table": "replicated" if whole else "split"},
            )


def rematerialized(facts: Facts) -> Iterator[Finding]:
    """The partitioner's own complaint: it gathers an array whole only to split it another way."""
    lines = [line for line in facts.messages.splitlines() if "nvoluntary full remat" in line]
    for line in dict.fromkeys(_between_layouts(line) for line in lines):
        yield Finding(
            "involuntary full rematerialization",
            line,
            "constrain the array to a layout on the way (logical.constrain), or split producer and consumer alike",
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


def _idle_axes(facts: Facts) -> Iterator[Finding]:
    program = facts.program
    held = [*jax.tree.leaves(program.state_shardings), *program.batch_shardings.values()]
    used = {axis for sharding in held for entry in sharding.spec for axis in logical.mesh_axes(entry)}
    shape = facts.program.partitioner.shape
    all_axes = tuple(axis for axis, degree in shape.items() if degree > 1)  # sums of metrics go over all of them
    used |= {axis for c in facts.collectives if c.axes != all_axes for axis in c.axes}
    for axis, degree in shape.items():
        if degree > 1 and axis not in used:
            yield Finding(
                "mesh axis that shards nothing",
                f"{axis} = {degree}, but no array of the state or of the batch is split over it: its {degree} chips "
                "repeat each other's work",
                f"set {axis} to 1, or give it an axis of this model in the strategy's table",
            )


def _undecided(facts: Facts) -> Iterator[Finding]:
    """A collective that some chips may reach and others not."""
    for c in facts.collectives:
        places = [f"one branch of {b.op_name or b.name}" for b in c.branches if b.depends_on in ("data", "chip")]
        places += [f"{loop.op_name or loop.name}, whose turns depend on data" for loop in c.loops if loop.trips is None]
        for place in places[:1]:
            yield Finding(
                "collective under a data-dependent branch",
                f"{_described(c)} runs in {place}: chips that decide differently wait for ever",
                "compute both sides and select (jnp.where), or decide by something that every chip knows alike",
            )


LINTS: tuple[Callable[[Facts], Iterator[Finding]], ...] = (
    _accumulated_gathers,
    _dcn,
    _float32_gathers,
    _whole_reductions,
    _replicated,
    rematerialized,
    _idle_axes,
    _undecided,
)


def _described(c: Collective) -> str:
    """`all-reduce bf16[4096,11008] over fsdp, 32 times, at jvp()/while/body/.../dot_general`."""
    arrays = ", ".join(listing.shortened([str(array) for array in c.arrays], most=2))
    times = f", {c.times} times" if c.times > 1 else ""
    where = "/".join(c.op_name.split("/")[-3:])
    return f"{c.kind} {arrays} over {' x '.join(c.axes) or 'nothing'}{times}" + (f", at {where}" if where else "")


def _wire(found: Sequence[Collective]) -> int:
    return sum(c.wire_bytes * c.times for c in found)
