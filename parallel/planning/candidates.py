"""Enumerates the candidates of a plan: the layouts of a slice, with choices that trade memory for time."""

import dataclasses
import difflib
import functools
import inspect
import itertools
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType, ModuleType
from typing import Any, TypeAlias

from core import logical, wrappers
from core.errors import UserError
from core.rematerialization import OnHost
from core.slices import Slice
from core.types import ChoosesRemat, Model, can
from parallel import strategies, strategy
from parallel.pipeline import schedules
from parallel.pipeline.schedules import Schedule
from parallel.strategy import MESH_AXES, Strategy

_NOT_STRATEGIES = {"REPLICATED", "Strategy", "override"}
_REMAT_LISTS = ("REMAT", "REMAT_CHOICES")  # names under which a model lists its choices
LONG_ROW = 16_384  # positions
_SAVING, _REPEATING = ("gpipe", "one_f_one_b"), ("circular", "interleaved")  # schedules by their arguments
_REPEATS = (2, 4, 8)
_MICROBATCHES_PER_STAGE = (1, 2, 4)

Given: TypeAlias = Mapping[str, Mapping[str, Any]]  # by name of a constructor: arguments by name


@dataclasses.dataclass(frozen=True)
class Choice:
    """A pipeline schedule: name of its constructor, and pairs of argument and value."""

    constructor: str
    arguments: tuple[tuple[str, int | str], ...]

    @property
    def all_arguments(self) -> dict[str, Any]:
        """The arguments of the constructor, defaults included."""
        return _defaults(getattr(schedules, self.constructor)) | dict(self.arguments)

    def schedule(self) -> Schedule:
        """Calls the constructor with the arguments."""
        return getattr(schedules, self.constructor)(**self.all_arguments)


@dataclasses.dataclass(frozen=True)
class Layout:
    """A strategy: a function of `parallel.strategies`, and degrees.

    Attributes:
      degrees: pairs of a mesh axis (or `slices`) and its degree; -1 stands for all remaining devices.
      choice: the schedule of a pipeline; None for other strategies.
      ring: whether keys and values travel around a ring instead of being gathered.
      given: pairs of another argument and the value that the user gave.
    """

    constructor: str
    degrees: tuple[tuple[str, int], ...]
    choice: Choice | None = None
    ring: bool = False
    given: tuple[tuple[str, Any], ...] = ()

    @property
    def all_arguments(self) -> dict[str, Any]:
        """The arguments of the constructor but for `schedule`, defaults included."""
        more = {**dict(self.given), **({"ring": True} if self.ring else {})}
        found = _defaults(getattr(strategies, self.constructor)) | dict(self.degrees) | more
        return {name: value for name, value in found.items() if name != "schedule"}

    def strategy(self) -> Strategy:
        """Calls the constructor; equal layouts share one result."""
        return _tables(self)


@functools.cache  # candidates of one layout differ in other choices
def _tables(layout: Layout) -> Strategy:
    schedule: dict[str, Any] = {"schedule": layout.choice.schedule()} if layout.choice else {}
    return getattr(strategies, layout.constructor)(**layout.all_arguments, **schedule)


