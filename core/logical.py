"""Logical axes: names for the meaning of array dimensions, which a strategy maps to mesh axes.

A model calls `param("wq", (D, H, K), ("embed", "heads", "head_dim"), init)` and `constrain(x, "batch", "length",
"embed")`. A strategy supplies two tables from logical to mesh axes, one for stored parameters and one for activations.
They reach the model through a context while it is traced.
"""

import contextlib
import contextvars
import dataclasses
import difflib
import fnmatch
import functools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
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
    """The logical axis of each dimension of one array, or None; a leaf of a pytree.

    `exchanged`: as in `core.parameters.ParamSpec`.
    """

    names: tuple[str | None, ...]
    exchanged: bool = False

    def __str__(self) -> str:
        return "(" + ", ".join(n or "-" for n in self.names) + ")"


@dataclasses.dataclass(frozen=True)
class _Tables:
    """A strategy's tables, hashed by value because they are part of JAX's trace key."""

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
    """Context that sets a strategy's tables for tracing; enter it inside `jax.set_mesh`."""
    return _tables(_Tables(dict(activations), dict(params)))


@contextlib.contextmanager
def lifted(name: str, *, layers: str = "") -> Iterator[None]:
    """Context in which parameters belong to a function that `hk.lift` calls `name`.

    `layers` is the axis of `STACKED` that a layer stack adds; "": none.
    """
    with _set(_lifted, (*_lifted.get(), name)), _set(_stacks, (*_stacks.get(), *((layers,) if layers else ()))):
        yield


def declare(name: str, meaning: str, *, mesh_axis: str | None = None, like: str | None = None) -> None:
    """Adds a logical axis of one model or strategy; call it at the top of a module.

    Under a table without a row for it, the axis is replicated unless `mesh_axis` or `like` is given.

    Args:
      name: a lower-case identifier.
      meaning: what the axis counts.
      mesh_axis: mesh axis that shards it, if the table uses that mesh axis.
      like: logical axis, never in the same array, whose mesh axes shard it.

    Raises:
      UserError: the declaration is malformed, or contradicts itself or an earlier one.
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
    """Returns the meaning of every logical axis, by name."""
    return {**LOGICAL_AXES, **{name: axis.meaning for name, axis in _declared.items()}}


def row(rules: Rules, name: str) -> MeshAxes:
    """Returns the mesh axes that a table assigns to a logical axis.

    Without a row, `expert_batch` gets the mesh axes of `batch` that `expert` does not use: an array [expert, batch,
    ...] that becomes [expert, expert_batch, ...] sends tokens to the chips of their experts (an all-to-all).

    Raises UserError if the axis needs a row and has none.
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
    """Raises UserError for a name that is not a logical axis."""
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
    """Returns whether the first axis counts the layers of a stack."""
    return bool(names) and names[0] in STACKED


def mesh_axes(axes: MeshAxes) -> tuple[str, ...]:
    """Converts an entry of a table to a tuple: `None` is (), `"fsdp"` is ("fsdp",)."""
    return () if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)


def shards(axes: MeshAxes, sizes: Mapping[str, int]) -> int:
    """Returns the number of shards into which these mesh axes split a dimension."""
    return math.prod(sizes[axis] for axis in mesh_axes(axes))


