"""Measures settings that change the speed of a step and never its results, and writes the fastest as a gin file.

The settings are tried in turn, in one process of each host: every candidate of a setting is compiled, and runs a few
steps of the experiment from the same kind of state with one batch. The fastest is kept for the settings that follow,
if it saves more than the fluctuation of the experiment as it is, which is measured first and last. Candidates that do
not compile or do not fit are left out. Nothing is saved but the file.
"""

import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import jax

from core import distributed, paths, slices, wrappers
from core.errors import UserError
from core.health import phase
from core.step import TrainState
from core.types import Batch
from launch.config import LoadedConfig, changes
from launch.experiment import Experiment
from launch.runs import training
from launch.runs.prepared_run import Run
from models.splash_tiles import Tiles
from parallel import compiler_options

FILE = "tuned.gin"
AS_IT_IS = "as it is"
LEAST_GAIN = 0.01
_STEPS = 15
_WARM_UP = 3  # first steps, which are not counted
_VMEM_KIB = "xla_tpu_scoped_vmem_limit_kib"
_ASYNC = "xla_enable_async_all_gather"
_TILES = "attention_tiles"
_PROBLEMS = (UserError, jax.errors.JaxRuntimeError, NotImplementedError, ValueError)  # of a candidate
_T = TypeVar("_T")


class Candidate(NamedTuple):
    """Values of settings.

    Attributes:
      name: for people.
      tiles: fields of `models.splash_tiles.Tiles`.
      options: of the compiler.
    """

    name: str = AS_IT_IS
    tiles: Mapping[str, Any] = MappingProxyType({})
    options: compiler_options.Overrides = MappingProxyType({})

    def joined(self, other: "Candidate") -> "Candidate":
        """Returns the values of both; where they differ, those of the other one."""
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
        """Returns the text of a gin file that changes the experiment to `applied`."""
        made, statements = self.applied(experiment), []
        if self.tiles:
            tiles = dataclasses.asdict(getattr(wrappers.field_owner(made.model, _TILES), _TILES))
            statements = ["from models import splash_tiles", *write.of_model(_TILES, "@splash_tiles.Tiles()")]
            statements += [f"splash_tiles.Tiles.{name} = {value!r}" for name, value in tiles.items()]
        if self.options:
            statements += write.of_experiment("compiler_options", repr(dict(made.compiler_options)))
        return changes.file(statements, header=header)


class Measured(NamedTuple):
    """What a candidate gave: the median seconds of a step, or the reason why there are none."""

    name: str
    seconds: float | None
    problem: str = ""


Levers = Sequence[Sequence[Candidate]]


def levers(generation: str, *, has_tiles: bool) -> Levers:
    """Returns the candidates of each setting for a chip generation, without the defaults of this project."""
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


def tune(run: Run, config: LoadedConfig, *, steps: int = _STEPS) -> Candidate:
    """Measures all candidates on the devices of a run, prints a table, and writes RUN/tuned.gin on host 0.

    Returns:
      What was chosen; `AS_IT_IS` if nothing is faster, and then no file is written.

    Raises:
      UserError: there are no settings to try on these chips, or the experiment does not run as it is.
    """
    write = changes.Changes(config, run.experiment.model)
    generation = slices.get(run.experiment.slice).generation
    found = levers(generation, has_tiles=write.constructor(_TILES) is not None)
    if not found:
        raise UserError(f"--tune: there are no settings to try on {generation}: expected TPUs")
    with training.open_batches(run, None) as batches:
        trials = _Trials(run, next(batches), steps=steps)
    chosen, rows = search(found, trials.measure)
    if run.host.is_zero:
        print(table(rows), flush=True)
        _report(run, chosen, rows, write)
    return chosen


def search(found: Levers, measure: Callable[[Candidate], Measured]) -> tuple[Candidate, list[Measured]]:
    """Tries the settings in turn, and returns what was chosen and all measurements, in order.

    Raises:
      UserError: the experiment does not run as it is.
    """
    rows = [measure(Candidate())]
    if (first := rows[0].seconds) is None:
        raise UserError(f"--tune: the experiment does not run as it is: {rows[0].problem}")
    chosen = Candidate()
    wins: list[tuple[Candidate, float]] = [(chosen, first)]
    for lever in found:
        tried = [(trial := chosen.joined(candidate), measure(trial)) for candidate in lever]
        rows += [row for _, row in tried]
        ended = [(row.seconds, trial) for trial, row in tried if row.seconds is not None]
        seconds, trial = min(ended, key=lambda pair: pair[0], default=(first, chosen))
        if seconds < (1 - LEAST_GAIN) * wins[-1][1]:
            chosen = trial
            wins.append((trial, seconds))
    rows.append(measure(Candidate()))
    again = rows[-1].seconds or first
    return (chosen if wins[-1][1] < (1 - LEAST_GAIN) * min(first, again) else Candidate()), rows


