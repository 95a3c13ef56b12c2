"""Drives a real slice from a workstation, through gcloud: every step is one command line that can be printed.

The one idea: this file decides, `gcloud compute tpus tpu-vm scp/ssh --worker=all` carries, and `pods/on_host.sh`,
which travels with the workspace, acts on each host. So a step is an argv list without a shell, `--dry-run` prints
exactly what would run, and the only quoting is that of one `--command`.

    pack (git's files) → describe → scp archive → install (unpack, launch/setup.sh) → scp token → start, detached

Each step reaches all hosts before the next begins: nothing starts anywhere unless set-up succeeded everywhere. A job
of several slices has a TPU for each; their hosts start with MEGASCALE_… set, by which JAX and libtpu join them. The
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

from core import paths, slices
from launch import environment
from launch.pods import hosts, logs

ACTIONS = ("logs", "status", "stop", "tensorboard")
REMOTE_WORKSPACE = "renga"  # under the home directory of every host, as are the next two
REMOTE_ARCHIVE = "renga.tar.gz"
REMOTE_TOKEN = ".renga/hf_token"
TENSORBOARD_PORT = 6006


@dataclasses.dataclass(frozen=True)
class Tpu:
    """A TPU (one slice) as gcloud finds it; project None is gcloud's own."""

    name: str
    zone: str
    project: str | None = None


class Run(NamedTuple):
    """What every host starts: arguments of `launch/pod.sh`, and NAME=VALUE of its environment."""

    arguments: Sequence[str]
    variables: Sequence[str]


class Step(NamedTuple):
    """One command line and what it is for."""

    purpose: str
    argv: tuple[str, ...]


def find_tpus(names: str | None, zone: str | None, project: str | None) -> tuple[Tpu, ...]:
    """The TPUs that the flags name, or else TPU_NAME, TPU_ZONE and TPU_PROJECT; empty where neither names one.

    Args:
      names: one, or `A,B`: one for each slice of the job, the first has its coordinator.
      zone: of all.
      project: of all.

    Raises:
      ValueError: a TPU without its zone, a name that gcloud would take for something else, or one given twice.
    """
    names = names or environment.read("TPU_NAME")
    if not names:
        return ()
    zone = zone or environment.read("TPU_ZONE")
    if not zone:
        raise ValueError(f"TPU {names!r} has no zone: add --zone ZONE or set TPU_ZONE (such as us-central2-b)")
    parts = names.split(",")
    for name in parts:
        if not name.replace("-", "").isalnum():
            raise ValueError(
                f"TPU name {name!r}: expected letters, digits and dashes, as `gcloud … tpu-vm list` prints it; several "
                "slices as A,B"
            )
    if len(set(parts)) < len(parts):
        raise ValueError(f"TPU {names!r}: each slice is a TPU of its own")
    return tuple(Tpu(name, zone, project or environment.read("TPU_PROJECT")) for name in parts)


