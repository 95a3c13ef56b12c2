"""Hashes the content of files.

If all local files together have at most 64 MiB, they are read whole. Otherwise 1,024 blocks of up to 64 KiB are read,
spread evenly over all bytes. Objects in buckets count by their checksums.
"""

import hashlib
from collections.abc import Collection, Iterator, Sequence

from core.files import paths
from tasks.text.documents import File

WHOLE_BYTES = 2**26
_BLOCK_BYTES, _MOST_BLOCKS = 2**16, 2**10


def of_files(files: Collection[File]) -> str:
    """Returns a hash of the files' content.

    It begins with `files:`, or with `objects:` if any file is in a bucket.
    """
    digest = hashlib.sha256()
    local = [file for file in files if not paths.is_remote(file.path)]
    for file in files:
        if paths.is_remote(file.path):
            digest.update(f"{file.name} {file.checksum}\n".encode())
    for file, start, length in _blocks(local):
        with open(file.path, "rb") as opened:  # noqa: PTH123 (a path is text here)
            opened.seek(start)
            digest.update(opened.read(length))
    return f"{'files' if len(local) == len(files) else 'objects'}:{digest.hexdigest()}"


def _blocks(files: Sequence[File]) -> Iterator[tuple[File, int, int]]:
    """Yields the blocks to read: a file, an offset in it, and a number of bytes (-1: to its end)."""
    total = sum(file.size_bytes for file in files)
    if total <= WHOLE_BYTES:
        yield from ((file, 0, -1) for file in files)
        return
    wanted = iter([total * number // _MOST_BLOCKS for number in range(_MOST_BLOCKS)])
    at, begin = next(wanted, None), 0
    for file in files:
        while at is not None and at < begin + file.size_bytes:
            yield file, at - begin, _BLOCK_BYTES
            at = next(wanted, None)
        begin += file.size_bytes
