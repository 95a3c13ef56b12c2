"""Logical axes: names for the meaning of array dimensions, which a strategy maps to mesh axes.

A model calls `param("wq", (D, H, K), ("embed", "heads", "head_dim"), init)` and `constrain(x, "batch", "length",
"embed")`, and never names mesh axes. A strategy supplies two tables from logical to mesh axes: one for stored
parameters, one for activations. The tables reach the model through a context variable while it is traced, so the same
model runs under every layout, or without one.

`abstract_init` records a `ParamSpec` for each parameter while it traces `init` abstractly. JAX does not trace the same
function twice, and a second call would record nothing; `abstract_init` therefore traces a new closure at each call, and
checks that every parameter was recorded.
"""

import contextlib
import contextvars
import dataclasses
import difflib
import fnmatch
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec

from core import parameters
from core.errors import UserError
from core.parameters import ParamSpec, Specs
from core.types import Params

if not __debug__:
    raise UserError(
        "Python runs without assert statements (-O, or PYTHONOPTIMIZE is set), and dm-haiku closes its contexts inside "
        "assert statements: every model would fail while it is traced. Unset PYTHONOPTIMIZE and start without -O"
    )

FIRST = "first_"  # start of the name of the first layers of a stack, whatever the stack is called
LAYERS, FIRST_LAYERS = "layers", f"{FIRST}layers"
STACKED = (LAYERS, FIRST_LAYERS)  # axes that count the layers of a stack
MeshAxes = str | tuple[str, ...] | None
Rules = Mapping[str, MeshAxes]

LOGICAL_AXES: Mapping[str, str] = {
    "batch": "rows of the global batch",
    "length": "positions of a row, inside a block",
    "residual_length": "positions of a row, between blocks",
    "kv_length": "positions that keys and values come from",
    "embed": "width of the residual stream",
    "mlp": "hidden width of a feed-forward layer",
    "heads": "query heads",
    "kv_heads": "key and value heads",
    "head_dim": "width of one head",
    "vocab": "entries of the vocabulary, as stored",
    "norm": "scale of a normalization: the width of what it normalizes, too small to split",
    "layers": "layers of a stack, in model order",
}
EXPERT_BATCH = "expert_batch"


class _Declared(NamedTuple):
    """An axis for which tables need no row.

    Attributes:
      meaning, mesh_axis, like: the arguments of `declare`.
    """

    meaning: str
    mesh_axis: str | None = None
    like: str | None = None


_declared: dict[str, _Declared] = {
    "expert": _Declared("experts of a mixture"),
    EXPERT_BATCH: _Declared("rows of the global batch in an array that is divided by `expert`, too"),
    FIRST_LAYERS: _Declared("layers at the beginning of a stack that differ from those after them"),
}


@dataclasses.dataclass(frozen=True)
class Axes:
    """The logical axis of each dimension of one array. Not a tuple, so that it is a leaf of a pytree.

    Attributes:
      names: the axis of each dimension; None for a dimension without one.
    """

    names: tuple[str | None, ...]

    def __str__(self) -> str:
        return "(" + ", ".join(n or "-" for n in self.names) + ")"


@dataclasses.dataclass(frozen=True)
class _Tables:
    """A strategy's tables, hashed by value because they are part of JAX's trace key.

    Attributes:
      activations, params: mesh axes by logical axis, for activations and for parameters.
    """

    activations: Rules
    params: Rules

    def __hash__(self) -> int:
        return hash((frozenset(self.activations.items()), frozenset(self.params.items())))


_tables = jax.make_user_context(None)  # a _Tables or None; part of the key of every trace
_record: contextvars.ContextVar[dict[str, dict[str, ParamSpec]] | None] = contextvars.ContextVar("record", default=None)
_stacks: contextvars.ContextVar[tuple[str, ...]] = contextvars.ContextVar("stacks", default=())
_lifted: contextvars.ContextVar[tuple[str, ...]] = contextvars.ContextVar("lifted", default=())
_in_param: contextvars.ContextVar[bool] = contextvars.ContextVar("in_param", default=False)


