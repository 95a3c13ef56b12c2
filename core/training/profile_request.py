"""Requests a profile of a run that is training (`launch/pod.sh profile RUN`), and waits for it."""

import contextlib
import json
import time
import uuid
from typing import Any

from core import units
from core.errors import UserError
from core.files import foreign_json, paths
from core.training import run_lock
from core.training.profiling import ANSWER_NAME, REQUEST_NAME

TAKEN_SECONDS = 60.0
_POLL_SECONDS = 0.3
_BUCKET_POLL_SECONDS = 2.0
_WRITING_SECONDS = 300.0  # a trace of seconds is hundreds of MB, which go to a bucket


def request(
    run_dir: str, *, steps: int | None = None, seconds: float | None = None, taken_seconds: float = TAKEN_SECONDS
) -> int:
    """Requests a profile, waits for it and prints where it is; returns 0.

    Args:
      steps: how many steps to trace; exactly one of `steps` and `seconds` is given.
      taken_seconds: how long to wait until the run accepts the request.

    Raises:
      UserError: arguments are wrong, or no run makes the profile in time.
    """
    if (steps is None) == (seconds is None):
        raise UserError("profile: give either --seconds S or --steps N (such as --seconds 5)")
    unit, length = ("seconds", seconds) if steps is None else ("steps", steps)
    folder = paths.resolve(run_dir)
    if not (folder / "config.gin").exists():
        raise UserError(f"{folder} is not a run directory: it has no config.gin (written when training starts)")
    if not (folder / run_lock.FILE).exists():
        raise UserError(f"no run is training in {folder}; launch/run profile {run_dir} prints the profiles that it has")
    name = uuid.uuid4().hex
    paths.write_text_atomically(folder / REQUEST_NAME, json.dumps({"id": name, unit: length}) + "\n")
    plan = None
    try:
        plan = _answer(folder, name, {"planned", "written", "over"}, within_seconds=taken_seconds)
    finally:
        if plan is None:  # removed, so that no later run accepts it
            with contextlib.suppress(FileNotFoundError, foreign_json.MalformedError):  # accepted at the last moment
                if foreign_json.load_object((folder / REQUEST_NAME).read_bytes(), {"id": str})["id"] == name:
                    (folder / REQUEST_NAME).unlink()
    if plan is None:
        raise UserError(
            f"no run accepted the request within {taken_seconds:g} s: is the run of {folder} training now "
            "(launch/pod.sh status)? Requests are accepted between steps, from the second step on"
        )
    if plan["state"] == "over":
        raise UserError(
            f"the run is at step {plan['step']} of {plan['last_step']} and ends before the trace could start"
        )
    return _wait(folder, plan)


def _wait(folder: paths.Path, plan: dict[str, Any]) -> int:
    first, last = plan["first_step"], plan["last_step"]
    print(
        f"{units.counted(plan['hosts'], 'host traces', 'hosts trace')} steps {first} to {last}, "
        f"starting in about {units.seconds(plan['starts_in_seconds'])}"
    )
    tracing_seconds = plan["starts_in_seconds"] + (last - first + 1) * plan["step_seconds"]
    answer = _answer(folder, plan["id"], {"written"}, within_seconds=3 * tracing_seconds + _WRITING_SECONDS)
    if answer is None:
        raise UserError(f"the hosts did not write the profile of steps {first} to {last}; see the logs of the run")
    for host, remark in sorted(answer["remarks"].items()):
        print(f"host {host} {remark}")
    failures = answer["failures"]
    if len(failures) < answer["hosts"]:
        where = folder / "tensorboard" / "plugins" / "profile" / answer["session"]
        print(f"profile     {where}\nprint       launch/run profile {folder} --session {answer['session']}")
        print(f"tensorboard launch/run tensorboard {folder}")
    if failures:
        raise UserError("\n".join(f"host {host} {failure}" for host, failure in sorted(failures.items())))
    return 0


def _answer(folder: paths.Path, name: str, states: set[str], *, within_seconds: float) -> dict[str, Any] | None:
    deadline = time.monotonic() + within_seconds
    while time.monotonic() < deadline:
        with contextlib.suppress(FileNotFoundError, foreign_json.MalformedError):  # while the file is being replaced
            answer = foreign_json.load_object((folder / ANSWER_NAME).read_bytes(), {"id": str, "state": str})
            if answer["id"] == name and answer["state"] in states:
                return answer
        time.sleep(_BUCKET_POLL_SECONDS if paths.is_remote(folder) else _POLL_SECONDS)
    return None