def _defaults(constructor: Callable[..., Any]) -> dict[str, Any]:
    parameters = inspect.signature(constructor).parameters.values()
    return {one.name: one.default for one in parameters if one.default is not inspect.Parameter.empty}


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One configuration that a plan may try.

    Attributes:
      layout: None for the experiment's own strategy.
      remat: None if the model offers no choice.
      accum_steps: microbatches over which a step accumulates gradients.
    """

    layout: Layout | None
    remat: str | None
    accum_steps: int
    batch_size: int

    def name(self, mesh: str) -> str:
        """Returns a short name, such as `fsdp_tensor: fsdp 4 x tensor 4, remat full, accum 2`.

        `mesh` is its part `fsdp 4 x tensor 4`; it may be empty.
        """
        layout = self.layout
        parts = [f"{layout.constructor if layout else 'as written'}: {mesh}".removesuffix(": ")]
        if layout and layout.ring:
            parts.append("keys in a ring")
        parts += [f"{name} {value}" for name, value in (layout.given if layout else ())]
        if layout and layout.choice:
            given = dict(layout.choice.arguments)
            rounds = f" x {given['repeats']}" if "repeats" in given else ""
            keeps = f", keeps {given['save']}" if "save" in given else ""
            parts.append(f"{layout.choice.constructor} {given['num_microbatches']}{rounds}{keeps}")
        if self.remat is not None:
            parts.append(f"remat {self.remat}")
        if self.accum_steps > 1:
            parts.append(f"accum {self.accum_steps}")
        return ", ".join(parts)


def layouts(
    slice: Slice,
    *,
    only: Sequence[str] = (),
    given: Given = MappingProxyType({}),
    has_experts: bool = True,
    has_long_rows: bool = False,
) -> list[Layout]:
    """Returns the layouts to try on a slice, without duplicates.

    Args:
      only: names of constructors; empty for all.
      given: arguments that the user gave; all layouts and schedules of these constructors have them.
      has_experts: if false, strategies that shard experts are tried only if named.
      has_long_rows: whether to also try `Layout.ring`.

    Raises:
      UserError: a plan cannot try a strategy in `only`.
    """
    require_known(only)
    known = _known()
    found: dict[Any, Layout] = {}
    for name in only or sorted(known, key=lambda name: len(known[name])):  # of equal layouts the simplest is kept
        own = given.get(name, {})
        others = tuple((key, own[key]) for key in own if key not in (*known[name], "ring", "schedule"))
        for degrees in _degrees(known[name], slice, own):
            rings = (
                (own["ring"],) if "ring" in own else (False, True) if has_long_rows and _has_ring(name) else (False,)
            )
            for choice, ring in itertools.product(_choices(name, dict(degrees), slice, given), rings):
                layout = Layout(name, degrees, choice, ring, others)
                if not (has_experts or only) and layout.strategy().param_rules.get("expert"):
                    continue
                found.setdefault(_what_it_is(layout.strategy(), slice), layout)
    return list(found.values())


def require_known(only: Sequence[str]) -> None:
    """Raises UserError if a plan cannot try one of these strategies."""
    known = _known()
    for name in only:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f" (did you mean {near[0]}?)" if near else ""
            raise UserError(f"--only {name}: no such strategy; expected some of {', '.join(sorted(known))}{hint}")


def _known() -> dict[str, dict[str, int | None]]:
    return {name: degrees for name in strategies.__all__ if (degrees := _parameters(name)) is not None}


def _has_ring(name: str) -> bool:
    return "ring" in inspect.signature(getattr(strategies, name)).parameters


def _parameters(name: str) -> dict[str, int | None] | None:
    """Returns the default of each degree (None: required); None if a plan cannot try the strategy."""
    if name in _NOT_STRATEGIES:
        return None
    degrees: dict[str, int | None] = {}
    for parameter in inspect.signature(getattr(strategies, name)).parameters.values():
        required = parameter.default is inspect.Parameter.empty
        if parameter.name in MESH_AXES or parameter.name == "slices":
            degrees[parameter.name] = None if required else parameter.default
        elif required:
            return None
    return degrees


def _degrees(
    defaults: Mapping[str, int | None], slice: Slice, given: Mapping[str, Any]
) -> Iterator[tuple[tuple[str, int], ...]]:
    if defaults.get("slices", 1) is None and slice.num_slices == 1:
        return  # a strategy for several slices
    divisors = [n for n in range(2, slice.devices_per_slice + 1) if slice.devices_per_slice % n == 0]
    if "slices" in defaults and slice.num_slices > 1:
        divisors.insert(0, 1)  # stages across slices need no axis within a slice
    fixed = {"slices": [slice.num_slices]} | {name: [-1] for name, default in defaults.items() if default == -1}
    fixed |= {name: [given[name]] for name in defaults if name in given}
    options = [fixed.get(name, sorted({*divisors, *[1] * (default == 1)})) for name, default in defaults.items()]
    for values in itertools.product(*options):
        degrees = tuple(zip(defaults, values, strict=True))
        within = math.prod(degree for name, degree in degrees if name != "slices" and degree > 0)
        if slice.devices_per_slice % within == 0:
            yield degrees


def _choices(name: str, degrees: Mapping[str, int], slice: Slice, given: Given) -> Sequence[Choice | None]:
    if "schedule" not in inspect.signature(getattr(strategies, name)).parameters:
        return [None]
    others = math.prod(degree for axis, degree in degrees.items() if axis not in ("stage", "slices") and degree > 0)
    stage = degrees.get("stage", 1)
    stage = slice.devices_per_slice // others if stage == -1 else stage
    stages = stage * (degrees.get("slices", 1) if slice.num_slices > 1 else 1)
    microbatches = dict.fromkeys(n * stages for n in _MICROBATCHES_PER_STAGE)
    kinds: list[tuple[str, dict[str, int | str]]] = [
        (kind, {"save": save}) for kind in _SAVING for save in schedules.SAVES
    ]
    kinds += [(kind, {"repeats": repeats}) for kind in _REPEATING for repeats in _REPEATS]
    kinds += [("zero_bubble", {})]
    chosen = given.get(name, {}).get("schedule")
    found = [
        Choice(kind, tuple({"num_microbatches": count, **more, **given.get(kind, {})}.items()))
        for count, (kind, more) in itertools.product(microbatches, kinds)
        if chosen in (None, kind)
    ]
    return list(dict.fromkeys(found))


def _what_it_is(tables: Strategy, slice: Slice) -> Any:
    try:
        shape = strategy.resolve(tables, slice)
    except UserError:
        return tables.name, tuple(tables.mesh_shape.items())

    def split(rules: Any) -> tuple:
        return tuple(
            tuple(a for a in logical.mesh_axes(logical.row(rules, name)) if shape[a] > 1) for name in logical.all_axes()
        )

    every = tables.param_rules, tables.activation_rules, tables.stored_optimizer_rules
    others = tuple(tables.dcn_shape.items()), tables.pipeline, tables.overlap_reduction
    return tuple(shape.items()), tuple(map(split, every)), *others


def remat_of(model: Model) -> str | None:
    """Returns the model's choice of `remat`; None if it offers no choice."""
    return model.remat if can(model, ChoosesRemat) else None