@contextlib.contextmanager
def _set(variable: contextvars.ContextVar, value) -> Iterator[Any]:
    token = variable.set(value)
    try:
        yield value
    finally:
        variable.reset(token)


def sharding_rules(activations: Rules, params: Rules) -> contextlib.AbstractContextManager:
    """Context in which `constrain` and `lookup_specs` use a strategy's tables; enter it inside `jax.set_mesh`.

    A jitted function is traced once for each pair of tables under which it is called.
    """
    return _tables(_Tables(dict(activations), dict(params)))


@contextlib.contextmanager
def lifted(name: str, *, layers: str = "") -> Iterator[None]:
    """Context in which parameters belong to a function that `hk.lift` calls `name`.

    Args:
      name: module name of the parameters.
      layers: for a layer stack: the leading axis that its parameters gain, one of `STACKED`; "": none.
    """
    with _set(_lifted, (*_lifted.get(), name)), _set(_stacks, (*_stacks.get(), *((layers,) if layers else ()))):
        yield


def declare(name: str, meaning: str, *, mesh_axis: str | None = None, like: str | None = None) -> None:
    """Adds a logical axis of one model or strategy.

    Call it at the top of the module that uses the axis. Tables need no row for it.

    Args:
      name: for example `patches`.
      meaning: what the axis counts, in a few words.
      mesh_axis: what shards it under a table without a row for it, if that table uses this mesh axis. By default,
        and under other tables, it is replicated.
      like: a logical axis that never occurs in the same array. Under a table without a row for the new axis, the mesh
        axes of `like` shard it.

    Raises:
      UserError: the name is not a lower-case identifier, the meaning is empty, the axis was declared otherwise before,
        both `mesh_axis` and `like` are given, or `like` is no logical axis.
    """
    if not (name.isidentifier() and name.islower() and meaning):
        raise UserError(f"logical.declare({name!r}, {meaning!r}): expected a lower-case identifier and its meaning")
    axis, before = _Declared(meaning, mesh_axis, like), all_axes().get(name, meaning)
    if before != meaning:
        raise UserError(f"logical.declare: {name!r} already means {before!r}, now {meaning!r}: choose another name")
    if _declared.get(name, axis) != axis:
        raise UserError(f"logical.declare: {name!r} is {_declared[name]}, now {axis}: declare it once, or equally")
    if mesh_axis is not None and like is not None:
        raise UserError(
            f"logical.declare: {name!r} has mesh_axis = {mesh_axis!r} and like = {like!r}: give one of them"
        )
    if like is not None:
        check_names([like], where=f"logical.declare: like of {name!r}")
    _declared[name] = axis


def all_axes() -> Mapping[str, str]:
    """Returns the meaning of every logical axis by name: those of this workspace, then the declared ones."""
    return {**LOGICAL_AXES, **{name: axis.meaning for name, axis in _declared.items()}}


def row(rules: Rules, name: str) -> MeshAxes:
    """Returns the mesh axes that a table assigns to a logical axis; for a declared axis without a row, see `declare`.

    `expert_batch`, the rows of an array that also has the axis `expert`, gets the mesh axes of `batch` that `expert`
    does not use. Laying out an array ("expert", "batch", …) as ("expert", "expert_batch", …) sends tokens to the chips
    of their experts (an all-to-all).

    Raises:
      UserError: the table lacks the name.
    """
    if name in rules:
        return rules[name]
    if name not in _declared:
        raise UserError(f"the table has no row for logical axis {name!r}; add one (None: replicated)")
    if name == EXPERT_BATCH:
        used = mesh_axes(rules.get("expert"))
        return tuple(axis for axis in mesh_axes(rules.get("batch")) if axis not in used)
    if (like := _declared[name].like) is not None:
        return row(rules, like)
    own = _declared[name].mesh_axis
    return own if any(own in mesh_axes(axes) for axes in rules.values()) else None


def check_names(names: Sequence[str | None], *, where: str) -> None:
    """Raises UserError for a name that is not a logical axis; the message begins with `where`."""
    known = all_axes()
    for name in names:
        if name is not None and name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            nearest = f"did you mean {near[0]}?" if near else f"expected one of {', '.join(sorted(known))}."
            raise UserError(
                f"{where}: unknown logical axis {name!r}; {nearest} An axis of your own is declared at the top of your "
                f"module: logical.declare({name!r}, 'what it counts')"
            )


