"""Measures settings that change a step's speed, and its results only by rounding; writes the fastest as gin.

Settings are tried one after another; the fastest candidate, a choice of their values, is kept while later settings are
tried. Every candidate trains a few steps from the same state with the same batch.
"""

import dataclasses
import hashlib
import itertools
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np

from core import slices, wrappers
from core.errors import UserError
from core.files import paths
from core.hosts import activity, distributed
from core.training.hooks import PreemptedError
from core.types import Batch
from launch.config import LoadedConfig, changes
from launch.experiment import Experiment
from launch.runs.prepared_run import Run
from models.decoder.attention.splash_tiles import Tiles
from parallel.compiled import compiler_options

FOLDER = "tune"  # folder in the run directory
FILE = "tuned.gin"
AS_IT_IS = "as it is"
LEAST_GAIN = 0.01
_STEPS = 15
_WARM_UP = 3  # first steps, which are not timed
_TOLERANCE = 0.01  # relative difference of losses; other tiles of a kernel round differently
_VMEM_KIB = "xla_tpu_scoped_vmem_limit_kib"
_ASYNC = "xla_enable_async_all_gather"
_TILES = "attention_tiles"
_T = TypeVar("_T")


class Candidate(NamedTuple):
    """A choice of values: fields of `splash_tiles.Tiles`, and compiler options."""

    name: str = AS_IT_IS
    tiles: Mapping[str, Any] = MappingProxyType({})
    options: compiler_options.Overrides = MappingProxyType({})

    def joined(self, other: "Candidate") -> "Candidate":
        """Returns the values of both candidates; the other's take precedence."""
        name = other.name if self.name == AS_IT_IS else f"{self.name}, {other.name}"
        return Candidate(name, {**self.tiles, **other.tiles}, {**self.options, **other.options})

    def applied(self, experiment: Experiment) -> Experiment:
        """Returns the experiment with these values."""
        model, own = experiment.model, wrappers.field_owner(experiment.model, _TILES)
        if self.tiles:
            tiles = dataclasses.replace(getattr(own, _TILES) or Tiles(), **self.tiles)
            model = wrappers.with_field(model, _TILES, tiles)
        options = {**experiment.compiler_options, **self.options}
        return dataclasses.replace(experiment, model=model, compiler_options=options)

    def file(self, experiment: Experiment, write: changes.Changes, *, header: Sequence[str]) -> str:
        """Returns the text of a gin file that makes the same changes as `applied`."""
        made, statements = self.applied(experiment), []
        if self.tiles:
            tiles = dataclasses.asdict(getattr(wrappers.field_owner(made.model, _TILES), _TILES))
            statements = [
                "from models.decoder.attention import splash_tiles",
                *write.of_model(_TILES, "@splash_tiles.Tiles()"),
            ]
            statements += [f"splash_tiles.Tiles.{name} = {value!r}" for name, value in tiles.items()]
        if self.options:
            statements += write.of_experiment("compiler_options", repr(dict(made.compiler_options)))
        return changes.file(statements, header=header)


Levers = Sequence[Sequence[Candidate]]


def levers(generation: str, *, has_tiles: bool) -> Levers:
    """Returns the candidates of each setting; [] if `generation` is not one of TPUs.

    `has_tiles`: whether the model's attention has tiles that can be set.
    """
    if generation not in slices.CHIPS:
        return []
    own = compiler_options.options(generation)
    shapes = [{"queries": q, "keys": k} for q, k in ((512, 1024), (1024, 512), (1024, 1024), (2048, 512))]
    tiles = [Candidate(f"tiles of {t['queries']} x {t['keys']}", tiles=t) for t in shapes]
    fused = Candidate("fused backward pass of attention", tiles={"fused_backward": True})
    limits = [kib for kib in (16384, 24576, 32768, 49152, 65536) if kib != own.get(_VMEM_KIB)]
    vmem = [Candidate(f"{kib // 1024} MiB of scoped VMEM", options={_VMEM_KIB: kib}) for kib in limits]
    gathers = Candidate("synchronous all-gathers", options={_ASYNC: False})
    return [*([tiles, [fused]] if has_tiles else []), vmem, [gathers]]


def refuse(*, generation: str, others: Sequence[str] = ()) -> None:
    """Raises UserError if nothing can be tried on `generation`, or other flags exclude --tune."""
    if others:
        raise UserError(f"--tune and {' and '.join(others)} exclude each other: give one of them")
    if not levers(generation, has_tiles=True):
        raise UserError(f"--tune: there are no settings to try on {generation}: expected a slice of TPUs")


def tune(run: Run, config: LoadedConfig, *, steps: int = _STEPS) -> Candidate:
    """Measures all candidates, prints a table, and writes tuned.gin on host 0.

    Each trains `steps` timed steps. If nothing is faster, the choice is named `AS_IT_IS`, and an earlier file is
    deleted.

    Raises:
      PreemptedError: a host received SIGTERM.
    """
    write = changes.Changes(config, run.experiment.model)
    generation = slices.get(run.experiment.slice).generation
    found = levers(generation, has_tiles=write.constructor(_TILES) is not None)
    with run.open_batches(None) as batches:
        trials = _Trials(run, next(batches), steps=steps)
    chosen, ratio = search(found, trials.measure)
    if run.host.is_zero:
        _report(run, chosen, ratio, write)
    return chosen


