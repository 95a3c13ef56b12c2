"""What compiling a candidate said, as a small JSON file, and where such files are kept.

A record belongs to a program, so its key is what makes one: slice, model, tables, shapes of a batch, optimizer, modules
of the user's own, the compiler's options, and the versions of jax, jaxlib and libtpu. Paths to data, learning rates and
lengths of runs are left out: another bucket is the same program.

There are two places. A user's own cache is also keyed by the text of the source files that make a program, so that an
edit compiles anew. `launch/plans/compiled/` is committed, for the experiments that are shipped, and is not: every
commit would empty it. Its records say which sources they were made of; where these have changed the plan says so, and
they hold a digest of the traced program, which only an edit that matters changes.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
import json
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from core import paths, slices, versions
from core.optimizers import schedules
from core.slices import GIB
from launch import environment
from launch.config import DEFAULTS, Binding, LoadedConfig, Macro, Reference, Settings, leaves, parse
from launch.environment import WORKSPACE
from launch.experiment import Experiment
from parallel import compiler_options
from parallel.planning.cost import AxisTime, StepTime

FORMAT = 2  # of a record; another number makes all there are unknown
COMMITTED = WORKSPACE / "launch" / "plans" / "compiled"
_FOLDERS = ("core", "models", "parallel")
# They only read programs, choose among them, or stand beside one that runs.
_NO_PART = (
    "agreement.py",
    "recording.py",
    "report.py",
    "lints.py",
    "candidates.py",
    "arithmetic.py",
    "placed.py",
    "units.py",
)
_BESIDE = ("checkpoints", "metrics", "training", "watch")

# Of `core.optimizers`: they give a step its rate, and cost nothing.
SCHEDULES = frozenset(name for name, value in vars(schedules).items() if inspect.isfunction(value) and name[0] != "_")
_OURS = tuple(WORKSPACE / name for name in ("core", "launch", "models", "parallel", "tasks"))
_INSTALLED = {"site-packages", "dist-packages"}

COMPILED, TOO_MUCH, REFUSED, FAILED = "compiled", "too much HBM", "refused", "failed"


@dataclasses.dataclass(frozen=True)
class Record:
    """What came of compiling one candidate.

    Attributes:
      status: COMPILED, TOO_MUCH, REFUSED, or FAILED, which is never kept.
      reason: why not; else empty.
      needed_bytes: of HBM on a chip: the peak, or what does not fit as the compiler words it.
      state_bytes: of that, state and batch.
      time: of the step; None where it was not compiled.
      bubble: share of a pipeline's time.
      compile_seconds: on the machine where it was done.
      warnings: of the compiler, without those that are known to be harmless.
      made_with: versions, digests of sources and program, git revision.
      is_committed: found in the workspace and not in a user's cache.
    """

    status: str
    reason: str = ""
    needed_bytes: float = 0.0
    state_bytes: float = 0.0
    time: StepTime | None = None
    bubble: float = 0.0
    compile_seconds: float = 0.0
    warnings: Sequence[str] = ()
    made_with: Mapping[str, str] = dataclasses.field(default_factory=dict)
    is_committed: bool = False

    def within(self, usable_bytes: float) -> Record:
        """As it is, or as too much where its peak is above what a chip has: not every such program is refused."""
        if self.status != COMPILED or self.needed_bytes <= usable_bytes:
            return self
        reason = f"needs {self.needed_bytes / GIB:.2f}GiB of {usable_bytes / GIB:.2f}GiB, though it compiled"
        return dataclasses.replace(self, status=TOO_MUCH, reason=reason, time=None)

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        plain = dataclasses.asdict(dataclasses.replace(self, time=None))
        del plain["is_committed"]
        if self.time:
            plain["time"] = {**self.time._asdict(), "traffic": [axis._asdict() for axis in self.time.traffic]}
        return plain


def from_json(plain: Mapping[str, Any], *, is_committed: bool = False) -> Record:
    """The record that `Record.as_json` gave."""
    time = plain["time"]
    if time:
        traffic = tuple(AxisTime(**{**axis, "axes": tuple(axis["axes"])}) for axis in time["traffic"])
        time = StepTime(**{**time, "traffic": traffic, "unpriced": tuple(time["unpriced"])})
    return Record(**{**plain, "time": time, "warnings": tuple(plain["warnings"])}, is_committed=is_committed)


def program_text(experiment: Experiment, config: LoadedConfig) -> str:
    """All that makes the program of a training step, equal for two experiments exactly if theirs are one.

    Of modules that are the user's own it has digests of their files.
    """
    parts = costing(experiment, config)
    if own := _own_modules(experiment, config):
        parts["own modules"] = own
    return "\n".join(f"{name}: {value!r}" for name, value in parts.items())


def costing(experiment: Experiment, settings: Settings) -> dict[str, Any]:
    """What of an experiment makes the program of its training step, as built; the optimizer as it is written."""
    spec = {k: (s.shape, str(s.dtype)) for k, s in sorted(experiment.task.spec(experiment.batch_size).items())}
    parts = {
        "slice": experiment.slice,
        "strategy": experiment.strategy,
        "model": experiment.model,
        "batch": spec,
        "accum_steps": experiment.accum_steps,
        "gather_once": experiment.gather_once,
        "optimizer": [str(binding) for binding in optimizer(settings)],
        "compiler options": sorted(_compiler_options(experiment).items()),
    }
    if experiment.non_finite == "skip":  # the one choice of these that is part of the program
        parts["non_finite"] = experiment.non_finite
    return parts


def _compiler_options(experiment: Experiment) -> dict[str, Any]:
    return compiler_options.options(slices.get(experiment.slice).generation, experiment.compiler_options)


def optimizer(settings: Settings) -> list[Binding]:
    """Returns the bindings that make the optimizer, without the values of the shared macros such as the learning rate.

    All of `core.optimizers`, and of every constructor and every macro of the user's own that the optimizer leads to.
    Schedules of ours in a scope are left out: they change no program.
    """
    ours = {symbol for symbol, module in settings.imports.items() if module == "core.optimizers"}
    home = next((s for s, module in settings.imports.items() if module == Experiment.__module__), "")
    direct = (b for b in settings.bindings if b.name == f"{home}.Experiment.optimizer")
    roots = [b for b in settings.bindings if b.name == "OPTIMIZER"]
    roots += [b for b in direct if isinstance(b.value, Reference)]
    schedules_of_ours = {f"{symbol}.{name}" for symbol in ours for name in SCHEDULES}
    reached = _reached(settings, roots) - schedules_of_ours
    return [
        b
        for b in settings.bindings
        if b in roots or b.selector in reached or (b.selector.partition(".")[0] in ours and not b.scope)
    ]


def _reached(settings: Settings, pending: Sequence[Binding]) -> set[str]:
    """The constructors and the macros of a user's own that bindings lead to."""
    found: set[str] = set()
    while pending:
        named = [leaf for binding in pending for leaf in leaves(binding.value)]
        new = {leaf.selector for leaf in named if isinstance(leaf, Reference)} - found
        new |= {leaf.name for leaf in named if isinstance(leaf, Macro)} - found - _shared_macros()
        found |= new
        pending = [b for b in settings.bindings if b.selector in new]
    return found


