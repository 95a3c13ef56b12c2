"""Drives a real slice from a workstation, through gcloud: every step is one command line that can be printed.

The one idea: this file decides, `gcloud compute tpus tpu-vm scp/ssh --worker=all` carries, and `pods/on_host.sh`,
which travels with the workspace, acts on each host. So a step is an argv list without a shell, `--dry-run` prints
exactly what would run, and the only quoting is that of one `--command`.

    pack (git's files) → describe → scp archive → install (unpack, launch/setup.sh) → scp token → start, detached

Each step reaches all hosts before the next begins: nothing starts anywhere unless set-up succeeded everywhere. The
Hugging Face token travels as a file of mode 600 that the host deletes when it has read it, never on a command line.

Flags: https://cloud.google.com/sdk/gcloud/reference/compute/tpus/tpu-vm (ssh, scp, describe).
"""

from __future__ import annotations

import dataclasses
import glob
import os
import shlex
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from core import slices
from launch import environment
from launch.pods import hosts

ACTIONS = ("logs", "status", "stop", "tensorboard")
REMOTE_WORKSPACE = "renga"  # under the home directory of every host, as are the next two
REMOTE_ARCHIVE = "renga.tar.gz"
REMOTE_TOKEN = ".renga/hf_token"
TENSORBOARD_PORT = 6006


@dataclasses.dataclass(frozen=True)
class Tpu:
    """A TPU as gcloud finds it; project None is gcloud's own."""

    name: str
    zone: str
    project: str | None = None


class Step(NamedTuple):
    """One command line and what it is for."""

    purpose: str
    argv: tuple[str, ...]


def find_tpu(name: str | None, zone: str | None, project: str | None) -> Tpu | None:
    """The TPU that the flags name, or else TPU_NAME, TPU_ZONE and TPU_PROJECT; None where neither names one.

    Raises:
      ValueError: a TPU without its zone, or a name that gcloud would take for something else.
    """
    name = name or environment.read("TPU_NAME")
    if not name:
        return None
    zone = zone or environment.read("TPU_ZONE")
    if not zone:
        raise ValueError(f"TPU {name!r} has no zone: add --zone ZONE or set TPU_ZONE (such as us-central2-b)")
    if not name.replace("-", "").isalnum():
        raise ValueError(f"TPU name {name!r}: expected letters, digits and dashes, as `gcloud … tpu-vm list` prints it")
    return Tpu(name, zone, project or environment.read("TPU_PROJECT"))


def start(tpu: Tpu, *, slice_: slices.Slice, arguments: Sequence[str], workspace: Path, dry_run: bool) -> int:
    """Ships the workspace to every host of `tpu`, sets up, and starts `launch/pod.sh ARGUMENTS` on all, detached.

    Args:
      tpu: must be READY and of the size of `slice_`.
      slice_: the SLICE argument.
      arguments: of `launch/pod.sh`, paths relative to the workspace.
      workspace: a git work tree; what git ignores stays here.
      dry_run: prints the steps instead.

    Returns:
      The exit code of the first step that failed, or 0.

    Raises:
      ValueError: the TPU is of another size or not READY, or the workspace is not under git.
    """
    files = workspace_files(workspace)
    token = environment.read("HF_TOKEN")
    with tempfile.TemporaryDirectory(prefix="renga-ship-") as folder:
        archive, token_file = Path(folder) / REMOTE_ARCHIVE, Path(folder) / "hf_token"
        steps = start_steps(tpu, arguments=arguments, archive=archive, token_file=token_file if token else None)
        if dry_run:
            return perform([describe_step(tpu), *steps], dry_run=True)
        _require_ready(tpu, slice_)
        pack(files, workspace=workspace, archive=archive)
        if token:
            token_file.touch(mode=0o600)
            token_file.write_text(token)
        code = perform(steps, dry_run=False)
    if code == 0:
        print(f"Started on {slice_.hosts} hosts. Follow it: launch/pod.sh logs --tpu {tpu.name} --zone {tpu.zone}")
    return code


def act(tpu: Tpu, *, action: str, log_directory: str, dry_run: bool) -> int:
    """Runs one of ACTIONS on the hosts of `tpu`; TensorBoard on host 0 alone, seen through a tunnel on 127.0.0.1."""
    return perform(action_steps(tpu, action=action, log_directory=log_directory), dry_run=dry_run)


def start_steps(tpu: Tpu, *, arguments: Sequence[str], archive: Path, token_file: Path | None) -> list[Step]:
    """What happens after the TPU has been looked at."""
    unpack = (
        f"mkdir -p {REMOTE_WORKSPACE} && tar -xzf {REMOTE_ARCHIVE} -C {REMOTE_WORKSPACE} launch/pods/on_host.sh && "
        f"{_on_host('install')}"
    )
    steps = [
        Step("ship the workspace to all hosts", _scp(tpu, archive, REMOTE_ARCHIVE)),
        Step("unpack and set up on all hosts", _ssh(tpu, unpack)),
    ]
    if token_file is not None:
        steps.append(Step("ship HF_TOKEN, in a file that each host deletes", _scp(tpu, token_file, REMOTE_TOKEN)))
    return [*steps, Step("start on all hosts, detached", _ssh(tpu, _on_host("start", *arguments)))]


def describe_step(tpu: Tpu) -> Step:
    """Prints the TPU's type, state and health, separated by tabs."""
    argv = ("gcloud", "compute", "tpus", "tpu-vm", "describe", tpu.name, *_where(tpu))
    return Step("look at the TPU", (*argv, "--format=value(acceleratorType,state,health)"))


