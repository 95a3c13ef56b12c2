"""Resolves local and gs:// paths, and writes files atomically."""

import contextlib
import errno
import glob
import os
import pathlib
import re
import shutil
import uuid
from collections.abc import Callable
from typing import Any, NamedTuple

from core import library_errors
from core.errors import UnreachableError, UserError

os.environ["EPATH_USE_TF"] = "0"  # must be set before etils is imported

import fsspec
from etils import epath

# Listings of a bucket are not cached, so that changes by other hosts are seen at once.
for _protocol in ("gcs", "gs"):
    fsspec.config.conf.setdefault(_protocol, {})["use_listings_cache"] = False
    fsspec.register_implementation(_protocol, f"{__package__}.buckets.Buckets", clobber=True)

Path = epath.Path

_NO_LINKS = (errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP)  # of file systems without hard links
_PROBE_BYTES = 4096  # not 0, because an empty file can be created on a full disk
_SCHEME = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]*):/")


def resolve(text: str | os.PathLike[str]) -> epath.Path:
    """Converts text to an absolute path, local (with `~` expanded) or gs://.

    Raises UserError if it is empty or malformed, or a user or the working directory does not exist.
    """
    text = os.fspath(text)
    if not text.strip():
        raise UserError("a path is empty; give a folder such as runs/first or gs://bucket/runs/first")
    if scheme := _SCHEME.match(text):
        return _resolve_remote(text, scheme=scheme.group(1))
    try:
        return epath.Path(os.path.abspath(pathlib.Path(text).expanduser()))  # noqa: PTH100 (keeps symlinks as typed)
    except RuntimeError as error:
        raise UserError(
            f"the path {text!r} begins with a home directory that this machine does not know; give an absolute path"
        ) from error
    except FileNotFoundError as error:
        raise UserError(
            f"the path {text!r} is relative, and the working directory no longer exists; "
            "change to a folder that does, or give an absolute path"
        ) from error


def _resolve_remote(text: str, *, scheme: str) -> epath.Path:
    if scheme != "gs":
        raise UserError(f"the path {text!r} has scheme {scheme!r}; expected gs://bucket/… or a local folder")
    bucket = text.removeprefix("gs:").removeprefix("//").split("/")[0]
    if not text.startswith("gs://") or len(bucket) < 3:
        raise UserError(
            f"the path {text!r} names no bucket; expected gs://BUCKET/folder (BUCKET has 3 letters or more)"
        )
    return epath.Path(text.rstrip("/"))


def is_remote(path: str | os.PathLike[str]) -> bool:
    """Returns whether a path is in a bucket (gs://)."""
    return os.fspath(path).startswith("gs://")


def require_writable(directory: str | os.PathLike[str]) -> epath.Path:
    """Creates a folder if necessary and returns its absolute path; raises UserError if it cannot be written."""
    folder = resolve(directory)

    def made() -> epath.Path:
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    _probe(folder, made)
    return folder


def check_writable(directory: str | os.PathLike[str]) -> epath.Path:
    """Returns a folder's absolute path; raises UserError if files cannot be written there.

    The folder is not created. A small file is written and removed there, or in the nearest existing parent of a local
    folder.
    """
    folder = resolve(directory)
    _probe(folder, lambda: folder if is_remote(folder) else _nearest(folder))
    return folder


def free_space(directory: str | os.PathLike[str]) -> str:
    """Describes the free space where a folder is or would be; a quota may allow less."""
    found = os.statvfs(_nearest(resolve(directory)))
    inodes = f" and {found.f_favail:,} inodes" if found.f_files else ""  # some file systems count none
    return f"{found.f_bavail * found.f_frsize / 2**30:.3g} GiB{inodes} are free on this host's disk"


def _nearest(directory: epath.Path) -> epath.Path:
    return next(folder for folder in (directory, *directory.parents) if folder.exists())


def _probe(directory: epath.Path, folder: Callable[[], epath.Path]) -> None:
    try:
        probe = folder() / f".writable-{uuid.uuid4().hex}"
        try:
            probe.write_text(" " * _PROBE_BYTES)
        finally:
            probe.unlink(missing_ok=True)
    except UnreachableError:
        raise
    except Exception as error:  # a bucket's client has exception types of its own
        fix = "check the credentials and the bucket's permissions" if is_remote(directory) else "choose another folder"
        if short := library_errors.shortage(error):
            fix = f"{free_space(directory)}. {short.mending}, then start again: nothing that was saved is lost"
        raise UserError(f"cannot write to {directory}: {type(error).__name__}: {error}; {fix}") from error