def remats(model: Model) -> list[str | None]:
    """Returns the choices of `remat` to try, and the model's own; [None] if it offers no choice."""
    if (owner := wrappers.field_owner(model, "remat")) is None:
        return [None]
    home = sys.modules[type(owner).__module__]
    beside = [value for value in vars(home).values() if isinstance(value, ModuleType)]
    lists = [getattr(place, table, ()) for place in (type(owner), home, *beside) for table in _REMAT_LISTS]
    names = [name for names in lists for name in names if not _is_on_host(names, name)]
    return [name for name in dict.fromkeys([*names, owner.remat]) if _accepts(owner, name)]


def _is_on_host(choices: Any, name: str) -> bool:
    return isinstance(choices, Mapping) and isinstance(choices[name], OnHost)


def _accepts(model: Any, remat: str) -> bool:
    try:
        dataclasses.replace(model, remat=remat)
    except ValueError:  # a model outside the tree may refuse a value without knowing UserError
        return False
    return True


def accumulations(rows_per_group: int) -> list[int]:
    """Returns the values of `accum_steps` to try, powers of two."""
    return [2**n for n in range(max(rows_per_group, 1).bit_length()) if rows_per_group % 2**n == 0]


def candidates(
    layouts: Sequence[Layout | None], *, own: Strategy, slice: Slice, model: Model, batch_sizes: Sequence[int]
) -> Iterator[Candidate]:
    """Yields the candidates of each layout and batch size.

    Args:
      layouts: None is the experiment's own strategy, `own`.
      batch_sizes: in rows of a global batch.
    """
    offered = remats(model)
    for layout, batch_size in itertools.product(layouts, batch_sizes):
        tables = layout.strategy() if layout else own
        try:
            shape = strategy.resolve(tables, slice)
        except UserError:  # the judge says why
            shape = None
        if schedule := strategy.schedule_of(tables, shape) if shape else tables.pipeline:
            # It has microbatches of its own. With the inputs of a stage saved, `remat` changes little.
            tried = [remat_of(model)] if schedule.save == "stage" else offered
            yield from (Candidate(layout, remat, 1, batch_size) for remat in tried)
            continue
        groups = logical.shards(tables.activation_rules["batch"], shape) if shape else batch_size
        rows, rest = divmod(batch_size, groups)
        for accum_steps in accumulations(1 if rest else rows):
            yield from (Candidate(layout, remat, accum_steps, batch_size) for remat in offered)
