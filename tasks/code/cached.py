"""Reads a chunk task's rows with a frozen model's hidden states, which `launch/run cache-hidden-states` computed."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from core.batches import BatchSpec, Field, is_same_data
from core.errors import Problem, UserError
from core.files import paths
from core.types import Model, can, lacking
from tasks.code import chunks

_BEGUN = "begun.json"  # written first: what every split in the folder was computed from
_ABOUT = "about.json"  # written last: the folder is complete
_FIELDS = ("inputs", "targets", "weights", "segment_ids", "positions", chunks.DOCUMENTS)
HIDDEN = "hidden"
_FORMAT = 2  # 1, without this number: fingerprints depend on the paths of the base and of the files


class _ReadsChunks(Protocol):
    chunk: int  # positions per chunk of hidden states that the model reads


def _local(folder: str) -> Path:
    return Path(str(paths.resolve(folder)))


class _CachedRows:
    def __init__(self, folder: Path) -> None:
        self._arrays = {name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in (*_FIELDS, HIDDEN)}

    def __len__(self) -> int:
        return len(self._arrays[HIDDEN])

    def row(self, number: int) -> Mapping[str, np.ndarray]:
        return {name: np.asarray(array[number]) for name, array in self._arrays.items()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class CachedHidden(chunks.ChunkTask):
    """A task that reads a folder written by `write`, on every host's disk or shared by all hosts."""

    folder: str

    vocabulary = None

    def prepare(self, run_dir: str, *, is_host_zero: bool) -> None:
        """Raises UserError if the folder does not fit the task."""
        del run_dir, is_host_zero
        if problems := self.problems():
            raise UserError(" ".join(problems))

    def spec(self, batch_size: int) -> BatchSpec:
        """Returns the fields of a `ChunkTask`, and `hidden` [B, T, width] float16."""
        shape = (batch_size, self.length, self._about["width"])
        return {**super().spec(batch_size), HIDDEN: Field(shape, np.float16, ("batch", "length", None))}

    def rows(self, split: str) -> _CachedRows:
        return _CachedRows(_local(self.folder) / split)

    def problems(self) -> list[str]:
        if not (_local(self.folder) / _ABOUT).exists():
            said = f"cached_hidden.folder = {self.folder!r}: no complete folder of launch/run cache-hidden-states"
            return [Problem(said, file=self.folder)]
        if "checksum" not in self._about["model"]:
            said = f"{self.folder!r} is of an earlier version, without a checksum"
            return [Problem(said, file=self.folder, fix="run launch/run cache-hidden-states again")]
        if self.length != self._about["length"]:
            said = f"cached_hidden.length = {self.length}: the rows of {self.folder!r} have {self._about['length']}"
            return [Problem(said, file=self.folder)]
        return []

    @property
    def chunk(self) -> int:
        """The number of positions per chunk with which the hidden states were computed."""
        return self._about["model"]["chunk"]

    def model_problems(self, model: Model, *, prepared: bool) -> list[str]:
        """Returns a problem if the model reads no hidden states, or has another chunk length."""
        del prepared
        if not can(model, _ReadsChunks):
            return [f"the data are hidden states computed before: {lacking(model, _ReadsChunks)}"]
        if model.chunk == self.chunk:
            return []
        return [
            f"the chunk of the model is {model.chunk}, and the hidden states of the data were computed with "
            f"{self.chunk}: set it to that, or compute them again (launch/run cache-hidden-states)"
        ]

    @property
    def base_checksum(self) -> int:
        """The checksum of the parameters of the model that computed the hidden states."""
        return self._about["model"]["checksum"]

    def named_files(self) -> tuple[str, ...]:
        """Returns the folder, as the user wrote it."""
        return (self.folder,)

    def describe(self) -> str:
        about = self._about
        rows = ", ".join(f"{count:,} {split}" for split, count in about["rows"].items())
        return f"cached_hidden: {rows} rows of {about['source']}; hidden states of {about['model']['base']}"

    def fingerprint(self) -> str:
        about = dict(self._about)
        if about.get("format") == _FORMAT:  # wherever the base and the files were
            about |= {"source": "", "model": _without_place(about["model"])}
        return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()

    @functools.cached_property
    def _about(self) -> dict[str, Any]:
        file = _local(self.folder) / _ABOUT
        if not file.exists():
            raise UserError(" ".join(self.problems()))
        return json.loads(file.read_text())


