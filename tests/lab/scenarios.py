"""The failures to try: the injected fault, how the run must end, and what its logs must say."""

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path

from core.hosts import activity, exit_codes
from core.hosts.failure_diagnosis import USUAL_LIMITS
from tests.lab.faults import Fault

ALL = (0, 1, 2, 3)
INTERVAL, STOPPED_AT = 4, 8  # steps between checkpoints; step at which a run is stopped before it is damaged
STEP_LIMIT_SECONDS = 15
OUTAGE_SECONDS = 30
JOIN_SECONDS = 20
UPLOADING_SECONDS = 1.0  # from the beginning of a save: parts of it are in the bucket
WORD_SECONDS = 30.0  # from when the hosts can detect the failure to the end of the last of them


@dataclasses.dataclass(frozen=True)
class Scenario:
    """One way in which a run fails.

    Attributes:
      name: row of the table.
      codes: allowed exit codes.
      says: regular expression that a host's log must match.
      fault: the injected fault; None if files are damaged instead.
      bindings: additional gin bindings of the run that fails.
      damage: damages the checkpoints of a run that was stopped half-way.
      refused: for a run in a bucket that is stopped half-way or killed: the share of requests that the bucket answers
        with an error.
      slow_seconds: how long the bucket takes for each answer.
      goes_on_from: the newest intact step after the damage.
      continues: whether the faulty start resumes from a checkpoint.
      ends_within_seconds: longest time from the event to the end of the last host.
      starts_again: whether the same command is then run again without the fault.
    """

    name: str
    codes: tuple[int, ...]
    says: str
    fault: Fault | None = None
    bindings: tuple[str, ...] = ()
    damage: Callable[[Path], None] | None = None
    refused: float | None = None
    slow_seconds: float = 0.0
    goes_on_from: int = STOPPED_AT
    continues: bool = False
    ends_within_seconds: float = WORD_SECONDS
    starts_again: bool = True


