"""Reads datasets of the Hugging Face hub, shard by shard, with the position that the library keeps in each."""

import dataclasses
import functools
import hashlib
from collections.abc import Mapping
from typing import Any

from core import extras
from core.errors import Problem, UserError
from tasks.text import documents
from tasks.text.document_streams import DocumentSource, Parts


@dataclasses.dataclass(frozen=True)
class HuggingFace(DocumentSource):
    """A dataset of the Hugging Face hub, as `text.huggingface` describes it."""

    name: str
    split: str
    validation_split: str
    field: str
    streaming: bool
    where: tuple[tuple[str, tuple[str, ...]], ...] = dataclasses.field(default=(), repr=False)

    def parts(self, split: str, num_streams: int) -> Parts:
        name = self.split if split == "train" else self.validation_split
        count = max(self.dataset(name).num_shards, 1)
        parts = [_Shard(self, name, index, count) for index in range(count)]
        return Parts(parts, is_shared=count < num_streams)

    def dataset(self, split: str) -> Any:
        """Returns a split as an iterable dataset, loaded once. Raises UserError if that fails."""
        if split not in self._loaded:
            if found := self.problems():
                raise UserError(*found)
            import datasets

            name, _, config = self.name.partition(":")
            try:
                found = datasets.load_dataset(name, config or None, split=split, streaming=self.streaming)
            except (ValueError, OSError) as error:  # unknown name, configuration or split; gated; no network
                raise UserError(
                    f"text.huggingface: {self.name}, split {split}, cannot be loaded: {error}. Check name and "
                    "split; for a gated dataset set HF_TOKEN"
                ) from error
            self._loaded[split] = found if self.streaming else found.to_iterable_dataset()
        return self._loaded[split]

    @functools.cached_property
    def _loaded(self) -> dict[str, Any]:
        return {}

    def problems(self) -> list[str]:
        found = extras.missing("datasets", extra="huggingface", what="text.huggingface")
        return [found] if found else []

    def overlaps(self, *, remote: bool) -> list[Problem]:
        found = documents.split_overlaps(self.split, self.validation_split, where="text.huggingface.validation_split")
        if remote and not found:
            self.dataset(self.validation_split)  # raises UserError before the first evaluation would
        return found

    def describe(self) -> str:
        how = "streamed" if self.streaming else "downloaded"
        kept = "".join(f", {column} {' or '.join(values)}" for column, values in self.where)
        return f"text.huggingface: {self.name} ({self.split}; validation {self.validation_split}){kept}, {how}"

    def fingerprint(self) -> str:
        about = repr(self) + (repr(self.where) if self.where else "")
        return hashlib.sha256(about.encode()).hexdigest()


@dataclasses.dataclass(frozen=True)
class _Shard:
    source: HuggingFace
    split: str
    index: int
    count: int

    def open(self, offset: Any) -> "_ShardReader":
        return _ShardReader(self, offset)


class _ShardReader:
    def __init__(self, part: _Shard, offset: dict[str, Any] | None) -> None:
        self._part, self._number, self._opened_at = part, 0, offset
        self._dataset = part.source.dataset(part.split).shard(num_shards=part.count, index=part.index)  # a new object
        if offset is not None:
            self._dataset.load_state_dict(offset["library"])
            self._number = offset["documents"]
        self._examples = iter(self._dataset)

    def offset(self) -> dict[str, Any]:
        if self._opened_at is not None:  # until the next example, the library does not report a restored position
            return self._opened_at
        return {"documents": self._number, "library": self._dataset.state_dict()}

    def __next__(self) -> bytes:
        example = next(self._examples)
        self._opened_at = None
        self._number += 1
        part = self._part
        shard = f" (shard {part.index + 1} of {part.count})" if part.count > 1 else ""
        return _text(example, part.source, where=f"document {self._number} of {part.split}{shard}")


def _text(example: Mapping[str, Any], source: HuggingFace, *, where: str) -> bytes:
    """Returns a document's text as UTF-8; b"" if it is blank or `source.where` leaves it out."""
    for column, values in source.where:
        if column not in example:
            raise UserError(f"text.huggingface.where: {source.name} has no column {column!r}, only {sorted(example)}")
        if example[column] not in values:
            documents.intake_of(source).count(f"skipped because {column} is none of {', '.join(values)}")
            return b""
    if source.field not in example:
        raise UserError(f"text.huggingface.field: {source.name} has no text {source.field!r}, only {sorted(example)}")
    return documents.intake_of(source).take(_checked, example[source.field], where=where)


def _checked(text: object, *, where: str) -> bytes:
    if not isinstance(text, str):
        raise documents.MalformedDocument(f"{where}: expected a text, got {type(text).__name__}")
    return documents.checked(documents.encoded(text, where=where), where=where)
