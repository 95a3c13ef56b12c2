"""Opens files of text by their endings: .txt and .jsonl, which may be compressed (.gz, .zst, .bz2), and .parquet.

A changed byte of a table may be read as other text if its writer stored no checksums of its pages.
"""

import contextlib
import io
import itertools
import os
import pathlib
from collections.abc import Iterator
from typing import Any, BinaryIO

from core.errors import UserError
from core.files import paths

KINDS = (".txt", ".jsonl", ".parquet")
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2"}
LARGEST_DOCUMENT_BYTES = 256 * 2**20
_BUFFER_BYTES = 2**20
_ROWS = 1024  # rows of a .parquet file that are decoded at a time


class UnreadableFile(UserError):
    """Raised for a file that cannot be read, or only in part."""


def kind(path: str) -> str:
    """Returns the ending of a file; `.jsonl` also for `a.jsonl.gz`."""
    name = pathlib.PurePath(path)
    if not is_compressed(path):
        return name.suffix
    packed = pathlib.PurePath(name.stem).suffix
    return packed if packed in (".txt", ".jsonl") else f"{packed}{name.suffix}"


def is_compressed(path: str) -> bool:
    """Returns whether a file must be decompressed from its beginning."""
    return pathlib.PurePath(path).suffix in COMPRESSIONS


def opened(path: str) -> "_Stream":
    """Opens a file, local or gs://, to read its decompressed bytes.

    Errors in reading it are OSErrors, which `reading` converts.
    """
    with reading(path):
        file = stream = paths.resolve(path).open("rb")
        if is_compressed(path):
            import pyarrow

            if not file.read(1):
                raise UnreadableFile(f"cannot read {path}: it is empty, and not compressed text")
            file.seek(0)
            stream = pyarrow.CompressedInputStream(file, COMPRESSIONS[pathlib.PurePath(path).suffix])
        return _Stream(stream, file)


class _Stream(io.BufferedReader):
    """A stream of decompressed bytes that knows how much of its file was read."""

    def __init__(self, raw: Any, file: BinaryIO) -> None:
        super().__init__(raw, _BUFFER_BYTES)
        self._file: Any = file
        at = file.tell()
        self._size = file.seek(0, io.SEEK_END)
        file.seek(at)

    def size(self) -> int:
        try:
            return os.fstat(self._file.fileno()).st_size
        except (OSError, AttributeError):  # an object in a bucket has no file number
            return self._size

    def fraction(self) -> float:
        at = self.tell() if self.raw is self._file else self._file.tell()  # a decompressor reads the file ahead
        return at / max(self._size, 1)


@contextlib.contextmanager
def reading(where: str) -> Iterator[None]:
    """Context that converts OSErrors to UnreadableFile, which names `where`."""
    try:
        yield
    except OSError as error:  # pyarrow's errors have no strerror
        raise UnreadableFile(f"cannot read {where}: {error.strerror or f'{error}; write or copy it again'}") from error


@contextlib.contextmanager
def _decoding(where: str) -> Iterator[None]:
    import pyarrow

    try:
        with reading(where):
            yield
    except pyarrow.ArrowException as error:
        raise UnreadableFile(f"cannot read {where}: {error}; write or copy it again") from error


class Rows:
    """The texts of one column of a .parquet file.

    Attributes:
      groups: the number of rows before each row group, then the number of all rows.
      size_bytes: size of the file.
    """

    def __init__(self, path: str, field: str) -> None:
        import pyarrow
        from pyarrow import parquet

        self._path, self._field = path, field
        with _decoding(path):
            file = paths.resolve(path).open("rb")
            self.size_bytes = file.seek(0, io.SEEK_END)
            self._file = parquet.ParquetFile(file, page_checksum_verification=True)
            schema, meta = self._file.schema_arrow, self._file.metadata
        if field not in schema.names:
            raise UserError(f"{path}: no column {field!r}, only {sorted(schema.names)}; set the field of the text")
        found = schema.field(field).type
        found = found.value_type if pyarrow.types.is_dictionary(found) else found
        checks = ("string", "large_string", "string_view", "binary", "large_binary", "binary_view")
        if not any(getattr(pyarrow.types, f"is_{check}")(found) for check in checks):
            raise UserError(f"{path}: column {field!r} is {found}, expected text; set the field of the text")
        self.groups = [0]
        for group in range(meta.num_row_groups):
            self.groups.append(self.groups[-1] + meta.row_group(group).num_rows)
        if self.groups[-1] != meta.num_rows:
            raise UnreadableFile(
                f"cannot read {path}: its footer says {meta.num_rows} rows, and {self.groups[-1]} in its row groups; "
                "write or copy it again"
            )

    def read(self, start: int, stop: int) -> Iterator[bytes | None]:
        """Yields the values of rows start to stop - 1, None for null. Raises UnreadableFile if the file is damaged."""
        import pyarrow

        groups = [g for g, (a, b) in enumerate(itertools.pairwise(self.groups)) if a < stop and b > start]
        at = self.groups[groups[0]] if groups else stop
        batches = self._file.iter_batches(_ROWS, row_groups=groups, columns=[self._field])
        while at < stop:
            with _decoding(where := f"{self._path} after row {at}"):
                batch = next(batches, None)
                values: list[Any] = batch.column(0).cast(pyarrow.large_binary()).to_pylist() if batch else []
            if not values:
                raise UnreadableFile(
                    f"cannot read {where}: its footer says {self.groups[-1]} rows, and its pages end here; write or "
                    "copy it again"
                )
            yield from values[max(start - at, 0) : stop - at]
            at += len(values)


def row_groups(path: str, field: str) -> list[tuple[int, int]]:
    """Returns (start, stop) of the rows of each row group of a .parquet file."""
    return list(itertools.pairwise(Rows(path, field).groups))
