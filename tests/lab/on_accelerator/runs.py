"""Steps that are runs of the product: started by its commands, and measured by the files that they write.

The files are read while the run trains, and every figure is recorded as soon as it is there. A run is ended when it
has what a step needs.
"""

import json
import statistics
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from core.checkpoints import steps as checkpoint_steps
from core.files import paths
from core.hosts import exit_codes
from core.slices import GIB
from core.training import profile_reader
from core.training.profiling import PROFILES, SUFFIX
from launch import environment
from tests.lab.on_accelerator import decoder
from tests.lab.on_accelerator.recorder import Recorder, Request

_LOOK_SECONDS = 0.5
_FIXTURE = environment.WORKSPACE / "tests" / "models" / "fixtures" / "families" / "smollm2"
_SETTLED = 10  # steps until times are counted
_PROFILED, _SAVED = 20, 30  # the steps of the large decoder at which it is profiled and saved
_SAVING_SECONDS, _REHEARSED_SAVING_SECONDS = 90, 900  # for which a checkpoint is waited for
_MOST_PROFILE_BYTES = 15 * 2**20
_ATTEMPTS = 3  # with fewer and fewer rows
_GOAL = 0.45


class RunError(Exception):
    """A run ended with an error.

    Attributes:
      code: its exit code.
    """

    def __init__(self, code: int):
        super().__init__(f"the run ended with exit code {code}; the log has its output")
        self.code = code


class Run:
    """One run of a command, and what its directory holds.

    Attributes:
      folder: that directory.
    """

    def __init__(self, request: Request, name: str, *words: str, bindings: Sequence[str] = ()):
        self.folder = Path(request.work, name)
        given = [word for binding in bindings for word in ("--gin", binding)]
        command = [*environment.COMMAND, *words, "--run-dir", str(self.folder), *given]
        print(" ".join(command), flush=True)
        self._began = time.time()
        self._process = subprocess.Popen(command, cwd=environment.WORKSPACE)

    def looks(self) -> Iterator[list[dict[str, Any]]]:
        """Yields the lines of its metrics that have a loss, again and again, the last time when it has ended.

        Raises:
          RunError: it ended with an error.
        """
        try:
            while True:
                code = self._process.poll()
                yield self.lines()
                if code is not None:
                    break
                time.sleep(_LOOK_SECONDS)
        finally:
            self._process.kill()
            self._process.wait()
        if code:
            raise RunError(code)

    def lines(self, key: str = "loss") -> list[dict[str, Any]]:
        """Returns the complete lines of its metrics that have a key."""
        file = self.folder / "metrics.jsonl"
        text = file.read_text() if file.exists() else ""
        whole = [line for line in text.splitlines() if line.endswith("}")]
        return [row for line in whole if key in (row := json.loads(line))]

    def first_step_seconds(self) -> float:
        """Returns seconds from the start of the command to the end of its first step, with compiling."""
        return self.lines()[0]["time_seconds"] - self._began

    @property
    def is_exhausted(self) -> bool:
        """Returns whether memory was exhausted: the run then leaves a profile of the memory."""
        return any((self.folder / "memory").glob("exhausted-*"))


def quickstart(record: Recorder, request: Request) -> None:
    """Trains `gin/quickstart.gin` as its page says, to the sample of text."""
    steps = request.sized(200, 20)
    run = Run(request, "quickstart", "pod", "local", "gin/quickstart.gin", "--steps", str(steps))
    for lines in run.looks():
        if lines:
            record.figure("first step after", run.first_step_seconds(), "s")
            record.figure("steps", lines[-1]["step"], beside=f"of {steps}")
            record.figure("loss", lines[-1]["loss"], "nats", beside=f"{lines[0]['loss']:.3g} at the first step")
    if found := run.lines("validation/loss"):
        record.figure("validation loss", found[-1]["validation/loss"], "nats")
    saved = checkpoint_steps.complete(paths.resolve(run.folder / "checkpoints"))
    record.figure("last checkpoint", max(saved, default=0), "step", ok=max(saved, default=0) == steps)


