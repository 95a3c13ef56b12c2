"""What a plan tries: every layout that the strategies allow on a slice, with every choice that trades memory for time.

The one idea: nothing here lists strategies, schedules or rematerialisations. A strategy enters by being in
`strategies.__all__` with degrees among its parameters, a choice of `remat` by being one that the model accepts, so
that what is added there is tried here.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import itertools
import math
import sys
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

from core import logical
from core.errors import UserError
from core.slices import Slice
from core.types import ChoosesRemat, Model, can
from parallel import strategies, strategy
from parallel.pipeline import schedules
from parallel.pipeline.schedules import Schedule
from parallel.strategy import MESH_AXES, Strategy

_NOT_STRATEGIES = {"REPLICATED", "Strategy", "override"}
_REMAT_LISTS = ("REMAT", "REMAT_CHOICES")  # what a model calls its list
_REPEATS = (2, 4)
_MICROBATCHES_PER_STAGE = (1, 2, 4)


@dataclasses.dataclass(frozen=True)
class Choice:
    """A schedule by its constructor and arguments.

    Attributes:
      constructor: a function of `parallel.pipeline.schedules`.
      arguments: as gin would bind them.
    """

    constructor: str
    arguments: tuple[tuple[str, int | str], ...]

    def schedule(self) -> Schedule:
        """The schedule."""
        return getattr(schedules, self.constructor)(**dict(self.arguments))


@dataclasses.dataclass(frozen=True)
class Layout:
    """A strategy by its constructor and degrees.

    Attributes:
      constructor: a function of `parallel.strategies`.
      degrees: every degree that it takes; -1 is what is left.
      choice: the schedule, of a pipeline.
    """

    constructor: str
    degrees: tuple[tuple[str, int], ...]
    choice: Choice | None = None

    def strategy(self) -> Strategy:
        """The tables."""
        schedule = {"schedule": self.choice.schedule()} if self.choice else {}
        return getattr(strategies, self.constructor)(**dict(self.degrees), **schedule)


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One configuration that a plan may try.

    Attributes:
      layout: None for the experiment's own strategy.
      remat: None where the model offers no choice, or where a pipeline decides by itself.
      accum_steps: microbatches of a step, one after the other.
      batch_size: rows of a global batch.
    """

    layout: Layout | None
    remat: str | None
    accum_steps: int
    batch_size: int


def layouts(slice: Slice, *, only: Sequence[str] = ()) -> list[Layout]:
    """Every strategy with every combination of degrees that makes a mesh of its own on this slice.

    Args:
      slice: to be spread over.
      only: names of constructors; none: all.

    Raises:
      ValueError: a name that is not a strategy.
    """
    known = sorted(constructors(), key=lambda name: len(_parameters(name) or ()))  # the simplest of equals stays
    for name in only:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            raise UserError(
                f"--only {name}: no such strategy; expected some of {', '.join(known)}"
                + (f" (did you mean {near[0]}?)" if near else "")
            )
    found: dict[Any, Layout] = {}
    for name in only or known:
        for degrees in _degrees(getattr(strategies, name), slice):
            for choice in _choices(name, dict(degrees), slice):
                layout = Layout(name, degrees, choice)
                found.setdefault(_what_it_is(layout.strategy(), slice), layout)
    return list(found.values())


def constructors() -> list[str]:
    """The strategies that take degrees and nothing that has no default."""
    return [name for name in strategies.__all__ if name not in _NOT_STRATEGIES and _parameters(name) is not None]


def _parameters(name: str) -> dict[str, int | None] | None:
    """Degrees with their defaults, None where there is none; None altogether where something else must be given."""
    degrees: dict[str, int | None] = {}
    for parameter in inspect.signature(getattr(strategies, name)).parameters.values():
        required = parameter.default is inspect.Parameter.empty
        if parameter.name in MESH_AXES or parameter.name == "slices":
            degrees[parameter.name] = None if required else parameter.default
        elif required:
            return None
    return degrees


