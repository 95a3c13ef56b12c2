"""Injects failures into runs on a simulated slice, restarts each run, and compares it with an undisturbed run.

A run that failed and was restarted must have the same losses and the same last checkpoint as an undisturbed run, bit
for bit, and must have resumed from the expected step. The time it took and the reported message are recorded too.
"""

import contextlib
import dataclasses
import os
import random
import re
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from core import slices
from core.checkpoints import steps
from launch.hosts import simulate
from tests.lab import evidence, faults, gcs_emulator, growth
from tests.lab.evidence import Left
from tests.lab.faults import Fault
from tests.lab.scenarios import INTERVAL, LOST, STOPPED_AT, Scenario

SLICE = "v4-32"
EXPERIMENT = "gin/quickstart.gin"
TOTAL_STEPS = 16
SMALL = (  # quick to import, to compile and to compute
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
    "settings.Health.replica_check_interval = 8",
)
LONG_STEPS = 160  # enough that the run is not finished at any kill


class Ended(NamedTuple):
    """How one start ended.

    Attributes:
      code: exit code of the launcher.
      seconds: duration.
      at: when it ended, in seconds since the epoch.
    """

    code: int
    seconds: float
    at: float


@dataclasses.dataclass(frozen=True)
class Outcome:
    """A row of the table.

    Attributes:
      name: of the scenario.
      codes: exit codes of its starts, without repetitions.
      ended_seconds: from the event to the end of the last host, with the launcher's part; None if the event did not end
        the run.
      said: the line of a log that reports the failure.
      lost_steps: steps that were repeated.
      recovered_seconds: from the restart to its first step; None if there was no restart.
      problems: violated expectations.
      difference: how the final state differs from that of an undisturbed run; empty if it does not.
    """

    name: str
    codes: tuple[int, ...]
    ended_seconds: float | None
    said: str
    lost_steps: int
    recovered_seconds: float | None
    problems: tuple[str, ...] = ()
    difference: str = ""


