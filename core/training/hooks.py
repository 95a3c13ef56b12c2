"""Hooks of the training loop: logs, checkpoints, preemption, and the policies for a loss that is not finite.

For a non-finite loss or gradient norm there is one hook per policy. The metrics of a step are the same on all hosts, so
all hosts decide alike without communication.

    Stop      ends the run before such a state can be saved
    Skip      ends the run after too many skipped updates in a row (`core.step` skips them)
    RollBack  makes the loop continue from the newest checkpoint, with the following data, a few times
"""

import math
import mmap
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from core.checkpoints.writing import Cost, WriteFailedError
from core.hosts import activity, distributed, exit_codes, interrupt
from core.step import TrainState
from core.training import compilation, metrics, trainer
from core.training.trainer import Hook, StepReport
from core.types import Params, WeightedSum

_STEP_FILE_BYTES = 64
# How long a host that raised waits for the others to raise at the same step: this, and two steps.
EMERGENCY_SECONDS, MOST_EMERGENCY_SECONDS = 5.0, 60.0

Scalars = Callable[[int, Mapping[str, float]], None]  # (step, name -> value)
POLICIES = ("stop", "skip", "roll_back")
SKIPPED = "skipped_updates"  # a metric of every step of a run that skips: 1 where the update was left out
ROLLED_BACK = "rolled_back"  # a metric of the steps that a run went back from
MOST_SKIPPED = 20  # in a row
MOST_ROLLED_BACK = 3  # without getting further
_CAUSES = "Usual causes: a learning rate that is too high, no warm-up, or a bad batch"
Say = Callable[[int, str, str], None]  # (step, name of the metric that becomes 1, sentence)


class Compiled(Hook):
    """Reports the process's compilations after a step, if there are new ones."""

    def __init__(self, write: Callable[[int, compilation.Totals], None]):
        self._write = write
        self._reported: compilation.Totals | None = None

    def after_step(self, report: StepReport) -> None:
        if (totals := compilation.totals()) != self._reported:
            self._write(report.step, totals)
            self._reported = totals


class Log(Hook):
    """Writes the metrics of the first step of this start, of every `every`-th step and of the last one.

    Loss, learning rate and gradient norm are those of the step; rates and the model's own metrics are means since the
    last line, without the metrics of updates that were left out. After a rollback, these begin anew.
    """

    def __init__(self, write: Scalars, *, every: int, items_per_step: int, last_step: int | None = None):
        """`items_per_step` is the number of tokens; `last_step` is None if it is not known."""
        self._write = write
        self._every = every
        self._items_per_step = items_per_step
        self._last_step = last_step
        self._seconds: list[float] = []
        self._waits: list[float] = []
        self._on_devices: list[float] = []
        self._sums: dict[str, WeightedSum] = {}
        self._step = 0  # the last one
        self._started = False

    def after_step(self, report: StepReport) -> None:
        if report.step <= self._step:
            self._forget()
        self._step = report.step
        self._seconds.append(report.seconds)
        self._waits.append(report.input_wait_seconds)
        self._on_devices.append(report.device_seconds)
        if not report.metrics.get(SKIPPED):
            self._sums = trainer.add_sums(self._sums, report.sums)
        if self._started and report.step % self._every and report.step != self._last_step:
            return
        self._started = True
        mean_seconds, waits, on_devices = map(_mean, (self._seconds, self._waits, self._on_devices))
        rates = {
            "step_seconds": mean_seconds,
            "input_wait_seconds": waits,
            "device_seconds": on_devices,
            "host_seconds": max(mean_seconds - waits - on_devices, 0.0),
            "tokens_per_second": self._items_per_step / mean_seconds,
        }
        own = trainer.means(self._sums)
        self._forget()
        self._write(report.step, {**own, **report.metrics, **rates})

    def _forget(self) -> None:
        self._seconds, self._waits, self._on_devices, self._sums = [], [], [], {}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


class Meet(Hook):
    """Waits for all hosts before they evaluate or save together; must precede the hooks that do.

    If a host does not come, an error names it; a collective would hang.
    """

    def __init__(self, purposes: Mapping[str, Hook], *, timeout_seconds: float):
        """`purposes`: the hooks that need all hosts, by names such as `evaluation`."""
        self._purposes, self._timeout_seconds = purposes, timeout_seconds
        self._meetings = 0  # numbered, because a step may be repeated after a rollback

    def needs_state(self, step: int) -> bool:
        return any(hook.needs_state(step) for hook in self._purposes.values())

    def at_boundary(self, step: int, state: TrainState) -> None:
        del state
        self._meetings += 1
        why = " and ".join(name for name, hook in self._purposes.items() if hook.needs_state(step))
        with activity.enter(activity.MEETING):
            distributed.barrier(
                f"{why} after step {step} (meeting {self._meetings})", timeout_seconds=self._timeout_seconds
            )


