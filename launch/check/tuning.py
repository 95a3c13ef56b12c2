"""Measures settings that change the speed of a step and not its results, and writes the fastest as gin bindings.

The levers are tried in turn: each candidate of a lever is a short run of the experiment with it and with what the
levers before gave, and is kept if its steps are the fastest by more than one per cent. All hosts read the seconds from
the run directory, so that they choose alike. A candidate that does not compile, or does not fit, is passed over.
"""

import statistics
import subprocess
import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from core import metrics, paths, slices, wrappers
from core.errors import UserError
from launch import environment
from launch.config import loader
from launch.plan.search import Writer
from parallel import compiler_options

NAME = "tuned.gin"
STEPS = 20  # of each run
AS_IT_IS = "as it is"
_WARM_UP = 5  # first steps, which are not counted
_LEAST_GAIN = 0.01
_ARRIVAL_SECONDS = 60.0  # in which the last step of a run that is over appears in the run directory
_VMEM_KIB = "xla_tpu_scoped_vmem_limit_kib"
_ASYNC = "xla_enable_async_all_gather"


class Candidate(NamedTuple):
    """One setting, or several that were chosen.

    Attributes:
      name: for people.
      tiles: arguments of `models.splash_tiles.Tiles`.
      options: of the compiler.
    """

    name: str
    tiles: Mapping[str, Any] = MappingProxyType({})
    options: compiler_options.Overrides = MappingProxyType({})

    def joined(self, other: "Candidate") -> "Candidate":
        """Returns both; where they differ, the other one counts."""
        name = other.name if self.name == AS_IT_IS else f"{self.name}, {other.name}"
        return Candidate(name, {**self.tiles, **other.tiles}, {**self.options, **other.options})


Levers = Mapping[str, Sequence[Candidate]]


def levers(generation: str, *, has_tiles: bool) -> Levers:
    """Returns the candidates for a chip generation, by lever."""
    tiles = [{"queries": q, "keys": k} for q, k in ((1024, 512), (1024, 1024), (2048, 512), (2048, 1024))]
    shapes = [Candidate(f"tiles of {t['queries']} x {t['keys']}", tiles=t) for t in tiles]
    fused = Candidate("fused backward pass of attention", tiles={"fused_backward": True})
    has_async = compiler_options.options(generation).get(_ASYNC)
    found: dict[str, Sequence[Candidate]] = {"tiles": shapes, "backward": [fused]} if has_tiles else {}
    found["vmem"] = [
        Candidate(f"{kib // 1024} MiB of scoped VMEM", options={_VMEM_KIB: kib}) for kib in _vmem(generation)
    ]
    if has_async:
        found["gathers"] = [Candidate("synchronous all-gathers", options={_ASYNC: False})]
    return found


def _vmem(generation: str) -> list[int]:
    """Returns limits to try, KiB, other than the default of this project."""
    own = compiler_options.options(generation).get(_VMEM_KIB)
    return [kib for kib in (24576, 32768, 49152, 65536) if kib != own]