class FaultHarness:
    """Runs a small experiment with injected failures, in one folder."""

    def __init__(self, folder: Path, *, requested: list[int], total_steps: int = TOTAL_STEPS, slice_name: str = SLICE):
        """Keeps a run directory for each scenario in `folder`; `requested` is the list of `supervise.stop_requests`."""
        self._folder = folder
        self._requested = requested
        self._total_steps = total_steps
        self._slice = slices.get(slice_name)
        self._undisturbed: Path | None = None

    @property
    def undisturbed(self) -> Path:
        """Run directory of an undisturbed run, which is made at the first access."""
        if self._undisturbed is None:
            run_dir = self._folder / f"undisturbed-{self._total_steps}"
            shutil.rmtree(run_dir, ignore_errors=True)
            ended = self._start(run_dir)
            if ended.code:
                raise RuntimeError(f"the undisturbed run ended with exit code {ended.code}: see {run_dir}/logs")
            self._undisturbed = run_dir
        return self._undisturbed

    def try_out(self, scenario: Scenario) -> Outcome:
        """Makes a run fail, restarts it, and compares it with the undisturbed run."""
        run_dir = self._fresh(scenario.name)
        if scenario.damage is not None:
            return self._damaged(scenario, run_dir)
        if scenario.refused is not None:
            return self._in_bucket(scenario, run_dir)
        return self._failing(scenario, run_dir)

    def soak(self) -> list[Path]:
        """Makes a long run without a fault, with many checkpoints and evaluations; returns a file of samples per host.

        Raises:
          RuntimeError: the run failed.
        """
        run_dir = self._folder / "soak"
        shutil.rmtree(run_dir, ignore_errors=True)
        run_dir.mkdir(parents=True)
        hosts = range(self._slice.hosts)
        note = run_dir / "samples"
        fault = Fault("soak", hosts=tuple(hosts), step=self._total_steps // growth.SAMPLES, note=str(note))
        often = growth.save_interval(self._total_steps)
        bindings = (f"CHECKPOINT_INTERVAL = {often}", f"EVAL_INTERVAL = {often}", "EVAL_BATCHES = 1")
        with _environment(growth.ENVIRONMENT):
            ended = self._start(run_dir, fault=fault, bindings=(*bindings, "LOG_INTERVAL = 10"))
        if ended.code:
            raise RuntimeError(f"the soak ended with exit code {ended.code}: see {run_dir}/logs")
        return [note.with_name(f"{note.name}-host_{host}.jsonl") for host in hosts]

    def kills(self, count: int, *, seed: int) -> Outcome:
        """Kills random hosts at random moments of one run, `count` times, then lets it finish."""
        chance = random.Random(seed)
        scenario = Scenario(f"kill -9 of a random host at {count} random moments", LOST, r"host \d .*was lost")
        run_dir = self._fresh(scenario.name)
        longest, lost, codes, problems, kinds = 0.0, 0, Counter(), [], Counter()
        for number in range(1, count + 1):
            before = evidence.left(run_dir)
            where = {"hosts": self._slice.hosts, "newest": before.newest, "note": str(run_dir / "event")}
            fault = faults.random_kill(chance, within=3 * INTERVAL, **where)
            ended = self._start(run_dir, fault=fault)
            event, after = evidence.event(run_dir), evidence.left(run_dir)
            if event is None:
                raise RuntimeError(f"kill {number} did not happen ({fault}); the run ended with exit code {ended.code}")
            longest = max(longest, ended.at - event)
            codes[ended.code] += 1
            kinds[fault.activity] += 1
            if after.starts > before.starts:  # it got far enough to record the step at which it began
                problems += _start_problems(run_dir, wanted=before.newest)
                lost = max(lost, before.made - before.newest)
            print(
                f"  kill {number} of {count}: host {fault.hosts[0]}, {fault.activity}; newest step {after.newest}",
                flush=True,
            )
        before, again = evidence.left(run_dir), self._start(run_dir)
        outcome = self._outcome(scenario, run_dir, tuple(codes), longest, before, again)
        how = ", ".join(f"{n} {activity}" for activity, n in sorted(kinds.items()))
        if not before.newest > INTERVAL * count / 4:
            problems.append(f"only step {before.newest} was reached: most kills happened before anything was saved")
        return dataclasses.replace(
            outcome,
            said=f"{how}, up to step {before.made}; {outcome.said}",
            lost_steps=max(lost, outcome.lost_steps),
            problems=(*problems, *outcome.problems),
        )

    def _fresh(self, name: str) -> Path:
        run_dir = self._folder / re.sub(r"\W+", "_", name)
        shutil.rmtree(run_dir, ignore_errors=True)
        run_dir.mkdir(parents=True)
        return run_dir

    def _stopped(self, run_dir: Path, **more) -> None:
        """Trains the first STOPPED_AT steps."""
        ended = self._start(run_dir, steps=STOPPED_AT, **more)
        if ended.code:
            raise RuntimeError(f"the first {STOPPED_AT} steps ended with exit code {ended.code}: see {run_dir}/logs")

    def _failing(self, scenario: Scenario, run_dir: Path) -> Outcome:
        if scenario.continues:
            self._stopped(run_dir)
        fault = dataclasses.replace(scenario.fault, note=str(run_dir / "event"))
        first = self._start(run_dir, fault=fault, bindings=scenario.bindings)
        event, before = evidence.event(run_dir), evidence.left(run_dir)
        said = evidence.said(run_dir, scenario.says)  # before another start adds its lines
        again = self._start(run_dir) if scenario.starts_again else None
        seconds = first.at - event if event and first.code else None
        return self._outcome(scenario, run_dir, (first.code,), seconds, before, again, said=said)

    def _damaged(self, scenario: Scenario, run_dir: Path) -> Outcome:
        self._stopped(run_dir)
        scenario.damage(run_dir / "checkpoints")
        before = evidence.left(run_dir)._replace(newest=scenario.goes_on_from)
        again = self._start(run_dir)
        return self._outcome(scenario, run_dir, (again.code,), None, before, again)

    def _in_bucket(self, scenario: Scenario, run_dir: Path) -> Outcome:
        """Stops and restarts a run in a bucket; then copies the contents of the bucket to `run_dir`."""
        place = f"gs://bucket/{run_dir.name}"
        fault = scenario.fault and dataclasses.replace(scenario.fault, note=str(run_dir / "event"))
        with gcs_emulator.start() as bucket, _environment(bucket.environment):
            bucket.errors(scenario.refused, seconds=scenario.slow_seconds)
            first = self._start(run_dir, fault=fault, place=place, steps=STOPPED_AT)
            there = bucket.list(f"{place}/checkpoints/")
            again = self._start(run_dir, place=place)
            counted = bucket.errors(0.0)
            bucket.copy(place, to=run_dir)
        seconds = first.at - evidence.event(run_dir) if first.code and evidence.event(run_dir) else None
        begun = {name.split("/")[0] for name in there}
        complete = {name.split("/")[0] for name in there if name.endswith(f"/{steps.COMMITTED_MARK}")}
        before = Left(made=STOPPED_AT, newest=max(map(int, complete), default=0), starts=1)
        outcome = self._outcome(scenario, run_dir, (first.code,), seconds, before, again)
        problems = [] if counted["refused"] else ["no request was refused"]
        problems += ["it was not killed during an upload"] if first.code and begun == complete else []
        return dataclasses.replace(
            outcome,
            said=f"{counted['refused']} of {counted['answered']} requests refused; {outcome.said}",
            problems=(*outcome.problems, *problems),
        )

    def _outcome(
        self,
        scenario: Scenario,
        run_dir: Path,
        codes: tuple[int, ...],
        ended_seconds: float | None,
        before: Left,
        again: Ended | None,
        *,
        said: str | None = None,
    ) -> Outcome:
        """Compares the result of a run with what is expected; `before` is the state before the restart `again`."""
        said = evidence.said(run_dir, scenario.says) if said is None else said
        said = said.replace(f"{self._folder}/", "")  # so that the text does not depend on the folder
        difference = evidence.difference(run_dir, self.undisturbed)
        problems = [
            f"exit code {code}, expected one of {scenario.codes}" for code in codes if code not in scenario.codes
        ]
        if scenario.fault and evidence.event(run_dir) is None:
            problems.append("the injected fault did not happen")
        if not said:
            problems.append(f"no log matches {scenario.says!r}")
        if (ended_seconds or 0.0) > scenario.ends_within_seconds:
            problems.append(
                f"it took {ended_seconds:.0f} s to end, expected {scenario.ends_within_seconds:.0f} at most"
            )
        if difference:
            problems.append(difference)
        lost, recovered = 0, None
        if again is not None:
            problems += [f"the restart ended with exit code {again.code}"] if again.code else []
            problems += _start_problems(run_dir, wanted=before.newest)
            resumed = evidence.last_session(run_dir).first_step
            lost = max(0, before.made - resumed)
            recovered = evidence.seconds_to_a_step(run_dir, behind=resumed, started=again.at - again.seconds)
        if lost > 2 * INTERVAL:  # the newest checkpoint may not have been written yet
            problems.append(f"{lost} steps lost, with a checkpoint every {INTERVAL}")
        return Outcome(scenario.name, codes, ended_seconds, said, lost, recovered, tuple(problems), difference)

    def _start(
        self,
        run_dir: Path,
        *,
        fault: Fault | None = None,
        bindings: Sequence[str] = (),
        steps: int | None = None,
        place: str | None = None,
    ) -> Ended:
        """Starts the run and waits for its end. Logs go to `run_dir`, the rest to `place` in a bucket, if given."""
        words = ["train", EXPERIMENT, "--slice", self._slice.name, "--run-dir", place or str(run_dir)]
        for binding in (*SMALL, f"TOTAL_STEPS = {self._total_steps}", *bindings):
            words += ["--gin", binding]
        words += ["--steps", str(steps)] if steps else []
        module = ["tests.lab.faulty_host", fault.as_json(), "--"] if fault else ["launch"]
        if fault:
            Path(fault.note).unlink(missing_ok=True)
        os.environ["JAX_COMPILATION_CACHE_DIR"] = str(
            self._folder / "compiled"
        )  # shared, so that only the first start compiles
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


def _start_problems(run_dir: Path, *, wanted: int) -> list[str]:
    found = evidence.last_session(run_dir).first_step
    return [] if found == wanted else [f"it went on from step {found}, and step {wanted} was there"]


@contextlib.contextmanager
def _environment(more: Mapping[str, str]) -> Iterator[None]:
    """Adds environment variables for the processes that are started inside."""
    before = dict(os.environ)
    os.environ.update(more)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextlib.contextmanager
def quiet(log: Path) -> Iterator[None]:
    """Redirects the launcher's output to a file."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a") as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
        yield