def _degrees(constructor: Any, slice: Slice) -> Iterator[tuple[tuple[str, int], ...]]:
    """The free axis takes what is left; every other one each divisor above 1."""
    defaults = _parameters(constructor.__name__) or {}
    if defaults.get("slices", 1) is None and slice.num_slices == 1:
        return  # it is for several slices
    divisors = [n for n in range(2, slice.chips_per_slice + 1) if slice.chips_per_slice % n == 0]
    options: dict[str, tuple[int, ...]] = {}
    for name, default in defaults.items():
        if name == "slices":
            options[name] = (slice.num_slices,)
        elif default == -1:
            options[name] = (-1,)
        elif "slices" in defaults and slice.num_slices > 1:
            options[name] = (1, *divisors)  # of stages across slices, one inside each is a layout too
        else:
            options[name] = tuple(divisors)
    for values in itertools.product(*options.values()):
        degrees = dict(zip(options, values, strict=True))
        within = math.prod(degree for name, degree in degrees.items() if name != "slices" and degree > 0)
        if slice.chips_per_slice % within == 0:
            yield tuple(degrees.items())


def _choices(name: str, degrees: dict[str, int], slice: Slice) -> list[Choice | None]:
    if "schedule" not in inspect.signature(getattr(strategies, name)).parameters:
        return [None]
    stages = degrees.get("stage", 1) * (degrees.get("slices", 1) if slice.num_slices > 1 else 1)
    found: list[Choice | None] = []
    for microbatches in dict.fromkeys(n * stages for n in _MICROBATCHES_PER_STAGE):
        common: dict[str, int | str] = {"num_microbatches": microbatches}
        for save in schedules.SAVES:
            found += [Choice(kind, tuple({**common, "save": save}.items())) for kind in ("gpipe", "one_f_one_b")]
            found += [
                Choice("circular", tuple({**common, "repeats": repeats, "save": save}.items())) for repeats in _REPEATS
            ]
    return found


def _what_it_is(tables: Strategy, slice: Slice) -> Any:
    """Equal for two strategies that do the same on this slice: an axis of one chip is none."""
    try:
        shape = strategy.resolve(tables, slice)
    except ValueError:
        return tables.name, tuple(tables.mesh_shape.items())

    def split(rules: Any) -> tuple:
        return tuple(
            tuple(a for a in logical.mesh_axes(logical.row(rules, name)) if shape[a] > 1) for name in logical.all_axes()
        )

    every = tables.param_rules, tables.activation_rules, tables.stored_optimizer_rules
    return tuple(shape.items()), tuple(map(split, every)), tuple(tables.dcn_shape.items()), tables.pipeline


def remat_of(model: Model) -> str | None:
    """What the model's backward pass computes again, by its own name; None where it offers no choice."""
    return model.remat if can(model, ChoosesRemat) else None


def remats(model: Model) -> list[str | None]:
    """What the model offers to compute again, by its own list; [None] where it offers no choice."""
    if not (dataclasses.is_dataclass(model) and can(model, ChoosesRemat)):
        return [None]
    home = sys.modules[type(model).__module__]
    beside = [value for value in vars(home).values() if isinstance(value, ModuleType)]
    lists = [getattr(place, table, ()) for place in (type(model), home, *beside) for table in _REMAT_LISTS]
    names = [name for names in lists for name in names]
    return [name for name in dict.fromkeys([*names, model.remat]) if _accepts(model, name)]


def _accepts(model: Any, remat: str) -> bool:
    try:
        dataclasses.replace(model, remat=remat)
    except ValueError:
        return False
    return True


def accumulations(rows_per_group: int) -> list[int]:
    """Powers of two, down to one row at a time."""
    return [2**n for n in range(max(rows_per_group, 1).bit_length()) if rows_per_group % 2**n == 0]


def candidates(
    layouts: Sequence[Layout | None], *, own: Strategy, slice: Slice, model: Model, batch_sizes: Sequence[int]
) -> Iterator[Candidate]:
    """Every layout with every choice that goes with it.

    Args:
      layouts: None is the experiment's own strategy.
      own: that strategy.
      slice: to be spread over.
      model: whose rematerialisations.
      batch_sizes: rows of a global batch.
    """
    offered = remats(model)
    for layout, batch_size in itertools.product(layouts, batch_sizes):
        tables = layout.strategy() if layout else own
        if tables.pipeline:  # it computes layers again by itself, and cuts rows by itself
            yield Candidate(layout, None, 1, batch_size)
            continue
        for accum_steps in accumulations(_rows_per_group(tables, slice, batch_size)):
            yield from (Candidate(layout, remat, accum_steps, batch_size) for remat in offered)


def _rows_per_group(tables: Strategy, slice: Slice, batch_size: int) -> int:
    try:
        shape = strategy.resolve(tables, slice)
    except ValueError:
        return 1
    rows, rest = divmod(batch_size, logical.shards(tables.activation_rules["batch"], shape))
    return 1 if rest else rows
