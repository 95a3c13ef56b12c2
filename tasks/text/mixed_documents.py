"""Mixes several sources of documents by weight, row by row."""

import dataclasses
import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from core.errors import Problem
from core.types import can
from tasks.streams import Stream, read_position
from tasks.text import documents, packing
from tasks.text.document_streams import Chunks, DocumentSource
from tasks.text.documents import Corpus, FillsCache, HashesContent, HoldsOut, PacksItsOwnWay, StreamSpec, TriesExamples
from tasks.text.ids import IsDefinedByTask, Vocabulary
from tasks.text.text_files import TextFiles

_GOLDEN = 0x9E3779B97F4A7C15  # 2**64 divided by the golden ratio


@dataclasses.dataclass(frozen=True)
class Mixture(Corpus):
    """A `documents.Corpus` of several sources; weights are shares of rows, not of documents.

    `vocabularies` has one for each source, which `problems` compares; (): they were compared before.
    """

    sources: tuple[DocumentSource, ...]
    weights: tuple[float, ...]
    vocabularies: tuple[Vocabulary, ...] = dataclasses.field(default=(), compare=False)

    def named_files(self) -> tuple[str, ...]:
        return tuple(name for source in self.sources for name in source.named_files())

    def open_stream(self, spec: StreamSpec) -> Stream:
        vocabularies = self.vocabularies or (spec.vocabulary,) * len(self.sources)
        pairs = zip(self.sources, vocabularies, strict=True)
        return MixtureStream([source.open_stream(_of(own, spec)) for source, own in pairs], self.weights, spec)

    @property
    def packing(self) -> int:
        """4 if sources begin rows with ids of their own; see `_of`."""
        has_tasks = any(can(vocabulary, IsDefinedByTask) for vocabulary in self.vocabularies)
        if has_tasks and len({vocabulary.bos_id for vocabulary in self.vocabularies}) > 1:
            return 4
        return max(source.packing if can(source, PacksItsOwnWay) else 2 for source in self.sources)

    def sample_texts(self) -> Iterator[str]:
        """Yields one document of each source in turn, until one source has no more."""
        for texts in zip(*(source.sample_texts() for source in self.sources), strict=False):
            yield from texts

    def problems(self) -> list[str]:
        found = [problem for source in self.sources for problem in source.problems()]
        if not found and len({vocabulary.hash for vocabulary in self.vocabularies}) > 1:
            each = ", ".join(vocabulary.describe() for vocabulary in self.vocabularies)
            return [f"text.mixture: its tasks have different vocabularies ({each}); use the same one for all"]
        return found

    def overlaps(self, *, remote: bool) -> list[Problem]:
        found = [one for source in self.sources if can(source, HoldsOut) for one in source.overlaps(remote=remote)]
        files = [source for source in self.sources if isinstance(source, TextFiles)]
        train, validation = (
            [pattern for source in files for pattern in getattr(source, split)] for split in ("train", "validation")
        )
        return found or documents.overlaps(train, validation, where="text.mixture", remote=remote)

    def example_problems(self, length: int) -> list[str]:
        tried = (source.example_problems(length) for source in self.sources if can(source, TriesExamples))
        return [problem for found in tried for problem in found]

    def fill(self) -> None:
        for source in self.sources:
            if can(source, FillsCache):
                source.fill()

    def describe(self) -> str:
        total = sum(self.weights)
        parts = [
            f"{weight / total:.0%} {source.describe()}"
            for source, weight in zip(self.sources, self.weights, strict=True)
        ]
        return f"text.mixture: {'; '.join(parts)}"

    def fingerprint(self) -> str:
        return hashlib.sha256(repr((self.weights, [s.fingerprint() for s in self.sources])).encode()).hexdigest()

    def content_hash(self) -> str:
        found = [source.content_hash() for source in self.sources if can(source, HashesContent)]
        kinds = "+".join(one.partition(":")[0] for one in found)
        return f"{kinds}:{hashlib.sha256(repr(found).encode()).hexdigest()}"


def _of(own: Vocabulary | None, spec: StreamSpec) -> StreamSpec:
    """Returns the spec of a source's stream: a seqio task begins rows with its own id, and others with theirs."""
    is_defined = any(can(vocabulary, IsDefinedByTask) for vocabulary in (own, spec.vocabulary))
    return spec._replace(vocabulary=own) if is_defined else spec