class Checkpoints(Protocol):
    """Interface of what `Save` and `SaveParams` write to.

    All hosts call the methods in the same order, except `check` and `costs`.
    """

    def check(self) -> None:
        """Raises RuntimeError if the current save is known to have failed. Does not wait."""

    def wait(self) -> None:
        """Waits until the last save is complete; raises RuntimeError if it fails."""

    def save(self, step: int, *, state: TrainState, data: Mapping[str, bytes], meta: Mapping[str, Any]) -> None:
        """Starts an asynchronous save.

        Args:
          data: positions of the data streams that this host owns, by name.
          meta: values that JSON can hold.
        """

    def save_params(self, step: int, params: Params, meta: Mapping[str, Any]) -> None:
        """Starts an asynchronous save of parameters alone."""

    def costs(self) -> Sequence[Cost]:
        """Returns the costs of saves completed since the last call."""


class Costs(Protocol):
    """Interface of a record of what saves cost."""

    def add(self, cost: Cost) -> None:
        """Records a completed save."""

    def end(self) -> None:
        """Reports the total cost of the saves."""


class Save(Hook):
    """Saves state, position in the data and metadata at the steps that are due."""

    def __init__(
        self,
        checkpoints: Checkpoints,
        position: Callable[[], Mapping[str, bytes]],
        meta: Mapping[str, Any],
        *,
        due: Callable[[int], bool],
        costs: Costs,
        check: Callable[[], None] = lambda: None,
        before: Callable[[], None] = lambda: None,
        say: Callable[[str], None] = lambda text: None,
        evaluated: Callable[[int], Mapping[str, Any]] = lambda step: {},
    ):
        """Takes what to save, where and when.

        Args:
          due: returns whether to save at a step.
          costs: records completed saves.
          check: raises an error if nothing may be written.
          before: stores what a resumed run does not make again, such as metrics of the steps up to this one.
          say: receives a sentence about a save after an error.
          evaluated: returns further metadata of a step.
        """
        self._checkpoints = checkpoints
        self._position = position
        self._meta = meta
        self._due = due
        self._costs = costs
        self._check, self._before = check, before
        self._say, self._evaluated = say, evaluated
        self._saved_step: int | None = None
        self._step_seconds = 0.0

    def before_step(self, step: int) -> None:
        if self._saved_step is None:
            self._saved_step = step - 1  # where the run starts
        self._checkpoints.check()
        self._tell()

    def needs_state(self, step: int) -> bool:
        return self._due(step)

    def at_boundary(self, step: int, state: TrainState) -> None:
        """Starts an asynchronous save; the arrays are copied off the devices when this returns."""
        with activity.enter(activity.SAVING):
            self._checkpoints.wait()  # the save before this one may take minutes
            self._check()
            self._before()
            meta = {**self._meta, **self._evaluated(step)}
            self._checkpoints.save(step, state=state, data=self._position(), meta=meta)
        self._saved_step = step

    def after_step(self, report: StepReport) -> None:
        self._step_seconds = report.seconds

    def on_error(self, error: Exception, last: trainer.LastStep) -> None:
        """Saves the last step, if its state is intact, finite and not yet saved, and all hosts ended at it.

        Nothing is saved after an error with the attribute `ends_without_save`, or one that the loss of another host can
        cause. Each host waits some seconds for the others.
        """
        if getattr(error, "ends_without_save", False) or last.state is None or last.step == self._saved_step:
            return
        if distributed.process_count() > 1 and isinstance(error, distributed.CONSEQUENCES):
            return  # another host is lost
        before = activity.place().activity
        activity.at(activity.SAVING)
        try:
            self._check()
            self._require_all_hosts(last.step)
            values = last.metrics()
            if (bad := non_finite(values)) and not values.get(SKIPPED):
                raise RuntimeError(f"no checkpoint of step {last.step} was saved: {bad}")
            self.at_boundary(last.step, last.state)
            self._checkpoints.wait()
        finally:
            activity.at(before)  # which the other hosts report as the place of the error
        self._say(
            f"step {last.step}: saved a checkpoint after {type(error).__name__}; the same command resumes from it"
        )

    def _require_all_hosts(self, step: int) -> None:
        patience_seconds = min(EMERGENCY_SECONDS + 2 * self._step_seconds, MOST_EMERGENCY_SECONDS)
        try:
            distributed.barrier(f"save after an error at step {step}", timeout_seconds=patience_seconds)
        except TimeoutError as missing:
            raise RuntimeError(f"no checkpoint of step {step} was saved, which needs all hosts: {missing}") from None

    def close(self) -> None:
        with activity.enter(activity.SAVING):
            self._checkpoints.wait()
        self._tell()
        self._costs.end()

    def _tell(self) -> None:
        for cost in self._checkpoints.costs():
            self._costs.add(cost)
            if cost.step == self._saved_step and not cost.alone:
                interrupt.saved(cost.step)


