"""Creates, queues for and deletes TPUs, and recreates a TPU that the cloud took away during a run.

Everything that a run needs is in its bucket, so a lost slice can be replaced by a new one. `watch` polls the state of
the TPU and of the run on its host 0, and acts:

    READY, run in progress     wait
    READY, run ended           return its exit code: the host has already restarted what a restart can help
    READY, run preempted       start again: the machine went down, or was about to
    PREEMPTED, SUSPENDED, …    delete, create, wait for READY, ship, start; the run resumes from its last checkpoint

A TPU that is about to be taken away stays READY for a while, and ssh fails now and then. Therefore a failure on the way
to a start is retried: the watch waits and polls again.

Flags: https://cloud.google.com/sdk/gcloud/reference/compute/tpus (tpu-vm, queued-resources: create, describe, delete).
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from core import slices
from core.errors import UserError
from core.watch import exit_codes
from launch.hosts import gcloud, supervise
from launch.hosts.gcloud import Step, Tpu

ACTIONS = ("create", "queue", "delete")
# States of a TPU, and of a request in the queue:
GONE = ("PREEMPTED", "SUSPENDED", "SUSPENDING", "TERMINATED", "STOPPED", "FAILED", "NOT_FOUND")
_QUEUED = ("CREATING", "ACCEPTED", "WAITING_FOR_RESOURCES", "PROVISIONING")
POLL_SECONDS = 60.0
READY_SECONDS = 7 * 24 * 3600.0  # a queue may be long
_MAKE_TRIES = 30  # capacity may be missing for some hours
_START_TRIES = 30  # in a row
_LONGEST_PAUSE = 10  # polls
_LOOK_SECONDS = 120.0
# Of TPU VMs by generation: https://cloud.google.com/tpu/docs/runtimes
RUNTIMES = {
    "v4": "tpu-ubuntu2204-base",
    "v5p": "v2-alpha-tpuv5",
    "v5e": "v2-alpha-tpuv5-lite",
    "v6e": "v2-alpha-tpuv6e",
}


class Order(NamedTuple):
    """How to request a TPU.

    Attributes:
      slice_: the slice of one TPU.
      is_spot: whether to request spot capacity, which is cheaper and may be preempted.
      is_queued: whether to request a queued resource, which waits until capacity is available.
    """

    slice_: slices.Slice
    is_spot: bool
    is_queued: bool


class Watched(NamedTuple):
    """One poll of a TPU and its run.

    Attributes:
      state: of the TPU, as the cloud names it; `NOT_FOUND` if there is none.
      run: of host 0's process: `running`, `ended CODE`, `gone`, or empty if host 0 did not answer.
    """

    state: str
    run: str


def accelerator_type(slice_: slices.Slice) -> str:
    """Returns the slice's name in gcloud: `v5litepod-16` for v5e-16."""
    return slice_.single.name.replace("v5e-", "v5litepod-")


def make_step(tpu: Tpu, order: Order) -> Step:
    """Creates a TPU, or queues a request for one."""
    kind = ("--spot",) if order.is_spot else ()
    accelerator = f"--accelerator-type={accelerator_type(order.slice_)}"
    runtime = RUNTIMES[order.slice_.generation]
    what = f"{'spot ' if order.is_spot else ''}{order.slice_.single.name} as {tpu.name}"
    if order.is_queued:
        argv = ("gcloud", "compute", "tpus", "queued-resources", "create", tpu.name, f"--node-id={tpu.name}")
        flags = (*gcloud.where(tpu), accelerator, f"--runtime-version={runtime}", *kind)
        return Step(f"queue for a {what}", (*argv, *flags))
    argv = ("gcloud", "compute", "tpus", "tpu-vm", "create", tpu.name, *gcloud.where(tpu))
    return Step(f"make a {what}", (*argv, accelerator, f"--version={runtime}", *kind))


def delete_step(tpu: Tpu, *, is_queued: bool) -> Step:
    """Deletes a TPU, and the request if it was queued."""
    if is_queued:
        argv = ("gcloud", "compute", "tpus", "queued-resources", "delete", tpu.name, *gcloud.where(tpu))
        return Step(f"delete {tpu.name} and its request", (*argv, "--force", "--quiet"))
    argv = ("gcloud", "compute", "tpus", "tpu-vm", "delete", tpu.name, *gcloud.where(tpu), "--quiet")
    return Step(f"delete {tpu.name}", argv)


