"""Identities of training programs, to look up records of compilations and predictions.

They leave out, for example, paths to data; `fingerprint` also leaves out learning rates. They contain the flags that
XLA_FLAGS and LIBTPU_INIT_ARGS give to the compiler of the slice.
"""

import hashlib
import inspect
import sys
from collections.abc import Sequence
from typing import Any

from core import identity, optimizers, slices, versions
from core.batches import Field
from core.optimizers import schedules
from launch import environment
from launch.config import Binding, Macro, Reference, Settings, declared_macros, leaves
from launch.experiment import Experiment
from parallel.compiled import compiler_options

# Schedules of `core.optimizers`, which set the learning rate of a step and do not change its program.
_SCHEDULES = frozenset(name for name, value in vars(schedules).items() if inspect.isfunction(value) and name[0] != "_")

# Beginnings of flags that change no program for TPUs. JAX itself adds the last one on every TPU host.
_UNRELATED_FLAGS = (*environment.NOT_FOR_TPUS, "--xla_dump_", "--xla_tpu_use_enhanced_launch_barrier=true")


def program_text(experiment: Experiment, settings: Settings) -> str:
    """Returns a text that describes the training program, to look up compilations by."""
    parts = _parts(experiment, _optimizer(settings))
    if own := own_modules(experiment, settings):
        parts["own modules"] = own
    return identity.text(parts)


def layout_text(experiment: Experiment) -> str:
    """Returns a text that describes the training program without its optimizer and the user's own modules."""
    return identity.text(_parts(experiment, ()))


def fingerprint(experiment: Experiment, settings: Settings) -> str:
    """Returns a hash to look up predictions by: 16 hexadecimal digits."""
    parts = _parts(experiment, [binding for binding in _optimizer(settings) if not _is_rate(binding)])
    return hashlib.sha256(identity.text(parts).encode()).hexdigest()[:16]


def _is_rate(binding: Binding) -> bool:
    is_of_a_schedule = binding.selector.rpartition(".")[2] in _SCHEDULES
    return not binding.scope and (binding.parameter == "learning_rate" or is_of_a_schedule)


def _parts(experiment: Experiment, optimizer: Sequence[Binding]) -> dict[str, Any]:
    spec = {k: _field(field) for k, field in sorted(experiment.task.spec(experiment.batch_size).items())}
    slice_ = slices.get(experiment.slice)
    shape = experiment.strategy.mesh_shape
    options = compiler_options.options(slice_.generation, experiment.compiler_options, mesh_shape=shape)
    parts = {
        "slice": experiment.slice,
        "strategy": experiment.strategy,
        "model": experiment.model,
        "batch": spec,
        "accum_steps": experiment.accum_steps,
        "gather_once": experiment.gather_once,
        "optimizer": [str(binding) for binding in optimizer],
        "compiler options": sorted(options.items()),
    }
    if experiment.non_finite == "skip":  # the only such policy that changes the program
        parts["non_finite"] = experiment.non_finite
    if experiment.frozen:
        parts["frozen"] = (tuple(experiment.frozen), experiment.frozen_dtype)
    if flags := _flags(slice_):
        parts["flags"] = flags
    return parts


def _flags(slice_: slices.Slice) -> list[str]:
    """Returns the flags of the environment that the compiler of a slice reads."""
    found = [flag for name in environment.COMPILED_BY for flag in (environment.read(name) or "").split()]
    return [flag for flag in found if not (slice_.is_tpu and flag.startswith(_UNRELATED_FLAGS))]


def _field(field: Field) -> tuple[Any, ...]:
    own = () if field.axes == ("batch", "length")[: len(field.shape)] else (field.axes,)
    return (field.shape, str(field.dtype), *own)


def optimizer_text(settings: Settings) -> str:
    """Returns the optimizer's gin statements in one line, without those of schedules in a scope."""
    direct = _optimizer(settings)
    used = {leaf.name for binding in direct for leaf in leaves(binding.value) if isinstance(leaf, Macro)}
    return "; ".join(str(b) for b in settings.bindings if b in direct or (b.is_macro and b.name in used))


def _optimizer(settings: Settings) -> list[Binding]:
    ours = {symbol for symbol, module in settings.imports.items() if module == optimizers.__name__}
    home = next((s for s, module in settings.imports.items() if module == Experiment.__module__), "")
    direct = (b for b in settings.bindings if b.name == f"{home}.Experiment.optimizer")
    roots = [b for b in settings.bindings if b.name == "OPTIMIZER"]
    roots += [b for b in direct if b.value != Macro("OPTIMIZER")]
    reached = _reached(settings, roots) - {f"{symbol}.{name}" for symbol in ours for name in _SCHEDULES}
    return [
        b
        for b in settings.bindings
        if b in roots or b.selector in reached or (b.selector.partition(".")[0] in ours and not b.scope)
    ]


def _reached(settings: Settings, pending: Sequence[Binding]) -> set[str]:
    found: set[str] = set()
    shared = declared_macros()
    while pending:
        named = [leaf for binding in pending for leaf in leaves(binding.value)]
        new = {leaf.selector for leaf in named if isinstance(leaf, Reference)} - found
        new |= {leaf.name for leaf in named if isinstance(leaf, Macro)} - found - shared
        found |= new
        pending = [b for b in settings.bindings if b.selector in new]
    return found


def own_modules(experiment: Experiment, settings: Settings) -> dict[str, str]:
    """Returns digests of the user's own modules that the configuration uses, by name.

    Modules that these import may be left out.
    """
    references = (leaf for b in settings.bindings for leaf in leaves(b.value) if isinstance(leaf, Reference))
    names = {type(experiment.model).__module__}
    for selector in {*(b.selector for b in settings.bindings if not b.is_macro), *(r.selector for r in references)}:
        symbol, _, name = selector.partition(".")
        module = settings.imports[symbol]
        names |= {module, getattr(getattr(sys.modules.get(module), name, None), "__module__", module)}
    return versions.of_modules(names)
