"""`launch/pod.sh profile RUN`: asks a run that is going for a profile of all its hosts, and waits for it.

The one idea: the run directory is what this machine and the hosts share, so a small file in it is the request and
another the answer (`core.training.profile_requests`). It works wherever the run directory can be written: a folder of
this machine, of a shared disk, or a bucket.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
import uuid
from typing import Any

from core import paths, units
from core.training.profile_requests import ANSWER_NAME, REQUEST_NAME

TAKEN_SECONDS = 60.0
_POLL_SECONDS = 0.3
_BUCKET_POLL_SECONDS = 2.0
_WRITING_SECONDS = 300.0  # a trace of seconds is hundreds of MB, which go to a bucket


def ask(
    run_dir: str, *, steps: int | None = None, seconds: float | None = None, taken_seconds: float = TAKEN_SECONDS
) -> int:
    """Asks, waits and says where the profile is; 0 when every host has written its file.

    Args:
      run_dir: of a run that is training.
      steps: how many to trace; or
      seconds: how long.
      taken_seconds: how long to wait for the run to take the request.

    Raises:
      ValueError: no run there, none that answers, or one that ends too soon.
    """
    if (steps is None) == (seconds is None):
        raise ValueError("profile: give either --seconds S or --steps N (such as --seconds 5)")
    length = steps if seconds is None else seconds
    if not 0 < length < math.inf:
        flag = "--steps" if seconds is None else "--seconds"
        raise ValueError(f"profile: {flag} {length} is no length: expected more than 0 (such as --seconds 5)")
    folder = paths.resolve(run_dir)
    if not (folder / "config.gin").exists():
        raise ValueError(f"{folder} is no run directory: it has no config.gin (written when a run starts to train)")
    request = {"id": uuid.uuid4().hex} | ({"steps": steps} if seconds is None else {"seconds": seconds})
    paths.write_text_atomically(folder / REQUEST_NAME, json.dumps(request) + "\n")
    answer = None
    try:
        answer = _answer(folder, request["id"], {"planned", "written", "over"}, within_seconds=taken_seconds)
    finally:
        if answer is None:
            _withdraw(folder / REQUEST_NAME, request["id"])
    if answer is None:
        raise ValueError(
            f"no run took the request within {taken_seconds:g} s: is the run of {folder} training now (launch/pod.sh "
            "status)? It looks for requests between its steps, from the second step on"
        )
    if answer["state"] == "over":
        raise ValueError(f"the run is at step {answer['step']} of {answer['last_step']} and ends before it could trace")
    return _wait(folder, answer)


def _wait(folder: paths.Path, plan: dict[str, Any]) -> int:
    first, last = plan["first_step"], plan["last_step"]
    print(
        f"{units.counted(plan['hosts'], 'host traces', 'hosts trace')} steps {first} to {last}, "
        f"starting in about {units.seconds(plan['starts_in_seconds'])}"
    )
    tracing_seconds = plan["starts_in_seconds"] + (last - first + 1) * plan["step_seconds"]
    answer = _answer(folder, plan["id"], {"written"}, within_seconds=3 * tracing_seconds + _WRITING_SECONDS)
    if answer is None:
        raise ValueError(f"the hosts did not write the profile of steps {first} to {last}; read the logs of the run")
    for host, remark in sorted(answer["remarks"].items()):
        print(f"host {host} {remark}")
    where = folder / "tensorboard" / "plugins" / "profile" / answer["session"]
    print(f"profile     {where}\nread it     launch/run profile {folder} --session {answer['session']}")
    print(f"tensorboard launch/run tensorboard {folder}")
    return 0


def _answer(folder: paths.Path, name: str, states: set[str], *, within_seconds: float) -> dict[str, Any] | None:
    """The run's answer to this request once it is in one of `states`."""
    deadline = time.monotonic() + within_seconds
    poll_seconds = _BUCKET_POLL_SECONDS if paths.is_remote(folder) else _POLL_SECONDS
    while time.monotonic() < deadline:
        path = folder / ANSWER_NAME
        with contextlib.suppress(FileNotFoundError, json.JSONDecodeError):  # of a bucket, half of what is replaced
            answer = json.loads(path.read_text())
            if answer["id"] == name and answer["state"] in states:
                return answer
        time.sleep(poll_seconds)
    return None


def _withdraw(path: paths.Path, name: str) -> None:
    """Nobody took it; a run that starts later must not."""
    with contextlib.suppress(FileNotFoundError, json.JSONDecodeError):  # or somebody did, at the last moment
        if json.loads(path.read_text())["id"] == name:
            path.unlink()