def partition_spec(axes: Axes, rules: Rules, *, keep: Callable[[str], bool] = lambda _: True) -> PartitionSpec:
    """Returns the `PartitionSpec` of an array with these logical axes; `keep` selects mesh axes.

    Raises UserError if an axis lacks a row, or two use one mesh axis.
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


def kept_spec(axes: Axes, params: Rules, activations: Rules, manual: Collection[str]) -> PartitionSpec:
    """Returns how a parameter stays sharded over manual mesh axes in the region where its layer runs.

    It is replicated, unless its layer exchanges activations (`ParamSpec.exchanged`): then a dimension is sharded as
    activations are, over the mesh axes of rows, if its shards in storage are parts of these.

    Args:
      params, activations: the strategy's tables.
      manual: the manual mesh axes; only those that shard rows count.
    """
    rows = mesh_axes(activations["batch"])

    def kept(name: str | None) -> tuple[str, ...]:
        stored, wanted = (
            tuple(axis for axis in mesh_axes(row(rules, name) if name else None) if axis in rows)
            for rules in (params, activations)
        )
        if not axes.exchanged or stored[: len(wanted)] != wanted:
            return ()
        return tuple(axis for axis in wanted if axis in manual)

    return PartitionSpec(*(kept(name) or None for name in axes.names))


def _kept_here(axes: Axes) -> PartitionSpec:
    """Returns `kept_spec` over the mesh axes that are manual where this is called."""
    tables, mesh = _tables.value, jax.sharding.get_abstract_mesh()
    if tables is None or mesh.empty:
        return PartitionSpec(*[None] * len(axes.names))
    manual = {axis for axis in mesh.axis_names if mesh.shape[axis] > 1} - automatic_axes()
    return kept_spec(axes, tables.params, tables.activations, manual)


def exchanged_axes(name: str) -> tuple[str, ...]:
    """Returns the manual mesh axes that shard this dimension of exchanged parameters, where this is called."""
    (entry,) = _kept_here(Axes((name,), exchanged=True))
    return mesh_axes(entry)


def whole_shape(shape: Sequence[int], axes: Axes) -> tuple[int, ...]:
    """Returns the shape of a parameter, given that of this chip's part in a manual region."""
    sizes = jax.sharding.get_abstract_mesh().shape
    return tuple(size * shards(entry, sizes) for size, entry in zip(shape, _kept_here(axes), strict=True))


