"""Selects and packs the files of a workspace that are shipped to hosts: all that git does not ignore."""

from __future__ import annotations

import glob
import os
import subprocess
import tarfile
from collections.abc import Sequence
from pathlib import Path

from core import paths, units, versions
from core.errors import UserError


def workspace_files(workspace: Path) -> list[str]:
    """Returns the paths, relative to `workspace`, of files that git tracks or would track.

    Raises:
      UserError: not a git work tree.
    """
    command = ["git", "-C", str(workspace), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, capture_output=True, text=True, check=False)
    if listed.returncode:
        raise UserError(f"cannot list the files to ship: {workspace} is not a git work tree ({listed.stderr.strip()})")
    return sorted(name for name in set(listed.stdout.split("\0")) if name and (workspace / name).exists())


def pack(files: Sequence[str], *, workspace: Path, archive: Path) -> None:
    """Writes `files` and their git revision into a gzipped tar archive."""
    note = archive.with_name("revision")
    note.write_text(versions.git_revision(workspace) + "\n")
    with tarfile.open(archive, "w:gz") as tar:
        for name in files:
            tar.add(workspace / name, arcname=name, recursive=False)
        tar.add(note, arcname=versions.REVISION_FILE)
    print(f"# packed {units.counted(len(files), 'file')}, {units.size(archive.stat().st_size)}", flush=True)


def shipped_path(path: str, *, workspace: Path) -> str:
    """Returns `path` relative to the workspace, as the hosts see it; gs:// paths are unchanged.

    Raises:
      UserError: the file does not exist, or is not among what is shipped.
    """
    if paths.is_remote(path):
        return path
    absolute = Path(path).resolve()
    if not absolute.is_file():
        raise UserError(f"no such experiment file: {path}")
    if not absolute.is_relative_to(workspace) or str(absolute.relative_to(workspace)) not in workspace_files(workspace):
        raise UserError(f"{path} would not reach the hosts: put it into {workspace}, where git does not ignore it")
    return str(absolute.relative_to(workspace))


def left_behind(names: Sequence[str], *, workspace: Path) -> list[str]:
    """Returns an error for each pattern, relative to `workspace`, that matches files which would not be shipped."""
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
