"""Compiles a program for its slice, and makes the record of the compiler's results."""

import time

from core import versions
from parallel.compiled import analysis, compiling
from parallel.compiled.compiling import OutOfHbmError
from parallel.compiled.hlo import messages
from parallel.partitioner import Program
from parallel.planning import cost, records
from parallel.planning.records import Record


def made_with() -> dict[str, str]:
    """Returns versions of jax, jaxlib and libtpu, the digest of Renga's sources and the git revision."""
    installed = versions.installed(versions.COMPILER)
    return {**installed, "sources": records.sources_digest(), "revision": versions.git_revision()}


def record(bound: Program) -> Record:
    """Compiles a program for its slice, and returns the record.

    Its status is TOO_MUCH if the step does not fit into HBM.
    """
    made = {**made_with(), "program": compiling.trace_digest(bound)}
    started = time.perf_counter()
    try:
        with messages.compiler_messages(pass_on=False):
            found = analysis.analyze(bound)
    except OutOfHbmError as error:
        return Record(
            records.TOO_MUCH,
            reason=f"needs {error.needed} of {error.present}",
            needed_bytes=error.needed_bytes,
            compile_seconds=time.perf_counter() - started,
            made_with=made,
        )
    return Record(
        records.COMPILED,
        needed_bytes=found.compiled.peak_bytes,
        needed_is_bound=found.compiled.peak_is_bound,
        state_bytes=found.compiled.argument_bytes,
        time=cost.step_time(found, bound),
        compile_seconds=found.compiled.compile_seconds,
        warnings=tuple(found.warnings),
        made_with=made,
    )