def request_step(tpu: Tpu) -> Step:
    """Prints the state of a queued request."""
    argv = ("gcloud", "compute", "tpus", "queued-resources", "describe", tpu.name, *gcloud.where(tpu))
    return Step("look at the request", (*argv, "--format=value(state.state)"))


def act(tpus: Sequence[Tpu], *, action: str, order: Order | None, is_queued: bool, dry_run: bool) -> int:
    """Performs one of ACTIONS on every TPU; `order` is for a new one. Returns the first exit code that is not 0."""
    if action == "delete":
        steps = [delete_step(tpu, is_queued=is_queued) for tpu in tpus]
    else:
        assert order is not None
        steps = [make_step(tpu, order) for tpu in tpus]
    return gcloud.perform(steps, dry_run=dry_run)


def look(tpu: Tpu) -> Watched:
    """Polls a TPU and the run on its host 0. A failure of gcloud itself does not count as a lost TPU."""
    described = _output(gcloud.describe_step(tpu).argv)
    if described.returncode:
        return Watched(_missing(described), "")
    state = (described.stdout.rstrip("\n") + "\t\t").split("\t")[1]
    if state != "READY":
        return Watched(state, "")
    asked = _output(gcloud.ssh(tpu, gcloud.on_host("state"), worker="0"))
    return Watched(state, asked.stdout.strip() if asked.returncode == 0 else "")


def watch(
    tpus: Sequence[Tpu],
    *,
    order: Order,
    restarts: int,
    start: Callable[[], int],
    newest_step: Callable[[], int | None],
    requested: Sequence[int],
    poll_seconds: float = POLL_SECONDS,
) -> int:
    """Follows a started run to its end and recreates slices that are lost on the way.

    Args:
      tpus: of the run.
      order: how to recreate a lost TPU.
      restarts: how many restarts to allow without a new checkpoint.
      start: ships and starts the run on all TPUs; returns an exit code, or raises ValueError if they are not ready.
      newest_step: returns the newest checkpointed step; may raise if the bucket does not answer.
      requested: gets an exit code when this process is asked to stop, which does not stop the run.
      poll_seconds: between two polls.

    Returns:
      The run's exit code; 1 if a TPU could not be recreated or the run not be started again.
    """
    progress = supervise.Progress(newest_step)
    while not requested:
        found = {tpu: look(tpu) for tpu in tpus}
        lost = [tpu for tpu, saw in found.items() if saw.state in GONE]
        code = None if lost else _ended(list(found.values()))
        if code not in (None, exit_codes.PREEMPTED):
            print(f"the run ended with exit code {code}: {exit_codes.ending(code).meaning}", flush=True)
            return code
        if not lost and code is None:
            supervise.waited(poll_seconds, requested)
            continue
        failures = progress.after_failure()
        said = ", ".join(f"{tpu.name} is {found[tpu].state}" for tpu in lost) or f"the run ended with exit code {code}"
        if failures > restarts:
            print(f"{said}; given up, {restarts} restarts brought no checkpoint", flush=True)
            return code or exit_codes.FAILED
        print(f"{said}: restart {failures} of at most {restarts} without a new checkpoint", flush=True)
        if problem := _back(tpus, order, start=start, requested=requested, poll_seconds=poll_seconds):
            return problem
    return requested[0]


def _back(
    tpus: Sequence[Tpu], order: Order, *, start: Callable[[], int], requested: Sequence[int], poll_seconds: float
) -> int:
    """Restarts the run, with retries; returns an exit code, 0 for success."""
    for tries in range(1, _START_TRIES + 1):
        try:
            return _bring_back(tpus, order, start=start, requested=requested, poll_seconds=poll_seconds)
        except (ValueError, OSError) as error:
            print(f"not started (try {tries} of {_START_TRIES}): {error}", flush=True)
        if not supervise.waited(poll_seconds * min(2 ** (tries - 1), _LONGEST_PAUSE), requested):
            return requested[0]
    return exit_codes.FAILED


