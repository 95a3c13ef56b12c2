"""Shards a program's state by a strategy's tables, from shapes alone: checks divisibility, and counts bytes."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from core import logical, units
from core.batches import batch_size
from core.errors import UserError
from core.logical import Axes, Rules
from core.slices import Slice
from parallel import accumulation, mesh, strategy
from parallel.partitioner import Program
from parallel.pipeline import schedules
from parallel.pipeline.schedules import Schedule
from parallel.planning import candidates
from parallel.planning.links import Links
from parallel.planning.model_trace import ModelTrace, leaves
from parallel.strategy import Strategy


class Refused(UserError):
    """A layout does not fit; `kind` is a short name of the reason."""

    def __init__(self, kind: str, reason: str):
        super().__init__(reason)
        self.kind = kind


class Step(NamedTuple):
    """The choices of a candidate besides its strategy, and the experiment's `gather_once`.

    `remat` is None if the model offers no choice.
    """

    remat: str | None
    batch_size: int
    accum_steps: int
    gather_once: bool = False


def step_of(program: Program) -> Step:
    """Returns a program's rematerialization policy, batch size, accumulation steps and `gather_once`."""
    remat = candidates.remat_of(program.model)
    return Step(remat, batch_size(program.spec), program.accum_steps, program.gather_once)


