"""Runs one failure after another on a simulated slice, starts each run again, and holds it against an undisturbed one.

The one idea: what counts is the end. A run that failed and was started again must have the losses and the checkpoint
of a run that nothing happened to, bit for bit; how long it took and how it was said is measured beside that.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import re
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from core import paths, slices
from core.checkpoints import description, steps
from launch.failures import faults, stand_in
from launch.failures.faults import Fault
from launch.failures.scenarios import LOST, Scenario
from launch.pods import simulate

SLICE = "v4-32"
EXPERIMENT = "gin/quickstart.gin"
TOTAL_STEPS, INTERVAL = 16, 4
JOIN_SECONDS = 20
SMALL = (  # nothing that takes long to import, to compile or to compute
    "TASK = @synthetic.random_tokens()",
    "VOCAB_SIZE = 256",
    "NUM_STREAMS = 16",
    "BATCH_SIZE = 32",
    "WARMUP_STEPS = 3",
    "LENGTH = 64",
    f"CHECKPOINT_INTERVAL = {INTERVAL}",
    "EVAL_BATCHES = 0",
    "LOG_INTERVAL = 1",
    "transformer.Transformer.num_layers = 1",
    "transformer.Transformer.embed_dim = 64",
    "transformer.Transformer.mlp_dim = 128",
    "PROMPT = ''",
    "experiment.Experiment.compare_interval = 8",
)
_STOPPED_AT = TOTAL_STEPS // 2
LONG_STEPS = 120  # enough for every kill to find a run that is not done


class Ended(NamedTuple):
    """How one start ended.

    Attributes:
      code: of the launcher.
      seconds: it took.
      at: when, since the epoch.
    """

    code: int
    seconds: float
    at: float


@dataclasses.dataclass(frozen=True)
class Outcome:
    """A row of the table.

    Attributes:
      name: of the scenario.
      code: with which the run ended.
      ended_seconds: from the event to the end of the last host; None where there was none.
      said: the line that says it.
      lost_steps: made, and behind the newest checkpoint.
      recovered_seconds: from the next start to its first step; None where none was started.
      is_equal: losses and last checkpoint are those of an undisturbed run.
      problems: what is not as it must be.
    """

    name: str
    code: int
    ended_seconds: float | None
    said: str
    lost_steps: int
    recovered_seconds: float | None
    is_equal: bool
    problems: tuple[str, ...]


class Laboratory:
    """Runs of one small experiment in a folder of their own."""

    def __init__(self, folder: Path, *, requested: list[int], total_steps: int = TOTAL_STEPS, slice_name: str = SLICE):
        """`folder` gets a run directory for each scenario, and keeps them; `requested` is of `stop_requests`."""
        self._folder = folder
        self._requested = requested
        self._total_steps = total_steps
        self._slice = slices.get(slice_name)
        self._undisturbed: Path | None = None

    @property
    def undisturbed(self) -> Path:
        """A run that nothing happened to; made when it is first asked for."""
        if self._undisturbed is None:
            run_dir = self._folder / f"undisturbed-{self._total_steps}"
            shutil.rmtree(run_dir, ignore_errors=True)
            ended = self._start(run_dir)
            if ended.code:
                raise RuntimeError(f"the run that nothing happens to ended with {ended.code}: see {run_dir}/logs")
            self._undisturbed = run_dir
        return self._undisturbed

    def try_out(self, scenario: Scenario) -> Outcome:
        """Lets a run fail, starts it again, and compares."""
        run_dir = self._folder / re.sub(r"\W+", "_", scenario.name)
        shutil.rmtree(run_dir, ignore_errors=True)
        run_dir.mkdir(parents=True)
        if scenario.damage is not None:
            return self._damaged(scenario, run_dir)
        if scenario.refused is not None:
            return self._in_bucket(scenario, run_dir)
        fault = dataclasses.replace(scenario.fault, note=str(run_dir / "event"))
        first = self._start(run_dir, fault=fault, bindings=scenario.bindings)
        event = _event(run_dir)
        newest, made = _newest(run_dir), max(_losses(run_dir), default=0)
        again = self._start(run_dir) if scenario.starts_again else None
        return self._outcome(
            scenario,
            run_dir,
            code=first.code,
            ended_seconds=None if event is None or not first.code else first.at - event,
            lost_steps=made - newest if scenario.starts_again else 0,
            again=again,
            newest=newest,
        )

    def soak(self, *, every: int) -> list[Path]:
        """A long run without a fault, sampled every so many steps; a file of samples for each host.

        Raises:
          RuntimeError: it did not end well.
        """
        run_dir = self._folder / "soak"
        shutil.rmtree(run_dir, ignore_errors=True)
        run_dir.mkdir(parents=True)
        hosts = range(self._slice.hosts)
        note = run_dir / "samples"
        fault = Fault("soak", hosts=tuple(hosts), step=every, note=str(note))
        ended = self._start(run_dir, fault=fault, bindings=(f"CHECKPOINT_INTERVAL = {every}", "LOG_INTERVAL = 10"))
        if ended.code:
            raise RuntimeError(f"the soak ended with {ended.code}: see {run_dir}/logs")
        return [note.with_name(f"{note.name}-host_{host}.jsonl") for host in hosts]

    def kills(self, count: int, *, seed: int) -> Outcome:
        """Kills some host at some moment, again and again, in one run; then lets it end."""
        chance = random.Random(seed)
        run_dir = self._folder / "kills"
        shutil.rmtree(run_dir, ignore_errors=True)
        run_dir.mkdir(parents=True)
        name = f"kill -9 of a random host at {count} random moments"
        longest, lost, codes = 0.0, 0, set()
        for number in range(count):
            fault = faults.random_kill(chance, hosts=self._slice.hosts, note=str(run_dir / "event"))
            ended = self._start(run_dir, fault=fault)
            event = _event(run_dir)
            if event is None:
                raise RuntimeError(f"kill {number + 1} did not come ({fault}); the run ended with {ended.code}")
            longest, codes = max(longest, ended.at - event), codes | {ended.code}
            lost = max(lost, max(_losses(run_dir), default=0) - _newest(run_dir))
            print(
                f"  kill {number + 1} of {count}: host {fault.hosts[0]}, {fault.phase}; newest step {_newest(run_dir)}",
                flush=True,
            )
        newest = _newest(run_dir)
        again = self._start(run_dir)
        scenario = Scenario(name, LOST, r"host \d .*was lost")
        code = next(iter(codes - set(LOST)), LOST[0])
        return self._outcome(
            scenario, run_dir, code=code, ended_seconds=longest, lost_steps=lost, again=again, newest=newest
        )

    def _damaged(self, scenario: Scenario, run_dir: Path) -> Outcome:
        stopped = self._start(run_dir, steps=_STOPPED_AT)
        if stopped.code:
            raise RuntimeError(f"the run to be damaged ended with {stopped.code}: see {run_dir}/logs")
        scenario.damage(run_dir / "checkpoints")
        again = self._start(run_dir)
        return self._outcome(
            scenario, run_dir, code=again.code, ended_seconds=None, lost_steps=0, again=again, newest=_STOPPED_AT
        )

    def _in_bucket(self, scenario: Scenario, run_dir: Path) -> Outcome:
        """Stopped in the middle and started again; at the end all that is in the bucket is copied to `run_dir`."""
        place = f"gs://bucket/{run_dir.name}"
        fault = scenario.fault and dataclasses.replace(scenario.fault, note=str(run_dir / "event"))
        with stand_in.start() as bucket, _environment(bucket.environment):
            bucket.errors(scenario.refused)
            stopped = self._start(run_dir, fault=fault, steps=_STOPPED_AT, place=place)
            again = None if stopped.code else self._start(run_dir, place=place)
            counted = bucket.errors(0.0)
            bucket.copy(place, to=run_dir)
        return self._outcome(
            scenario,
            run_dir,
            code=again.code if again else stopped.code,
            ended_seconds=None,
            lost_steps=0,
            again=again,
            newest=_STOPPED_AT,
            counted=f", {counted['refused']} of {counted['answered']} requests answered with 503",
        )

    def _outcome(
        self, scenario, run_dir, *, code, ended_seconds, lost_steps, again, newest, counted: str = ""
    ) -> Outcome:
        said = _said(run_dir, scenario.says)
        same = is_equal(run_dir, self.undisturbed)
        problems = []
        if code not in scenario.codes:
            problems.append(f"exit code {code}, expected {' or '.join(map(str, scenario.codes))}")
        if not said:
            problems.append(f"no log says {scenario.says!r}")
        if again is not None and again.code:
            problems.append(f"started again it ended with {again.code}")
        if not same:
            problems.append("the end is not that of an undisturbed run")
        if lost_steps > 2 * INTERVAL:  # the newest may not have been written yet
            problems.append(f"{lost_steps} steps lost, with a checkpoint every {INTERVAL}")
        recovered = None if again is None else _seconds_to_a_step(run_dir, newest, started=again.at - again.seconds)
        said += counted
        return Outcome(scenario.name, code, ended_seconds, said, max(0, lost_steps), recovered, same, tuple(problems))

    def _start(
        self,
        run_dir: Path,
        *,
        fault: Fault | None = None,
        bindings: Sequence[str] = (),
        steps: int | None = None,
        place: str | None = None,
    ) -> Ended:
        """Logs are written to `run_dir`; everything else too, but for a `place` in a bucket."""
        words = ["train", EXPERIMENT, "--slice", self._slice.name, "--run-dir", place or str(run_dir)]
        for binding in (*SMALL, f"TOTAL_STEPS = {self._total_steps}", *bindings):
            words += ["--gin", binding]
        words += ["--steps", str(steps)] if steps else []
        module = ["launch.failures.host", fault.as_json(), "--"] if fault else ["launch"]
        if fault:
            Path(fault.note).unlink(missing_ok=True)
        os.environ["JAX_COMPILATION_CACHE_DIR"] = str(self._folder / "compiled")  # one start compiles for all
        start = time.time()
        with quiet(run_dir / "launcher.log"):
            code = simulate.run(
                self._slice,
                command=[sys.executable, "-m", *module, *words],
                log_directory=run_dir / "logs",
                requested=self._requested,
            )
        if self._requested:
            raise KeyboardInterrupt
        return Ended(code, time.time() - start, time.time())


@contextlib.contextmanager
def _environment(more: Mapping[str, str]) -> Iterator[None]:
    """What processes started now find beside what they always do."""
    before = dict(os.environ)
    os.environ.update(more)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextlib.contextmanager
def quiet(log: Path) -> Iterator[None]:
    """What the launcher prints goes to a file."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a") as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
        yield