def start(
    tpus: Sequence[Tpu],
    *,
    slice_: slices.Slice,
    arguments: Sequence[str],
    variables: Sequence[str] = (),
    workspace: Path,
    dry_run: bool,
) -> int:
    """Ships the workspace to every host of `tpus`, sets up, and starts `launch/pod.sh ARGUMENTS` on all, detached.

    Args:
      tpus: one for each slice; each must be READY and of the size of `slice_`.
      slice_: the SLICE argument.
      arguments: of `launch/pod.sh`, paths relative to the workspace.
      variables: NAME=VALUE, of its environment.
      workspace: a git work tree; what git ignores stays here.
      dry_run: prints the steps instead.

    Returns:
      The exit code of the first step that failed, or 0.

    Raises:
      ValueError: a TPU is of another size or not READY, there are more or fewer than slices, or the workspace is not
        under git.
    """
    if len(tpus) != slice_.num_slices:
        raise ValueError(
            f"{slice_.name} is {slice_.num_slices} slice(s), but {len(tpus)} TPU(s) are named "
            f"({', '.join(tpu.name for tpu in tpus)}): give one for each, as --tpu A,B"
        )
    files = workspace_files(workspace)
    token = environment.read("HF_TOKEN")
    with tempfile.TemporaryDirectory(prefix="renga-ship-") as folder:
        archive, token_file = Path(folder) / REMOTE_ARCHIVE, Path(folder) / "hf_token"
        shipped = {"run": Run(arguments, variables), "archive": archive, "token_file": token_file if token else None}
        if dry_run:
            looks = [describe_step(tpu) for tpu in tpus] + [address_step(tpus[0])][: len(tpus) - 1]
            steps = start_steps(tpus, **shipped, coordinator=f"ADDRESS_OF_{tpus[0].name}")
            return perform([*looks, *steps], dry_run=True)
        for tpu in tpus:
            _require_ready(tpu, slice_)
        steps = start_steps(tpus, **shipped, coordinator=_address(tpus[0]) if len(tpus) > 1 else "")
        pack(files, workspace=workspace, archive=archive)
        if token:
            token_file.touch(mode=0o600)
            token_file.write_text(token)
        code = perform(steps, dry_run=False)
    if code == 0:
        names = ",".join(tpu.name for tpu in tpus)
        print(f"Started on {slice_.hosts} hosts. Follow it: launch/pod.sh logs --tpu {names} --zone {tpus[0].zone}")
    return code


def act(tpus: Sequence[Tpu], *, action: str, log_directory: str, dry_run: bool) -> int:
    """Runs one of ACTIONS on all hosts at once; TensorBoard on host 0 alone, seen through a tunnel on 127.0.0.1."""
    if action == "tensorboard":
        return perform([tensorboard_step(tpus[0], log_directory=log_directory)], dry_run=dry_run)
    if action == "status" and (code := perform([describe_step(tpu) for tpu in tpus], dry_run=dry_run)):
        return code
    steps = [action_step(tpu, action=action) for tpu in tpus]
    if action == "logs" and not dry_run:
        return logs.follow([_resolved(step.argv) for step in steps])
    return perform(steps, dry_run=dry_run, together=True)


def start_steps(
    tpus: Sequence[Tpu], *, run: Run, archive: Path, token_file: Path | None, coordinator: str
) -> list[Step]:
    """What happens after the TPUs have been looked at; `coordinator` is the address of the first one's host 0."""
    unpack = (
        f"mkdir -p {REMOTE_WORKSPACE} && tar -xzf {REMOTE_ARCHIVE} -C {REMOTE_WORKSPACE} launch/pods/on_host.sh && "
        f"{_on_host('install')}"
    )
    of = {tpu: f" of {tpu.name}" if len(tpus) > 1 else "" for tpu in tpus}
    steps = [Step(f"ship the workspace to all hosts{of[t]}", _scp(t, archive, REMOTE_ARCHIVE)) for t in tpus]
    steps += [Step(f"unpack and set up on all hosts{of[t]}", _ssh(t, unpack)) for t in tpus]
    if token_file is not None:
        purpose = "ship HF_TOKEN, in a file that each host deletes"
        steps += [Step(f"{purpose}{of[t]}", _scp(t, token_file, REMOTE_TOKEN)) for t in tpus]
    for index, tpu in enumerate(tpus):
        joined = _joined(index, len(tpus), coordinator) if len(tpus) > 1 else ()
        command = _on_host("start", *run.arguments, variables=(*joined, *run.variables))
        steps.append(Step(f"start on all hosts{of[tpu]}, detached", _ssh(tpu, command)))
    return steps


def _joined(index: int, count: int, coordinator: str) -> tuple[str, ...]:
    """What makes the hosts of a slice part of a job of several (read by JAX and libtpu)."""
    values = {"NUM_SLICES": count, "SLICE_ID": index, "COORDINATOR_ADDRESS": coordinator}
    return tuple(f"MEGASCALE_{name}={value}" for name, value in values.items())