class MixtureStream(Stream):
    """A `streams.Stream` that takes whole rows from the streams of several sources."""

    def __init__(self, streams: Sequence[packing.PackedStream], weights: Sequence[float], spec: StreamSpec) -> None:
        self._streams, self._weights, self._spec = streams, tuple(map(Fraction, weights)), spec
        self._batch = 0
        self._left, self._row = list(range(len(streams))), 0  # sources left for a stream that reads every source once

    def __next__(self) -> Mapping[str, np.ndarray]:
        if self._spec.once:
            return self._next_once()
        spec = self._spec
        first = (self._batch * spec.num_streams + slot_of(spec.index, spec.num_streams, turn=self._batch)) * spec.rows
        self._batch += 1
        chosen = [source_of(row, self._weights) for row in range(first, first + spec.rows)]
        rows = [row for source in chosen if (row := self._streams[source].next_row())]
        return packing.batch(rows, length=spec.length)

    def _next_once(self) -> Mapping[str, np.ndarray]:
        rows: list[packing.Row] = []
        while len(rows) < self._spec.rows and self._left:
            place = source_of(self._row, tuple(self._weights[source] for source in self._left))
            if row := self._streams[self._left[place]].next_row():
                rows.append(row)
                self._row += 1
            else:
                self._left.pop(place)
                self._row = 0
        if not rows:
            raise StopIteration
        return packing.batch(rows, length=self._spec.length)

    def state(self) -> bytes:
        return json.dumps({"batch": self._batch, "sources": [stream.position() for stream in self._streams]}).encode()

    def restore(self, state: bytes) -> None:
        position = read_position(state, batch=int, sources=list)
        self._batch = position["batch"]
        for stream, place in zip(self._streams, position["sources"], strict=True):
            stream.move(place)


class MixedChunks(Chunks):
    """Chunks of several sources; weights are shares of chunks, as in a seqio mixture."""

    def __init__(self, sources: Sequence[Chunks], weights: Sequence[float], spec: StreamSpec) -> None:
        exact = tuple(map(Fraction, weights))
        scale = math.lcm(*(weight.denominator for weight in exact))
        self._sources, self._spec = sources, spec
        self._weights = [int(weight * scale) for weight in exact]  # integer arithmetic is faster
        self._number = 0  # number of the next chunk of this stream
        self._left = list(range(len(sources)))  # sources left for a stream that reads every source once

    def position(self) -> dict[str, Any]:
        return {"number": self._number, "left": self._left, "sources": [each.position() for each in self._sources]}

    def move(self, position: Mapping[str, Any]) -> None:
        self._number, self._left = position["number"], position["left"]
        for source, place in zip(self._sources, position["sources"], strict=True):
            source.move(place)

    def share(self) -> float | None:
        known = [share for source in self._sources if (share := source.share()) is not None]
        return sum(known) / len(known) if len(known) == len(self._sources) else None

    def next_segment(self, most: int) -> packing.Segment | None:
        while self._left:
            spec = self._spec
            number = self._number * spec.num_streams + slot_of(spec.index, spec.num_streams, turn=self._number)
            place = source_of(number, [self._weights[source] for source in self._left])
            if segment := self._sources[self._left[place]].next_segment(most):
                self._number += 1
                return segment
            self._left = [source for source in self._left if source != self._left[place]]
            self._number = 0
        return None


def slot_of(stream: int, num_streams: int, *, turn: int) -> int:
    """Returns the slot that a stream has in a turn, in which each of the streams has one.

    Sources deal their documents over all streams, so every stream must draw from every source. In a slot that never
    changed, it might not: with weights 1:1, every second slot is of the same source. So streams rotate by the fraction
    of `turn` times the golden ratio, which spreads evenly and has no period in common with the weights.
    """
    return (stream + (turn * _GOLDEN % 2**64 * num_streams >> 64)) % num_streams


def source_of(row: int, weights: Sequence[Fraction | int]) -> int:
    """Returns the index of the source of row `row`, given relative weights.

    The list of sources is divided into halves recursively. Of the first n rows of a list, floor(n * share) come from
    its first half. So each half has its share of any consecutive rows to within one row.
    """
    begin, end = 0, len(weights)
    while end - begin > 1:
        middle = (begin + end) // 2
        first, both = sum(weights[begin:middle]), sum(weights[begin:end])
        before = int(row * first // both)
        if (row + 1) * first // both > before:
            row, end = before, middle
        else:
            row, begin = row - before, middle
    return begin