def sudoku(record: Recorder, request: Request) -> None:
    """Trains the recursive model on Sudoku 4x4."""
    goal, key = 0.99, "validation/exact_accuracy"
    steps = request.sized((), ("--steps", "4"))
    smaller = request.sized(
        (),
        (
            "EVAL_INTERVAL = 4",
            "puzzles.sudoku.num_train = 40",
            "puzzles.sudoku.num_test = 128",
            "puzzles.sudoku.num_aug = 2",
        ),
    )
    run = Run(request, "sudoku", "train", "gin/trm/sudoku4.gin", "--slice", request.slice, *steps, bindings=smaller)
    best = 0.0
    for lines in run.looks():
        if lines:
            record.figure("steps", lines[-1]["step"])
            record.figure("step", _median(lines, "step_seconds", after=2) * 1000, "ms")
        for line in run.lines(key):
            best = max(best, line[key])
            passed = None if request.is_rehearsal else best >= goal
            record.figure("puzzles solved", 100 * best, "%", f"goal {goal:.0%} after 300 steps", passed)


def published(record: Recorder, request: Request) -> None:
    """Tunes a published model on Python's library, or the small random one of the tests on random tokens."""
    folder, steps = request.model or str(_FIXTURE), request.sized(50, 5)
    task = ["TASK = @text.python_source()", "text.python_source.vocabulary = @vocabularies.tokenizer()"]
    task += ["text.python_source.length = %LENGTH", "text.python_source.num_streams = %NUM_STREAMS"]
    if not request.model:
        task = ["TASK = @synthetic.random_tokens()", "VOCAB_SIZE = 83", "LENGTH = 32"]
    run = Run(
        request,
        "published",
        *("train", "gin/finetune.gin", "--slice", request.slice, "--steps", str(steps)),
        bindings=[f"FOLDER = {folder!r}", "EVAL_INTERVAL = 1000", "LOG_INTERVAL = 5", *task],
    )
    record.figure("folder", Path(folder).name, beside="" if request.model else "random weights: no --model was given")
    for lines in run.looks():
        if lines:
            record.figure("steps", lines[-1]["step"], beside=f"of {steps}")
            record.figure("loss", lines[-1]["loss"], "nats", beside=f"{lines[0]['loss']:.3g} at the first step")
            record.figure("tokens/s", _median(lines, "tokens_per_second", after=2))


def training(record: Recorder, request: Request) -> None:
    """Trains the large decoder: speed, memory, a profile, and a checkpoint that is saved beside computing."""
    jax.config.update("jax_platforms", "cpu")  # of this process, which only plans; the run needs all devices
    file = decoder.write(request)
    chosen = decoder.choices(request)
    for attempt in range(1, _ATTEMPTS + 1):
        choice = chosen[0]
        run = _started(record, request, file, choice, name=f"training_{attempt}")
        try:
            _measure_training(record, request, run, choice)
            return
        except RunError as error:
            smaller = [other for other in chosen if other.peak_bytes < 0.85 * choice.peak_bytes]
            may_fit = error.code == exit_codes.RAISED and smaller  # no other code can be a lack of memory
            if not may_fit or attempt == _ATTEMPTS:
                raise
            why = "memory was exhausted" if run.is_exhausted else "it failed; the log says why"
            record.figure(f"attempt {attempt}", f"{choice.rows} rows, remat {choice.remat!r}", beside=why)
            chosen = smaller


def _started(record: Recorder, request: Request, file: Path, choice: decoder.Choice, *, name: str) -> Run:
    place = decoder.planned_for(request)
    record.figure("chosen", f"{choice.rows} rows, remat {choice.remat!r}", beside=f"by arithmetic, for {place.name}")
    bindings = [*choice.bindings, f"CHECKPOINT_INTERVAL = {_SAVED}", f"PROFILE_STEPS = ({_PROFILED},)"]
    return Run(request, name, "train", str(file), "--slice", request.slice, bindings=bindings)


