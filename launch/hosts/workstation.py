"""Drives a real slice from a workstation through gcloud; every step is one command line, which `--dry-run` prints.

`gcloud compute tpus tpu-vm scp/ssh --worker=all` copies files and runs `hosts/on_host.sh`, which is shipped with the
workspace, on each host.

    pack (git's files) → describe → scp archive → install (unpack, launch/setup.sh) → scp secrets → start, detached

Each step finishes on all hosts before the next begins, so nothing starts unless set-up succeeded on every host. A job
of several slices has one TPU for each; MEGASCALE_… variables tell JAX and libtpu how to join them. HF_TOKEN and
RENGA_ALERT are copied as files of mode 600, which the host deletes after reading them.
"""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from core import slices, units
from core.errors import UserError
from launch import environment
from launch.hosts import gcloud, logs, shipping, tpu_host
from launch.hosts.gcloud import Step, Tpu

ACTIONS = ("logs", "status", "stop", "tensorboard")
REMOTE_ARCHIVE = "renga.tar.gz"  # under the home directory of every host, as is the next
REMOTE_STATE = ".renga"


class Run(NamedTuple):
    """What every host starts.

    Attributes:
      arguments: of `launch/pod.sh`, without --run-dir.
      directory: of the run, as the hosts see it; a relative one is inside the shipped workspace.
      variables: NAME=VALUE, of its environment.
    """

    arguments: Sequence[str]
    directory: str
    variables: Sequence[str] = ()


def start(
    tpus: Sequence[Tpu],
    *,
    slice_: slices.Slice,
    run: Run,
    workspace: Path,
    dry_run: bool,
) -> int:
    """Ships the workspace to every host of `tpus`, sets up, and starts `run` on all of them, detached.

    Args:
      tpus: one for each slice; each must be READY and of the size of `slice_`.
      slice_: the SLICE argument.
      run: what to start; paths are relative to the workspace.
      workspace: a git work tree; what git ignores stays here.
      dry_run: prints the steps instead.

    Returns:
      The exit code of the first step that failed, or 0.

    Raises:
      ValueError: a TPU is of another size or not READY, there are more or fewer than slices, or the workspace is not
        under git.
    """
    if len(tpus) != slice_.num_slices:
        raise UserError(
            f"{slice_.name} is {units.counted(slice_.num_slices, 'slice')}, but "
            f"{units.counted(len(tpus), 'TPU is', 'TPUs are')} named ({', '.join(tpu.name for tpu in tpus)}): "
            "give one for each, as --tpu A,B"
        )
    files = shipping.workspace_files(workspace)
    with tempfile.TemporaryDirectory(prefix="renga-ship-") as folder:
        archive = Path(folder) / REMOTE_ARCHIVE
        values = {"HF_TOKEN": environment.read("HF_TOKEN"), "RENGA_ALERT": environment.read("RENGA_ALERT")}
        secrets = [Path(folder) / name for name, value in values.items() if value]
        shipped = {"run": run, "archive": archive, "secrets": secrets}
        if dry_run:
            looks = [gcloud.describe_step(tpu) for tpu in tpus] + [gcloud.address_step(tpus[0])][: len(tpus) - 1]
            steps = start_steps(tpus, **shipped, coordinator=f"ADDRESS_OF_{tpus[0].name}")
            return gcloud.perform([*looks, *steps], dry_run=True)
        for tpu in tpus:
            _require_ready(tpu, slice_)
        steps = start_steps(tpus, **shipped, coordinator=gcloud.address(tpus[0]) if len(tpus) > 1 else "")
        shipping.pack(files, workspace=workspace, archive=archive)
        for file in secrets:
            file.touch(mode=0o600)
            file.write_text(values[file.name])
        code = gcloud.perform(steps, dry_run=False)
    if code == 0:
        names = ",".join(tpu.name for tpu in tpus)
        print(
            f"Started on {units.counted(slice_.hosts, 'host')}. "
            f"Follow it: launch/pod.sh logs --tpu {names} --zone {tpus[0].zone}"
        )
    return code


def act(tpus: Sequence[Tpu], *, action: str, log_directory: str | None = None, dry_run: bool) -> int:
    """Runs one of ACTIONS on all hosts at once; TensorBoard runs on host 0 alone, with a tunnel to 127.0.0.1."""
    if action == "tensorboard":
        return gcloud.perform([gcloud.tensorboard_step(tpus[0], log_directory=log_directory)], dry_run=dry_run)
    if action == "status" and (code := gcloud.perform([gcloud.describe_step(tpu) for tpu in tpus], dry_run=dry_run)):
        return code
    steps = [gcloud.action_step(tpu, action=action) for tpu in tpus]
    if action == "logs" and not dry_run:
        return logs.follow([gcloud.resolved(step.argv) for step in steps])
    return gcloud.perform(steps, dry_run=dry_run, together=True)


def start_steps(
    tpus: Sequence[Tpu], *, run: Run, archive: Path, secrets: Sequence[Path], coordinator: str
) -> list[Step]:
    """Returns the steps after the TPUs were checked; `coordinator` is the address of host 0 of the first TPU."""
    into = gcloud.REMOTE_WORKSPACE
    unpack = (
        f"mkdir -p {into} && tar -xzf {REMOTE_ARCHIVE} -C {into} launch/hosts/on_host.sh && {gcloud.on_host('install')}"
    )
    of = {tpu: f" of {tpu.name}" if len(tpus) > 1 else "" for tpu in tpus}
    steps = [Step(f"ship the workspace to all hosts{of[t]}", gcloud.scp(t, archive, REMOTE_ARCHIVE)) for t in tpus]
    steps += [Step(f"unpack and set up on all hosts{of[t]}", gcloud.ssh(t, unpack)) for t in tpus]
    for file in secrets:
        purpose = f"ship {file.name}, in a file that each host deletes"
        steps += [Step(f"{purpose}{of[t]}", gcloud.scp(t, file, f"{REMOTE_STATE}/{file.name}")) for t in tpus]
    for index, tpu in enumerate(tpus):
        joined = _joined(index, len(tpus), coordinator) if len(tpus) > 1 else ()
        command = gcloud.on_host("start", run.directory, *run.arguments, variables=(*joined, *run.variables))
        steps.append(Step(f"start on all hosts{of[tpu]}, detached", gcloud.ssh(tpu, command)))
    return steps


def _joined(index: int, count: int, coordinator: str) -> tuple[str, ...]:
    """Returns the variables by which JAX and libtpu join the slices of a job."""
    values = {"NUM_SLICES": count, "SLICE_ID": index, "COORDINATOR_ADDRESS": coordinator}
    return tuple(f"MEGASCALE_{name}={value}" for name, value in values.items())


def _require_ready(tpu: Tpu, slice_: slices.Slice) -> None:
    described = subprocess.run(
        gcloud.resolved(gcloud.describe_step(tpu).argv), capture_output=True, text=True, check=False
    )
    if described.returncode:
        raise UserError(f"gcloud finds no TPU {tpu.name!r} in {tpu.zone}: {described.stderr.strip()}")
    accelerator_type, state, health, *_ = (described.stdout.rstrip("\n") + "\t\t").split("\t")
    if state != "READY":
        raise UserError(f"TPU {tpu.name} is {state or 'in no known state'} (health {health or 'unknown'}), not READY")
    tpu_host.require_slice(slice_, accelerator_type=accelerator_type or None, where=f"TPU {tpu.name}")
