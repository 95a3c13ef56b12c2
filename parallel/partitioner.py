"""Binds a strategy to devices: the mesh, the sharding of every array, and the jitted steps."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from core import logical, optimizers, parameters, platforms, random_bits, slices, stack, step, units, wrappers
from core.batches import BatchSpec, Field, batch_shapes, batch_size, check_spec
from core.errors import UserError, named_model
from core.optimizers import Optimizer
from core.parameters import Specs
from core.slices import Slice
from core.step import TrainState
from core.types import Batch, DataLayout, Model, Params
from parallel import accumulation, cpu_runner, mesh, strategy
from parallel.compiled import compiler_options
from parallel.pipeline import schedules
from parallel.pipeline.schedules import Schedule


class Partitioner:
    """A strategy bound to the chips of a slice.

    Attributes:
      slice: the slice that the devices are, or simulate.
      shape: degree by mesh axis over all slices, slowest network first.
      mesh: the devices; its axes may be in another order.
    """

    def __init__(self, tables: strategy.Strategy, *, slice: Slice, devices: Sequence[jax.Device]):
        """Raises UserError if strategy, slice and devices do not fit each other."""
        self.strategy = tables
        self.slice = slice
        self.shape = strategy.resolve(tables, slice)
        first = accumulation.outermost_axes(tables)
        self.mesh = mesh.make_mesh(self.shape, slice=slice, devices=devices, dcn_shape=tables.dcn_shape, leading=first)

    @contextlib.contextmanager
    def tracing(self) -> Iterator[None]:
        """Context in which a model is traced with this mesh and the strategy's tables."""
        tables = self.strategy
        run = stack.use_runner(self._runner) if self._runner else contextlib.nullcontext()
        rules = logical.sharding_rules(tables.activation_rules, tables.param_rules)
        with jax.set_mesh(self.mesh), rules, run, self.platform_context():
            yield

    def platform_context(self) -> contextlib.AbstractContextManager:
        """Context in which, on a slice of CPUs, only implementations for CPUs are traced."""
        return platforms.use("cpu" if self.slice.generation == "cpu" else None)

    @functools.cached_property
    def _runner(self) -> stack.Runner | None:  # created once, because it is part of the cache key of every trace
        tables, is_cpu = self.strategy, self.slice.generation == "cpu"  # simulated TPU slices keep the scan, as TPUs do
        if tables.overlap_reduction and self.row_shards > 1:
            from parallel import overlapped  # of no use to other strategies

            otherwise = cpu_runner.cpu_runner if is_cpu else stack.scan_runner
            return overlapped.runner(tables.param_rules, tables.activation_rules, otherwise=otherwise)
        if self.pipeline is None:
            return cpu_runner.cpu_runner if is_cpu else None
        from parallel.pipeline import runner  # of no use without a pipeline

        spans_slices = tables.dcn_shape.get("stage", 1) > 1
        return runner.runner(self.pipeline, tables.param_rules, tables.activation_rules, spans_slices=spans_slices)

    @property
    def pipeline(self) -> Schedule | None:
        """The schedule; None without a pipeline or with a single stage."""
        return strategy.schedule_of(self.strategy, self.shape)

    @property
    def row_shards(self) -> int:
        """The number of groups of chips with different rows."""
        return logical.shards(self.strategy.activation_rules["batch"], self.shape)

    def batch_shardings(self, spec: BatchSpec) -> Mapping[str, NamedSharding]:
        """Returns the sharding of every array of a batch, or raises UserError if a dimension does not divide."""
        axes = strategy.batch_axes(spec)
        where = f"batch under strategy {self.strategy.name!r} on {self.slice.name}"
        tree = strategy.specs(dict(spec), axes, self.strategy.activation_rules, mesh_shape=self.shape, where=where)
        return strategy.shardings(tree, self.mesh)

    def data_layout(self, batch_size: int) -> DataLayout:
        """Returns the rows of a global batch that this host supplies."""
        rows = {"rows": Field((batch_size,), jnp.int32, ("batch",))}
        return mesh.data_layout(self.batch_shardings(rows)["rows"], batch_size)

    def check_streams(self, batch_size: int, *, num_streams: int, accum_steps: int) -> None:
        """Checks that a batch divides over streams and over chips.

        Raises:
          UserError: it does not divide; some cases are left to `schedules.check_rows`.
        """
        cuts = accum_steps * (self.pipeline.num_microbatches if self.pipeline else 1)
        groups = self.row_shards * cuts
        fits_streams, fits_chips = batch_size % num_streams == 0, batch_size % groups == 0
        if (fits_streams and fits_chips) or (fits_streams and groups % num_streams == 0):
            return  # or the layout's own message is complete
        nearest = logical.nearest_multiples(batch_size, math.lcm(num_streams, groups))
        microbatches = f" x {units.counted(cuts, 'microbatch', 'microbatches')}" if cuts > 1 else ""
        raise UserError(
            f"batch_size = {batch_size} must divide over NUM_STREAMS = {num_streams} and over "
            f"{units.counted(self.row_shards, 'group')} of chips{microbatches} "
            f"(strategy {self.strategy.name!r} on {self.slice.name}). Set BATCH_SIZE = {' or '.join(map(str, nearest))}"
        )

    def program(
        self,
        model: Model,
        optimizer: Optimizer,
        spec: BatchSpec,
        *,
        seed: int,
        accum_steps: int = 1,
        gather_once: bool = False,
        skip_non_finite: bool = False,
        compiler_overrides: compiler_options.Overrides | None = None,
        frozen: Sequence[str] = (),
        frozen_dtype: str = "bfloat16",
    ) -> Program:
        """Returns the model's training and evaluation steps under this partitioner.

        Args:
          accum_steps: microbatches per step; at least 1.
          gather_once: whether parameters are gathered once per step (`parallel.accumulation`).
          skip_non_finite: whether a step with a non-finite loss or gradient is only counted.
          compiler_overrides: compiler options to change, by name; None: no changes.
          frozen: shell wildcards over paths (`layers/block/query`) of parameters not to train.
          frozen_dtype: dtype in which floating-point parameters that match `frozen` are stored.

        Raises:
          UserError: model, optimizer, batch, options and tables do not fit each other.
        """
        flags = (accum_steps, gather_once, skip_non_finite, compiler_overrides or {}, tuple(frozen), frozen_dtype)
        found = Program(self, model, optimizer, dict(spec), seed, *flags)
        found.check()
        return found