def _measure_training(record: Recorder, request: Request, run: Run, choice: decoder.Choice) -> None:
    saved_after: float | None = None
    is_read, patience = False, request.sized(_SAVING_SECONDS, _REHEARSED_SAVING_SECONDS)
    for lines in run.looks():
        _speed(record, request, lines, choice, run)
        last = lines[-1]["step"] if lines else 0
        if not is_read and last > _PROFILED + 5:
            is_read = _profile(record, request, run)
        if saved_after is None and checkpoint_steps.complete(paths.resolve(run.folder / "checkpoints")):
            saved_after = time.time() - _time_of(lines, _SAVED)
            record.figure("checkpoint complete after", saved_after, "s", beside=f"of step {_SAVED}; seen every 0.5 s")
        if saved_after is None and lines and time.time() - _time_of(lines, _SAVED) > patience:
            record.figure("checkpoint", "not complete", beside=f"{patience} s after step {_SAVED}", ok=False)
            return
        if last >= _SAVED + 15 and saved_after is not None:
            beside = _median(lines, "step_seconds", after=_SAVED)
            usual = _median(lines, "step_seconds", after=_SETTLED, until=_SAVED)
            record.figure("step while saving and after it", 1000 * beside, "ms", f"{beside / usual:.2f} of one before")
            return


def _time_of(lines: list[dict[str, Any]], step: int) -> float:
    """Returns when a step was logged; now, if it was not yet."""
    return next((line["time_seconds"] for line in lines if line["step"] >= step), time.time())


def _speed(record: Recorder, request: Request, lines: list[dict[str, Any]], choice: decoder.Choice, run: Run) -> None:
    if not lines:
        return
    record.figure("first step after", run.first_step_seconds(), "s")
    counted = [line for line in lines if _SETTLED < line["step"] <= _PROFILED or line["step"] > _PROFILED + 5]
    before = [line for line in counted if line["step"] <= _SAVED]
    if not before:
        return
    tokens = statistics.median(line["tokens_per_second"] for line in before)
    predicted = f"predicted for {decoder.planned_for(request).name}: {choice.tokens_per_second:,.0f}"
    record.figure("tokens/s", tokens, beside=predicted + ("" if request.is_rehearsal else _share(tokens, choice)))
    if request.is_rehearsal:
        record.absent("MFU", "the table has no peak of a CPU in bfloat16")
    else:
        mfu = statistics.median(line["mfu"] for line in before)
        record.figure("MFU", 100 * mfu, "%", beside=f"goal {_GOAL:.0%}")
    wait = statistics.median(line["input_wait_seconds"] / line["step_seconds"] for line in before)
    record.figure("waiting for data", 100 * wait, "% of a step")
    peaks = [value for line in run.lines("step") for name, value in line.items() if name.startswith("hbm_gib/")]
    expected = f"predicted {choice.peak_bytes / GIB:.3g} GiB"
    if peaks:
        record.figure("peak memory", max(peaks), "GiB", f"{expected}: {choice.peak_bytes / GIB / max(peaks):.2f} times")
    else:
        record.absent("peak memory", f"JAX counts no memory of these devices; {expected}")


def _share(measured: float, choice: decoder.Choice) -> str:
    return f"; measured {measured / choice.tokens_per_second:.2f} of it"


def _profile(record: Recorder, request: Request, run: Run) -> bool:
    """Reads the profile of the run, if it is written, and keeps its file if it is not too large."""
    files = sorted(run.folder.joinpath(*PROFILES).rglob(f"*{SUFFIX}"))
    if not files:
        return False
    if (size := files[0].stat().st_size) <= _MOST_PROFILE_BYTES:
        Path(request.out, f"profile{SUFFIX}").write_bytes(files[0].read_bytes())
    try:
        _, (host, *_) = profile_reader.read_session(str(run.folder))
    except Exception as error:  # its names on this device are new to the reader
        record.figure("profile", f"{type(error).__name__}: {error}", ok=False)
        return True
    share = (
        f"{size / 2**20:.3g} MiB; {host.chips} devices, {'their own rows' if host.from_chips else 'rows of threads'}"
    )
    first = ", ".join(f"{o.name} {1000 * o.seconds:.3g} ms" for o in host.operations[:3])
    record.figure("profile: step", 1000 * (host.step_seconds or 0), "ms", share, ok=bool(host.operations))
    record.figure("profile: operations", len(host.operations), beside=first)
    return True


def _median(lines: list[dict[str, Any]], key: str, *, after: int, until: float = float("inf")) -> float:
    """Returns the median of a metric over lines of these steps; of all lines if there are none."""
    chosen = [line[key] for line in lines if after < line["step"] <= until]
    return statistics.median(chosen or [line[key] for line in lines])