class SaveParams(Hook):
    """Saves the parameters alone at the steps that are due."""

    def __init__(
        self,
        checkpoints: Checkpoints,
        evaluated: Callable[[TrainState], Params],
        meta: Mapping[str, Any],
        *,
        due: Callable[[int], bool],
        check: Callable[[], None] = lambda: None,
    ):
        """`evaluated(state)` returns the parameters to save; other arguments are as in `Save`."""
        self._checkpoints, self._evaluated, self._meta = checkpoints, evaluated, meta
        self._due, self._check = due, check

    def needs_state(self, step: int) -> bool:
        return self._due(step)

    def at_boundary(self, step: int, state: TrainState) -> None:
        with activity.enter(activity.SAVING):
            self._checkpoints.wait()
            self._check()
            self._checkpoints.save_params(step, self._evaluated(state), self._meta)


class PreemptedError(RuntimeError):
    """The run was preempted, or interrupted by Ctrl-C, and can be started again."""

    ends_without_save = True

    def __init__(self, what: str, *, interrupted: bool):
        """`what` says what was saved and how to continue."""
        super().__init__(f"{'interrupted (Ctrl-C)' if interrupted else 'preempted (SIGTERM)'}: {what}")
        self.exit_code = exit_codes.INTERRUPTED if interrupted else exit_codes.PREEMPTED


class StopWhenPreempted(Hook):
    """Ends the run after a preemption, at a step that all hosts agree on. Must follow `Save`."""

    def __init__(self, preempted: Callable[[int], bool], *, wait: Callable[[], None]):
        """Takes how the run learns of a preemption, and how it waits for its checkpoint.

        Args:
          preempted: returns whether the run is preempted at a step, the same on all hosts.
          wait: waits until the last save is complete; raises an error if it failed.
        """
        self._preempted, self._wait = preempted, wait
        self._stopping = False

    def before_step(self, step: int) -> None:
        self._stopping = self._stopping or self._preempted(step)

    def needs_state(self, step: int) -> bool:
        del step
        return self._stopping

    def at_boundary(self, step: int, state: TrainState) -> None:
        del state
        with activity.enter(activity.SAVING):
            self._wait()
        raise PreemptedError(
            f"saved a checkpoint at step {step}; run the same command to resume",
            interrupted=distributed.is_interrupted(),
        )


class NoteEnding(Hook):
    """Tells `interrupt` when the last step of the run is done."""

    def __init__(self, last_step: int):
        self._last_step = last_step

    def after_step(self, report: StepReport) -> None:
        if report.step == self._last_step:
            interrupt.ending()


class NoteStep(Hook):
    """Writes `host 2 step 17` before each step, for the process that prefixes this host's log."""

    def __init__(self, path: str, *, name: str, step: int):
        file = pathlib.Path(path)
        file.write_bytes(bytes(_STEP_FILE_BYTES))
        with file.open("r+b") as opened:
            self._map = mmap.mmap(opened.fileno(), _STEP_FILE_BYTES)
        self._name = name
        self.before_step(step)

    def before_step(self, step: int) -> None:
        self._map[:] = f"{self._name} step {step}".encode()[:_STEP_FILE_BYTES].ljust(_STEP_FILE_BYTES, b"\0")


class NonFiniteLossError(RuntimeError):
    """The loss or the gradient of a step is NaN or infinite."""

    exit_code = exit_codes.NON_FINITE
    ends_without_save = True
    says_all = True

    def __init__(self, step: int, said: str):
        """`said` is a sentence about what is not finite and what to do."""
        super().__init__(f"step {step}: {said}")
        self.step = step


def non_finite(values: Mapping[str, float]) -> str:
    """Describes a non-finite loss or gradient norm, for example `loss = nan`; "" if both are finite."""
    looked_at = {name: values[name] for name in ("loss", "gradient_norm") if name in values}
    return ", ".join(f"{name} = {value}" for name, value in looked_at.items() if not math.isfinite(value))


