"""Compiles a training step for a slice with the real TPU compiler, on any machine.

A step that does not fit into HBM does not compile.
"""

import hashlib
import re
import time
from typing import Any, NamedTuple

import jax

from core.errors import UserError
from core.slices import Slice
from parallel import mesh
from parallel.partitioner import Program


class Compiled(NamedTuple):
    """The compiler's results for one program on one chip.

    Attributes:
      peak_bytes: maximum HBM in use at any time, arguments included.
      peak_is_bound: whether `peak_bytes` is only an upper bound.
    """

    slice: Slice
    peak_bytes: int
    peak_is_bound: bool
    argument_bytes: int
    temp_bytes: int
    compile_seconds: float
    hlo: str


_PREFIXES = "KMGTP"  # of the compiler's sizes, each 1,024 times the one before


class OutOfHbmError(UserError):
    """A program needs more HBM than a chip has; `needed` and `present` are texts such as `75.31GiB`."""

    def __init__(self, message: str, *, needed: str, present: str):
        super().__init__(message)
        self.needed = needed
        self.present = present

    @property
    def needed_bytes(self) -> float:
        """`needed` as a number."""
        return _bytes(self.needed)

    @property
    def present_bytes(self) -> float:
        """`present` as a number."""
        return _bytes(self.present)


def _bytes(written: str) -> float:
    number, prefix = written.removesuffix("iB")[:-1], written.removesuffix("iB")[-1]
    return float(number) * 2.0 ** (10 * (_PREFIXES.index(prefix) + 1))


STEP = "the step"
FIX = "Shard more (fsdp, tensor), recompute more (remat = 'full'), increase accum_steps or reduce the batch size."


def compile_for_slice(program: Program, *, dump_to: str | None = None) -> Compiled:
    """Compiles the training step of a program, whose devices are `devices_of(slice)`.

    `dump_to` is a folder for the compiler's dump files; None: no dump.

    Raises:
      OutOfHbmError: the step does not fit.
      UserError: the compiler does not know one of the options.
    """
    start = time.perf_counter()
    executable = compile_lowered(program.lower_train_step(), program, dump_to=dump_to)
    return results(executable, program, seconds=time.perf_counter() - start)


def compile_lowered(
    lowered: Any, program: Program, *, what: str = STEP, fix: str = FIX, dump_to: str | None = None
) -> Any:
    """Compiles a lowered function of a program.

    Args:
      lowered: from `jax.jit(...).lower`.
      what, fix: for errors: what is compiled, and what to do if it does not fit.
      dump_to: folder for the compiler's dump files; None: no dump.

    Raises:
      OutOfHbmError, UserError: as `compile_for_slice`.
    """
    try:
        return lowered.compile(compiler_options={"xla_dump_to": dump_to} if dump_to else None)
    except jax.errors.JaxRuntimeError as error:
        raise _explained(error, program, what, fix) from error


def results(executable: Any, program: Program, *, seconds: float) -> Compiled:
    """Returns the compiler's results for an executable."""
    memory: Any = executable.memory_analysis()
    slice_ = program.partitioner.slice
    return Compiled(
        slice=slice_,
        peak_bytes=_peak_bytes(memory, usable=slice_.chip.usable_hbm_bytes),
        peak_is_bound=memory.host_temp_size_in_bytes > 0,
        argument_bytes=memory.argument_size_in_bytes,
        temp_bytes=memory.temp_size_in_bytes,
        compile_seconds=seconds,
        hlo=executable.as_text(),
    )


def _peak_bytes(memory: Any, *, usable: int) -> int:
    """With arrays on the host, the compiler's peak is useless, and an upper bound is returned."""
    if not memory.host_temp_size_in_bytes:
        return memory.peak_memory_in_bytes
    results = memory.output_size_in_bytes - memory.alias_size_in_bytes  # of arguments whose memory is not used again
    return min(memory.argument_size_in_bytes + results + memory.temp_size_in_bytes, usable)


# The compiler has one message for the whole program, and another when temporaries alone exceed the HBM.
_TOO_MUCH = (
    rf"Used (?P<needed>[\d.]+[{_PREFIXES}]) of (?P<present>[\d.]+[{_PREFIXES}]) hbm",
    rf"\((?P<needed>[\d.]+[{_PREFIXES}])\) exceeds available HBM \((?P<present>[\d.]+[{_PREFIXES}])\)",
)


def _explained(error: Exception, program: Program, what: str, fix: str) -> Exception:
    if unknown := re.search(r"No such compile option: '([^']*)'", str(error)):
        return UserError(
            f"this version of libtpu has no compiler option {unknown[1]!r} (set by "
            f"parallel.compiled.compiler_options for {program.partitioner.slice.generation}, or by "
            "experiment.Experiment.compiler_options): set it to None to "
            "remove it, or correct its name"
        )
    found = next((m for pattern in _TOO_MUCH if (m := re.search(pattern, str(error)))), None)
    if found is None:
        return error
    needed, present = f"{found['needed']}iB", f"{found['present']}iB"
    slice_ = program.partitioner.slice
    message = (
        f"strategy {program.partitioner.strategy.name!r} on {slice_.name}: {what} needs {needed} of HBM per "
        f"{slice_.chip.unit}, but a {slice_.chip.unit} has {present}. {fix}"
    )
    return OutOfHbmError(message, needed=needed, present=present)


def devices_of(slice: Slice) -> list[jax.Device]:
    """Returns the devices with which a `Partitioner` compiles for a TPU slice."""
    return mesh.topology_devices(slice)


def trace_digest(bound: Program) -> str:
    """Returns a hash of the traced training step and the layouts of its inputs, 16 hexadecimal digits."""
    with bound.partitioner.tracing():
        traced = bound.jitted_train_step.trace(bound.abstract_state, bound.abstract_batch)
    text = re.sub(r"\b0x[0-9a-f]+\b", "", str(traced.jaxpr))  # addresses differ between processes
    text = re.sub(r"frozenset\(\{([^}]*)\}\)", _sorted_set, text)  # so does the order of sets
    layouts = [str(leaf.sharding.spec) for leaf in jax.tree.leaves((bound.abstract_state, dict(bound.abstract_batch)))]
    return hashlib.sha256("\n".join([text, *layouts]).encode()).hexdigest()[:16]


def _sorted_set(match: re.Match) -> str:
    return f"frozenset({sorted(match[1].split(', '))})"
