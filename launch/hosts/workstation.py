"""Starts and controls a run on a real slice from a workstation, with gcloud command lines.

    describe → pack (git's files) → scp archive → install (unpack, launch/setup.sh) → scp secrets → start, detached

Each step finishes on all hosts before the next begins.
"""

import glob
import os
import subprocess
import sysconfig
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from secrets import token_hex
from typing import NamedTuple

from core import extras, slices, units, versions
from core.errors import UserError
from core.files import paths
from launch import environment
from launch.hosts import gcloud, logs, tpu_host
from launch.hosts.gcloud import Step, Tpu

ACTIONS = ("logs", "status", "stop", "tensorboard")
TENSORBOARD_PORT = 6006
HOME = "~/renga/"  # the shipped workspace
KEPT = "runs"  # folder in it that a start keeps; on_host.sh has the same name
_ARCHIVE = "renga.tar.gz"  # both are in the home directory of every host
_STATE = ".renga"
MOST_BYTES = 50 * 2**20  # size of the files to ship, before compression: code and settings, but no weights or data
_MOST_LISTED = 8


class Run(NamedTuple):
    """The command that every host starts."""

    arguments: Sequence[str]  # arguments of `launch/pod.sh`, without --run-dir
    directory: str  # the run directory as the hosts see it; a relative path is inside the shipped workspace
    variables: Sequence[str] = ()  # its environment variables, NAME=VALUE


def start(tpus: Sequence[Tpu], *, slice_: slices.Slice, run: Run, workspace: Path, dry_run: bool) -> int:
    """Ships the workspace to every host, sets up, and starts a detached run.

    Args:
      tpus: the TPUs, one for each slice.
      workspace: the folder to ship, without files that git ignores.
      dry_run: whether only to print the steps.

    Returns:
      The exit code of the first step that failed, or 0.

    Raises:
      UserError: the number, state or type of the TPUs is wrong or unknown, or the workspace cannot be shipped.
    """
    require_one_for_each(tpus, slice_)
    names = ", ".join(tpu.name for tpu in tpus)
    shipment = require_small(workspace)
    secrets = {name: value for name in environment.SECRETS if (value := environment.read(name))}
    if dry_run:
        print(f"# ARCHIVE: {shipment}", flush=True)
        gcloud.perform([gcloud.describe_step(tpu) for tpu in tpus], dry_run=True)
        ships = {_ARCHIVE: Path("ARCHIVE"), **{name: Path(f"FILE_WITH_{name}") for name in secrets}}
        steps = _start_steps(tpus, run, ships, coordinator=f"ADDRESS_OF_{tpus[0].name}", secret="RANDOM_TEXT")
        return gcloud.perform(steps, dry_run=True)
    coordinator, *_ = [_ready(tpu, slice_).address for tpu in tpus]
    with tempfile.TemporaryDirectory(prefix="renga-ship-") as folder:
        ships = {name: Path(folder) / name for name in (_ARCHIVE, *secrets)}
        _pack(shipment, workspace=workspace, archive=ships[_ARCHIVE])
        for name, value in secrets.items():
            ships[name].touch(mode=0o600)
            ships[name].write_text(value)
        code = gcloud.perform(
            _start_steps(tpus, run, ships, coordinator=coordinator, secret=token_hex()), dry_run=False
        )
    if code == 0:
        project = f" --project {tpus[0].project}" if tpus[0].project else ""
        print(
            f"Started on {units.counted(slice_.hosts, 'host')}. "
            f"Follow it: launch/pod.sh logs --tpu {names.replace(' ', '')} --zone {tpus[0].zone}{project}"
        )
    return code


def require_one_for_each(tpus: Sequence[Tpu], slice_: slices.Slice) -> None:
    """Raises UserError unless there is one TPU for each slice."""
    if len(tpus) != slice_.num_slices:
        names = ", ".join(tpu.name for tpu in tpus)
        raise UserError(
            f"{slice_.name} is {units.counted(slice_.num_slices, 'slice')}, but "
            f"{units.counted(len(tpus), 'TPU is', 'TPUs are')} named ({names}): give one for each, as --tpu A,B"
        )


_REMEDIES = {  # by the state of a TPU
    **dict.fromkeys(
        ("PREEMPTED", "TERMINATED", "FAILED"),
        "delete it and create it anew (launch/pod.sh delete, launch/pod.sh create)",
    ),
    "STOPPED": "start it (gcloud compute tpus tpu-vm start)",
}


