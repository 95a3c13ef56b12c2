"""Builds, prints and runs gcloud command lines for a TPU.

Each step is an argv list without a shell, so `--dry-run` prints exactly what would run; only the text of `--command` is
quoted for a shell.

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
    """One command line and its purpose."""

    purpose: str
    argv: tuple[str, ...]


class Description(NamedTuple):
    """A TPU as gcloud describes it: `v4-32`, `READY`, `HEALTHY`, and the address of host 0.

    If gcloud failed, `problem` is what it printed, and `state` is `NOT_FOUND` if there is no such TPU, otherwise empty.
    """

    accelerator_type: str = ""
    state: str = ""
    health: str = ""
    address: str = ""
    problem: str = ""


def find_tpus(names: str | None, zone: str | None, project: str | None) -> tuple[Tpu, ...]:
    """Returns the TPUs named by flags, or else by TPU_NAME, TPU_ZONE and TPU_PROJECT; empty if there are none.

    `names` is one name, or `A,B` with one for each slice of the job; the first TPU runs the coordinator.

    Raises:
      UserError: there is no zone, or a name is malformed or given twice.
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
      tpu: the TPU.
      verb: the action, such as `create`.
      *flags: flags after those for the zone and the project.
      group: the kind of resource, such as `tpu-vm`.
      target: what the verb applies to; empty: the name of the TPU.
    """
    where = (f"--zone={tpu.zone}", *((f"--project={tpu.project}",) if tpu.project else ()))
    return ("gcloud", "compute", "tpus", group, verb, *(target or (tpu.name,)), *where, *flags)


def scp(tpu: Tpu, source: Path, destination: str) -> tuple[str, ...]:
    """Returns the command that copies a local file to all hosts of a TPU."""
    return command(tpu, "scp", "--worker=all", target=(os.fspath(source), f"{tpu.name}:{destination}"))


def ssh(tpu: Tpu, text: str, *flags: str, worker: str = "all") -> tuple[str, ...]:
    """Returns the command that runs shell text on hosts of a TPU.

    Args:
      tpu: the TPU.
      text: the shell text.
      *flags: further flags of gcloud.
      worker: the index of a host, or `all`.
    """
    return command(tpu, "ssh", f"--worker={worker}", *flags, f"--command={text}")


def on_host(action: str, *arguments: str, variables: Sequence[str] = ()) -> str:
    """Returns shell text that runs an action of `on_host.sh`, with `variables` (NAME=VALUE) in its environment."""
    script = f"{REMOTE_WORKSPACE}/launch/hosts/on_host.sh"
    return shlex.join([*(("env", *variables) if variables else ()), "bash", script, action, *arguments])


def describe_step(tpu: Tpu) -> Step:
    """Returns the step that prints the TPU's type, state, health and address, separated by tabs."""
    form = "--format=value(acceleratorType,state,health,networkEndpoints[0].ipAddress)"
    return Step(f"describe {tpu.name}", command(tpu, "describe", form))


def describe(tpu: Tpu) -> Description:
    """Asks gcloud to describe a TPU; if gcloud fails, the description has a `problem`.

    Raises:
      UserError: gcloud is not installed.
    """
    found = output(describe_step(tpu).argv)
    if found.returncode:
        return Description(state=missing(found), problem=found.stderr.strip())
    return Description(*(found.stdout.rstrip("\n") + "\t\t\t").split("\t")[:4])


def output(argv: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Runs a command line and captures its output; a timeout counts as a failure.

    Raises:
      UserError: the program is not installed.
    """
    try:
        return subprocess.run(resolved(argv), capture_output=True, text=True, check=False, timeout=_ANSWER_SECONDS)
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(argv, 1, "", f"no answer within {_ANSWER_SECONDS:g} s")


def missing(failed: subprocess.CompletedProcess[str]) -> str:
    """Returns NOT_FOUND if gcloud failed because the resource does not exist, otherwise ""."""
    return "NOT_FOUND" if "NOT_FOUND" in failed.stderr or "not found" in failed.stderr else ""


def perform(steps: Sequence[Step], *, dry_run: bool, together: bool = False) -> int:
    """Runs the steps one by one up to the first failure, or all at once if `together`; `dry_run` only prints them.

    Returns:
      The exit code of the first step that failed, or 0.

    Raises:
      UserError: the program of a step is not installed, unless `dry_run`.
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
        print(f"failed (exit code {code}): {shlex.join(step.argv)}", flush=True)
    return code


def resolved(argv: Sequence[str]) -> list[str]:
    """Returns the command line with the full path of its program. Raises UserError if it is not installed."""
    program = shutil.which(argv[0])
    if program is None:
        raise UserError(f"{argv[0]} is not on PATH: install it (https://cloud.google.com/sdk), or use --dry-run")
    return [program, *argv[1:]]