class Stop(Hook):
    """Ends the run at the first step with a non-finite loss or gradient norm."""

    def __init__(self, *, newest: Callable[[], int | None] = lambda: None, wait: Callable[[], None] = lambda: None):
        """`newest` returns the step of the newest checkpoint or None, `wait` waits until the last save is complete."""
        self._newest, self._wait = newest, wait

    def after_step(self, report: StepReport) -> None:
        if bad := non_finite(report.metrics):
            failed = self._failed_save()
            step = self._newest()
            saved = "No checkpoint was saved before" if step is None else f"The checkpoint of step {step} precedes it"
            start = "Start again" if step is None else "The same command continues from it: start it"
            error = NonFiniteLossError(
                report.step,
                f"{bad}. {saved}. {_CAUSES}. {start} with a lower rate, or set "
                "experiment.Experiment.non_finite = 'skip' or 'roll_back'.",
            )
            for said in failed:
                error.add_note(said)
            raise error

    def _failed_save(self) -> list[str]:
        try:
            with activity.enter(activity.SAVING):
                self._wait()
        except WriteFailedError as error:
            return [str(error)]
        return []


class Skip(Hook):
    """Reports every skipped update, and ends the run after MOST_SKIPPED in a row."""

    def __init__(self, say: Say):
        """`say(step, metric, sentence)` is called for every skipped update."""
        self._say = say
        self._in_a_row = 0

    def after_step(self, report: StepReport) -> None:
        if not report.metrics[SKIPPED]:
            self._in_a_row = 0
            return
        self._in_a_row += 1
        bad = non_finite(report.metrics)
        self._say(report.step, SKIPPED, f"step {report.step}: {bad}; its update is left out")
        if self._in_a_row >= MOST_SKIPPED:
            raise NonFiniteLossError(
                report.step,
                f"{bad}, as in the {MOST_SKIPPED - 1} steps before, whose updates were left out too: no batch is to "
                f"blame. {_CAUSES}.",
            )


class RollBack(Hook):
    """Makes the loop continue from the newest checkpoint, at most MOST_ROLLED_BACK times without progress."""

    def __init__(
        self,
        say: Say,
        *,
        newest: Callable[[], int | None] = lambda: None,
        wait: Callable[[], None] = lambda: None,
        writers: metrics.Writers | None = None,
    ):
        """Takes what to call for every rollback.

        Args:
          say: `say(step, metric, sentence)`.
          newest, wait: as in `policy_hook`.
          writers: learn which steps were lost; None: no records are kept.
        """
        self._say, self._newest, self._wait, self._writers = say, newest, wait, writers or metrics.Writers()
        self._all_failed_at: list[int] = []
        self._failed_at = 0
        self._in_vain = 0

    def after_step(self, report: StepReport) -> None:
        if not (bad := non_finite(report.metrics)):
            if report.step > self._failed_at:
                self._in_vain = 0
            return
        self._failed_at = max(self._failed_at, report.step)
        self._in_vain += 1
        said = f"step {report.step}: {bad}. {_CAUSES}."
        if self._in_vain > MOST_ROLLED_BACK:
            in_vain = f"Rolled back {MOST_ROLLED_BACK} times and got no further than step {self._failed_at}."
            raise NonFiniteLossError(report.step, f"{bad}. {_CAUSES}. {in_vain}")
        self._wait()  # an incomplete save would not be found
        newest = self._newest()
        where = "the start, because there is no checkpoint" if newest is None else f"the checkpoint of step {newest}"
        self._all_failed_at.append(self._failed_at)
        self._say(self._failed_at, ROLLED_BACK, f"{said} Back to {where}, with the data after this.")
        raise trainer.RollBackError(said)

    def after_rollback(self, step: int) -> None:
        self._writers.lost_after(step)
        for failed_at in self._all_failed_at:  # the records of rollbacks are not lost
            self._writers.scalars(failed_at, {ROLLED_BACK: 1.0})


def policy_hook(
    name: str,
    *,
    warn: Callable[[str], None],
    writers: metrics.Writers,
    newest: Callable[[], int | None] = lambda: None,
    wait: Callable[[], None] = lambda: None,
) -> Hook:
    """Returns the hook of a policy for steps with a non-finite loss or gradient norm.

    Args:
      name: one of POLICIES.
      warn: receives a sentence for every skipped update and every rollback.
      newest: returns the step of the newest checkpoint, or None.
      wait: waits until the last save is complete.
    """

    def say(step: int, metric: str, sentence: str) -> None:
        warn(sentence)
        writers.scalars(step, {metric: 1.0})
        writers.flush()

    match name:
        case "skip":
            return Skip(say)
        case "roll_back":
            return RollBack(say, newest=newest, wait=wait, writers=writers)
    return Stop(newest=newest, wait=wait)
