"""`python -m launch.plans.worker JOB.json`: compiles one candidate and writes its record; the plan's own process never
does, for the compiler holds 3 GiB until its process ends.

A job says experiment, slice, bindings and where the record goes. The process ends with whoever started it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
import threading
import time
from pathlib import Path

_WATCH_SECONDS = 1.0


def main(job_file: str) -> None:
    """Compiles what a job names."""
    job = json.loads(Path(job_file).read_text())
    threading.Thread(target=_end_with, args=(job["parent"],), daemon=True).start()
    from launch.plans import records

    records.write(Path(job["record"]), compile_one(job).as_json())


def _end_with(parent: int) -> None:
    """Ends this process when the one that started it is gone, however that went."""
    while os.getppid() == parent:
        time.sleep(_WATCH_SECONDS)
    os._exit(1)


def compile_one(job: dict):
    """The record of a job's candidate."""
    from core import slices, versions
    from launch import configuration
    from launch.hosts import tpu_host
    from launch.plans import records
    from parallel import analysis, compiled
    from parallel.compiled import OutOfHbmError
    from parallel.hlo.messages import compiler_messages
    from parallel.planning import cost

    made = {
        **versions.installed(versions.COMPILER),
        "sources": records.sources_digest(),
        "revision": tpu_host.revision(),
    }
    try:
        config = configuration.load(job["experiment"], bindings=job["bindings"], slice_name=job["slice"])
        experiment = config.build()
        bound = experiment.bind(compiled.devices_of(slices.get(experiment.slice)))
    except ValueError as error:
        return records.Record(records.REFUSED, reason=" ".join(str(error).split()), made_with=made)
    made["program"] = program_digest(bound)
    started = time.perf_counter()
    try:
        with compiler_messages(pass_on=False):
            found = analysis.analyze(bound)
    except OutOfHbmError as error:
        needed = records.gib_of(error.needed)
        seconds = time.perf_counter() - started
        reason = f"needs {error.needed} of {error.present}"
        return records.Record(
            records.TOO_MUCH, reason=reason, needed_bytes=needed, compile_seconds=seconds, made_with=made
        )
    schedule = bound.partitioner.strategy.pipeline
    return records.Record(
        records.COMPILED,
        needed_bytes=found.compiled.peak_bytes,
        state_bytes=found.compiled.argument_bytes,
        time=cost.step_time(found, bound),
        bubble=schedule.bubble(bound.partitioner.shape["stage"]) if schedule else 0.0,
        compile_seconds=found.compiled.compile_seconds,
        warnings=tuple(found.warnings),
        made_with=made,
    )


def program_digest(bound) -> str:
    """Of the traced training step and the layout of what it takes: equal for equal programs, whoever wrote them."""
    with bound.partitioner.tracing():
        traced = bound.jitted_train_step.trace(bound.abstract_state, bound.abstract_batch)
    text = _without_chance(str(traced.jaxpr))
    import jax

    layouts = [str(leaf.sharding.spec) for leaf in jax.tree.leaves((bound.abstract_state, dict(bound.abstract_batch)))]
    return hashlib.sha256("\n".join([text, *layouts]).encode()).hexdigest()[:16]


def _without_chance(text: str) -> str:
    """A traced program without what differs from process to process: addresses, and the order of sets."""

    def in_order(found: re.Match) -> str:
        return f"frozenset({sorted(found[1].split(', '))})"

    return re.sub(r"frozenset\(\{([^}]*)\}\)", in_order, re.sub(r"\b0x[0-9a-f]+\b", "", text))


if __name__ == "__main__":
    main(sys.argv[1])