class _Trials:
    """Compiles and times candidates with one state and one batch."""

    def __init__(self, run: Run, batch: Batch, *, steps: int):
        self._run, self._batch, self._steps = run, batch, steps
        self._state: TrainState = run.program.init()
        self._texts: set[str] = set()
        self._agreements = itertools.count()

    def measure(self, candidate: Candidate) -> Measured:
        """Returns the seconds that host 0 measured, or the first problem of any host; the same on all hosts."""
        if self._run.host.is_zero:
            print(f"tune: {candidate.name}", flush=True)
        compiled, problem = self._attempt(lambda: self._compiled(candidate))
        if compiled is None:
            return Measured(candidate.name, None, problem)
        seconds, problem = self._attempt(lambda: self._timed(compiled))
        if seconds is None:
            self._state = self._run.program.init()  # the step that failed may have taken the state
            return Measured(candidate.name, None, problem)
        return Measured(candidate.name, distributed.decided_by_host_zero(lambda: seconds))

    def _attempt(self, work: Callable[[], _T]) -> tuple[_T | None, str]:
        """Returns the result of `work` if it succeeded on all hosts; otherwise None and the first problem of any."""
        found, problem = None, ""
        try:
            found = work()
        except _PROBLEMS as error:
            problem = str(error).strip().partition("\n")[0] or type(error).__name__
        name, limit = f"tune/{next(self._agreements)}", training.meeting_seconds(self._run)
        problem = next(filter(None, distributed.all_gather_text(name, problem, timeout_seconds=limit)), "")
        return (None if problem else found), problem

    def _compiled(self, candidate: Candidate) -> Any:
        program = candidate.applied(self._run.experiment).bind(jax.devices())
        lowered = program.lower_train_step()
        text = f"{lowered.as_text()}\n{program.compiler_options}"
        if candidate.name != AS_IT_IS and text in self._texts:
            raise UserError("the program is one that was measured")
        self._texts.add(text)
        with phase.enter(phase.COMPILING):
            return lowered.compile()

    def _timed(self, step: Any) -> float:
        """Returns the median seconds of a step."""
        seconds = []
        for number in range(_WARM_UP + self._steps):
            phase.at(phase.TRAINING, step=number + 1)
            start = time.perf_counter()
            self._state = jax.block_until_ready(step(self._state, self._batch))[0]
            seconds.append(time.perf_counter() - start)
        return statistics.median(seconds[_WARM_UP:])


def table(rows: Sequence[Measured]) -> str:
    """Returns a line for each measurement: seconds, their ratio to the experiment as it is, settings or the problem."""
    lines = ["s/step    ratio  settings"]
    for row in rows:
        if row.seconds is None:
            lines.append(f"{'-':<8}{'-':>8}  {row.name}: {row.problem}")
        else:
            lines.append(f"{row.seconds:<8.4g}{row.seconds / (rows[0].seconds or 1.0):8.3f}  {row.name}")
    return "\n".join(lines)


def _report(run: Run, chosen: Candidate, rows: Sequence[Measured], write: changes.Changes) -> None:
    """Writes RUN/tuned.gin, and prints how to use it."""
    if chosen.name == AS_IT_IS:
        print(f"tune: nothing saves more than {100 * LEAST_GAIN:g} %, so no file is written", flush=True)
        return
    seconds = {row.name: row.seconds for row in rows}
    ratio = (seconds[chosen.name] or 0.0) / (rows[0].seconds or 1.0)
    simulated = ", simulated: not a measurement of TPUs" if run.host.simulated else ""
    header = [
        f"Measured on {time.strftime('%Y-%m-%d', time.gmtime())} on {run.experiment.slice}{simulated}:",
        f"a step takes {ratio:.3f} of its time without this file.",
    ]
    path = paths.resolve(run.run_dir) / FILE
    paths.write_text_atomically(path, chosen.file(run.experiment, write, header=header))
    print(f"tune: {chosen.name}: {ratio:.3f} of the time of a step", flush=True)
    print(f"use it with --gin \"include '{path}'\"", flush=True)