class ShardedState:
    """The state of a program under the tables of a strategy; `shape` is the degree by mesh axis."""

    def __init__(self, tables: Strategy, trace: ModelTrace):
        """Raises Refused if the tables do not fit the slice or the model."""
        self.tables, self.trace = tables, trace
        self._pieces: dict[tuple[tuple[str | None, ...], bool], int] = {}
        self.traffic_of_weights: dict[tuple, tuple] = {}  # kept by `arithmetic`; rescheduled states share it
        self.params = leaves(trace.shapes.params, trace.axes.params)
        try:
            self.shape = strategy.resolve(tables, trace.slice)
        except UserError as error:
            raise Refused("degrees do not make the slice", str(error)) from error
        if not schedules.depths(trace.shapes.params, trace.axes.params):
            self._check_stages()  # without a stack of layers no schedule and no dimension can help
        shapes, axes = trace.shapes, trace.axes
        parts = (
            (shapes.params, axes.params, tables.param_rules),
            (shapes.params, axes.params, tables.activation_rules),
            (shapes.opt_state, axes.opt_state, tables.stored_optimizer_rules),
        )
        where = f"strategy {tables.name!r} on {trace.slice.name}"
        try:
            for part in parts:
                strategy.specs(*part, mesh_shape=self.shape, where=where)
        except UserError as error:
            raise Refused("a dimension does not divide", str(error)) from error

    def rescheduled(self, tables: Strategy) -> ShardedState:
        """Returns the state under tables that differ in the schedule alone."""
        _ = self.state, self.gradients, self.gathered, self.links
        other = copy.copy(self)
        other.tables = tables
        for name in ("pipeline", "padding"):
            vars(other).pop(name, None)
        if other.padding != self.padding:
            del vars(other)["gradients"], vars(other)["gathered"]
        return other

    def _check_stages(self) -> None:
        schedule, shapes, axes = self.pipeline, self.trace.shapes.params, self.trace.axes.params
        if schedule is None:
            return
        sizes = {"stages": self.shape["stage"], "slices": self.tables.dcn_shape.get("stage", 1)}
        if found := schedules.problems(schedule, shapes, axes, chips=self.trace.slice.devices, **sizes):
            raise Refused("layers do not divide into stages", f"strategy {self.tables.name!r}: " + "; ".join(found))

    def _check_together(self, step: Step) -> None:
        accumulates, overlaps = step.accum_steps > 1, self.tables.overlap_reduction
        if accumulates and jax.tree.leaves(self.trace.shapes.carry):
            raise Refused(
                "rows belong together", "a model whose carry belongs to the rows of a batch cannot accumulate"
            )
        if self.trace.couples_rows and (accumulates or self.pipeline or overlaps):
            how = "accumulation" if accumulates else "a pipeline" if self.pipeline else "overlap_reduction"
            raise Refused("rows belong together", f"{how} would divide the rows that the model's loss couples")

    def check(self, step: Step, *, num_streams: int = 1) -> None:
        """Raises Refused if layers, rows or positions do not divide, or rows must not be divided."""
        self._check_stages()
        self._check_together(step)
        groups = self.shards(["batch"], self.tables.activation_rules)
        unit = groups * step.accum_steps * self.microbatches
        if step.batch_size % unit or step.batch_size % num_streams:
            nearest = logical.nearest_multiples(step.batch_size, math.lcm(unit, num_streams))
            cuts = f" in {units.counted(unit // groups, 'microbatch', 'microbatches')}" if unit > groups else ""
            raise Refused(
                "rows do not divide",
                f"batch_size = {step.batch_size} does not divide over {units.counted(groups, 'group')} of chips{cuts}, "
                f"or over {units.counted(num_streams, 'stream')}; nearest that do: {', '.join(map(str, nearest))}",
            )
        pieces = strategy.row_pieces(self.tables, self.shape)
        if self.trace.length % pieces:
            raise Refused("positions do not divide", f"length = {self.trace.length} does not divide over {pieces}")

    @functools.cached_property
    def pipeline(self) -> Schedule | None:
        """The schedule; None without a pipeline or with a single stage."""
        return strategy.schedule_of(self.tables, self.shape)

    @property
    def microbatches(self) -> int:
        """Number of microbatches of the pipeline; 1 without one."""
        return self.pipeline.num_microbatches if self.pipeline else 1

    @functools.cached_property
    def padding(self) -> float:
        """Layers that a pipeline runs, with padding, divided by those of the model."""
        return max((self.padding_of(leaf, of) for leaf, of in self.params), default=1.0)

    def padding_of(self, leaf: Any, of: Axes) -> float:
        """Returns `padding` for one parameter; 1 if it is not of layers on stages."""
        schedule = self.pipeline
        if schedule is None or of.names[:1] != ("layers",):
            return 1.0
        return schedules.padded(leaf.shape[0], schedule.layer_unit(self.shape["stage"])) / leaf.shape[0]

    def degree(self, axes: Iterable[str]) -> int:
        """Returns the number of devices in a group over these mesh axes."""
        return math.prod(self.shape[axis] for axis in axes)

    def shards(self, names: Sequence[str | None], table: Rules, *, without: Collection[str] = ()) -> int:
        """Returns the number of shards of an array, not counting mesh axes in `without`."""
        return self.degree(mesh_axes(names, table) - set(without))

    def pieces(self, names: tuple[str | None, ...], *, as_stored: bool = False) -> int:
        """Returns the number of shards of an array by the table of activations or, `as_stored`, of parameters."""
        if (names, as_stored) not in self._pieces:
            table = self.tables.param_rules if as_stored else self.tables.activation_rules
            self._pieces[names, as_stored] = self.shards(names, table)
        return self._pieces[names, as_stored]

    def stored_axes(self, leaf: Any, of: Axes, table: Rules) -> set[str]:
        """Returns the mesh axes that shard an array of the state."""
        spec = strategy.stored_spec(leaf.shape, of, table, self.shape)
        return {axis for entry in spec for axis in logical.mesh_axes(entry)}

    def runs_before_stages(self, of: Axes) -> bool:
        """Returns whether a parameter is of layers that a pipeline runs before its first stage."""
        return self.pipeline is not None and of.names[:1] == (logical.FIRST_LAYERS,)

    def held_axes(self, step: Step) -> set[str]:
        """Returns the mesh axes over which weights are gathered before the microbatches of an accumulation."""
        if not step.gather_once or step.accum_steps == 1:
            return set()
        return accumulation.manual_axes(self.tables, self.shape, gather_once=True)

    def held_bytes(self, step: Step) -> int:
        """Returns the bytes that whole parameters and gradients take beside shards during an accumulation."""
        params, axes, held = self.trace.shapes.params, self.trace.axes.params, self.held_axes(step)
        by: dict[str, Any] = {"tables": self.tables, "shape": self.shape, "manual": held}
        return accumulation.gathered_bytes(params, axes, self.trace.trained, **by) if held else 0

    def _bytes(self, shapes: Any, axes: Any, table: Rules) -> float:
        return sum(
            size_bytes(leaf) / self.degree(self.stored_axes(leaf, of, table)) for leaf, of in leaves(shapes, axes)
        )

    @functools.cached_property
    def state(self) -> dict[str, float]:
        """Bytes per chip of the parameters and of the optimizer's state."""
        shapes, axes, tables = self.trace.shapes, self.trace.axes, self.tables
        return {
            "parameters": self._bytes(shapes.params, axes.params, tables.param_rules),
            "optimizer": self._bytes(shapes.opt_state, axes.opt_state, tables.stored_optimizer_rules),
        }

    @functools.cached_property
    def gathered_once(self) -> tuple[str, ...]:
        """Mesh axes over which a pipeline gathers weights once per step; () without one."""
        rows = logical.mesh_axes(self.tables.activation_rules["batch"])
        return tuple(a for a in rows if self.shape[a] > 1) if self.pipeline else ()

    def _shards_in_pipeline(self, of: Axes) -> int:
        """Returns the number of shards of a parameter after it was gathered once per step."""
        kept = logical.kept_spec(of, self.tables.param_rules, self.tables.activation_rules, self.gathered_once)
        stay = {axis for entry in kept for axis in logical.mesh_axes(entry)}
        return self.shards(of.names, self.tables.param_rules, without=set(self.gathered_once) - stay)

    @functools.cached_property
    def gradients(self) -> float:
        """Bytes of the gradients of all trained parameters on a chip."""
        table = self.tables.param_rules

        def of_one(leaf: Any, of: Axes) -> float:
            if self.runs_before_stages(of):
                return size_bytes(leaf) / self.degree(self.stored_axes(leaf, of, table))
            return size_bytes(leaf) * self.padding_of(leaf, of) / self._shards_in_pipeline(of)

        trained = zip(self.params, self.trace.trained, strict=True)
        return sum(of_one(leaf, of) for (leaf, of), is_trained in trained if is_trained)

    @functools.cached_property
    def gathered(self) -> float:
        """Estimated bytes of gathered weights on a chip."""
        total = 0.0
        stored, used = self.tables.param_rules, self.tables.activation_rules
        for leaf, of in self.params:
            if logical.is_stacked(of.names) and (self.pipeline is None or self.runs_before_stages(of)):
                whole = 2 * leaf.size / leaf.shape[0] / self.shards(of.names, used)
            else:
                whole = leaf.size / self._shards_in_pipeline(of)
                whole *= self.padding_of(leaf, of)
            if self.pipeline or self.shards(of.names, stored) > 1:
                total += whole * self.trace.itemsize
        return total

    @functools.cached_property
    def links(self) -> Links:
        """The bandwidth model of this mesh."""
        chips = _chips(self.trace.slice)
        made = mesh.make_mesh(self.shape, slice=self.trace.slice, devices=chips, dcn_shape=self.tables.dcn_shape)
        return Links(made, self.trace.slice)


@functools.cache
def _chips(slice: Slice) -> list[jax.Device]:
    return mesh.topology_devices(slice)


def mesh_axes(names: Sequence[str | None], table: Rules) -> set[str]:
    """Returns the mesh axes that shard an array with these logical axes."""
    return {axis for name in names if name for axis in logical.mesh_axes(logical.row(table, name))}


def size_bytes(leaf: Any) -> int:
    """Returns the bytes of a whole array."""
    return math.prod(leaf.shape) * jnp.dtype(leaf.dtype).itemsize if hasattr(leaf.dtype, "itemsize") else 0