def _ready(tpu: Tpu, slice_: slices.Slice) -> gcloud.Description:
    found = gcloud.describe(tpu)
    if found.state == "NOT_FOUND":
        raise UserError(
            f"gcloud finds no TPU {tpu.name!r} in {tpu.zone}: {found.problem} (expected its name, zone and "
            "project, as --tpu, --zone and --project)"
        )
    if found.problem:
        raise UserError(
            f"gcloud cannot describe TPU {tpu.name!r} in {tpu.zone}: {found.problem}. Try again; `gcloud auth "
            "list` shows whether you are signed in"
        )
    if found.state != "READY":
        state = found.state or "in an unknown state"
        remedy = _REMEDIES.get(found.state, "wait until it is, or create it anew")
        raise UserError(f"TPU {tpu.name} is {state} (health {found.health or 'unknown'}), not READY: {remedy}")
    tpu_host.require_slice(slice_, accelerator_type=found.accelerator_type or None, where=f"TPU {tpu.name}")
    if slice_.num_slices > 1 and not found.address:
        raise UserError(
            f"gcloud has no address of host 0 of {tpu.name}, which the slices need to join: expected one in "
            "the output of gcloud compute tpus tpu-vm describe. Try again"
        )
    return found


def _start_steps(
    tpus: Sequence[Tpu], run: Run, ships: Mapping[str, Path], *, coordinator: str, secret: str
) -> list[Step]:
    into = gcloud.REMOTE_WORKSPACE
    install = gcloud.on_host("install", *extras.flags())
    unpack = f"mkdir -p {into} && tar -xzf {_ARCHIVE} -C {into} launch/hosts/on_host.sh && {install}"
    steps = [("ship the workspace to all hosts", tpu, gcloud.scp(tpu, ships[_ARCHIVE], _ARCHIVE)) for tpu in tpus]
    steps += [("unpack and set up on all hosts", tpu, gcloud.ssh(tpu, unpack)) for tpu in tpus]
    for name in [name for name in ships if name != _ARCHIVE]:
        purpose = f"ship {name} in a file that each host deletes"
        steps += [(purpose, tpu, gcloud.scp(tpu, ships[name], f"{_STATE}/{name}")) for tpu in tpus]
    for index, tpu in enumerate(tpus):
        megascale = {"NUM_SLICES": len(tpus), "SLICE_ID": index, "COORDINATOR_ADDRESS": coordinator}
        joined = [f"MEGASCALE_{name}={value}" for name, value in megascale.items()] if len(tpus) > 1 else []
        variables = (*joined, f"RENGA_JOIN_SECRET={secret}", *run.variables)
        text = gcloud.on_host("start", run.directory, *run.arguments, variables=variables)
        steps.append(("start on all hosts, detached", tpu, gcloud.ssh(tpu, text)))
    several = len(tpus) > 1
    return [Step(f"{tpu.name}: {purpose}" if several else purpose, argv, secret) for purpose, tpu, argv in steps]


def act(tpus: Sequence[Tpu], *, action: str, log_directory: str | None = None, dry_run: bool) -> int:
    """Runs an action on all hosts; TensorBoard runs on host 0 of the first TPU.

    Args:
      action: one of ACTIONS.
      log_directory: for TensorBoard; None: that of the run on host 0.

    Returns:
      The exit code of the first command that failed, or 0.
    """
    if action == "tensorboard":
        return gcloud.perform([tensorboard_step(tpus[0], log_directory)], dry_run=dry_run)
    if action == "status" and (code := gcloud.perform([gcloud.describe_step(tpu) for tpu in tpus], dry_run=dry_run)):
        return code
    steps = [action_step(tpu, action) for tpu in tpus]
    if action == "logs" and not dry_run:
        return logs.follow([gcloud.resolved(step.argv) for step in steps])
    return gcloud.perform(steps, dry_run=dry_run, together=True)


def action_step(tpu: Tpu, action: str) -> Step:
    """Returns the step that runs an action of `on_host.sh` on all hosts of a TPU."""
    return Step(f"{action} on all hosts of {tpu.name}", gcloud.ssh(tpu, gcloud.if_installed(gcloud.on_host(action))))


def tensorboard_step(tpu: Tpu, log_directory: str | None) -> Step:
    """Returns the step for TensorBoard on host 0; `log_directory` None: that of its run."""
    port = TENSORBOARD_PORT
    tunnel = ("--ssh-flag=-tt", f"--ssh-flag=-L 127.0.0.1:{port}:127.0.0.1:{port}")  # -tt: ends with this process
    text = gcloud.if_installed(gcloud.on_host("tensorboard", str(port), *([log_directory] if log_directory else [])))
    purpose = f"TensorBoard of {log_directory or 'the run'} at http://127.0.0.1:{port} until Ctrl-C"
    return Step(purpose, gcloud.ssh(tpu, text, *tunnel, worker="0"))


