"""Builds, prints and runs gcloud command lines for a TPU.

Each step is an argv list without a shell, so `--dry-run` prints exactly what would run; only the text of `--command` is
quoted for a shell.

Flags: https://cloud.google.com/sdk/gcloud/reference/compute/tpus/tpu-vm (ssh, scp, describe).
"""

from __future__ import annotations

import dataclasses
import os
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from core.errors import UserError
from launch import environment

REMOTE_WORKSPACE = "renga"  # under the home directory of every host, as is what is copied there
TENSORBOARD_PORT = 6006


@dataclasses.dataclass(frozen=True)
class Tpu:
    """A TPU (one slice) as gcloud identifies it; project None is gcloud's default."""

    name: str
    zone: str
    project: str | None = None


class Step(NamedTuple):
    """One command line and its purpose."""

    purpose: str
    argv: tuple[str, ...]


def find_tpus(names: str | None, zone: str | None, project: str | None) -> tuple[Tpu, ...]:
    """Returns the TPUs named by flags, or else by TPU_NAME, TPU_ZONE and TPU_PROJECT; empty if there are none.

    Args:
      names: one, or `A,B` with one for each slice of the job; the first runs the coordinator.
      zone: of all.
      project: of all.

    Raises:
      ValueError: a TPU without a zone, a malformed name, or the same name twice.
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
        raise UserError(f"TPU {names!r}: each slice is a TPU of its own")
    return tuple(Tpu(name, zone, project or environment.read("TPU_PROJECT")) for name in parts)


def describe_step(tpu: Tpu) -> Step:
    """Prints the TPU's type, state and health, separated by tabs."""
    argv = ("gcloud", "compute", "tpus", "tpu-vm", "describe", tpu.name, *where(tpu))
    return Step("look at the TPU", (*argv, "--format=value(acceleratorType,state,health)"))


def address_step(tpu: Tpu) -> Step:
    """Prints the address of host 0 in the network of the TPU."""
    argv = ("gcloud", "compute", "tpus", "tpu-vm", "describe", tpu.name, *where(tpu))
    return Step("find the address of host 0", (*argv, "--format=value(networkEndpoints[0].ipAddress)"))


def action_step(tpu: Tpu, *, action: str) -> Step:
    """One of ACTIONS on all hosts of a TPU."""
    return Step(f"{action} on all hosts of {tpu.name}", ssh(tpu, on_host(action)))


def tensorboard_step(tpu: Tpu, *, log_directory: str | None) -> Step:
    """TensorBoard on host 0, over `log_directory` or, for None, over the run directory of the run that is there."""
    port = TENSORBOARD_PORT
    tunnel = ("-tt", f"-L 127.0.0.1:{port}:127.0.0.1:{port}")  # with a terminal, so that it ends with the tunnel
    command = on_host("tensorboard", str(port), *([log_directory] if log_directory else []))
    purpose = f"TensorBoard of {log_directory or 'the run'} at http://127.0.0.1:{port} until Ctrl-C"
    return Step(purpose, ssh(tpu, command, worker="0", ssh_flags=tunnel))


def perform(steps: Sequence[Step], *, dry_run: bool, together: bool = False) -> int:
    """Runs the steps in turn up to the first failure, or all at once if `together`; with `dry_run` only prints them.

    Returns:
      The exit code of the first that failed, or 0.
    """
    running = []
    for step in steps:
        print(f"# {step.purpose}", flush=True)
        if dry_run:
            print(shlex.join(step.argv))
            continue
        running.append((step, subprocess.Popen(resolved(step.argv))))
        if not together and (code := _ended(*running.pop())):
            return code
    return next((code for code in [_ended(*started) for started in running] if code), 0)


def _ended(step: Step, process: subprocess.Popen) -> int:
    code = process.wait()
    if code:
        print(f"failed (exit code {code}): {shlex.join(step.argv)}", flush=True)
    return code


def address(tpu: Tpu) -> str:
    """Returns the address of host 0 in the network of the TPU. Raises ValueError if gcloud has none."""
    found = subprocess.run(resolved(address_step(tpu).argv), capture_output=True, text=True, check=False)
    if found.returncode or not found.stdout.strip():
        raise UserError(
            f"gcloud has no address of host 0 of {tpu.name}: {found.stderr.strip() or 'it printed nothing'}"
        )
    return found.stdout.strip()


def resolved(argv: Sequence[str]) -> list[str]:
    """Returns the command line with the full path of its program. Raises ValueError if it is not installed."""
    program = shutil.which(argv[0])
    if program is None:
        raise UserError(f"{argv[0]} is not on PATH: install it (https://cloud.google.com/sdk), or use --dry-run")
    return [program, *argv[1:]]


def on_host(action: str, *arguments: str, variables: Sequence[str] = ()) -> str:
    """Returns shell text that runs an action of `on_host.sh`, with `variables` (NAME=VALUE) in its environment."""
    script = f"{REMOTE_WORKSPACE}/launch/hosts/on_host.sh"
    return shlex.join([*(("env", *variables) if variables else ()), "bash", script, action, *arguments])


def where(tpu: Tpu) -> tuple[str, ...]:
    """Returns the --zone and --project flags."""
    return (f"--zone={tpu.zone}", *((f"--project={tpu.project}",) if tpu.project else ()))


def scp(tpu: Tpu, source: Path, destination: str) -> tuple[str, ...]:
    """Copies a local file to all hosts of a TPU."""
    argv = ("gcloud", "compute", "tpus", "tpu-vm", "scp", os.fspath(source), f"{tpu.name}:{destination}")
    return (*argv, "--worker=all", *where(tpu))


def ssh(tpu: Tpu, command: str, *, worker: str = "all", ssh_flags: Sequence[str] = ()) -> tuple[str, ...]:
    """Runs shell text on the hosts of a TPU."""
    argv = ("gcloud", "compute", "tpus", "tpu-vm", "ssh", tpu.name, f"--worker={worker}", *where(tpu))
    return (*argv, *(f"--ssh-flag={flag}" for flag in ssh_flags), f"--command={command}")