def action_steps(tpu: Tpu, *, action: str, log_directory: str) -> list[Step]:
    """The steps of one of ACTIONS."""
    if action == "tensorboard":
        port = TENSORBOARD_PORT
        tunnel = ("-tt", f"-L 127.0.0.1:{port}:127.0.0.1:{port}")  # with a terminal, so that it ends with the tunnel
        command = _on_host("tensorboard", str(port), log_directory)
        purpose = f"TensorBoard of {log_directory} at http://127.0.0.1:{port} until Ctrl-C"
        return [Step(purpose, _ssh(tpu, command, worker="0", ssh_flags=tunnel))]
    steps = [Step(f"{action} on all hosts", _ssh(tpu, _on_host(action)))]
    return [describe_step(tpu), *steps] if action == "status" else steps


def perform(steps: Sequence[Step], *, dry_run: bool) -> int:
    """Runs the steps up to the first that fails and returns its exit code, or prints them for a shell."""
    for step in steps:
        print(f"# {step.purpose}", flush=True)
        if dry_run:
            print(shlex.join(step.argv))
        elif code := subprocess.run(_resolved(step.argv), check=False).returncode:
            print(f"failed (exit code {code}): {shlex.join(step.argv)}", flush=True)
            return code
    return 0


def workspace_files(workspace: Path) -> list[str]:
    """Paths, relative to `workspace`, of what git tracks or would track.

    Raises:
      ValueError: not a git work tree.
    """
    command = ["git", "-C", str(workspace), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, capture_output=True, text=True, check=False)
    if listed.returncode:
        raise ValueError(f"cannot list the files to ship: {workspace} is not a git work tree ({listed.stderr.strip()})")
    return sorted(name for name in set(listed.stdout.split("\0")) if name and (workspace / name).exists())


def pack(files: Sequence[str], *, workspace: Path, archive: Path) -> None:
    """Writes `files` and the revision they are of into a gzipped tar."""
    note = archive.with_name("revision")
    note.write_text(hosts.revision(workspace=workspace) + "\n")
    with tarfile.open(archive, "w:gz") as tar:
        for name in files:
            tar.add(workspace / name, arcname=name, recursive=False)
        tar.add(note, arcname=hosts.REVISION_FILE)
    print(f"# packed {len(files)} files, {archive.stat().st_size / 1e6:.1f} MB", flush=True)


def shipped_path(path: str, *, workspace: Path) -> str:
    """`path` relative to the workspace, as the hosts will see it.

    Raises:
      ValueError: the file does not exist, or is not among what is shipped.
    """
    absolute = Path(path).resolve()
    if not absolute.is_file():
        raise ValueError(f"no such experiment file: {path}")
    if not absolute.is_relative_to(workspace) or str(absolute.relative_to(workspace)) not in workspace_files(workspace):
        raise ValueError(f"{path} would not reach the hosts: put it into {workspace}, where git does not ignore it")
    return str(absolute.relative_to(workspace))


def left_behind(names: Sequence[str], *, workspace: Path) -> list[str]:
    """What is wrong with files, named by patterns relative to `workspace`, that are there but would not be shipped."""
    shipped = workspace_files(workspace) if names else []
    found = []
    for name in names:
        here = sorted(map(os.path.normpath, glob.glob(name, root_dir=workspace, recursive=True)))  # noqa: PTH207 (as `tasks.listing`)
        left = [path for path in here if not any(f == path or f.startswith(f"{path}/") for f in shipped)]
        if left:
            found.append(
                f"{name!r} would not reach the hosts: git ignores {left[0]}, so it is not shipped. Give gs://BUCKET/…, "
                "or the absolute path where the hosts have it"
            )
    return found


def _require_ready(tpu: Tpu, slice_: slices.Slice) -> None:
    described = subprocess.run(_resolved(describe_step(tpu).argv), capture_output=True, text=True, check=False)
    if described.returncode:
        raise ValueError(f"gcloud finds no TPU {tpu.name!r} in {tpu.zone}: {described.stderr.strip()}")
    accelerator_type, state, health, *_ = (described.stdout.rstrip("\n") + "\t\t").split("\t")
    if state != "READY":
        raise ValueError(f"TPU {tpu.name} is {state or 'in no known state'} (health {health or 'unknown'}), not READY")
    hosts.require_slice(slice_, accelerator_type=accelerator_type or None, where=f"TPU {tpu.name}")


def _resolved(argv: Sequence[str]) -> list[str]:
    program = shutil.which(argv[0])
    if program is None:
        raise ValueError(f"{argv[0]} is not on PATH: install it (https://cloud.google.com/sdk), or use --dry-run")
    return [program, *argv[1:]]


def _on_host(action: str, *arguments: str) -> str:
    return shlex.join(["bash", f"{REMOTE_WORKSPACE}/launch/pods/on_host.sh", action, *arguments])


def _where(tpu: Tpu) -> tuple[str, ...]:
    return (f"--zone={tpu.zone}", *((f"--project={tpu.project}",) if tpu.project else ()))


def _scp(tpu: Tpu, source: Path, destination: str) -> tuple[str, ...]:
    argv = ("gcloud", "compute", "tpus", "tpu-vm", "scp", os.fspath(source), f"{tpu.name}:{destination}")
    return (*argv, "--worker=all", *_where(tpu))


def _ssh(tpu: Tpu, command: str, *, worker: str = "all", ssh_flags: Sequence[str] = ()) -> tuple[str, ...]:
    argv = ("gcloud", "compute", "tpus", "tpu-vm", "ssh", tpu.name, f"--worker={worker}", *_where(tpu))
    return (*argv, *(f"--ssh-flag={flag}" for flag in ssh_flags), f"--command={command}")