class Shipment(NamedTuple):
    """The files of the workspace to ship, and their size before compression."""

    files: Sequence[str]
    size_bytes: int

    def __str__(self) -> str:
        return (
            f"{units.counted(len(self.files), 'file')} that git tracks or does not ignore, as they are now; "
            f"{units.size(self.size_bytes)} before compression"
        )


def workspace_files(workspace: Path) -> list[str]:
    """Returns the files to ship: those that git tracks or does not ignore."""
    return _listed_by_git(workspace, "--cached", "--others")


def require_small(workspace: Path) -> Shipment:
    """Returns the files to ship. Raises UserError if they are larger than MOST_BYTES in all."""
    files = workspace_files(workspace)
    sizes = {name: (workspace / name).lstat().st_size for name in files}
    if (total := sum(sizes.values())) <= MOST_BYTES:
        return Shipment(files, total)
    tracked = set(_listed_by_git(workspace, "--cached"))
    entries = {name: sizes[name] for name in tracked}
    for name in _listed_by_git(workspace, "--others", "--directory"):  # `smollm2/`: a folder without tracked files
        entries[name] = sum(size for file, size in sizes.items() if file == name or file.startswith(name))
    largest = sorted(entries, key=entries.__getitem__, reverse=True)[:_MOST_LISTED]
    lines = [
        f"  {units.size(entries[name]):>10}  {name}{'' if name in tracked else '  (untracked)'}" for name in largest
    ]
    raise UserError(
        f"{units.size(total)} would be copied to every host (limit: {units.size(MOST_BYTES)}). The largest are:\n"
        + "\n".join(lines)
        + f"\nThe hosts get the files of {workspace} that git tracks or does not ignore. Move large ones out of it, or "
        "name them in .gitignore or .git/info/exclude; data and weights that the hosts need belong on gs://BUCKET/…"
    )


def _listed_by_git(workspace: Path, *kinds: str) -> list[str]:
    """With `--directory`, git lists an untracked folder as one entry that ends in `/`."""
    command = ["git", "-C", str(workspace), "ls-files", "-z", *kinds, "--exclude-standard"]
    listed = subprocess.run(command, capture_output=True, text=True, check=False)
    if listed.returncode:
        raise UserError(f"cannot list the files to ship: {workspace} is not a git work tree ({listed.stderr.strip()})")
    return sorted(name for name in set(listed.stdout.split("\0")) if name and (workspace / name).exists())


def _pack(shipment: Shipment, *, workspace: Path, archive: Path) -> None:
    note = archive.with_name("revision")
    note.write_text(versions.git_revision(workspace) + "\n")
    with tarfile.open(archive, "w:gz") as tar:
        for name in shipment.files:
            tar.add(workspace / name, arcname=name, recursive=False)
        tar.add(note, arcname=versions.REVISION_FILE)
    print(f"# packed {shipment}, {units.size(archive.stat().st_size)} after it", flush=True)


def shipped_path(path: str, *, workspace: Path) -> str:
    """Returns where the file `path` is on the hosts, or raises UserError if it is not shipped."""
    if paths.is_remote(path):
        return path
    absolute = next((at for at in (Path(path), workspace / path) if at.is_file()), Path(path)).resolve()
    if not absolute.is_file():
        raise UserError(f"no such experiment file: {path}; expected one in {workspace}, such as gin/quickstart.gin")
    if left := not_shipped([absolute], workspace=workspace):
        raise UserError(left[0])
    return str(absolute.relative_to(workspace))


def not_shipped(files: Sequence[Path], *, workspace: Path) -> list[str]:
    """Returns a message for each file that would not be shipped, without those of installed packages."""
    installed = [Path(sysconfig.get_path(name)).resolve() for name in ("purelib", "platlib", "stdlib", "platstdlib")]
    own = [file for file in files if not any(file.is_relative_to(folder) for folder in installed)]
    shipped = {workspace / name for name in (workspace_files(workspace) if own else ())}
    fix = f"put it into {workspace}, not ignored by git"
    return [f"{file} would not be copied to the hosts: {fix}" for file in own if file not in shipped]


def left_behind(patterns: Sequence[str], *, workspace: Path) -> list[str]:
    """Returns a message for each pattern that matches files that would not be shipped.

    Patterns are relative to `workspace`.
    """
    shipped = workspace_files(workspace) if patterns else []
    found = []
    for pattern in patterns:
        here = sorted(map(os.path.normpath, glob.glob(pattern, root_dir=workspace, recursive=True)))  # noqa: PTH207 (as `documents`)
        left = [path for path in here if not any(f == path or f.startswith(f"{path}/") for f in shipped)]
        if left:
            found.append(
                f"{pattern!r} would not be copied to the hosts: git ignores {left[0]}. Give gs://BUCKET/…, or the "
                "absolute path that the data has on the hosts"
            )
    return found