class Tuning:
    """Finds the fastest settings of one experiment on one slice."""

    def __init__(
        self, slice_: slices.Slice, experiment: str, *, run_dir: str, bindings: Sequence[str], simulated: bool = False
    ):
        self._slice, self._experiment, self._run_dir = slice_, experiment, run_dir
        self._given, self._is_simulated = tuple(bindings), simulated
        config = loader.load(experiment, bindings=bindings, slice_name=slice_.name)
        built = config.build()
        if built.total_steps < STEPS:
            raise UserError(
                f"{experiment}: TOTAL_STEPS = {built.total_steps}: expected at least {STEPS} to be measured"
            )
        self._own_options = dict(built.compiler_options)
        has_tiles = wrappers.field_path(built.model, "attention_tiles") is not None
        self._decoder = Writer(config, built).remat_home if has_tiles else None  # one constructor has both fields
        module = self._decoder.partition(".")[0] if self._decoder else ""
        self._import = config.import_line(module) if module else ""

    @property
    def levers(self) -> Levers:
        """The candidates."""
        return levers(self._slice.generation, has_tiles=self._decoder is not None)

    def statements(self, chosen: Candidate) -> list[str]:
        """Returns the gin statements of settings."""
        found = []
        if chosen.tiles:
            found += [self._import, "from models import splash_tiles"]
            found += [f"{self._decoder}.attention_tiles = @splash_tiles.Tiles()"]
            found += [f"splash_tiles.Tiles.{name} = {value!r}" for name, value in sorted(chosen.tiles.items())]
        if chosen.options:
            options = {**self._own_options, **chosen.options}
            found += ["from launch import experiment", f"experiment.Experiment.compiler_options = {options!r}"]
        return found

    def file(self, chosen: Candidate, *, header: Sequence[str]) -> str:
        """Returns the text of a gin file with settings."""
        statements = self.statements(chosen)
        imports = [line for line in dict.fromkeys(statements) if line.startswith(("from ", "import "))]
        rest = [line for line in statements if line not in imports]
        comment = [f"# {line}" for line in header]
        return "\n".join([*comment, "from __gin__ import dynamic_registration", *imports, "", *rest]) + "\n"

    def measure(self) -> tuple[Candidate, dict[str, float | None]]:
        """Measures all candidates. Returns what was chosen, and the seconds of a step of each; None: it failed."""
        best, found = Candidate(AS_IT_IS), {AS_IT_IS: self._seconds(Candidate(AS_IT_IS), number=0)}
        least = found[AS_IT_IS]
        if least is None:
            raise UserError(f"{self._experiment} does not run as it is: see the lines above")
        for lever in self.levers.values():
            trials = {trial.name: trial for trial in map(best.joined, lever)}
            times = {
                name: self._seconds(trial, number=len(found) + i) for i, (name, trial) in enumerate(trials.items())
            }
            found |= times
            ended = {name: seconds for name, seconds in times.items() if seconds is not None}
            fastest = min(ended, key=lambda name: ended[name], default=None)
            if fastest is not None and ended[fastest] < (1 - _LEAST_GAIN) * least:
                best, least = trials[fastest], ended[fastest]
        return best, found

    def write(self, *, is_host_zero: bool) -> None:
        """Measures, prints a table, and writes RUN/tuned.gin on host 0 if something is faster."""
        chosen, found = self.measure()
        print(table(found), flush=True)
        if chosen.name == AS_IT_IS:
            print(f"tune: nothing is faster by more than {_LEAST_GAIN:.0%}: no file is needed", flush=True)
            return
        ratio = (found[chosen.name] or 0.0) / (found[AS_IT_IS] or 1.0)
        where = f"{self._slice.name}{', simulated' if self._is_simulated else ''}"
        header = [
            f"{self._experiment} on {where}, measured on {time.strftime('%Y-%m-%d', time.gmtime())}:",
            f"{chosen.name}; {ratio:.3f} of the time of a step without this file.",
        ]
        file = paths.resolve(self._run_dir) / NAME
        if is_host_zero:
            paths.write_text_atomically(file, self.file(chosen, header=header))
        print(f"tune: {chosen.name}: {ratio:.3f} of the time of a step; {file} has it", flush=True)
        print(f"use it (copied to the workspace, if it is remote) with --gin \"include '{file}'\"", flush=True)

    def _seconds(self, candidate: Candidate, *, number: int) -> float | None:
        """Runs the experiment for a few steps; returns the median seconds of a step, None if it did not end them."""
        directory = f"{self._run_dir}/tune/{number:02d}"
        bindings = [*self._given, *self.statements(candidate), "LOG_INTERVAL = 1", "PROFILE_STEPS = ()"]
        command = [*environment.COMMAND, "pod", self._slice.name, self._experiment, "--run-dir", directory]
        command += ["--steps", str(STEPS), *(["--simulate"] if self._is_simulated else [])]
        print(f"tune: {candidate.name}", flush=True)
        subprocess.run([*command, *(word for b in bindings for word in ("--gin", b))], check=False)
        return measured(directory, patience=0 if self._is_simulated else _ARRIVAL_SECONDS)


def measured(run_dir: str, *, patience: float) -> float | None:
    """Returns the median seconds of a step of a run that is over, without the first ones; None if a step is missing."""
    until = time.monotonic() + patience
    while True:
        timed = metrics.read(run_dir).curve("step_seconds")
        if timed and timed[-1][0] >= STEPS:
            return statistics.median(value for step, value in timed if step > _WARM_UP)
        if time.monotonic() > until:
            return None
        time.sleep(1.0)


def table(found: Mapping[str, float | None]) -> str:
    """Returns a line for each candidate: seconds, and the ratio to the experiment as it is."""
    first = next(iter(found.values()))
    lines = ["s/step    ratio  settings"]
    for name, seconds in found.items():
        ratio = f"{seconds / first:8.3f}" if seconds is not None and first else "        "
        lines.append(f"{'failed' if seconds is None else f'{seconds:.4g}':<8}{ratio}  {name}")
    return "\n".join(lines)