def write_text_atomically(path: str | os.PathLike[str], text: str) -> None:
    """Writes a file, in a new folder if necessary; a reader sees the old text or the new one."""
    write_bytes_atomically(path, text.encode())


def write_bytes_atomically(path: str | os.PathLike[str], content: bytes) -> None:
    """Writes a file as `write_text_atomically` does."""
    file = resolve(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    if is_remote(file):
        file.write_bytes(content)  # writing an object is atomic
        return
    part = file.parent / f".{file.name}.{uuid.uuid4().hex}"
    try:
        part.write_bytes(content)
        os.replace(part, file)  # noqa: PTH105 (epath's replace copies across backends)
    finally:
        part.unlink(missing_ok=True)


class Versioned(NamedTuple):
    """The content and version of a small text file.

    Attributes:
      version: an object's generation, or a local file's inode and modification time.
    """

    text: str
    version: str


def read_versioned(path: epath.Path) -> Versioned | None:
    """Reads a file and its version; None if it does not exist."""
    try:
        if is_remote(path):
            bucket, key = _bucket_and_key(path)
            headers, content = fsspec.filesystem("gcs").call("GET", "b/{}/o/{}", bucket, key, alt="media")
            return Versioned(content.decode(errors="replace"), headers["x-goog-generation"])
        with open(path, encoding="utf-8", errors="replace") as file:  # noqa: PTH123 (opening asks a network disk anew)
            about = os.fstat(file.fileno())
            return Versioned(file.read(), f"{about.st_ino}.{about.st_mtime_ns}")
    except FileNotFoundError:
        return None


def write_if_unchanged(path: epath.Path, text: str, *, version: str | None) -> bool:
    """Writes a file atomically unless another process has changed it; returns whether it was written.

    Not exact on a disk: two processes may replace the same version, so read the file again a moment later.

    Args:
      path: the file; its folder must exist.
      version: the version that was read; None: the file did not exist.
    """
    if is_remote(path):
        service, (bucket, key) = fsspec.filesystem("gcs"), _bucket_and_key(path)
        to = service.base.replace("/storage/v1/", "/upload/storage/v1/b/{}/o")
        wanted = {"uploadType": "media", "name": key, "ifGenerationMatch": version or "0"}
        try:
            service.call("POST", to, bucket, data=text.encode(), **wanted)
        except FileExistsError:  # the precondition failed, also where the object is gone
            return False
        return True
    part = path.parent / f".{path.name}.{uuid.uuid4().hex}"
    try:
        part.write_text(text)
        if version is None:
            _create(path, part, text)
        elif (there := read_versioned(path)) is None or there.version != version:
            return False
        else:
            os.replace(part, path)  # noqa: PTH105
        return True
    except FileExistsError:
        return False
    finally:
        part.unlink(missing_ok=True)


def _create(path: epath.Path, part: epath.Path, text: str) -> None:
    """Creates a file, all of it at once where the file system has hard links; raises FileExistsError."""
    try:
        os.link(part, path)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        with open(path, "x") as created:  # noqa: PTH123
            created.write(text)


def remove_if_unchanged(path: epath.Path, *, version: str) -> None:
    """Removes a file unless another process has written it since; not exact on a disk."""
    if is_remote(path):
        with contextlib.suppress(FileNotFoundError, FileExistsError):  # gone, or another generation
            fsspec.filesystem("gcs").call("DELETE", "b/{}/o/{}", *_bucket_and_key(path), ifGenerationMatch=version)
    elif (there := read_versioned(path)) is not None and there.version == version:
        path.unlink(missing_ok=True)


def _bucket_and_key(path: epath.Path) -> tuple[str, str]:
    bucket, _, key = os.fspath(path).removeprefix("gs://").partition("/")
    return bucket, key


def read_range(path: epath.Path, start: int, stop: int) -> bytes:
    """Returns bytes [start, stop) of a file; raises UserError if it has fewer."""
    if is_remote(path):
        system, name = fsspec.core.url_to_fs(os.fspath(path))
        found = system.cat_file(name, start=start, end=stop) if stop > start else b""
    else:
        with path.open("rb") as opened:
            opened.seek(start)
            found = opened.read(stop - start)
    if len(found) != stop - start:
        raise UserError(f"{path} ended after byte {start + len(found)}, expected {stop} or more: was it replaced?")
    return found


def patterns(value: Any) -> tuple[Any, ...]:
    """Returns a path or pattern, several or none (None or "") as a tuple, with text for path objects."""
    if value is None or value == "":
        return ()
    several = (value,) if isinstance(value, str | os.PathLike) else tuple(value)
    return tuple(os.fspath(one) if isinstance(one, os.PathLike) else one for one in several)


def _unless_it_vanished(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        raise error


def sizes(folder: epath.Path) -> dict[str, int]:
    """Returns the size in bytes of every file below a folder, by relative path."""
    if not is_remote(folder):
        found = {}
        for above, _, names in os.walk(folder, onerror=_unless_it_vanished):
            for path in (pathlib.Path(above, name) for name in names):
                with contextlib.suppress(FileNotFoundError):
                    found[path.relative_to(folder).as_posix()] = path.stat().st_size
        return found
    system, root = fsspec.core.url_to_fs(os.fspath(folder))
    found = system.find(root, detail=True)
    return {name.removeprefix(f"{root}/"): about["size"] for name, about in found.items()}


def kvstore(folder: epath.Path) -> dict[str, str]:
    """Returns the TensorStore spec that opens a folder as a key-value store."""
    if not is_remote(folder):
        return {"driver": "file", "path": f"{folder}/"}
    bucket, name = _bucket_and_key(folder)
    return {"driver": "gcs", "bucket": bucket, "path": f"{name}/"}


def file_version(path: str) -> str:
    """Returns a file's modification time, or the generation of an object, as text."""
    if not is_remote(path):
        return str(pathlib.Path(path).stat().st_mtime_ns)
    system, name = fsspec.core.url_to_fs(path)
    return str(system.info(name)["generation"])


class Listed(NamedTuple):
    """A file in a listing.

    Attributes:
      checksum: checksum or generation of an object in a bucket; empty for a local file.
    """

    size_bytes: int
    checksum: str = ""


def listed(pattern: str) -> dict[str, Listed]:
    """Returns the files that match a pattern (`*`, `**`), by absolute path or gs:// name."""
    if not is_remote(pattern):
        here, absolute = resolve("."), resolve(pattern)
        if pathlib.Path(pattern).expanduser().is_absolute():
            found = glob.glob(os.fspath(absolute), recursive=True)  # noqa: PTH207 (absolute patterns)
        else:  # brackets in the name of the working directory are no pattern
            names = glob.glob(pattern, root_dir=os.fspath(here), recursive=True)  # noqa: PTH207
            found = [os.fspath(resolve(name)) for name in names]
        return {name: Listed(pathlib.Path(name).stat().st_size) for name in found if pathlib.Path(name).is_file()}
    system, name = fsspec.core.url_to_fs(pattern)
    about = system.glob(name, detail=True)
    return {
        f"gs://{name}": Listed(entry["size"], str(entry.get("crc32c") or entry.get("generation", "")))
        for name, entry in about.items()
        if entry["type"] == "file"
    }


def literal(folder: str | os.PathLike[str]) -> str:
    """Returns a folder as the beginning of a pattern for `listed`; the name of a local one is taken as it is."""
    return os.fspath(folder) if is_remote(folder) else glob.escape(os.fspath(folder))


def matching(pattern: str) -> dict[str, int]:
    """Returns the sizes in bytes of the files that match a pattern, as `listed`."""
    return {name: found.size_bytes for name, found in listed(pattern).items()}


def copy_between(source: epath.Path, target: epath.Path) -> None:
    """Copies a file between disks and buckets, and creates the target's folder if necessary."""
    if is_remote(source):
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(source.read_bytes())
    else:
        copy_file(source, to=target)


def copy_file(local: str | os.PathLike[str], *, to: epath.Path) -> epath.Path:
    """Copies a local file to a disk or bucket, and creates the target's folder if necessary; returns `to`."""
    to.parent.mkdir(parents=True, exist_ok=True)
    if is_remote(to):
        to.write_bytes(pathlib.Path(local).read_bytes())
        return to
    part = to.parent / f".{to.name}.{uuid.uuid4().hex}"
    shutil.copyfile(local, part)
    os.replace(part, to)  # noqa: PTH105
    return to