@functools.cache
def _shared_macros() -> frozenset[str]:
    text = (WORKSPACE / DEFAULTS).read_text()
    return frozenset(b.name for b in parse(text).bindings if b.is_macro)


def _own_modules(experiment: Experiment, settings: Settings) -> dict[str, str]:
    """Digests of the files of modules that a configuration names and that are neither ours nor installed, by name.

    Also where what it names is defined, and the model; what these modules import themselves is not looked at.
    """
    references = (leaf for b in settings.bindings for leaf in leaves(b.value) if isinstance(leaf, Reference))
    names = {type(experiment.model).__module__}
    for selector in {*(b.selector for b in settings.bindings if not b.is_macro), *(r.selector for r in references)}:
        symbol, _, name = selector.partition(".")
        module = settings.imports[symbol]
        names |= {module, getattr(getattr(sys.modules.get(module), name, None), "__module__", module)}
    files = {name: getattr(sys.modules.get(name), "__file__", None) for name in names}
    own = {name: Path(file).resolve() for name, file in sorted(files.items()) if file}
    return {n: hashlib.sha256(f.read_bytes()).hexdigest()[:16] for n, f in own.items() if not _is_known(f)}


def _is_known(file: Path) -> bool:
    """Whether a source file is ours, whose text stands in `sources_digest`, or of a package with a version."""
    installed = _INSTALLED & set(file.parts) or file.is_relative_to(sysconfig.get_path("stdlib"))
    return bool(installed) or any(file.is_relative_to(folder) for folder in _OURS)