def _event(run_dir: Path) -> float | None:
    note = run_dir / "event"
    return float(note.read_text()) if note.exists() else None


def _rows(run_dir: Path) -> list[dict]:
    file = run_dir / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return [row for line in lines if line.endswith("}") and "loss" in (row := json.loads(line))]


def _losses(run_dir: Path) -> dict[int, float]:
    """By step, the last that was written."""
    return {row["step"]: row["loss"] for row in _rows(run_dir)}


def _newest(run_dir: Path) -> int:
    return max(steps.complete(paths.resolve(run_dir / "checkpoints")), default=0)


def is_equal(run_dir: Path, undisturbed: Path) -> bool:
    """Every loss, and every array of the last checkpoint by its content."""
    mine, wanted = (_newest(folder) for folder in (run_dir, undisturbed))
    if mine != wanted or _losses(run_dir) != _losses(undisturbed):
        return False
    read = (description.read(paths.resolve(f / "checkpoints") / str(wanted)) for f in (run_dir, undisturbed))
    first, second = read
    return first.content == second.content


def _said(run_dir: Path, pattern: str) -> str:
    """The first line of a host's log that matches, without the time, host and step before it."""
    for log in sorted((run_dir / "logs").glob("host_*.log")):
        for line in log.read_text(errors="replace").splitlines():
            text = line.partition(" | ")[2]
            if not text.startswith("---") and re.search(pattern, text):
                return text.strip()
    return ""


def _seconds_to_a_step(run_dir: Path, newest: int, *, started: float) -> float | None:
    """From a start to the end of its first step."""
    after = [row["time_seconds"] for row in _rows(run_dir) if row["step"] > newest and row["time_seconds"] > started]
    return min(after) - started if after else None
