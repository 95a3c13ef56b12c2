"""Compiles candidates in separate processes, at most two at a time.

The compiler holds gigabytes of memory until its process ends.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from core import slices
from core.errors import UserError
from core.hosts import tied_process
from core.slices import GIB
from launch import environment, program_identity
from launch.config import changes
from parallel.compiled import compiling, host_memory
from parallel.compiled.hlo import messages
from parallel.planning import compiled_records, records
from parallel.planning.records import Record

BYTES_PER_COMPILE = 4 * GIB  # the step of a 7B model takes about 3 GiB
MAX_CONCURRENT = 2
WORKER = (sys.executable, "-m", f"{environment.PACKAGE}launch.plan.compiling")
_POLL_SECONDS = 0.1


class Job(NamedTuple):
    """One candidate to compile.

    Attributes:
      bindings: the user's.
      candidate: the gin statements that change the experiment to the candidate.
      program: `program_identity.layout_text` of the candidate.
      record: the file for its record.
    """

    name: str
    experiment: str
    slice: str
    bindings: tuple[str, ...]
    candidate: tuple[str, ...]
    program: str
    record: Path


class _Running(NamedTuple):
    job: Job
    process: subprocess.Popen
    folder: Path


def max_concurrent() -> int:
    """Returns how many compilations to run at once, from 1 to MAX_CONCURRENT."""
    room = host_memory.available_bytes() // BYTES_PER_COMPILE
    return int(max(1, min(MAX_CONCURRENT, os.cpu_count() or 1, room)))


def compile_all(
    jobs: Iterator[Job],
    *,
    wanted: Callable[[], int],
    on_start: Callable[[Job], None] = lambda job: None,
    command: Sequence[str] = WORKER,
) -> Iterator[tuple[Job, Record]]:
    """Compiles jobs in worker processes, and yields each with its record as it finishes.

    If the iteration ends early, the workers are killed.

    Args:
      wanted: returns how many more candidates that fit are wanted.
      command: the command line of a worker, without its job's file.
    """
    running: list[_Running] = []
    with tempfile.TemporaryDirectory(prefix="renga-plan-") as scratch:
        try:
            while True:
                while len(running) < min(max_concurrent() if running else 1, wanted()) and (job := next(jobs, None)):
                    on_start(job)
                    running.append(_start(job, Path(tempfile.mkdtemp(dir=scratch)), command))
                if not running:
                    return
                ended = [one for one in running if one.process.poll() is not None]
                for one in ended:
                    running.remove(one)
                    yield one.job, _record(one)
                if not ended:
                    time.sleep(_POLL_SECONDS)
        finally:
            for one in running:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(one.process.pid, signal.SIGKILL)
                one.process.wait()


def _start(job: Job, folder: Path, command: Sequence[str]) -> _Running:
    (folder / "job.json").write_text(json.dumps({**job._asdict(), "record": str(job.record)}))
    env = os.environ | {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    env |= messages.AUDIBLE_WARNINGS
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(environment.import_root()), env.get("PYTHONPATH", "")]))
    with (folder / "output").open("wb") as output:
        process = subprocess.Popen(
            tied_process.tied([*command, str(folder / "job.json")]),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=env,
            process_group=0,  # Ctrl-C reaches only this process, which then stops the worker
        )
    return _Running(job, process, folder)


def _record(ended: _Running) -> Record:
    if ended.process.returncode == 0 and ended.job.record.is_file():
        return records.from_json(json.loads(ended.job.record.read_text()))
    lines = (ended.folder / "output").read_text(errors="replace").strip().splitlines()
    last = lines[-1] if lines else "no output"
    return Record(records.FAILED, reason=f"the compiler's process ended with {ended.process.returncode}: {last}")


def main(job_file: str) -> None:
    """Compiles the candidate that a job file describes, and writes its record."""
    job = json.loads(Path(job_file).read_text())
    given = {"bindings": job["bindings"], "candidate": job["candidate"], "program": job["program"]}
    record = compile_one(job["experiment"], slice_name=job["slice"], **given)
    records.write(Path(job["record"]), record.as_json())


def compile_one(
    experiment_file: str, *, slice_name: str, bindings: Sequence[str], candidate: Sequence[str], program: str
) -> Record:
    """Compiles one candidate in this process; its record is REFUSED if its layout does not fit the slice.

    Args:
      experiment_file: the experiment.
      slice_name: the slice.
      bindings: the user's.
      candidate: the gin statements that change the experiment to the candidate.
      program: `program_identity.layout_text` of the candidate.

    Raises:
      UserError: the configuration has mistakes, or gives another program; neither must be recorded as the candidate's.
    """
    experiment = changes.load(experiment_file, candidate, bindings=bindings, slice_name=slice_name).build()
    if program_identity.layout_text(experiment) != program:
        raise UserError(
            f"{experiment_file}: not compiled, because its own bindings change the candidate to another program: "
            f"expected what {'; '.join(candidate)} select"
        )
    try:
        bound = experiment.bind(compiling.devices_of(slices.get(experiment.slice)))
    except UserError as error:
        reason = " ".join(str(error).split())
        return Record(records.REFUSED, reason=reason, made_with=compiled_records.made_with())
    return compiled_records.record(bound)


if __name__ == "__main__":
    main(sys.argv[1])