def is_stacked(names: Sequence[str | None]) -> bool:
    """Returns whether the first of these axes counts the layers of a stack."""
    return bool(names) and names[0] in STACKED


def mesh_axes(axes: MeshAxes) -> tuple[str, ...]:
    """Converts an entry of a table to a tuple: `None` is (), `"fsdp"` is ("fsdp",)."""
    return () if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)


def shards(axes: MeshAxes, sizes: Mapping[str, int]) -> int:
    """Returns the number of shards into which these mesh axes split a dimension; `sizes` has the size of each axis."""
    return math.prod(sizes[axis] for axis in mesh_axes(axes))


def partition_spec(axes: Axes, rules: Rules, *, keep: Callable[[str], bool] = lambda _: True) -> PartitionSpec:
    """Returns the `PartitionSpec` of an array with these logical axes.

    Args:
      axes: logical axis of each dimension.
      rules: the table.
      keep: selects the mesh axes to use; the others are left out.

    Raises:
      UserError: the table lacks a name, or would use a mesh axis twice in this array.
    """
    entries: list[str | tuple[str, ...] | None] = []
    used: dict[str, str | None] = {}
    for name in axes.names:
        try:
            wanted = tuple(a for a in mesh_axes(row(rules, name) if name else None) if keep(a))
        except UserError as error:
            raise UserError(f"array {axes}: {error}") from error
        for axis in wanted:
            if axis in used:
                raise UserError(
                    f"array {axes}: mesh axis {axis!r} is used twice, by {used[axis]!r} and by {name!r}; "
                    "an array can use it once: give one of them None or another mesh axis"
                )
            used[axis] = name
        entries.append(wanted[0] if len(wanted) == 1 else wanted or None)
    return PartitionSpec(*entries)


def constrain(x: jax.Array, *names: str | None) -> jax.Array:
    """Constrains the sharding of `x` by the strategy's table of activations.

    Returns `x` unchanged without a strategy or a mesh. Works under jit, under `vmap(..., spmd_axis_name)` and inside a
    partly manual `shard_map`: only mesh axes that are still automatic are used.

    Raises:
      UserError: the number of names is not the rank of x, a name is unknown, the table lacks a name or gives two
        dimensions one mesh axis, or a dimension does not divide evenly.
    """
    if len(names) != x.ndim:
        raise UserError(f"constrain: {len(names)} names {names} for an array of shape {x.shape}")
    check_names(names, where="constrain")
    tables, mesh = _tables.value, jax.sharding.get_abstract_mesh()
    if tables is None or mesh.empty:
        return x
    spec = partition_spec(Axes(names), tables.activations, keep=automatic_axes().__contains__)
    _check_divides(x.shape, Axes(names), spec, mesh.shape)
    return jax.lax.with_sharding_constraint(x, spec)


def constrain_stored(x: jax.Array, axes: Axes) -> jax.Array:
    """Constrains the sharding of a parameter by the strategy's table of stored parameters, over automatic mesh axes.

    Returns `x` unchanged without a strategy or a mesh.

    Raises UserError as `partition_spec`.
    """
    tables, mesh = _tables.value, jax.sharding.get_abstract_mesh()
    if tables is None or mesh.empty:
        return x
    return jax.lax.with_sharding_constraint(x, partition_spec(axes, tables.params, keep=automatic_axes().__contains__))


def _check_divides(shape: Sequence[int], axes: Axes, spec: PartitionSpec, sizes: Mapping[str, int]) -> None:
    for size, name, entry in zip(shape, axes.names, spec, strict=True):
        count = shards(entry, sizes)
        if size % count:
            raise UserError(
                f"activation {axes} of shape {tuple(shape)}: {name} = {size} does not divide over {entry} = {count}; "
                f"nearest sizes that do: {', '.join(map(str, nearest_multiples(size, count)))}; "
                f"or replicate it: activation_rules={{{name!r}: None}}"
            )