def search(found: Levers, measure: Callable[[Candidate], float | None]) -> tuple[Candidate, float]:
    """Tries the settings one by one; returns the choice and its time relative to the unchanged experiment.

    If none saves more than LEAST_GAIN, that is the unchanged experiment, and 1. `measure` returns seconds per step;
    None: a candidate cannot be used.

    Raises:
      UserError: the unchanged experiment does not run.
    """
    first = measure(Candidate())
    if first is None:
        raise UserError("--tune: the unchanged experiment does not run; the reason is above")
    chosen, least = Candidate(), first
    for lever in found:
        tried = [(measure(trial), trial) for trial in map(chosen.joined, lever)]
        ended = [(seconds, trial) for seconds, trial in tried if seconds is not None]
        seconds, trial = min(ended, key=lambda pair: pair[0], default=(least, chosen))
        if seconds < (1 - LEAST_GAIN) * least:
            chosen, least = trial, seconds
    if chosen.name == AS_IT_IS:
        return chosen, 1.0
    again, unchanged = measure(chosen), measure(Candidate())
    ratio = (again or math.inf) / min(first, unchanged or first)
    return (chosen, ratio) if ratio < 1 - LEAST_GAIN else (Candidate(), 1.0)


class _Trials:
    def __init__(self, run: Run, batch: Batch, *, steps: int):
        self._run, self._batch, self._steps = run, batch, steps
        self._losses: np.ndarray | None = None  # [_WARM_UP], of the unchanged experiment's first steps
        self._names: dict[str, str] = {}  # names of candidates by their programs
        self._agreements, self._numbers = itertools.count(), itertools.count(1)

    def measure(self, candidate: Candidate) -> float | None:
        """Returns host 0's seconds per step, or None after a problem; equal on all hosts."""
        with activity.enter(activity.COMPILING):
            compiled, problem = self._attempt(lambda: self._ready(candidate))
        seconds = None
        if compiled is not None:
            seconds, problem = self._attempt(lambda: self._timed(compiled))
            seconds = distributed.decided_by_host_zero(lambda: seconds)
        if self._run.host.is_zero:
            print(
                f"tune: {'-':>9}  {candidate.name}: {problem}" if seconds is None else line(candidate, seconds),
                flush=True,
            )
        return seconds

    def _attempt(self, work: Callable[[], _T]) -> tuple[_T | None, str]:
        """Returns the result of `work`, or None if it failed on any host, and the problem."""
        found, problem = None, ""
        try:
            found = work()
        except (PreemptedError, TimeoutError):
            raise
        except Exception as error:  # kernel compilers raise classes of their own
            problem = str(error).strip().partition("\n")[0] or type(error).__name__
        name, limit = f"tune/{next(self._agreements)}", self._run.meeting_seconds
        problem = next(filter(None, distributed.all_gather_text(name, problem, timeout_seconds=limit)), "")
        return (None if problem else found), problem

    def _ready(self, candidate: Candidate) -> Any:
        """Returns the candidate's compiled step. Raises UserError if an earlier candidate is the same program."""
        program = candidate.applied(self._run.experiment).bind(jax.devices())
        lowered = program.lower_train_step()
        text = f"{lowered.as_text()}\n{program.compiler_options}"
        known = self._names.setdefault(hashlib.sha256(text.encode()).hexdigest(), candidate.name)
        if known != candidate.name:
            raise UserError(f"the same program as {known!r}")
        return lowered.compile()

    def _timed(self, step: Any) -> float:
        state = jax.block_until_ready(self._run.program.init())
        seconds, losses = [], []
        for _ in range(_WARM_UP + self._steps):
            number = next(self._numbers)
            activity.at(activity.TRAINING, step=number)
            start = time.perf_counter()
            state, metrics = jax.block_until_ready(step(state, self._batch))
            seconds.append(time.perf_counter() - start)
            losses.append(float(metrics["loss"]))
            if distributed.preempted(number):
                raise PreemptedError("nothing was chosen; run the same command again", interrupted=False)
        self._require_same(np.array(losses[:_WARM_UP]))
        return statistics.median(seconds[_WARM_UP:])

    def _require_same(self, losses: np.ndarray) -> None:
        if self._losses is None:
            self._losses = losses
        elif not np.allclose(losses, self._losses, rtol=_TOLERANCE, atol=0.0, equal_nan=True):
            ours, theirs = ([f"{loss:.4g}" for loss in each] for each in (losses, self._losses))
            raise UserError(
                f"wrong results: losses {', '.join(ours)}; the unchanged experiment has {', '.join(theirs)}"
            )


def line(candidate: Candidate, seconds: float) -> str:
    """Returns the line to print for a measurement."""
    return f"tune: {seconds:>9.4g} s/step  {candidate.name}"


def _report(run: Run, chosen: Candidate, ratio: float, write: changes.Changes) -> None:
    path = paths.resolve(run.run_dir) / FILE
    if chosen.name == AS_IT_IS:
        path.unlink(missing_ok=True)
        print(f"tune: nothing saves more than {100 * LEAST_GAIN:g} %, so there is no {FILE}", flush=True)
        return
    found = run.meta["versions"]
    simulated = ", simulated: not a measurement of TPUs" if run.host.simulated else ""
    phases = f" of {run.span}, the only one that was measured" if run.span.count > 1 else ""
    header = [
        f"{chosen.name}: a step{phases} takes {ratio:.3f} of its time without this file.",
        f"Measured on {time.strftime('%Y-%m-%d', time.gmtime())} on {run.experiment.slice}{simulated},",
        f"with jax {found.get('jax')} and libtpu {found.get('libtpu')}.",
    ]
    paths.write_text_atomically(path, chosen.file(run.experiment, write, header=header))
    print(f"tune: {chosen.name}: {ratio:.3f} of the time of a step{phases}", flush=True)
    include = path
    if paths.is_remote(run.run_dir):
        include = FILE
        print(f"copy the file into the workspace: gcloud storage cp {path} {FILE}", flush=True)
    print(f"use it with --gin \"include '{include}'\"", flush=True)