def _truncate_newest(checkpoints: Path) -> None:
    """Cuts the largest file of the newest step in half."""
    file = max((p for p in _newest(checkpoints).rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def _remove_from_newest(checkpoints: Path) -> None:
    file = max((p for p in _newest(checkpoints).rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    file.unlink()


def _half_delete_oldest(checkpoints: Path) -> None:
    """Imitates an interrupted removal, and adds an empty folder that looks like the newest step."""
    shutil.rmtree(min(_steps(checkpoints)) / "state")
    (checkpoints / "999").mkdir()


def _steps(checkpoints: Path) -> list[Path]:
    return sorted((p for p in checkpoints.iterdir() if p.name.isdigit()), key=lambda p: int(p.name))


def _newest(checkpoints: Path) -> Path:
    return _steps(checkpoints)[-1]


LOST = (exit_codes.PEER_LOST, 128 + 9)

SCENARIOS: tuple[Scenario, ...] = (
    Scenario("kill -9 of host 2, training", LOST, r"host 2 .*was lost.*step \d+", Fault("kill")),
    Scenario("kill -9 of host 0, training", LOST, r"host 0 .*was lost", Fault("kill", hosts=(0,))),
    Scenario(
        "kill -9 of host 1, saving", LOST, r"host 1 .*was lost", Fault("kill", hosts=(1,), activity=activity.SAVING)
    ),
    Scenario(
        "kill -9 of host 3, starting",
        LOST,
        r"host 3 .*was lost",
        Fault("kill", hosts=(3,), activity=activity.PREPARING, step=0),
    ),
    Scenario(
        "kill -9 of host 1, restoring",
        LOST,
        r"host 1 .*was lost",
        Fault("kill", hosts=(1,), activity=activity.RESTORING, step=0),
        continues=True,
    ),
    Scenario("SIGTERM to one host", (exit_codes.PREEMPTED,), r"saved a checkpoint at step \d+", Fault("terminate")),
    Scenario(
        "SIGTERM to all hosts",
        (exit_codes.PREEMPTED,),
        r"saved a checkpoint at step \d+",
        Fault("terminate", hosts=ALL),
    ),
    Scenario(
        "a host hangs in Python",
        (exit_codes.HUNG,),
        r"host 2 .*has been at step \d+",
        Fault("hang"),
        (f"settings.Health.step_limit_seconds = {STEP_LIMIT_SECONDS}",),
        ends_within_seconds=STEP_LIMIT_SECONDS + WORD_SECONDS,
    ),
    Scenario(
        "a host is frozen (SIGSTOP)",
        (*LOST, exit_codes.HUNG),
        r"host 2 .*has been silent",
        Fault("freeze"),
        ends_within_seconds=USUAL_LIMITS.silent_seconds + WORD_SECONDS,
    ),
    Scenario("an exception on one host", (exit_codes.RAISED,), r"host 2 .*planted: a host raises", Fault("raise")),
    Scenario("a host leaves early", (exit_codes.PEER_LOST,), r"host 2 .*ended its training loop", Fault("leave")),
    Scenario(
        "a branch that one host takes",
        (exit_codes.PEER_LOST, exit_codes.HUNG, exit_codes.RAISED, exit_codes.JAX_ABORTED),
        r"host 2 \(\S+\) (has been at|raised|was lost|left)",
        Fault("branch"),
        (f"settings.Health.step_limit_seconds = {STEP_LIMIT_SECONDS}",),
        ends_within_seconds=STEP_LIMIT_SECONDS + WORD_SECONDS,
    ),
    Scenario(
        "another configuration on one host",
        (exit_codes.USER_ERROR,),
        r"host 2: -BATCH_SIZE = 32",
        Fault("config", bindings=("BATCH_SIZE = 64",)),
    ),
    Scenario(
        "a host that never comes",
        (exit_codes.USER_ERROR, exit_codes.RAISED),
        r"missing: host 3",
        Fault("missing", hosts=(3,)),
        ends_within_seconds=JOIN_SECONDS + WORD_SECONDS,
    ),
    Scenario(
        "a slow host", (exit_codes.DONE,), r"waits .* for host 2", Fault("slow", delay_seconds=0.5), starts_again=False
    ),
    Scenario("NaN in the data of one host, stop", (exit_codes.NON_FINITE,), r"step \d+: loss = nan", Fault("nan")),
    Scenario(
        "a full disk on one host",
        (exit_codes.RAISED, exit_codes.PEER_LOST),
        r"saving the checkpoint",
        Fault("full disk"),
    ),
    Scenario(
        "the newest checkpoint truncated",
        (exit_codes.DONE,),
        r"is damaged",
        damage=_truncate_newest,
        goes_on_from=STOPPED_AT - INTERVAL,
    ),
    Scenario(
        "a file of the newest checkpoint missing",
        (exit_codes.DONE,),
        r"is damaged",
        damage=_remove_from_newest,
        goes_on_from=STOPPED_AT - INTERVAL,
    ),
    Scenario(
        "an old step half removed, an empty newest",
        (exit_codes.DONE,),
        rf"continues from step {STOPPED_AT}",
        damage=_half_delete_oldest,
    ),
    Scenario("one request in twenty to the bucket refused", (exit_codes.DONE,), r"continues from step", refused=0.05),
    Scenario(
        f"the bucket out for {OUTAGE_SECONDS} s",
        (exit_codes.DONE,),
        r"continues from step",
        Fault("outage", hosts=(0,), delay_seconds=OUTAGE_SECONDS),
        refused=0.0,
    ),
    Scenario(
        "kill -9 of host 1, uploading to a slow bucket that refuses one request in twenty",
        LOST,
        r"host 1 .*was lost",
        Fault("kill", hosts=(1,), activity=activity.SAVING, delay_seconds=UPLOADING_SECONDS),
        refused=0.05,
        slow_seconds=0.03,
    ),
)
