"""Builds, prints and runs gcloud command lines for a TPU.

Flags: https://cloud.google.com/sdk/gcloud/reference/compute/tpus/tpu-vm (ssh, scp, describe).
"""

import os
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from core.errors import UserError
from core.hosts import exit_codes
from launch import environment

REMOTE_WORKSPACE = "renga"  # in the home directory of every host
_ANSWER_SECONDS = 120.0


class Tpu(NamedTuple):
    """A TPU (one slice) as gcloud identifies it; project None: gcloud's default project."""

    name: str
    zone: str
    project: str | None = None


class Step(NamedTuple):
    """One command line and its purpose; `secret` is a part of it that no message shows."""

    purpose: str
    argv: tuple[str, ...]
    secret: str = ""

    @property
    def shown(self) -> str:
        """The command line as text, with SECRET in place of `secret`."""
        line = shlex.join(self.argv)
        return line.replace(self.secret, "SECRET") if self.secret else line


class Description(NamedTuple):
    """A TPU as gcloud describes it: `v4-32`, `READY`, `HEALTHY`, and the address of host 0.

    If gcloud failed, `problem` says why, and `state` is `NOT_FOUND` or empty.
    """

    accelerator_type: str = ""
    state: str = ""
    health: str = ""
    address: str = ""
    problem: str = ""


def find_tpus(names: str | None, zone: str | None, project: str | None) -> tuple[Tpu, ...]:
    """Returns the TPUs that flags or environment variables name; empty if there are none.

    `names`: `A`, or `A,B` with one for each slice.

    Raises:
      UserError: the zone is missing, or a name is malformed or given twice.
    """
    names = names or environment.read("TPU_NAME")
    if not names:
        return ()
    zone = zone or environment.read("TPU_ZONE")
    if not zone:
        raise UserError(f"TPU {names!r} has no zone: add --zone ZONE or set TPU_ZONE (such as us-central2-b)")
    parts = names.split(",")
    for name in parts:
        if not name.replace("-", "").isalnum():
            raise UserError(
                f"TPU name {name!r}: expected letters, digits and dashes, as `gcloud … tpu-vm list` prints it; several "
                "slices as A,B"
            )
    if len(set(parts)) < len(parts):
        raise UserError(f"TPU {names!r}: the same TPU is named twice; every slice needs its own TPU")
    return tuple(Tpu(name, zone, project or environment.read("TPU_PROJECT")) for name in parts)


def command(tpu: Tpu, verb: str, *flags: str, group: str = "tpu-vm", target: Sequence[str] = ()) -> tuple[str, ...]:
    """Returns the command line `gcloud compute tpus GROUP VERB TARGET … FLAGS`.

    Args:
      group: the kind of resource.
      target: what the verb applies to; empty: the TPU.
    """
    where = (f"--zone={tpu.zone}", *((f"--project={tpu.project}",) if tpu.project else ()))
    return ("gcloud", "compute", "tpus", group, verb, *(target or (tpu.name,)), *where, *flags)


def scp(tpu: Tpu, source: Path, destination: str) -> tuple[str, ...]:
    """Returns the command that copies a local file to all hosts of a TPU."""
    return command(tpu, "scp", "--worker=all", target=(os.fspath(source), f"{tpu.name}:{destination}"))


def ssh(tpu: Tpu, text: str, *flags: str, worker: str = "all") -> tuple[str, ...]:
    """Returns the command that runs shell text on hosts of a TPU.

    Args:
      worker: the index of a host, or `all`.
    """
    return command(tpu, "ssh", f"--worker={worker}", *flags, f"--command={text}")


def if_installed(text: str) -> str:
    """Returns shell text that says that nothing was started on a host without our files, or runs `text`."""
    script = f"{REMOTE_WORKSPACE}/launch/hosts/on_host.sh"
    return f'if [ ! -f {script} ]; then echo "$(hostname): nothing was started here yet" >&2; exit 1; fi; {text}'


def on_host(action: str, *arguments: str, variables: Sequence[str] = ()) -> str:
    """Returns shell text that runs an action of `on_host.sh`; `variables` are NAME=VALUE."""
    script = f"{REMOTE_WORKSPACE}/launch/hosts/on_host.sh"
    return shlex.join([*(("env", *variables) if variables else ()), "bash", script, action, *arguments])


def describe_step(tpu: Tpu) -> Step:
    """Returns the step that prints the TPU's type, state, health and address."""
    form = "--format=value(acceleratorType,state,health,networkEndpoints[0].ipAddress)"
    return Step(f"describe {tpu.name}", command(tpu, "describe", form))


def describe(tpu: Tpu) -> Description:
    """Asks gcloud to describe a TPU."""
    found = output(describe_step(tpu).argv)
    if found.returncode:
        return Description(state=missing(found), problem=found.stderr.strip())
    return Description(*(found.stdout.rstrip("\n") + "\t\t\t").split("\t")[:4])


def output(argv: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Runs a command line and captures its output; a timeout counts as a failure."""
    try:
        return subprocess.run(resolved(argv), capture_output=True, text=True, check=False, timeout=_ANSWER_SECONDS)
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(argv, 1, "", f"no answer within {_ANSWER_SECONDS:g} s")


def missing(failed: subprocess.CompletedProcess[str]) -> str:
    """Returns NOT_FOUND if gcloud says that something was not found, otherwise ""."""
    return "NOT_FOUND" if "NOT_FOUND" in failed.stderr or "not found" in failed.stderr else ""


def perform(steps: Sequence[Step], *, dry_run: bool, together: bool = False) -> int:
    """Runs the steps until one fails, or all at once if `together`; `dry_run` only prints them.

    Returns the first exit code that is not 0, or 0.
    """
    running = []
    for step in steps:
        print(f"# {step.purpose}", flush=True)
        if dry_run:
            print(shlex.join(step.argv))
            continue
        running.append((step, subprocess.Popen(resolved(step.argv))))
        if not together and (code := _wait(*running.pop())):
            return code
    return next((code for code in [_wait(*started) for started in running] if code), 0)


def _wait(step: Step, process: subprocess.Popen) -> int:
    code = exit_codes.of_process(process.wait())
    if code:
        print(f"failed (exit code {code}): {step.shown}", flush=True)
    return code


def resolved(argv: Sequence[str]) -> list[str]:
    """Returns the command line with the full path of its program, or raises UserError."""
    program = shutil.which(argv[0])
    if program is None:
        raise UserError(f"{argv[0]} is not on PATH: install it (https://cloud.google.com/sdk), or use --dry-run")
    return [program, *argv[1:]]
