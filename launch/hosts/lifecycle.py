"""Creates, queues for and deletes TPUs, and recreates a TPU that was preempted during a run.

`Watch` polls the state of the TPU, and of the run on its host 0, and acts:

    READY, run in progress     wait
    READY, run ended           return its exit code
    READY, run preempted       start again
    PREEMPTED, SUSPENDED, …    delete, create, wait for READY, ship, start; the run resumes from its last checkpoint
    NOT_FOUND, STOPPED         end: somebody deleted or stopped the TPU, so it is not wanted

Flags: https://cloud.google.com/sdk/gcloud/reference/compute/tpus (tpu-vm, queued-resources: create, describe, delete).
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

from core import slices
from core.errors import UserError
from core.hosts import exit_codes
from core.training import supervise
from launch.hosts import gcloud, workstation
from launch.hosts.gcloud import Step, Tpu

ACTIONS = ("create", "queue", "delete")
# States of a lost TPU, and of a TPU that is being created or queued for:
GONE = ("PREEMPTED", "SUSPENDED", "SUSPENDING", "TERMINATED", "FAILED", "NOT_FOUND")
_BY_HAND = ("NOT_FOUND", "STOPPED", "STOPPING")  # of a TPU whose run was in progress; preempted ones stay listed
_QUEUED = ("CREATING", "ACCEPTED", "WAITING_FOR_RESOURCES", "PROVISIONING")
POLL_SECONDS = 60.0
_TRIES = 30  # tries of one restart; capacity may be missing for some hours
_LONGEST_PAUSE = 10  # most polls between two tries
# Software versions of TPU VMs by generation: https://cloud.google.com/tpu/docs/runtimes
RUNTIMES = {
    "v4": "tpu-ubuntu2204-base",
    "v5p": "v2-alpha-tpuv5",
    "v5e": "v2-alpha-tpuv5-lite",
    "v6e": "v2-alpha-tpuv6e",
    "tpu7x": "v2-alpha-tpu7-ubuntu2404",
}


class Order(NamedTuple):
    """The options of a request for a TPU."""

    slice_: slices.Slice | None  # the slice of the TPU, or the slices of the whole job; None: only to delete TPUs
    is_spot: bool  # cheaper, and may be preempted
    is_queued: bool  # a queued resource, which is created when capacity is available


def create_step(tpu: Tpu, order: Order) -> Step:
    """Returns the step that creates a TPU, or queues a request for one."""
    assert order.slice_ is not None
    slice_, runtime = order.slice_.single, RUNTIMES[order.slice_.generation]
    flags = [f"--accelerator-type={slice_.name.replace('v5e-', 'v5litepod-')}", *(["--spot"] if order.is_spot else [])]
    what = f"{'spot ' if order.is_spot else ''}{slice_.name} as {tpu.name}"
    if order.is_queued:
        flags += [f"--node-id={tpu.name}", f"--runtime-version={runtime}"]
        return Step(f"queue for a {what}", gcloud.command(tpu, "create", *flags, group="queued-resources"))
    return Step(f"create a {what}", gcloud.command(tpu, "create", *flags, f"--version={runtime}"))


def delete_step(tpu: Tpu, *, is_queued: bool) -> Step:
    """Returns the step that deletes a TPU, and its request if it was queued."""
    if not is_queued:
        return Step(f"delete {tpu.name}", gcloud.command(tpu, "delete", "--quiet"))
    argv = gcloud.command(tpu, "delete", "--force", "--quiet", group="queued-resources")
    return Step(f"delete {tpu.name} and its request", argv)


def act(tpus: Sequence[Tpu], *, action: str, order: Order, dry_run: bool) -> int:
    """Creates, queues for or deletes TPUs one after another, up to the first failure.

    Args:
      action: one of ACTIONS.
      dry_run: whether only to print the commands.

    Returns:
      The exit code of the command that failed, or 0.
    """
    delete = action == "delete"
    steps = [delete_step(tpu, is_queued=order.is_queued) if delete else create_step(tpu, order) for tpu in tpus]
    return gcloud.perform(steps, dry_run=dry_run)


def run_state(tpu: Tpu) -> str:
    """Returns the state of the run on host 0: `running`, `ended CODE` or `gone`.

    Empty: host 0 did not answer.
    """
    asked = gcloud.output(gcloud.ssh(tpu, gcloud.on_host("state"), worker="0"))
    return asked.stdout.strip() if asked.returncode == 0 else ""


class _StopRequested(Exception):
    """A signal asked this process to stop."""


class _TakenAwayError(Exception):
    """Somebody deleted or stopped a TPU of the run."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Watch:
    """Follows a started run to its end, and recreates slices that are lost meanwhile.

    Attributes:
      tpus: the TPUs of the run, one for each slice.
      start: ships and starts the run on all TPUs; returns an exit code.
      requested: gets an exit code when this process is asked to stop.
      unanswered: what was said last about a TPU that does not answer, by TPU and by what was asked.
    """

    tpus: Sequence[Tpu]
    order: Order
    start: Callable[[], int]
    requested: Sequence[int]
    poll_seconds: float = POLL_SECONDS
    unanswered: dict[tuple[str, str], str] = dataclasses.field(default_factory=dict)

    def run(self, *, restarts: int, newest_step: Callable[[], int | None]) -> int:
        """Watches until the run ends, and restarts it after a preemption; returns an exit code.

        `restarts`: how many restarts without a new checkpoint to allow.
        """
        attempts = itertools.count()

        def attempt() -> int:
            try:
                return self._follow() if next(attempts) == 0 or self._restart() else exit_codes.FAILED
            except _StopRequested:
                return self.requested[0]
            except _TakenAwayError as taken:
                print(f"{taken}: somebody deleted or stopped it, so the watch ends", flush=True)
                return exit_codes.FAILED

        def ending(code: int) -> exit_codes.Ending:
            """Only PREEMPTED leads to a restart here; the hosts handle other codes."""
            if code == exit_codes.PREEMPTED:
                return exit_codes.Ending("the run was preempted, or its TPU is gone", True)
            return exit_codes.ending(code)._replace(restart=False)

        return supervise.supervise(
            attempt,
            restarts=restarts,
            newest_step=newest_step,
            requested=self.requested,
            ending=ending,
            first_pause_seconds=min(self.poll_seconds, supervise.FIRST_PAUSE_SECONDS),
        )

    def _follow(self) -> int:
        before: dict[str, str] = {}
        while True:
            states = {tpu: self._state(tpu) for tpu in self.tpus}
            taken = {tpu.name: state for tpu, state in states.items() if state in _BY_HAND}
            if taken and taken == before:  # a request may say for a moment that a preempted TPU is there
                raise _TakenAwayError(", ".join(f"{name} is {state}" for name, state in taken.items()))
            before = taken
            lost_states = {*GONE, *_QUEUED} - {*_BY_HAND}
            if lost := [f"{tpu.name} is {state}" for tpu, state in states.items() if state in lost_states]:
                print(", ".join(lost), flush=True)
                return exit_codes.PREEMPTED
            runs = [self._run_state(tpu) for tpu, state in states.items() if state == "READY"]
            codes = [int(run.split()[1]) for run in runs if run.startswith("ended ")]
            codes += [exit_codes.PREEMPTED for run in runs if run == "gone"]  # the host went down
            if codes:
                code = next((code for code in codes if code != exit_codes.PREEMPTED), codes[0])
                print(f"the run ended with exit code {code}: {exit_codes.ending(code).meaning}", flush=True)
                return code
            self._pause()

    def _restart(self) -> bool:
        for tries in range(_TRIES):
            try:
                self._restart_once()
                return True
            except (UserError, OSError) as error:
                print(f"not started (try {tries + 1} of {_TRIES}): {error}", flush=True)
            self._pause(min(2**tries, _LONGEST_PAUSE))
        return False

    def _restart_once(self) -> None:
        for tpu, state in {tpu: self._state(tpu) for tpu in self.tpus}.items():
            if state in GONE:
                if self.order.is_queued or state != "NOT_FOUND":
                    gcloud.perform([delete_step(tpu, is_queued=self.order.is_queued)], dry_run=False)
                if gcloud.perform([create_step(tpu, self.order)], dry_run=False):
                    raise UserError(f"{tpu.name} could not be created; the message of gcloud is above")
            elif state == "READY":  # these processes wait for lost hosts
                gcloud.perform([workstation.action_step(tpu, "stop")], dry_run=False)
        for tpu in self.tpus:
            self._wait_until_ready(tpu)
        if code := self.start():
            raise UserError(f"a step of the start failed (exit code {code}); its output is above")

    def _wait_until_ready(self, tpu: Tpu) -> None:
        before = "READY"
        while True:  # a queued TPU may take long
            state = self._state(tpu)
            if state in ("STOPPED", "STOPPING"):
                raise _TakenAwayError(f"{tpu.name} is {state}")
            if state in GONE:
                raise UserError(f"{tpu.name} is {state}, and will not be READY")
            if state not in ("", before):
                print(f"{tpu.name} is {state}", flush=True)
                before = state
            if state == "READY":
                return
            self._pause()

    def _state(self, tpu: Tpu) -> str:
        """Returns the state of a TPU, or of its queued request; empty if unknown."""
        found = gcloud.describe(tpu)
        self._say(tpu, "describe", found.problem if not found.state else "")
        if found.state != "NOT_FOUND" or not self.order.is_queued:
            return found.state
        request = gcloud.command(tpu, "describe", "--format=value(state.state)", group="queued-resources")
        described = gcloud.output(request)
        if described.returncode:
            return gcloud.missing(described)
        asked = described.stdout.strip()
        return asked if asked in (*_QUEUED, *GONE) else "NOT_FOUND"

    def _run_state(self, tpu: Tpu) -> str:
        state = run_state(tpu)
        self._say(tpu, "state", "" if state else "no answer from host 0 by ssh")
        return state

    def _say(self, tpu: Tpu, asked: str, problem: str) -> None:
        """Prints why something is not known about a TPU, when that changes."""
        if problem and problem != self.unanswered.get((tpu.name, asked)):
            print(f"{tpu.name}: {problem}; the watch asks again every {self.poll_seconds:g} s", flush=True)
        self.unanswered[tpu.name, asked] = problem

    def _pause(self, polls: int = 1) -> None:
        if not supervise.waited(self.poll_seconds * polls, self.requested):
            raise _StopRequested
