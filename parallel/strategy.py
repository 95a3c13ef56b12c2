"""Strategies: tables from logical axes to the axes of a named mesh.

A table says which logical axes are sharded over which mesh axes. A dimension that does not divide is an error, except
that of layers in a pipeline (`stored_spec`).
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from core import logical, parameters, units
from core.batches import BatchSpec, check_spec
from core.errors import UserError
from core.logical import Axes, Rules
from core.slices import Slice
from parallel.pipeline.schedules import Schedule

MESH_AXES: Mapping[str, str] = {  # slowest network first
    "stage": "groups of consecutive layers",
    "data": "replicas of the whole model, each with rows of its own",
    "fsdp": "rows, and shards of every parameter",
    "expert": "shards of a mixture's experts; only in the meshes of strategies that mention it",
    "sequence": "positions of a row",
    "tensor": "shards of heads, hidden units and vocabulary",
}

REPLICATED: Rules = MappingProxyType(dict.fromkeys(logical.LOGICAL_AXES))


@dataclasses.dataclass(frozen=True)
class Strategy:
    """The sharding of a model over a mesh.

    Attributes:
      mesh_shape: degree by mesh axis inside a slice; -1: the remaining chips; missing: 1.
      param_rules: sharding of stored parameters: mesh axes for each of `core.logical.LOGICAL_AXES`.
      activation_rules: sharding of activations, in the same form.
      optimizer_rules: sharding of optimizer state; None: as the parameters.
      dcn_shape: degree by mesh axis across slices; missing: 1; empty for one slice.
      pipeline: the schedule over `stage`; None without a pipeline.
      overlap_reduction: whether a layer's gradients are reduced while the layer before it computes.
      own_mesh_axes: additional mesh axes, each with the axis of `MESH_AXES` that it follows: `{"ring": "fsdp"}`.

    Raises:
      UserError: a degree, a table or another argument is malformed, or they do not fit each other.
    """

    name: str
    mesh_shape: Mapping[str, int]
    param_rules: Rules
    activation_rules: Rules
    optimizer_rules: Rules | None = None
    dcn_shape: Mapping[str, int] = dataclasses.field(default_factory=dict)
    pipeline: Schedule | None = None
    overlap_reduction: bool = False
    own_mesh_axes: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        problems = _own_axes_problems(self.own_mesh_axes)
        for table in ("mesh_shape", "dcn_shape"):
            problems += _mesh_problems(table, getattr(self, table), self.mesh_axes)
        for table in ("param_rules", "activation_rules", "optimizer_rules"):
            rules = getattr(self, table)
            if rules is not None or table != "optimizer_rules":
                problems += _table_problems(table, rules, self.mesh_axes)
        problems = problems or _idle_axes(self)
        problems = problems or _pipeline_problems(self) or _overlap_problems(self)
        if problems:
            raise UserError(f"strategy {self.name!r}:\n  " + "\n  ".join(problems))

    @functools.cached_property
    def mesh_axes(self) -> tuple[str, ...]:
        """The names of all mesh axes, used or not, slowest network first."""
        return tuple(
            name
            for axis in MESH_AXES
            for name in (axis, *(own for own, at in self.own_mesh_axes.items() if at == axis))
        )

    @functools.cached_property
    def used_mesh_axes(self) -> tuple[str, ...]:
        """The axes of the mesh: `mesh_axes`, without `expert` if nothing mentions it."""
        tables = (self.param_rules, self.activation_rules, self.stored_optimizer_rules)
        mentioned = {axis for rules in tables for row in rules.values() for axis in logical.mesh_axes(row)}
        mentioned |= {*self.mesh_shape, *self.dcn_shape}
        return tuple(axis for axis in self.mesh_axes if axis != "expert" or axis in mentioned)

    @property
    def stored_optimizer_rules(self) -> Rules:
        """The table for the optimizer state; by default `param_rules`."""
        return self.param_rules if self.optimizer_rules is None else self.optimizer_rules


def _own_axes_problems(own: Mapping[str, str]) -> list[str]:
    problems = []
    for name, after in own.items():
        if name in MESH_AXES or not (name.isidentifier() and name.islower()):
            problems.append(
                f"own_mesh_axes: {name!r}; expected a lower-case identifier other than {', '.join(MESH_AXES)}"
            )
        if after not in MESH_AXES:
            problems.append(f"own_mesh_axes: {name} after {after!r}; expected one of {', '.join(MESH_AXES)}")
    return problems


def _mesh_problems(table: str, mesh_shape: Mapping[str, int], known: Sequence[str]) -> list[str]:
    if not isinstance(mesh_shape, Mapping):
        return [f"{table} = {mesh_shape!r}; expected degrees of mesh axes, such as {{'fsdp': -1}}"]
    problems = []
    for axis, degree in mesh_shape.items():
        if axis not in known:
            hint = f"expected one of {', '.join(known)}, or an axis of your own in own_mesh_axes"
            hint = "call it 'tensor'" if axis in ("model", "mp") else hint
            problems.append(f"{table}: unknown mesh axis {axis!r}; {hint}")
        free = table == "mesh_shape"  # the number of slices is given, so -1 is not allowed in dcn_shape
        if isinstance(degree, bool) or not isinstance(degree, int) or not (degree >= 1 or (free and degree == -1)):
            wanted = "a positive integer" + (", or -1 for the remaining chips" if free else "")
            problems.append(f"{table}: {axis} = {degree!r}; expected {wanted}")
    if list(mesh_shape.values()).count(-1) > 1:
        problems.append(f"{table}: more than one -1 in {dict(mesh_shape)}; only one axis can take the remaining chips")
    return problems


def _table_problems(table: str, rules: Rules, known: Sequence[str]) -> list[str]:
    if not isinstance(rules, Mapping):
        return [f"{table} = {rules!r}; expected a table, such as REPLICATED | {{'embed': 'fsdp'}}"]
    problems, declared = [], logical.all_axes()
    for name, axes in rules.items():
        if name not in declared:
            try:
                logical.check_names([name], where=table)
            except UserError as error:  # says which name may be meant
                problems.append(str(error))
        if isinstance(axes, PartitionSpec):
            problems.append(
                f"{table}: {name} -> {axes} has {len(axes)} dimensions, but a row describes one dimension: write "
                "'fsdp' for one mesh axis, ('data', 'fsdp') to shard this dimension over both"
            )
            continue
        if not (axes is None or isinstance(axes, str) or (isinstance(axes, tuple) and set(map(type, axes)) <= {str})):
            problems.append(f"{table}: {name} -> {axes!r}; expected None, a mesh axis, or a tuple of mesh axes")
            continue
        if len(set(logical.mesh_axes(axes))) < len(logical.mesh_axes(axes)):
            problems.append(f"{table}: {name} -> {axes!r} names a mesh axis twice")
        problems += [
            f"{table}: {name} -> unknown mesh axis {axis!r}; expected one of {', '.join(known)}"
            for axis in logical.mesh_axes(axes)
            if axis not in known
        ]
    missing = [name for name in logical.LOGICAL_AXES if name not in rules]
    if missing:
        problems.append(f"{table}: no row for {', '.join(missing)}; start from REPLICATED, where every axis is None")
    return problems


def _idle_axes(strategy: Strategy) -> list[str]:
    used = {
        a
        for rules in (strategy.param_rules, strategy.activation_rules)
        for v in rules.values()
        for a in logical.mesh_axes(v)
    }
    tables = {"mesh_shape": strategy.mesh_shape, "dcn_shape": strategy.dcn_shape}
    return [
        f"{table}: {axis} = {degree}, but no rule uses {axis!r}: its chips would do the same work"
        for table, degrees in tables.items()
        for axis, degree in degrees.items()
        if axis in strategy.mesh_axes
        and degree != 1
        and axis not in used
        and not (axis == "stage" and strategy.pipeline)
    ]


def _pipeline_problems(strategy: Strategy) -> list[str]:
    if strategy.pipeline is None:
        stages = strategy.mesh_shape.get("stage", 1) * strategy.dcn_shape.get("stage", 1)
        return [f"stage = {stages} without a schedule; give one, such as schedules.gpipe(...)"] * (stages != 1)
    if not isinstance(strategy.pipeline, Schedule):
        return [
            f"schedule = {strategy.pipeline!r}; expected a schedule, such as schedules.gpipe(num_microbatches=8); in "
            "gin, with parentheses: @schedules.gpipe()"
        ]
    if logical.mesh_axes(strategy.param_rules["layers"]) != ("stage",):
        return ["param_rules: a pipeline shards layers over stages only; set {'layers': 'stage'}"]
    return []


def _overlap_problems(strategy: Strategy) -> list[str]:
    if not isinstance(strategy.overlap_reduction, bool):
        return [f"overlap_reduction = {strategy.overlap_reduction!r}; expected True or False"]
    if not strategy.overlap_reduction:
        return []
    rows = logical.mesh_axes(strategy.activation_rules["batch"])
    degrees = [*strategy.mesh_shape.items(), *strategy.dcn_shape.items()]
    problems = []
    if logical.mesh_axes(strategy.param_rules.get("expert")):
        problems.append("overlap_reduction would gather all experts on every chip: set overlap_reduction = False")
    if logical.mesh_axes(strategy.param_rules.get("layers")):
        problems.append("overlap_reduction: layers must not be sharded; set param_rules {'layers': None}")
    return problems + [
        f"overlap_reduction: {axis} = {degree} does not shard rows, and only degrees of {', '.join(rows)} may differ "
        "from 1: set overlap_reduction = False"
        for axis, degree in degrees
        if degree != 1 and axis not in rows
    ]


def override(
    strategy: Strategy,
    rules: Rules | None = None,
    *,
    param_rules: Rules | None = None,
    activation_rules: Rules | None = None,
) -> Strategy:
    """Returns a strategy with rows of its tables replaced.

    Args:
      rules: rows of all tables; `{"kv_heads": None}` replicates key and value heads.
      param_rules, activation_rules: rows of these tables; they take precedence over `rules`.
    """
    both, state = dict(rules or {}), strategy.optimizer_rules
    return dataclasses.replace(
        strategy,
        param_rules={**strategy.param_rules, **both, **(param_rules or {})},
        activation_rules={**strategy.activation_rules, **both, **(activation_rules or {})},
        optimizer_rules=None if state is None else {**state, **both},
    )


def resolve(strategy: Strategy, slice: Slice) -> dict[str, int]:
    """Returns the degree of each used mesh axis over all slices, or raises UserError if they do not fit."""
    across = {axis: strategy.dcn_shape.get(axis, 1) for axis in strategy.used_mesh_axes}
    slices = math.prod(across.values())
    if slices != slice.num_slices:
        fix = (
            "Use a strategy without slices, such as fsdp. In a strategy of your own, leave dcn_shape empty: ICI "
            "connects all chips of one slice, so all of them belong in mesh_shape"
            if slice.num_slices == 1
            else f"Use strategies.multislice with slices = {slice.num_slices}, give dcn_shape degrees whose product is "
            f"{slice.num_slices}, or run on {units.counted(slices, 'slice')}"
        )
        raise UserError(
            f"strategy {strategy.name!r}: dcn_shape {dict(strategy.dcn_shape)} spans {units.counted(slices, 'slice')}, "
            f"but {slice.name} has {slice.num_slices}. {fix}"
        )
    within = _resolve_within(strategy, slice)
    return {axis: degree * across[axis] for axis, degree in within.items()}


def row_pieces(strategy: Strategy, shape: Mapping[str, int]) -> int:
    """Returns the number of pieces of a row that chips compute apart: one on each chip of the row, two in a ring."""
    length, keys = (logical.shards(logical.row(strategy.activation_rules, n), shape) for n in ("length", "kv_length"))
    return length * (2 if keys > 1 else 1)


def schedule_of(strategy: Strategy, shape: Mapping[str, int]) -> Schedule | None:
    """Returns the schedule of a pipeline, or None if the mesh has a single stage; `shape` is from `resolve`."""
    return strategy.pipeline if shape["stage"] > 1 else None


def multiple_of(strategy: Strategy, slice: Slice, axis: str) -> int:
    """Returns the number of which a dimension with this logical axis must be a multiple.

    A multiple of it for `layers` also needs no padding in a pipeline.
    """
    shape = resolve(strategy, slice)
    rules = (strategy.param_rules, strategy.activation_rules, strategy.stored_optimizer_rules)
    pieces = math.lcm(*(logical.shards(logical.row(r, axis), shape) for r in rules))
    if axis == "layers" and (schedule := schedule_of(strategy, shape)):
        return math.lcm(pieces, schedule.layer_unit(shape["stage"]))
    return pieces


def mesh_text(shape: Mapping[str, int], *, dcn_shape: Mapping[str, int] | None = None, single: str = "1 chip") -> str:
    """Returns the degrees of a mesh as text, such as `data 2 (DCN) x fsdp 16`.

    `dcn_shape`: number of slices that each axis spans; None: 1. `single`: the text if every degree is 1.
    """
    spans = dcn_shape or {}
    degrees = (f"{axis} {n}" + (" (DCN)" if spans.get(axis, 1) > 1 else "") for axis, n in shape.items() if n != 1)
    return " x ".join(degrees) or single


def _resolve_within(strategy: Strategy, slice: Slice) -> dict[str, int]:
    devices = slice.devices_per_slice
    shape = {axis: strategy.mesh_shape.get(axis, 1) for axis in strategy.used_mesh_axes}
    fixed = math.prod(d for d in shape.values() if d != -1)
    free = [axis for axis, d in shape.items() if d == -1]
    if free and devices % fixed == 0:
        return shape | {free[0]: devices // fixed}
    if fixed == devices:
        return shape
    asked = mesh_text(shape, single="1")
    raise UserError(
        f"strategy {strategy.name!r}: the mesh {asked} needs {_needs(fixed, free)} devices, but {slice.name} has "
        f"{devices} ({slice.single.counted}). Nearest that fit: {_nearest_fits(shape, devices)}"
    )


def _needs(fixed: int, free: list[str]) -> str:
    return f"a multiple of {fixed}" if free else str(fixed)


def _nearest_fits(shape: Mapping[str, int], devices: int) -> str:
    fits = []
    for axis, degree in shape.items():
        if degree in (1, -1):
            continue
        others = math.prod(d for a, d in shape.items() if a != axis and d != -1)
        if devices % others == 0:
            choices = [n for n in _divisors(devices // others)] if -1 in shape.values() else [devices // others]
            nearest = min(choices, key=functools.partial(_distance, degree))
            fits.append(mesh_text({**shape, axis: nearest}, single="1 device"))
    return "; ".join(fits) or f"data {devices}, fsdp {devices}, or any degrees whose product is {devices}"


def _distance(one: int, other: int) -> int:
    return abs(one - other)


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def specs(shapes: Any, axes: Any, rules: Rules, *, mesh_shape: Mapping[str, int], where: str) -> Any:
    """Returns the `PartitionSpec` of every array of a tree.

    Args:
      shapes: tree of arrays or `jax.ShapeDtypeStruct`.
      where: name of the table for messages.

    Raises:
      UserError: the table does not fit some arrays.
    """
    problems: dict[str, list[str]] = {}  # problem -> arrays

    def one(path, shape, named: Axes) -> PartitionSpec:
        array = f"{parameters.path_name(path)}: shape {tuple(shape.shape)}, axes {named}"
        try:
            spec = stored_spec(shape.shape, named, rules, mesh_shape)
        except UserError as error:
            problems.setdefault(str(error), []).append(f"{parameters.path_name(path)}: shape {tuple(shape.shape)}")
            return PartitionSpec()
        for problem in _division_problems(shape.shape, named, spec, mesh_shape):
            problems.setdefault(problem, []).append(array)
        return spec

    tree = jax.tree_util.tree_map_with_path(one, shapes, axes, is_leaf=lambda a: isinstance(a, Axes))
    if problems:
        raise UserError(f"{where} does not fit:\n  " + "\n  ".join(map(_formatted, problems, problems.values())))
    return tree


def stored_spec(shape: Sequence[int], axes: Axes, rules: Rules, mesh_shape: Mapping[str, int]) -> PartitionSpec:
    """Returns the `PartitionSpec` of a stored array.

    If layers do not divide over the stages of a pipeline, or run before its first stage, `stage` shards another
    dimension that divides, if there is one.

    Args:
      mesh_shape: degree by mesh axis.
    """
    spec = logical.partition_spec(axes, rules)
    is_first = axes.names[:1] == (logical.FIRST_LAYERS,) and "stage" in logical.mesh_axes(rules["layers"])
    is_staged = axes.names[:1] == (logical.LAYERS,) and spec[0] == "stage"
    if not (is_first or (is_staged and shape[0] % mesh_shape["stage"])):
        return spec
    entries = [logical.mesh_axes(entry) for entry in spec[1:]]
    for i, size in enumerate(shape[1:]):
        if size % logical.shards((*entries[i], "stage"), mesh_shape) == 0:
            entries[i] = (*entries[i], "stage")
            break
    return PartitionSpec(None, *(entry[0] if len(entry) == 1 else entry or None for entry in entries))


def _formatted(problem: str, arrays: Sequence[str]) -> str:
    others = [array.partition(":")[0] for array in arrays[1:]]
    return f"{arrays[0]}: {problem}" + (f" (also {', '.join(others)})" if others else "")


def _division_problems(
    shape: Sequence[int], axes: Axes, spec: PartitionSpec, mesh_shape: Mapping[str, int]
) -> list[str]:
    if len(shape) != len(axes.names):
        return [f"{len(shape)} dimensions, but its axes name {len(axes.names)}"]
    problems = []
    for size, name, entry in zip(shape, axes.names, spec, strict=True):
        shards = logical.shards(entry, mesh_shape)
        if name is not None and size % shards:
            fix = _fix(name, size, entry, mesh_shape)
            problems.append(f"{name} = {size} does not divide over {_product(entry)} = {shards}. {fix}")
    return problems


def _product(entry: str | tuple[str, ...]) -> str:
    return " x ".join(logical.mesh_axes(entry))


def _fix(name: str, size: int, entry: str | tuple[str, ...], mesh_shape: Mapping[str, int]) -> str:
    shards = logical.shards(entry, mesh_shape)
    if name in ("batch", "length"):
        return f"Nearest that do: {', '.join(map(str, logical.nearest_multiples(size, shards)))}"
    chips = math.prod(mesh_shape.values())
    degrees = [str(d) for d in range(1, chips + 1) if size % d == 0 and chips % d == 0]
    of = f"of {_product(entry)} " if len(logical.mesh_axes(entry)) > 1 else ""
    padded = f"or store it rounded up to {math.ceil(size / shards) * shards} (vocab_multiple); " * (name == "vocab")
    return (
        f"Degrees {of}that do: {', '.join(degrees)}; {padded}or replicate it: "
        f"strategies.override(strategy, {{{name!r}: None}})"
    )


def shardings(spec_tree: Any, mesh: jax.sharding.Mesh) -> Any:
    """Returns the tree with a `NamedSharding` over the mesh in place of each spec."""
    return jax.tree.map(lambda s: NamedSharding(mesh, s), spec_tree, is_leaf=lambda s: isinstance(s, PartitionSpec))


def batch_axes(spec: BatchSpec) -> dict[str, Axes]:
    """Returns the logical axes of the fields of a batch, or raises UserError if one is malformed."""
    check_spec(spec)
    for name, field in spec.items():
        logical.check_names(field.axes, where=f"field {name!r} of a batch")
    return {name: Axes(field.axes) for name, field in spec.items()}


def row_axes(shape: Sequence[int]) -> Axes:
    """Returns the axes of an array whose first dimension is rows; a scalar has no axes."""
    return Axes((("batch",) + (None,) * len(shape))[: len(shape)])