def _bring_back(
    tpus: Sequence[Tpu], order: Order, *, start: Callable[[], int], requested: Sequence[int], poll_seconds: float
) -> int:
    """Recreates the lost TPUs and starts the run on all of them.

    Returns:
      An exit code, 0 for success.

    Raises:
      ValueError: the attempt failed, and another may succeed.
    """
    states = {tpu: _state(tpu, is_queued=order.is_queued) for tpu in tpus}
    for tpu in [tpu for tpu in tpus if states[tpu] in GONE]:
        if code := _made_again(tpu, order, requested=requested, poll_seconds=poll_seconds):
            return code
    for tpu in [tpu for tpu in tpus if states[tpu] == "READY"]:  # its processes wait for hosts that are gone
        gcloud.perform([gcloud.action_step(tpu, action="stop")], dry_run=False)
    for tpu in tpus:
        if code := _ready(tpu, is_queued=order.is_queued, requested=requested, poll_seconds=poll_seconds):
            return code
    if code := start():
        raise UserError(f"a step of the start failed (exit code {code})")
    return exit_codes.DONE


def _ready(tpu: Tpu, *, is_queued: bool, requested: Sequence[int], poll_seconds: float) -> int:
    """Waits until a TPU is READY; returns an exit code, 0 for success. Raises ValueError if it never will be."""
    deadline, before = time.monotonic() + READY_SECONDS, "READY"
    while not requested and time.monotonic() < deadline:
        state = _state(tpu, is_queued=is_queued)
        if state in GONE:
            raise UserError(f"{tpu.name} is {state}, and will not be READY")
        if state not in ("", before):
            print(f"{tpu.name} is {state}", flush=True)
            before = state
        if state == "READY":
            return exit_codes.DONE
        supervise.waited(poll_seconds, requested)
    if requested:
        return requested[0]
    print(f"{tpu.name} is not READY after {READY_SECONDS / 3600:g} hours", flush=True)
    return exit_codes.FAILED


def _state(tpu: Tpu, *, is_queued: bool) -> str:
    """Returns the state of a TPU, or of its request while it is queued; empty if gcloud did not answer."""
    state = look(tpu).state
    if state != "NOT_FOUND" or not is_queued:
        return state
    described = _output(request_step(tpu).argv)
    if described.returncode:
        return _missing(described)
    asked = described.stdout.strip()
    return asked if asked in (*_QUEUED, *GONE) else "NOT_FOUND"


def _made_again(tpu: Tpu, order: Order, *, requested: Sequence[int], poll_seconds: float) -> int:
    """Deletes what is left of a TPU and requests another, with retries; returns an exit code, 0 for success."""
    if order.is_queued or look(tpu).state != "NOT_FOUND":
        gcloud.perform([delete_step(tpu, is_queued=order.is_queued)], dry_run=False)
    for tries in range(_MAKE_TRIES):
        code = gcloud.perform([make_step(tpu, order)], dry_run=False)
        if not code or requested:
            return code
        supervise.waited(poll_seconds * min(2**tries, _LONGEST_PAUSE), requested)
    return code


def _ended(found: Sequence[Watched]) -> int | None:
    """Returns the run's exit code, None while it runs or if no host answered; a host that went down was preempted."""
    runs = [saw.run for saw in found]
    codes = [int(run.split()[1]) for run in runs if run.startswith("ended ")]
    codes += [exit_codes.PREEMPTED for run in runs if run == "gone"]
    return next((code for code in codes if code != exit_codes.PREEMPTED), codes[0] if codes else None)


def _missing(described: subprocess.CompletedProcess[str]) -> str:
    """Returns NOT_FOUND if gcloud says so, else empty: it failed for another reason."""
    return "NOT_FOUND" if "NOT_FOUND" in described.stderr or "not found" in described.stderr else ""


def _output(argv: Sequence[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(gcloud.resolved(argv), capture_output=True, text=True, check=False, timeout=_LOOK_SECONDS)
    except subprocess.TimeoutExpired:  # a host that does not answer is asked again
        return subprocess.CompletedProcess(argv, 1, "", "no answer")