def cached_hidden(*, folder: str, length: int, num_streams: int, held_out: str = "validation") -> CachedHidden:
    """Returns a task whose batches include hidden states that were computed in advance.

    Args:
      folder: the folder that `launch/run cache-hidden-states` wrote.
      length: must equal that of the folder.
      num_streams, held_out: as in `tasks.code.chunks.ChunkTask`.
    """
    return CachedHidden(folder=folder, length=length, num_streams=num_streams, held_out=held_out)


def write(
    folder: str,
    task: chunks.ChunkTask,
    hidden: Callable[[Mapping[str, np.ndarray]], np.ndarray],
    *,
    limits: Mapping[str, int],
    rows: int,
    model: Mapping[str, Any],
) -> Iterator[tuple[str, int, int]]:
    """Computes and writes the hidden states of a task's rows; complete splits on disk are kept.

    If a split has more rows than its limit, those that an evaluation visits first are written, in the order of the
    task.

    Args:
      hidden: computes the hidden states [rows, T, D] of a batch, which are stored in float16.
      limits: maximum number of rows, by split.
      rows: rows per batch.
      model: what determines the hidden states, as JSON values: `checksum` is that of the base's parameters, and `chunk`
        is the number of positions per chunk; and `base`, which says where the base is, for messages alone.

    Yields:
      After every batch: the split, its rows done, and its rows in total.

    Raises:
      UserError: `folder` was begun with other rows or another model.
    """
    home = _local(folder)
    begun = {"length": task.length, "fingerprint": task.fingerprint(), "model": model}
    _begin(home, {**begun, "limits": dict(limits)})
    counts, width = {}, 0
    for split in chunks.SPLITS:
        source, place = task.rows(split), home / split
        if not place.exists():
            total = min(len(source), limits[split])
            order = sorted(map(int, chunks.evaluation_order(len(source))[:total]))
            partial = home / f"{split}.partial"
            for done in _write_rows(partial, source, order, hidden, rows=rows):
                yield split, done, total
            partial.rename(place)
        counts[split], _, width = np.load(place / f"{HIDDEN}.npy", mmap_mode="r").shape
    about = {**begun, "format": _FORMAT, "width": width, "rows": counts, "source": task.describe()}
    paths.write_text_atomically(paths.resolve(str(home)) / _ABOUT, json.dumps(about, indent=1) + "\n")


def _write_rows(
    place: Path,
    source: chunks.Rows,
    order: Sequence[int],
    hidden: Callable[[Mapping[str, np.ndarray]], np.ndarray],
    *,
    rows: int,
) -> Iterator[int]:
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    arrays: dict[str, np.memmap] = {}
    for begin in range(0, len(order), rows):
        found = [source.row(number) for number in order[begin : begin + rows]]
        count = len(found)
        found += [found[-1]] * (rows - count)
        batch = {name: np.stack([row[name] for row in found]) for name in _FIELDS}
        batch[HIDDEN] = np.asarray(hidden(batch), np.float16)
        for name, values in batch.items():
            if name not in arrays:
                shape = (len(order), *values.shape[1:])
                arrays[name] = np.lib.format.open_memmap(place / f"{name}.npy", "w+", values.dtype, shape)
            arrays[name][begin : begin + rows] = values[:count]
        yield begin + count
    for array in arrays.values():
        array.flush()


def _without_place(model: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in model.items() if key != "base"}


def _begin(folder: Path, begun: Mapping[str, Any]) -> None:
    file = paths.resolve(str(folder)) / _BEGUN
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        paths.write_text_atomically(file, json.dumps(begun, indent=1) + "\n")
    saved = json.loads(file.read_text())
    now = json.loads(json.dumps(begun))
    if is_same_data(saved.get("fingerprint", ""), now["fingerprint"]):
        now["fingerprint"] = saved["fingerprint"]
    if _without_place(saved.get("model", {})) == _without_place(now["model"]):
        now["model"] = saved["model"]
    if differing := [name for name, value in now.items() if saved.get(name) != value]:
        raise UserError(
            f"{folder} was begun with different {', '.join(differing)}: {[saved.get(name) for name in differing]}, now "
            f"{[begun[name] for name in differing]}. Give another folder, or remove this one"
        )
