"""Runs the pipelines of registered seqio tasks on Apache Beam, for token caches of large data.

A worker reads a lane (a share of a split) and writes its examples to files, the parts:

  lanes -> Reshuffle -> `_write_lane` on the workers -> parts-HASH/LANE-BEGIN.npz -> `Parts.submit`, in order
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import hashlib
import importlib.util
import io
import os
import re
import secrets
import shlex
import socket
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil

from core.errors import UserError
from core.files import paths
from tasks.text import seqio_pipeline
from tasks.text.seqio_pipeline import Asked, Found, Lane
from tasks.text.token_writer import Converted

if TYPE_CHECKING:
    from tasks.text.filters import Filters

RUNNERS = ("DirectRunner", "FlinkRunner", "SparkRunner", "DataflowRunner")


@dataclasses.dataclass(frozen=True)
class Beam:
    """Selects how Apache Beam runs a pipeline.

    Attributes:
      runner: one of `RUNNERS`.
      options: Beam's options, as on a command line.
    """

    runner: str
    options: str = ""

    def __post_init__(self) -> None:
        try:
            shlex.split(self.options)
        except ValueError as error:
            raise UserError(f"--runner-options {self.options!r}: {error}") from error
        if importlib.util.find_spec("apache_beam") is None:
            raise UserError(
                f"--runner {self.runner} needs the package apache_beam, which excludes versions of this environment: "
                "docs/how-to/tokenize.md says how to make one for it"
            )

    def arguments(self, processes: int) -> list[str]:
        """Returns Beam's options; `processes` is the number of workers of the DirectRunner."""
        own = [f"--direct_num_workers={processes}", "--direct_running_mode=multi_processing"]
        own += ["--default_sdk_harness_log_level=ERROR"]
        return [f"--runner={self.runner}", *(own if self.runner == "DirectRunner" else []), *shlex.split(self.options)]


class Parts:
    """Makes parts on Beam's workers and reads them."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def make(
        self,
        asked: Asked,
        lanes: Sequence[Lane],
        most: int,
        filters: "Filters | None",
        arguments: Sequence[str],
    ) -> None:
        """Lets the workers write the parts of all lanes.

        Args:
          asked: the task or mixture.
          lanes: the shares of the data.
          most: maximum number of examples per part.
          filters: which examples are left out; None: none.
          arguments: options of the Apache Beam pipeline.

        Raises:
          UserError: the pipeline fails.
        """
        import apache_beam
        from apache_beam.options.pipeline_options import PipelineOptions

        pipeline = apache_beam.Pipeline(options=PipelineOptions(list(arguments)))
        marker = f"{self._folder}/command-{secrets.token_hex(8)}"
        paths.write_text_atomically(paths.resolve(marker), "workers look for this file\n")
        write = functools.partial(_write_lane, marker, asked, most, filters)
        given = pipeline | apache_beam.Create(list(map(tuple, lanes))) | apache_beam.Reshuffle()
        _ = given | "write parts" >> apache_beam.Map(write)  # errors show this label
        try:
            _run(pipeline)
        except Exception as error:  # runners raise types of their own
            said = " ".join(str(error).split())[-400:]
            raise UserError(
                f"Apache Beam failed: {type(error).__name__}: {said}. If a worker was killed, it often lacked memory: "
                "give fewer --processes. Run the same command again: it continues"
            ) from error
        finally:
            paths.resolve(marker).unlink(missing_ok=True)

    def submit(
        self,
        number: int,
        call: Callable[..., Any],
        asked: Asked,
        lane: Lane,
        begin: int,
        most: int,
        filters: "Filters | None",
    ) -> Any:
        """Returns a future of a part, or of its error; a part with an error is deleted.

        Args:
          number, call, asked, most, filters: not used.
          lane: the lane of the part.
          begin: number of the part's first example.
        """
        done: concurrent.futures.Future = concurrent.futures.Future()
        file = paths.resolve(_part(self._folder, lane, begin))
        if not file.exists():
            done.set_exception(
                UserError(f"the workers did not write {file}: --out must be a bucket or a disk that all workers share")
            )
            return done
        found, problem = _read(file.read_bytes())
        if found is None:
            file.unlink()  # the next start tries again
            done.set_exception(UserError(problem))
        else:
            done.set_result(found)
        return done


def _run(pipeline: Any) -> None:
    """Runs a pipeline to its end, or until any thread fails: the DirectRunner waits forever for a killed worker."""
    ended: concurrent.futures.Future = concurrent.futures.Future()
    others = set(psutil.Process().children(recursive=True))

    def end(error: BaseException | None) -> None:
        with contextlib.suppress(concurrent.futures.InvalidStateError):  # only the first end counts
            ended.set_exception(error) if error else ended.set_result(None)

    def run() -> None:
        try:
            pipeline.run().wait_until_finish()
        except BaseException as error:
            end(error)
        else:
            end(None)

    before, threading.excepthook = threading.excepthook, lambda failure: end(failure.exc_value)
    try:
        threading.Thread(target=run, daemon=True).start()
        ended.result()
    finally:
        threading.excepthook = before
        for process in set(psutil.Process().children(recursive=True)) - others:  # these only write parts
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def _write_lane(marker: str, asked: Asked, most: int, filters: "Filters | None", fields: tuple) -> int:
    """Runs on a worker: writes a lane's missing parts beside the marker file; returns the number of all its parts."""
    if not paths.resolve(marker).exists():
        raise UserError(
            f"the worker {socket.gethostname()} does not see {marker}, which the command wrote: --out must be a bucket "
            "or a disk that all workers share"
        )
    folder = marker.rpartition("/")[0]
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # seqio imports JAX, which must not use a worker's accelerator
    lane, begin, count, is_end = Lane(*fields), 0, 0, False
    try:
        while not is_end:
            file, found, problem = paths.resolve(_part(folder, lane, begin)), None, ""
            if file.exists():
                found, problem = _read(file.read_bytes())
            if found is None:
                try:
                    found = seqio_pipeline.convert(asked, lane, begin, most, filters)
                except UserError as error:
                    problem = str(error)
                _write(file, found, problem)
            count, is_end = count + 1, found is None or found.is_end
            begin += found.read if found else 0
    finally:
        seqio_pipeline.close(lane)
    return count


def _part(folder: str, lane: Lane, begin: int) -> str:
    name = re.sub(r"[^A-Za-z0-9.-]", "_", lane.task)
    if name != lane.task:  # seqio tells a:b from a_b
        name += f"-{hashlib.sha256(lane.task.encode()).hexdigest()[:8]}"
    return f"{folder}/{name}-{lane.split}-{lane.epoch}-{lane.index}-{lane.count}-{begin}.npz"


def _write(file: paths.Path, found: Found | None, problem: str) -> None:
    arrays: dict[str, Any] = {"problem": problem}
    if found:
        arrays = {name: value for name, value in found.converted._asdict().items() if value is not None}
        arrays |= {"read": found.read, "is_end": found.is_end}
    content = io.BytesIO()
    np.savez(content, **arrays)
    paths.write_bytes_atomically(file, content.getvalue())  # two workers may make the same part


def _read(content: bytes) -> tuple[Found | None, str]:
    with np.load(io.BytesIO(content)) as arrays:
        if "problem" in arrays:
            return None, str(arrays["problem"])
        converted = Converted(**{name: arrays[name] for name in Converted._fields if name in arrays})
        return Found(converted, int(arrays["read"]), bool(arrays["is_end"])), ""