@functools.cache
def sources_digest() -> str:
    """Of the text of every file that makes a program."""
    digest = hashlib.sha256()
    for path in sorted(p for folder in _FOLDERS for p in (WORKSPACE / folder).rglob("*.py")):
        if path.name not in _NO_PART and path.parent.name not in _BESIDE:
            digest.update(path.relative_to(WORKSPACE).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def key(text: str, *, sources: str = "") -> str:
    """Names a record.

    Args:
      text: `program_text`.
      sources: `sources_digest()`; nothing in the committed place.
    """
    parts = [str(FORMAT), text, json.dumps(versions.installed(versions.COMPILER), sort_keys=True)]
    return hashlib.sha256("\n".join([*parts, sources]).encode()).hexdigest()[:24]


class Store:
    """Records by key: those of this user, then those that are committed.

    Attributes:
      folder: the user's.
    """

    def __init__(self, folder: Path | None = None, *, with_committed: bool = True):
        self.folder = folder or user_folder()
        self._committed = COMMITTED if with_committed else None
        self._unreadable: set[Path] = set()

    def find(self, text: str) -> Record | None:
        """The record of a program; None where it was not compiled yet."""
        mine = self._read(self.path(text))
        if mine is not None:
            return mine
        plain = self._shipped.get(key(text))
        return from_json(plain, is_committed=True) if plain else None

    def path(self, text: str) -> Path:
        """Where the record of a program is kept for this user."""
        return self.folder / f"{key(text, sources=sources_digest())}.json"

    def _read(self, file: Path) -> Record | None:
        """A record of the user's; one that cannot be read is told of once, and is as good as none."""
        try:
            return from_json(json.loads(file.read_text()))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            if file not in self._unreadable:
                self._unreadable.add(file)
                said = f"{type(error).__name__}: {error}"
                print(f"warning: {file} is no record of a plan ({said}); taken as missing", file=sys.stderr)
            return None

    @functools.cached_property
    def _shipped(self) -> dict[str, Any]:
        files = sorted(self._committed.glob("*.json")) if self._committed else []
        return {k: plain for file in files for k, plain in json.loads(file.read_text())["records"].items()}


def user_folder() -> Path:
    """`$XDG_CACHE_HOME/renga/plans`."""
    root = environment.read("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "renga" / "plans"


def write(path: Path, plain: Any) -> None:
    """Writes JSON; who reads meanwhile sees the old file or the new one."""
    paths.write_text_atomically(path, json.dumps(plain, indent=1, sort_keys=True) + "\n")


def ship(path: Path, found: Iterator[tuple[str, Record]]) -> None:
    """Writes the records of a plan to be committed, by key; what failed says nothing of a program."""
    kept = {key(text): record.as_json() for text, record in found if record.status != FAILED}
    write(path, {"records": kept})


def gib_of(written: str) -> float:
    """`75.31GiB` of a compiler's message in bytes."""
    units = {"KiB": 2**10, "MiB": 2**20, "GiB": GIB}
    return float(written[:-3]) * units[written[-3:]]