def nearest_multiples(size: int, unit: int) -> list[int]:
    """Returns the largest multiple of `unit` up to `size`, if there is one, and the smallest one above `size`."""
    return sorted({max(size // unit, 1) * unit, (size // unit + 1) * unit})


def automatic_axes() -> set[str]:
    """Returns the mesh axes that the partitioner controls, without those of an enclosing manual region."""
    mesh = jax.sharding.get_abstract_mesh()
    return {axis for axis, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Auto}


def activation_spec(*names: str | None) -> PartitionSpec | None:
    """Returns the spec of an activation with these axes over automatic mesh axes; None without a strategy or mesh.

    Raises UserError as `partition_spec`.
    """
    tables, mesh = _tables.value, jax.sharding.get_abstract_mesh()
    if tables is None or mesh.empty:
        return None
    return partition_spec(Axes(names), tables.activations, keep=automatic_axes().__contains__)


class LookupSpecs(NamedTuple):
    """Layouts for computing the gradient of an embedding table from the gradients of the rows that were looked up.

    Attributes:
      table: layout of the table, as the parameter is stored.
      moves: successive layouts of the row gradients [..., columns]. Each mesh axis that stores columns of the table
        moves in turn from the rows to the columns (an all-to-all each); axes that store rows of the table are removed
        last. Then a chip has its columns of every row.
    """

    table: PartitionSpec
    moves: tuple[PartitionSpec, ...]

    @property
    def ids(self) -> PartitionSpec:
        """Layout of the indices [...]: the last entry of `moves` without its column axis."""
        return PartitionSpec(*self.moves[-1][:-1])


def lookup_specs(table: tuple[str | None, str], rows: Sequence[str | None]) -> LookupSpecs | None:
    """Returns the layouts for summing the gradient of a table [rows, columns] directly into its stored shards.

    Args:
      table: logical axes of the table.
      rows: logical axes of the indices.

    Returns:
      The layouts over automatic mesh axes. None without a strategy or a mesh, and for a table that is sharded over both
      dimensions inside a region that is manual over some mesh axes: XLA for TPU crashes when it partitions that sum.

    Raises:
      UserError: as `partition_spec`.
    """
    tables, mesh = _tables.value, jax.sharding.get_abstract_mesh()
    if tables is None or mesh.empty:
        return None
    automatic = automatic_axes()
    stored = partition_spec(Axes(table), tables.params, keep=automatic.__contains__)
    entries, columns = map(mesh_axes, stored)
    if entries and columns and automatic != set(mesh.axis_names):
        return None

    def without(moved: tuple[str, ...]) -> PartitionSpec:
        spec = partition_spec(Axes(tuple(rows)), tables.activations, keep=(automatic - set(moved)).__contains__)
        return PartitionSpec(*spec, tuple(axis for axis in columns if axis in moved) or None)

    moves = [without(columns[: i + 1]) for i in range(len(columns))]
    return LookupSpecs(stored, (*moves, without(columns + entries)))


def param(
    name: str,
    shape: Sequence[int],
    axes: Sequence[str | None],
    init: Callable,
    *,
    kind: str = "",
    in_dims: int = 1,
    stacked: int = 0,
    trainable: bool = True,
    dtype: jax.typing.DTypeLike = jnp.float32,
    compute_dtype: jax.typing.DTypeLike | None = None,
    as_stored: bool = False,
) -> jax.Array:
    """Creates a Haiku parameter with named axes.

    Args:
      name: name within the current module.
      shape: shape of one layer's parameter; a layer stack adds the leading dimension.
      axes: logical axis of each dimension of `shape`.
      init: initializer, called as `init(shape, dtype)`.
      kind, in_dims, stacked, trainable: information for optimizers, as in `core.parameters.ParamSpec`. A layer stack
        adds 1 to `stacked`.
      dtype: stored dtype.
      compute_dtype: returned dtype; None: the stored one. The cast comes before any all-gather, which then moves the
        narrower dtype.
      as_stored: whether to return the parameter in its stored dtype and layout, for callers that cast and constrain it.

    Returns:
      [*shape], laid out for computation by the activation table unless `as_stored`.

    Raises:
      UserError: the axes are not as many as the dimensions, an axis is unknown, or `ParamSpec` or `constrain` fails.
    """
    names = tuple(axes)
    where = f"parameter {hk.experimental.current_name()}/{name}"
    if len(names) != len(shape):
        raise UserError(f"{where}: {len(names)} axes {names} for shape {tuple(shape)}")
    check_names(names, where=where)
    try:
        spec = ParamSpec(names, kind, in_dims, stacked, trainable, jnp.dtype(dtype).name)
    except UserError as error:
        raise UserError(f"{where}, shape {tuple(shape)}, axes {Axes(names)}: {error}") from error
    _remember(name, spec)
    with _set(_in_param, True):
        stored = hk.get_parameter(name, shape, dtype, init)
    return stored if as_stored else constrain(stored.astype(compute_dtype or dtype), *names)


def _remember(name: str, spec: ParamSpec) -> None:
    """Records the spec of a parameter of the current module, if `abstract_init` is running."""
    record = _record.get()
    if record is not None and hk.running_init():
        path = "/".join((*_lifted.get(), hk.experimental.current_name()))
        record.setdefault(path, {})[name] = spec.in_stack(*_stacks.get())


class _Names(NamedTuple):
    """The names that `named` gives.

    Attributes:
      table: the `ParamSpec` of each pattern over paths.
      within: module names of the lifted functions around the one that is traced, outermost first.
    """

    table: Mapping[str, ParamSpec]
    within: tuple[str, ...]


_names: contextvars.ContextVar[_Names | None] = contextvars.ContextVar("names", default=None)


def named(fn: Callable, table: Mapping[str, Sequence[str | None] | ParamSpec]) -> Callable:
    """Returns `fn`, a Haiku function that uses stock modules such as `hk.Linear`, with axes for their parameters.

        NAMES = {"*/attn/linear/w": ("heads", "embed"), "*/attn/*/w": ("embed", "heads"), "*ln*": ("norm",), …}
        net = hk.transform(logical.named(forward, NAMES))

    These parameters are stored in float32 (or the dtype of their `ParamSpec`), and returned in the dtype that the
    module asks for, laid out for computation, as `param` returns its own. Parameters that are made by `param` are not
    affected. A layer stack inside the function uses the same table for its blocks, with its own name as the first part
    of their paths.

    Args:
      fn: a Haiku function.
      table: for each pattern over paths (`layers/block/attn/query/w`; shell wildcards; the first that matches counts)
        the axes of the parameter, or its `ParamSpec`.

    Raises:
      UserError: an unknown axis; in `fn`, a parameter with another number of dimensions than axes, or Haiku state. A
        parameter that no pattern matches is an error in `abstract_init`.
    """
    specs = {}
    for pattern, entry in table.items():
        axes = entry.axes if isinstance(entry, ParamSpec) else tuple(entry)
        check_names(axes, where=f"logical.named, {pattern!r}")
        specs[pattern] = entry if isinstance(entry, ParamSpec) else ParamSpec(axes)
    return _with_names(fn, _Names(specs, ()))


def named_within(fn: Callable, name: str) -> Callable:
    """Returns `fn` with the table that `named` gave to the Haiku function that is being traced, if it gave one.

    Args:
      fn: a function that is passed to its own `hk.transform`.
      name: module name of its parameters in the outer function.
    """
    names = _names.get()
    return fn if names is None else _with_names(fn, names._replace(within=(*names.within, name)))


def _with_names(fn: Callable, names: _Names) -> Callable:
    def spec_of(context: Any, shape: Sequence[int]) -> ParamSpec | None:
        path = "/".join((*names.within, context.full_name)).replace("~/", "")
        spec = next((spec for pattern, spec in names.table.items() if fnmatch.fnmatchcase(path, pattern)), None)
        if spec is not None and len(spec.axes) != len(shape):
            raise UserError(f"logical.named: {path} has shape {tuple(shape)}, but its axes are {Axes(spec.axes)}")
        return spec

    def create(following: Callable, shape: Sequence[int], dtype: Any, init: Callable, context: Any) -> jax.Array:
        spec = None if _in_param.get() else spec_of(context, shape)
        if spec is None:
            return following(shape, dtype, init)
        _remember(context.name, spec)
        return following(shape, jnp.dtype(spec.dtype), init)

    def get(following: Callable, value: jax.Array, context: Any) -> jax.Array:
        spec = None if _in_param.get() else spec_of(context, value.shape)
        if spec is not None:
            value = constrain(value.astype(context.original_dtype), *spec.axes)
        return following(value)

    def refuse_state(following: Callable, shape: Sequence[int], dtype: Any, init: Callable, context: Any) -> Any:
        raise _has_state(context.full_name)

    def refuse_batch_norm(following: Callable, args: Any, kwargs: Any, context: Any) -> Any:
        if isinstance(context.module, hk.BatchNorm) and context.method_name == "__call__":
            raise _has_state(context.module.module_name)  # outside of training it reads state that nothing created
        return following(*args, **kwargs)

    @functools.wraps(fn)
    def run(*args: Any, **kwargs: Any) -> Any:
        with (
            _set(_names, names),
            hk.custom_creator(create),
            hk.custom_creator(refuse_state, params=False, state=True),
            hk.custom_getter(get),
            hk.intercept_methods(refuse_batch_norm),
        ):
            return fn(*args, **kwargs)

    return run


def _has_state(name: str) -> UserError:
    return UserError(
        f"logical.named: {name} has Haiku state, such as the means of hk.BatchNorm, which is not supported. Means over "
        "a batch depend on how it is divided into microbatches, and a pipeline cannot pass them from one to the next. "
        "Normalize over one row at a time (hk.LayerNorm, hk.RMSNorm, hk.GroupNorm); state between steps belongs in "
        "the carry of the model (init_carry)"
    )


def abstract_init(init: Callable, *args) -> tuple[Mapping, Specs]:
    """Returns shapes and specs of the parameters that `init(*args)` would create, without creating them.

    Returns:
      Two trees of the same structure, with `jax.ShapeDtypeStruct` and `ParamSpec` leaves.

    Raises:
      UserError: lists the parameters that were created without `param` and without an entry of `named`, so that their
        axes have no names.
    """
    with _set(_record, {}) as record:
        shapes = jax.eval_shape(lambda *a: init(*a), *args)
    unnamed = [
        f"{module}/{name} {list(leaf.shape)}".replace("~/", "")
        for module, leaves in shapes.items()
        for name, leaf in leaves.items()
        if name not in record.get(module, {})
    ]
    if unnamed:
        raise UserError(
            f"parameters without named axes: {', '.join(unnamed)}; make them with logical.param(...), or name the axes "
            "of stock modules: hk.transform(logical.named(fn, {'*/linear/w': ('embed', 'mlp'), …}))"
        )
    specs = {module: {name: record[module][name] for name in leaves} for module, leaves in shapes.items()}
    for module, leaves in shapes.items():
        for name, leaf in leaves.items():
            assert len(specs[module][name].axes) == len(leaf.shape), (module, name, leaf.shape, specs[module][name])
    return shapes, specs


def frozen(params: Params, patterns: Sequence[str], dtype: str | None = None) -> Params:
    """Freezes parameters at the end of a model's `init`, so that training keeps their bits; returns all parameters.

    Args:
      params: what `init` created.
      patterns: shell wildcards over paths (`layers/block/query`) of the parameters to freeze.
      dtype: dtype in which floating-point ones are stored; None: the dtype that they have.

    Raises:
      UserError: a pattern matches no parameter.
    """
    chosen, record = parameters.matches(params, patterns, where="frozen"), _record.get() or {}
    stored = {module: dict(leaves) for module, leaves in params.items()}
    for module, name in ((module, name) for module, leaves in chosen.items() for name in leaves if leaves[name]):
        leaf = params[module][name]
        stored[module][name] = leaf.astype(dtype) if dtype and jnp.issubdtype(leaf.dtype, jnp.floating) else leaf
        if name in record.get(module, ()):
            record[module][name] = record[module][name].frozen(stored[module][name].dtype.name)
    return stored


def axes_of(specs: Specs) -> Any:
    """Returns the tree of `Axes` of these parameters."""
    return jax.tree.map(lambda spec: Axes(spec.axes), specs)