def describe_step(tpu: Tpu) -> Step:
    """Prints the TPU's type, state and health, separated by tabs."""
    argv = ("gcloud", "compute", "tpus", "tpu-vm", "describe", tpu.name, *_where(tpu))
    return Step("look at the TPU", (*argv, "--format=value(acceleratorType,state,health)"))


def address_step(tpu: Tpu) -> Step:
    """Prints the address of host 0 in the network of the TPU."""
    argv = ("gcloud", "compute", "tpus", "tpu-vm", "describe", tpu.name, *_where(tpu))
    return Step("find the address of host 0", (*argv, "--format=value(networkEndpoints[0].ipAddress)"))


def action_step(tpu: Tpu, *, action: str) -> Step:
    """One of ACTIONS on all hosts of a TPU."""
    return Step(f"{action} on all hosts of {tpu.name}", _ssh(tpu, _on_host(action)))


def tensorboard_step(tpu: Tpu, *, log_directory: str) -> Step:
    """TensorBoard on host 0."""
    port = TENSORBOARD_PORT
    tunnel = ("-tt", f"-L 127.0.0.1:{port}:127.0.0.1:{port}")  # with a terminal, so that it ends with the tunnel
    command = _on_host("tensorboard", str(port), log_directory)
    purpose = f"TensorBoard of {log_directory} at http://127.0.0.1:{port} until Ctrl-C"
    return Step(purpose, _ssh(tpu, command, worker="0", ssh_flags=tunnel))


def perform(steps: Sequence[Step], *, dry_run: bool, together: bool = False) -> int:
    """Runs the steps one after the other up to the first that fails, or all `together`; or prints them for a shell.

    Returns:
      The exit code of the first that failed, or 0.
    """
    running = []
    for step in steps:
        print(f"# {step.purpose}", flush=True)
        if dry_run:
            print(shlex.join(step.argv))
            continue
        running.append((step, subprocess.Popen(_resolved(step.argv))))
        if not together and (code := _ended(*running.pop())):
            return code
    return next((code for code in [_ended(*started) for started in running] if code), 0)


def _ended(step: Step, process: subprocess.Popen) -> int:
    code = process.wait()
    if code:
        print(f"failed (exit code {code}): {shlex.join(step.argv)}", flush=True)
    return code


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
    """`path` relative to the workspace, as the hosts will see it; gs:// is what it is everywhere.

    Raises:
      ValueError: the file does not exist, or is not among what is shipped.
    """
    if paths.is_remote(path):
        return path
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


def _address(tpu: Tpu) -> str:
    found = subprocess.run(_resolved(address_step(tpu).argv), capture_output=True, text=True, check=False)
    if found.returncode or not found.stdout.strip():
        raise ValueError(
            f"gcloud has no address of host 0 of {tpu.name}: {found.stderr.strip() or 'it printed nothing'}"
        )
    return found.stdout.strip()


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


def _on_host(action: str, *arguments: str, variables: Sequence[str] = ()) -> str:
    script = f"{REMOTE_WORKSPACE}/launch/pods/on_host.sh"
    return shlex.join([*(("env", *variables) if variables else ()), "bash", script, action, *arguments])


def _where(tpu: Tpu) -> tuple[str, ...]:
    return (f"--zone={tpu.zone}", *((f"--project={tpu.project}",) if tpu.project else ()))


def _scp(tpu: Tpu, source: Path, destination: str) -> tuple[str, ...]:
    argv = ("gcloud", "compute", "tpus", "tpu-vm", "scp", os.fspath(source), f"{tpu.name}:{destination}")
    return (*argv, "--worker=all", *_where(tpu))


def _ssh(tpu: Tpu, command: str, *, worker: str = "all", ssh_flags: Sequence[str] = ()) -> tuple[str, ...]:
    argv = ("gcloud", "compute", "tpus", "tpu-vm", "ssh", tpu.name, f"--worker={worker}", *_where(tpu))
    return (*argv, *(f"--ssh-flag={flag}" for flag in ssh_flags), f"--command={command}")