def constrain(x: jax.Array, *names: str | None) -> jax.Array:
    """Constrains the sharding of `x` by the strategy's activation table, over automatic mesh axes.

    Returns `x` unchanged without a strategy or a mesh. Raises UserError if the names are unknown or do not fit the
    shape of `x`.
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
    """Constrains `x` to the layout of a stored parameter, over automatic mesh axes.

    Returns `x` unchanged without a strategy or a mesh.
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
    """Returns the largest multiple of `unit` up to `size`, if any, and the smallest above."""
    return sorted({max(size // unit, 1) * unit, (size // unit + 1) * unit})


def automatic_axes() -> set[str]:
    """Returns the mesh axes that the partitioner controls, of type Auto."""
    mesh = jax.sharding.get_abstract_mesh()
    return {axis for axis, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Auto}


def activation_spec(*names: str | None) -> PartitionSpec | None:
    """Returns the spec of an activation over automatic mesh axes; None without a strategy or mesh."""
    tables, mesh = _tables.value, jax.sharding.get_abstract_mesh()
    if tables is None or mesh.empty:
        return None
    return partition_spec(Axes(names), tables.activations, keep=automatic_axes().__contains__)


class LookupSpecs(NamedTuple):
    """Layouts for computing the gradient of an embedding table from gradients of looked-up rows.

    Attributes:
      moves: successive layouts of the row gradients [..., columns].
    """

    table: PartitionSpec
    moves: tuple[PartitionSpec, ...]

    @property
    def ids(self) -> PartitionSpec:
        """Layout of the indices [...] that goes with the last of `moves`."""
        return PartitionSpec(*self.moves[-1][:-1])


def lookup_specs(table: tuple[str | None, str], rows: Sequence[str | None]) -> LookupSpecs | None:
    """Returns layouts for summing the gradient of a table [rows, columns] into its shards.

    None without a strategy or a mesh, and where XLA for TPU crashes: for a table sharded over both dimensions in a
    partly manual region.
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
    exchanged: bool = False,
) -> jax.Array:
    """Creates a Haiku parameter with named axes.

    Args:
      shape: its shape; a layer stack adds a leading dimension.
      axes: logical axis of each dimension of `shape`.
      init: called as `init(shape, dtype)`.
      kind, in_dims, stacked, trainable, exchanged: as in `core.parameters.ParamSpec`. In a manual region, the result is
        this chip's part of an exchanged parameter.
      dtype: stored dtype.
      compute_dtype: dtype of the result; None: `dtype`. The cast precedes any all-gather.
      as_stored: whether to return it as stored, not cast and laid out by the activation table.

    Raises:
      UserError: an axis or `kind` is unknown, or arguments do not fit together.
    """
    names, used = tuple(axes), jnp.dtype(compute_dtype or dtype)
    where = f"parameter {hk.experimental.current_name()}/{name}"
    if len(names) != len(shape):
        raise UserError(f"{where}: {len(names)} axes {names} for shape {tuple(shape)}")
    check_names(names, where=where)
    try:
        stored_as, computed = jnp.dtype(dtype).name, "" if as_stored else used.name
        spec = ParamSpec(names, kind, in_dims, stacked, trainable, stored_as, exchanged, computed)
    except UserError as error:
        raise UserError(f"{where}, shape {tuple(shape)}, axes {Axes(names)}: {error}") from error
    _remember(name, spec)
    if exchanged:
        sizes = jax.sharding.get_abstract_mesh().shape
        parts = _kept_here(Axes(names, exchanged=True))
        shape = tuple(size // shards(entry, sizes) for size, entry in zip(shape, parts, strict=True))
    with _set(_in_param, True):
        stored = hk.get_parameter(name, shape, dtype, init)
    return stored if as_stored else constrain(stored.astype(used), *names)


def _remember(name: str, spec: ParamSpec) -> None:
    record = _record.get()
    if record is not None and hk.running_init():
        path = "/".join((*_lifted.get(), hk.experimental.current_name()))
        record.setdefault(path, {})[name] = spec.in_stack(*_stacks.get())


class _Names(NamedTuple):
    """The specs that `named` sets, and the module names of the enclosing lifted functions, outermost first."""

    table: Mapping[str, ParamSpec]
    within: tuple[str, ...]


_names: contextvars.ContextVar[_Names | None] = contextvars.ContextVar("names", default=None)


def named(fn: Callable, table: Mapping[str, Sequence[str | None] | ParamSpec]) -> Callable:
    """Returns a Haiku function of stock modules, such as `hk.Linear`, with axes for their parameters.

        NAMES = {"*/attn/linear/w": ("heads", "embed"), "*/attn/*/w": ("embed", "heads"), "*ln*": ("norm",), …}
        net = hk.transform(logical.named(forward, NAMES))

    They are stored in float32, or the dtype of their `ParamSpec`. A layer stack inside the function uses the same
    table; paths of its parameters begin with the name of the stack.

    Args:
      fn: a Haiku function without state.
      table: axes or `ParamSpec` by pattern over paths (shell wildcards); the first that matches counts.
    """
    specs = {}
    for pattern, entry in table.items():
        axes = entry.axes if isinstance(entry, ParamSpec) else tuple(entry)
        check_names(axes, where=f"logical.named, {pattern!r}")
        if isinstance(entry, ParamSpec) and entry.exchanged:
            raise UserError(
                f"logical.named, {pattern!r}: exchanged = True needs logical.param, in a layer that exchanges"
            )
        specs[pattern] = entry if isinstance(entry, ParamSpec) else ParamSpec(axes)
    return _with_names(fn, _Names(specs, ()))


def named_within(fn: Callable, name: str) -> Callable:
    """Returns `fn` for its own `hk.transform`; its parameters still get the axes of the enclosing `named`, if any.

    `name` is the module name of its parameters in the outer function.
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
    """Returns trees of shapes and of specs of the parameters that `init(*args)` would create.

    It traces a new closure at each call: JAX would not trace the same function again, so nothing would be recorded.
    Raises UserError if a parameter has no named axes.
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
    """Freezes parameters at the end of a model's `init`; returns all parameters.

    Args:
      patterns: shell wildcards over paths (`layers/block/query`).
      dtype: stored dtype of frozen floating-point parameters; None: unchanged.
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
    return jax.tree.map(lambda spec: Axes(spec.axes, spec.exchanged), specs)