@dataclasses.dataclass(frozen=True)
class Program:
    """Initial state, training step and evaluation step of a model, with their shardings.

    The attributes are the arguments of `Partitioner.program`, which also checks that they fit each other.
    """

    partitioner: Partitioner
    model: Model
    optimizer: Optimizer
    spec: BatchSpec
    seed: int
    accum_steps: int
    gather_once: bool = False
    skip_non_finite: bool = False
    compiler_overrides: compiler_options.Overrides = dataclasses.field(default_factory=dict)
    frozen: tuple[str, ...] = ()
    frozen_dtype: str = "bfloat16"

    def check(self) -> None:
        """Raises UserError if model, optimizer, batch, options and tables do not fit each other."""
        if self.accum_steps < 1 or not self.spec:
            raise UserError(
                f"accum_steps = {self.accum_steps}, features {list(self.spec)}: expected at least 1 step and 1 feature"
            )
        check_spec(self.spec)
        # The checks are independent of each other, so all problems are reported together.
        independent = (
            self._check_rows,
            self._check_positions,
            self._check_microbatches,
            self._check_products,
            self._check_state,
        )
        if errors := [error for check in independent if (error := self._error_of(check))]:
            raise UserError("\n".join(map(str, errors))) from ExceptionGroup("checks of the program", errors)
        with named_model(self.model, self.spec):
            self._check_activations()

    @functools.cached_property
    def axes(self) -> TrainState:
        """Logical axes of every array of the state."""
        return self._abstract[1]

    @functools.cached_property
    def abstract_state(self) -> TrainState:
        """Shape, dtype and sharding of every array of the state."""
        shapes, axes = self._abstract
        tables = self.partitioner.strategy
        fit = functools.partial(strategy.specs, mesh_shape=self.partitioner.shape)
        name = f"strategy {tables.name!r} on {self.partitioner.slice.name}"
        spec = TrainState(
            step=PartitionSpec(),
            params=fit(shapes.params, axes.params, tables.param_rules, where=f"{name}, param_rules"),
            opt_state=fit(
                shapes.opt_state, axes.opt_state, tables.stored_optimizer_rules, where=f"{name}, optimizer state"
            ),
            carry=fit(shapes.carry, axes.carry, tables.activation_rules, where=f"{name}, carry"),
        )
        layouts = strategy.shardings(spec, self.partitioner.mesh)
        return jax.tree.map(lambda s, at: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=at), shapes, layouts)

    @functools.cached_property
    def state_shardings(self) -> TrainState:
        """Sharding of every array of the state."""
        return jax.tree.map(lambda s: s.sharding, self.abstract_state)

    @functools.cached_property
    def batch_shardings(self) -> Mapping[str, NamedSharding]:
        """Sharding of every array of a batch."""
        return self.partitioner.batch_shardings(self.spec)

    @property
    def abstract_batch(self) -> Mapping[str, jax.ShapeDtypeStruct]:
        """Shape, dtype and sharding of every array of a batch."""
        layouts = self.batch_shardings
        return {k: s.update(sharding=layouts[k]) for k, s in batch_shapes(self.spec).items()}

    @functools.cached_property
    def _abstract(self) -> tuple[TrainState, TrainState]:
        params, _ = self._params
        opt_state = jax.eval_shape(self._bound_optimizer.init, params)
        carry = jax.eval_shape(self.model.init_carry, batch_shapes(self.spec))
        shapes = TrainState(jax.ShapeDtypeStruct((), jnp.int32), params, opt_state, carry)
        axes = TrainState(
            logical.Axes(()),
            logical.axes_of(self.param_specs),
            optimizers.state_axes(self._bound_optimizer, params),
            jax.tree.map(lambda s: strategy.row_axes(s.shape), carry),
        )
        return shapes, axes

    @property
    def param_specs(self) -> Specs:
        """Axes, kind and trainability of every parameter."""
        return self._params[1]

    @property
    def trained_params(self) -> list[jax.ShapeDtypeStruct]:
        """Shapes of the parameters that are trained."""
        shapes, specs = map(jax.tree.leaves, self._params)
        return [shape for shape, spec in zip(shapes, specs, strict=True) if spec.trainable]

    @functools.cached_property
    def _params(self) -> tuple[Any, Specs]:
        with self.partitioner.platform_context():
            return logical.abstract_init(self._created, jax.random.key(self.seed), batch_shapes(self.spec))

    def _created(self, rng: jax.Array, batch: Batch) -> Params:
        return logical.frozen(self.model.init(rng, batch), self.frozen, self.frozen_dtype)

    @functools.cached_property
    def _bound_optimizer(self) -> Optimizer:
        return self.optimizer.bound(self.param_specs)

    def _check_products(self) -> None:
        choice = getattr(wrappers.field_owner(self.model, "quantization"), "quantization", "none")
        slice_ = self.partitioner.slice
        if choice == "fp8" and not slice_.chip.has_fp8 and slice_.chip.platform != "cpu":
            having = ", ".join(name for name, chip in {**slices.CHIPS, **slices.GPUS}.items() if chip.has_fp8)
            raise UserError(
                f"quantization = 'fp8': {slice_.generation} has no products in FP8 of its own, and would convert their "
                f"operands to bfloat16; expected one of {having}, or quantization = 'int8' or 'none'"
            )

    def _check_dtypes(self) -> None:
        leaves = jax.tree_util.tree_leaves_with_path(self._params[0])
        others = [
            f"{parameters.path_name(path)}: {a.dtype}"
            for path, a in leaves
            if not jnp.issubdtype(a.dtype, jnp.floating)
        ]
        if others:
            raise UserError(
                f"parameters of {type(self.model).__name__} are not floating-point numbers: {', '.join(others)}. A "
                "step differentiates with respect to all parameters, also to frozen ones: keep other arrays in a field "
                "of the model, or in its carry"
            )

    def _check_state(self) -> None:
        """Making `abstract_state` raises UserError if the tables do not fit."""
        self._check_dtypes()
        if any(jax.dtypes.issubdtype(a.dtype, jax.dtypes.prng_key) for a in jax.tree.leaves(self._abstract[0].carry)):
            raise UserError(
                f"the carry of {type(self.model).__name__} has a random key (jax.random.key), which checkpoints do not "
                "hold: keep jax.random.key_data(key) in it, and use jax.random.wrap_key_data"
            )
        at = self.partitioner
        if at.pipeline:
            shapes, axes = self._abstract
            sizes = {"stages": at.shape["stage"], "slices": at.strategy.dcn_shape.get("stage", 1)}
            chips = at.slice.devices
            if found := schedules.problems(at.pipeline, shapes.params, axes.params, chips=chips, **sizes):
                raise UserError(f"strategy {at.strategy.name!r} on {at.slice.name}:\n  " + "\n  ".join(found))
        _ = self.abstract_state

    def _check_rows(self) -> None:
        at = self.partitioner
        schedules.check_rows(
            self._num_rows,
            groups=at.row_shards,
            accum_steps=self.accum_steps,
            schedule=at.pipeline,
            stages=at.shape["stage"],
            where=f"strategy {at.strategy.name!r} on {at.slice.name}",
        )

    def _check_positions(self) -> None:
        rows = self.partitioner.row_shards
        others = {k: dataclasses.replace(s, shape=(rows, *s.shape[1:])) for k, s in self.spec.items()}
        self.partitioner.batch_shardings(others)

    def _check_microbatches(self) -> None:
        step.refuse_carry(jax.eval_shape(self.model.init_carry, batch_shapes(self.spec)), self.accum_steps)
        step.refuse_tables(self.optimizer, self.accum_steps)
        if division := self._division():
            step.refuse_coupled_rows(self.model, division)
            random_bits.refuse_shared_draws(self.model, self._abstract[0].params, self.spec)

    def _division(self) -> str:
        """Returns the setting by which parts of a batch have losses of their own; "" if none does."""
        at = self.partitioner
        if self.accum_steps > 1:
            return f"accum_steps = {self.accum_steps}"
        if at.pipeline:
            return f"num_microbatches = {at.pipeline.num_microbatches} of strategy {at.strategy.name!r}"
        return "overlap_reduction" if at.strategy.overlap_reduction else ""

    def _check_activations(self) -> None:
        """Traces the evaluation step and, for runners with derivatives of their own, the training step.

        JAX keeps the traces of jitted functions, so that the first step does not trace again.
        """
        traced = [self.jitted_eval_step]
        has_rules = self.partitioner.pipeline or self.partitioner.strategy.overlap_reduction
        traced += [self.jitted_train_step] if has_rules else []
        with self.partitioner.tracing():
            try:
                for jitted in traced:
                    jitted.eval_shape(self.abstract_state, self.abstract_batch)
            except UserError as error:
                tables, where = self.partitioner.strategy, self.partitioner.slice.name
                raise UserError(f"strategy {tables.name!r} on {where}, computation: {error}") from error

    @functools.cached_property
    def _replicated(self) -> NamedSharding:
        return NamedSharding(self.partitioner.mesh, PartitionSpec())

    @functools.cached_property
    def jitted_init(self) -> Any:
        """The jitted initialization of the state; trace it inside `partitioner.tracing()`."""

        def fresh() -> TrainState:
            zeros = self._zeros()
            params = self._created(jax.random.key(self.seed), zeros)
            return step.create(self.model, self._bound_optimizer, params, zeros)

        return jax.jit(fresh, out_shardings=self.state_shardings, compiler_options=self._options_of_init)

    def init(self) -> TrainState:
        """Initializes the state."""
        with self.partitioner.tracing():
            return self.jitted_init()

    def init_params(self, paths: Set[str] | None = None) -> Params:
        """Initializes the parameters with these paths (`layers/block/query`), and no others; None: all."""

        def chosen(params: Params) -> Params:
            return params if paths is None else parameters.where(params, paths.__contains__)

        def fresh() -> Params:
            return chosen(self._created(jax.random.key(self.seed), self._zeros()))

        layouts = chosen(self.state_shardings.params)
        with self.partitioner.tracing():
            return jax.jit(fresh, out_shardings=layouts, compiler_options=self._options_of_init)()

    def init_from(self, params: Params) -> TrainState:
        """Returns the state before the first step with the given parameters, which are donated."""

        def begun(params: Params) -> TrainState:
            return step.create(self.model, self._bound_optimizer, params, self._zeros())

        with self.partitioner.tracing():
            return jax.jit(begun, donate_argnums=0, out_shardings=self.state_shardings)(params)

    def first_carry(self) -> Any:
        """Returns the carry before the first step, sharded as in the state."""

        def made() -> Any:
            return self.model.init_carry(self._zeros())

        with self.partitioner.tracing():
            return jax.jit(made, out_shardings=self.state_shardings.carry)()

    def _zeros(self) -> dict[str, jax.Array]:
        return {k: jnp.zeros(s.shape, s.dtype) for k, s in self.spec.items()}

    @functools.cached_property
    def manual_axes(self) -> set[str]:
        """Mesh axes over which gradients of microbatches are reduced once per step."""
        at = self.partitioner
        return accumulation.manual_axes(at.strategy, at.shape, gather_once=self.gather_once)

    @property
    def gathered_bytes(self) -> int:
        """Bytes that `gather_once` adds per chip; 0 without it."""
        return self.bytes_of_gathering(self.manual_axes)

    def bytes_of_gathering(self, manual: set[str]) -> int:
        """Returns the bytes that a chip needs more if parameters are gathered over these mesh axes once per step."""
        at, trained = self.partitioner, [spec.trainable for spec in jax.tree.leaves(self.param_specs)]
        by: dict[str, Any] = {"tables": at.strategy, "shape": at.shape, "manual": manual}
        return accumulation.gathered_bytes(self.abstract_state.params, self.axes.params, trained, **by)

    @functools.cached_property
    def jitted_train_step(self) -> Any:
        """The jitted training step; trace it inside `partitioner.tracing()`. The state is donated."""
        return self._jitted_train_step(with_statistics=False)

    @functools.cached_property
    def jitted_statistics_step(self) -> Any:
        """The jitted training step that also computes `core.step.UpdateStatistics`. The state is donated."""
        return self._jitted_train_step(with_statistics=True)

    def _jitted_train_step(self, *, with_statistics: bool) -> Any:
        out = (self.state_shardings, self._replicated)
        return self._jit(self._pure_train_step(with_statistics), out_shardings=out, donate_argnums=0)

    def _pure_train_step(self, with_statistics: bool = False) -> Callable:
        add = accumulation.sum_gradients(self.manual_axes, self.axes.params, self.partitioner.strategy)
        return step.train_step(
            self.model,
            self._bound_optimizer,
            seed=self.seed,
            accum_steps=self.accum_steps,
            skip_non_finite=self.skip_non_finite,
            with_statistics=with_statistics,
            sum_gradients=add,
        )

    @functools.cached_property
    def jitted_eval_step(self) -> Any:
        """The jitted evaluation step; trace it inside `partitioner.tracing()`."""
        return self._jit(
            step.eval_step(self.model, self._bound_optimizer, seed=self.seed), out_shardings=self._replicated
        )

    @functools.cached_property
    def jitted_answer_step(self) -> Any:
        """The jitted evaluation step that also returns answers; trace it inside `partitioner.tracing()`."""
        return self._jit(
            step.answer_step(self.model, self._bound_optimizer, seed=self.seed), out_shardings=self._replicated
        )

    @property
    def _on_cpus(self) -> bool:
        return self.partitioner.mesh.devices.flat[0].platform == "cpu"

    @property
    def _options_of_init(self) -> dict[str, compiler_options.Value] | None:
        return compiler_options.initialization_on_cpus() if self._on_cpus else None

    @property
    def compiler_options(self) -> dict[str, compiler_options.Value] | None:
        """Compiler options of the steps; None if the devices are CPU devices."""
        if self._on_cpus:
            return None
        at = self.partitioner
        shape = at.strategy.mesh_shape
        return compiler_options.options(at.slice.generation, self.compiler_overrides, mesh_shape=shape)

    def _jit(self, fn: Callable, **options) -> Any:
        inputs = (self.state_shardings, self.batch_shardings)
        return jax.jit(fn, in_shardings=inputs, compiler_options=self.compiler_options, **options)

    def train_step(self, state: TrainState, batch: Batch) -> tuple[TrainState, step.Metrics]:
        """Runs one training step; returns the new state and the step's metrics. `state` is donated."""
        with self.partitioner.tracing():
            return self.jitted_train_step(state, batch)

    def statistics_step(self, state: TrainState, batch: Batch) -> tuple[TrainState, step.Metrics]:
        """Runs one training step whose metrics contain `core.step.UpdateStatistics`. `state` is donated."""
        with self.partitioner.tracing():
            return self.jitted_statistics_step(state, batch)

    def eval_step(self, state: TrainState, batch: Batch) -> Mapping[str, Any]:
        """Returns the sums of the loss and of the metrics over one batch."""
        with self.partitioner.tracing():
            return self.jitted_eval_step(state, batch)

    def answer_step(self, state: TrainState, batch: Batch) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        """Returns the results of `eval_step`, and the model's answers for the global batch, replicated."""
        with self.partitioner.tracing():
            return self.jitted_answer_step(state, batch)

    def abstract_answers(self) -> Mapping[str, jax.ShapeDtypeStruct]:
        """Returns shapes and dtypes of the answers of `answer_step`."""
        with self.partitioner.tracing():
            return jax.eval_shape(self.jitted_answer_step, self.abstract_state, self.abstract_batch)[1]

    def put(self, batch: Mapping[str, np.ndarray]) -> Batch:
        """Places this host's rows of a batch on its devices.

        `batch`: arrays [rows of this host, ...], in the order of `data_layout(...).rows`.
        """
        return mesh.put(batch, self.spec, self.batch_shardings, rows=self._host_rows)

    @functools.cached_property
    def _host_rows(self) -> tuple[int, ...]:
        return self.partitioner.data_layout(self._num_rows).rows

    @property
    def _num_rows(self) -> int:
        return batch_size(self.spec)

    def lower_train_step(self, *, with_statistics: bool = False) -> Any:
        """Lowers the training step, or the statistics step, from shapes alone."""
        jitted = self.jitted_statistics_step if with_statistics else self.jitted_train_step
        with self.partitioner.tracing():
            return jitted.lower(self.abstract_state, self.abstract_batch)

    def _error_of(self, check: Callable[[], object]) -> UserError | None:
        try:
            with named_model(self.model, self.spec):
                check()
        except UserError as error:
            return error
        return None
