"""What a strategy is: two or three tables from the meaning of an axis to axes of a named mesh.

A strategy is data. It says how many ways each mesh axis is split and which logical axes are spread over which mesh
axes, for stored parameters, for computation and, where that differs, for optimizer state. It holds no code and knows
no model, so that the same table serves every model and can be printed, compared and proven.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from types import MappingProxyType

from jax.sharding import PartitionSpec

from core import logical, units
from core.errors import UserError
from core.logical import Rules
from core.slices import Slice
from parallel.pipeline.schedules import Schedule

MESH_AXES: Mapping[str, str] = {  # slowest network first
    "stage": "groups of consecutive layers",
    "data": "replicas of the whole model, each with rows of its own",
    "fsdp": "rows, and pieces of every parameter",
    "sequence": "positions of a row",
    "tensor": "pieces of heads, hidden units and vocabulary",
}

REPLICATED: Rules = MappingProxyType(dict.fromkeys(logical.LOGICAL_AXES))


@dataclasses.dataclass(frozen=True)
class Strategy:
    """Tables for one way of spreading a model.

    Attributes:
      name: as gin and reports call it.
      mesh_shape: degree by mesh axis inside a slice; one may be -1, "what is left"; a missing axis is 1.
      param_rules: how parameters are stored; lists every logical axis.
      activation_rules: how computation is spread; lists every logical axis.
      optimizer_rules: how optimizer state is stored; None: as the parameters.
      dcn_shape: degree by mesh axis across slices; empty for one slice.
      pipeline: the schedule over `stage`, where there is one.

    Raises:
      ValueError: every unknown or missing name in the tables, at once.
    """

    name: str
    mesh_shape: Mapping[str, int]
    param_rules: Rules
    activation_rules: Rules
    optimizer_rules: Rules | None = None
    dcn_shape: Mapping[str, int] = dataclasses.field(default_factory=dict)
    pipeline: Schedule | None = None

    def __post_init__(self):
        problems = _mesh_problems("mesh_shape", self.mesh_shape) + _mesh_problems("dcn_shape", self.dcn_shape)
        for table in ("param_rules", "activation_rules", "optimizer_rules"):
            rules = getattr(self, table)
            if rules is not None or table != "optimizer_rules":
                problems += _table_problems(table, rules)
        problems = problems or _idle_axes(self)
        problems = problems or _pipeline_problems(self)
        if problems:
            raise UserError(f"strategy {self.name!r}:\n  " + "\n  ".join(problems))

    @property
    def stored_optimizer_rules(self) -> Rules:
        """The table that optimizer state follows."""
        return self.param_rules if self.optimizer_rules is None else self.optimizer_rules


def _mesh_problems(table: str, mesh_shape: Mapping[str, int]) -> list[str]:
    problems = []
    for axis, degree in mesh_shape.items():
        if axis not in MESH_AXES:
            hint = "call it 'tensor'" if axis in ("model", "mp") else f"expected one of {', '.join(MESH_AXES)}"
            problems.append(f"{table}: unknown mesh axis {axis!r}; {hint}")
        free = table == "mesh_shape"  # how many slices there are is no matter of what is left
        if isinstance(degree, bool) or not isinstance(degree, int) or not (degree >= 1 or (free and degree == -1)):
            wanted = "a whole number from 1 up" + (", or -1 for what is left" if free else "")
            problems.append(f"{table}: {axis} = {degree!r}; expected {wanted}")
    if list(mesh_shape.values()).count(-1) > 1:
        problems.append(f"{table}: more than one -1 in {dict(mesh_shape)}; only one axis can take what is left")
    return problems


def _table_problems(table: str, rules: Rules) -> list[str]:
    if not isinstance(rules, Mapping):
        return [f"{table} = {rules!r}; expected a table, such as REPLICATED | {{'embed': 'fsdp'}}"]
    problems = []
    for name, axes in rules.items():
        try:
            logical.check_names([name], where=table)
        except ValueError as error:
            problems.append(str(error))
        if isinstance(axes, PartitionSpec):
            problems.append(
                f"{table}: {name} -> {axes} lays out {len(axes)} dimensions, a row is for one: write 'fsdp' for one "
                "mesh axis, ('data', 'fsdp') for both of them on this one dimension"
            )
            continue
        if not (axes is None or isinstance(axes, str) or (isinstance(axes, tuple) and set(map(type, axes)) <= {str})):
            problems.append(f"{table}: {name} -> {axes!r}; expected None, a mesh axis, or a tuple of mesh axes")
            continue
        if len(set(logical.mesh_axes(axes))) < len(logical.mesh_axes(axes)):
            problems.append(f"{table}: {name} -> {axes!r} names a mesh axis twice")
        problems += [
            f"{table}: {name} -> unknown mesh axis {axis!r}; expected one of {', '.join(MESH_AXES)}"
            for axis in logical.mesh_axes(axes)
            if axis not in MESH_AXES
        ]
    missing = [name for name in logical.LOGICAL_AXES if name not in rules]
    if missing:
        problems.append(f"{table}: no row for {', '.join(missing)}; start from REPLICATED (None: replicated)")
    return problems


def _idle_axes(strategy: Strategy) -> list[str]:
    used = {
        a
        for rules in (strategy.param_rules, strategy.activation_rules)
        for v in rules.values()
        for a in logical.mesh_axes(v)
    }
    return [
        f"mesh_shape: {axis} = {degree}, but no rule uses {axis!r}: those chips would repeat each other's work"
        for axis, degree in (*strategy.mesh_shape.items(), *strategy.dcn_shape.items())
        if axis in MESH_AXES and degree != 1 and axis not in used and not (axis == "stage" and strategy.pipeline)
    ]


def _pipeline_problems(strategy: Strategy) -> list[str]:
    if strategy.pipeline is None:
        stages = strategy.mesh_shape.get("stage", 1) * strategy.dcn_shape.get("stage", 1)
        return [f"stage = {stages} without a schedule; give one, such as schedules.gpipe(...)"] * (stages != 1)
    if not isinstance(strategy.pipeline, Schedule):
        return [
            f"schedule = {strategy.pipeline!r}; expected a schedule, such as schedules.gpipe(num_microbatches=8), in "
            "gin with its brackets: @schedules.gpipe()"
        ]
    if logical.mesh_axes(strategy.param_rules["layers"]) != ("stage",):
        return ["param_rules: a pipeline needs its layers over its stages alone: {'layers': 'stage'}"]
    return []


def override(
    strategy: Strategy,
    *,
    param_rules: Rules | None = None,
    activation_rules: Rules | None = None,
) -> Strategy:
    """`strategy` with rows of its tables replaced, e.g. 2 key heads over tensor 4: `{"kv_heads": None}` in both."""
    return dataclasses.replace(
        strategy,
        param_rules={**strategy.param_rules, **(param_rules or {})},
        activation_rules={**strategy.activation_rules, **(activation_rules or {})},
    )


def resolve(strategy: Strategy, slice: Slice) -> dict[str, int]:
    """The degree of every mesh axis on a slice, or over several, in the order of MESH_AXES.

    Raises:
      ValueError: the degrees inside a slice do not multiply to its chips, or those across slices to their number;
        names the nearest that do.
    """
    across = {axis: strategy.dcn_shape.get(axis, 1) for axis in MESH_AXES}
    slices = math.prod(across.values())
    if slices != slice.num_slices:
        fix = (
            "Leave dcn_shape empty: the hosts of one slice are joined by ICI, all its chips belong into mesh_shape"
            if slice.num_slices == 1
            else f"Take strategies.multislice with slices = {slice.num_slices}, give dcn_shape degrees that multiply "
            f"to {slice.num_slices}, or run on {units.counted(slices, 'slice')}"
        )
        raise UserError(
            f"strategy {strategy.name!r}: dcn_shape {dict(strategy.dcn_shape)} spans {units.counted(slices, 'slice')}, "
            f"{slice.name} "
            f"is {slice.num_slices}. {fix}"
        )
    within = _resolve_within(strategy, slice.chips_per_slice, where=slice.name)
    return {axis: degree * across[axis] for axis, degree in within.items()}


def mesh_text(shape: Mapping[str, int], *, dcn_shape: Mapping[str, int] | None = None, single: str = "1 chip") -> str:
    """Returns the degrees of a mesh as text: `data 2 (DCN) x fsdp 16`.

    Args:
      shape: degree by mesh axis; an axis of degree 1 is left out.
      dcn_shape: of each axis, how many slices it spans; axes that span several are marked.
      single: the text of a mesh in which every degree is 1.
    """
    spans = dcn_shape or {}
    degrees = (f"{axis} {n}" + (" (DCN)" if spans.get(axis, 1) > 1 else "") for axis, n in shape.items() if n != 1)
    return " x ".join(degrees) or single


def _resolve_within(strategy: Strategy, devices: int, *, where: str) -> dict[str, int]:
    shape = {axis: strategy.mesh_shape.get(axis, 1) for axis in MESH_AXES}
    fixed = math.prod(d for d in shape.values() if d != -1)
    free = [axis for axis, d in shape.items() if d == -1]
    if free and devices % fixed == 0:
        return shape | {free[0]: devices // fixed}
    if fixed == devices:
        return shape
    asked = mesh_text(shape, single="1")
    raise UserError(
        f"strategy {strategy.name!r}: the mesh {asked} needs {_needs(fixed, free)} devices, but {where} has {devices} "
        f"(a JAX device is one chip). Nearest that fit: {_nearest_fits(shape, devices)}"
    )


def _needs(fixed: int, free: list[str]) -> str:
    return f"a multiple of {fixed}" if free else str(fixed)


def _nearest_fits(shape: Mapping[str, int], devices: int) -> str:
    """Change one fixed degree so that the product is right; else give everything to one axis."""
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
