"""Reads the documents of a source part by part, and streams them as packed rows.

A source has parts: files, ranges of lines, or shards. With a seed, every epoch has a new order of the parts. Parts are
dealt to the streams in turn. If there are fewer parts than streams, each stream reads all parts and keeps its share of
the documents.

  parts -> documents -> ids + end of document -> chunks of at most T ids -> windows, shuffled -> packed rows [R, T]

R: rows per element of a stream. T: tokens per row.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import numpy as np

from core.errors import UserError
from core.types import can
from tasks import permutation
from tasks.text import packing
from tasks.text.documents import Corpus, StreamSpec
from tasks.text.ids import Vocabulary, lowest_id, with_bos, with_eos

_MOST_REMEMBERED = 2**25  # most bytes of a split's documents that are kept in memory
_DOCUMENT_BYTES = 200  # bytes of a document's objects in addition to its text
WINDOW_IDS = 2**18  # ids per window, but at least 16 rows, and at most 1,024 (64 without shuffling)


class Reader(Protocol):
    """Reads the documents of one part in order."""

    def offset(self) -> Any:
        """Returns where the next document begins, as a JSON value."""

    def __next__(self) -> bytes:
        """Returns the next document as UTF-8; b"" if it is blank. Raises StopIteration at the end."""


class MeasuresProgress(Protocol):
    """A `Reader` that knows how much of its part it has read."""

    def fraction(self) -> float:
        """Returns the share of the part that was read, 0 to 1."""


class Part(Protocol):
    """A share of the documents of a source."""

    def open(self, offset: Any) -> Reader:
        """Opens the part at an offset from one of its readers; None: at its beginning."""


class Parts(NamedTuple):
    """The parts of one split.

    Attributes:
      parts: the parts, at least one.
      is_shared: whether every stream reads all parts; otherwise they are dealt to the streams.
      deals_chunks: whether the chunks of shared parts are dealt to the streams; otherwise documents are.
    """

    parts: Sequence[Part]
    is_shared: bool
    deals_chunks: bool = False


class DocumentSource(Corpus):
    """A `documents.Corpus` whose documents are read part by part, or from a token cache."""

    def parts(self, split: str, num_streams: int) -> Parts:
        """Returns a split's parts; they are shared if there are fewer than `num_streams`."""
        raise NotImplementedError

    def named_files(self) -> tuple[str, ...]:
        return ()

    def describe(self) -> str:
        raise NotImplementedError

    @functools.cached_property
    def _memories(self) -> "dict[tuple[str, int, int], _Memory]":
        return {}

    def memory(self, spec: StreamSpec) -> "_Memory":
        key = (spec.split, spec.num_streams, id(spec.vocabulary))  # the memory keeps the vocabulary alive
        return self._memories.setdefault(key, _Memory(spec.vocabulary))

    def open_stream(self, spec: StreamSpec) -> packing.PackedStream:
        return DocumentStream(_Chunks(self, spec), spec)

    def sample_texts(self) -> Iterator[str]:
        for part in self.parts("train", 1).parts:
            yield from (text.decode() for text in _texts(part) if text)


def with_end(ids: list[int], vocabulary: Vocabulary, *, where: Callable[[], str]) -> np.ndarray:
    """Returns the ids of a document and the end-of-document id, int32. Raises UserError if one is out of range.

    If the vocabulary reads special tokens, a text written as `<s>Hi</s>` gets the same ids as `Hi`.
    """
    found = np.asarray([*ids, vocabulary.eos_id], np.int32)
    lowest = lowest_id(vocabulary)
    if found.min() < lowest or found.max() >= vocabulary.size:
        reserved = " (id 0 is reserved for padding)" if lowest else ""
        raise UserError(
            f"{where()}: ids {found.min()} to {found.max()} in a document, expected {lowest} to "
            f"{vocabulary.size - 1}{reserved}"
        )
    return np.asarray(with_eos(with_bos(ids, vocabulary)[1:], vocabulary), np.int32)


def _texts(part: Part) -> Iterator[bytes]:
    reader = part.open(None)
    while (text := next(reader, None)) is not None:
        yield text


class Chunks(Protocol):
    """The chunks of a source that belong to one stream, endlessly or once (`StreamSpec.once`)."""

    def position(self) -> dict[str, Any]:
        """Returns the position of the next chunk, as JSON values."""

    def move(self, position: Mapping[str, Any]) -> None:
        """Moves to a position."""

    def share(self) -> float | None:
        """Returns approximately the share of the source that was read, 0 to 1; None if it is not known."""

    def next_segment(self, most: int) -> packing.Segment | None:
        """Returns the next chunk, of at most `most` ids; None at the end."""


class DocumentStream(packing.PackedStream):
    """A stream of packed rows of one source."""

    KINDS = MappingProxyType({"window": int, "source": dict})

    def __init__(
        self, chunks: Chunks, spec: StreamSpec, *, concatenates: bool = False, window_ids: int | None = None
    ) -> None:
        """With `concatenates`, chunks fill rows in the order of the source. `window_ids` None: WINDOW_IDS."""
        super().__init__(spec, packing.in_order if concatenates else packing.first_fit)
        self._chunks, self._concatenates, self._window_ids = chunks, concatenates, window_ids
        self._window = 0

    def _position(self) -> dict[str, Any]:
        return {"window": self._window, "source": self._chunks.position()}

    def _move(self, position: Mapping[str, Any]) -> None:
        self._window = position["window"]
        self._chunks.move(position["source"])

    def _source_share(self) -> float | None:
        return self._chunks.share()

    def _next_window(self) -> list[packing.Segment]:
        spec = self._spec
        wanted = spec.length * int(
            np.clip((self._window_ids or WINDOW_IDS) // spec.length, 16, 64 if spec.seed is None else 1024)
        )
        segments: list[packing.Segment] = []
        taken = 0
        while taken < wanted:
            most = spec.length - taken % spec.length if self._concatenates else spec.length
            if (segment := self._chunks.next_segment(most)) is None:
                break
            segments.append(segment)
            taken += len(segment.targets)
        self._window += 1
        if spec.seed is None or self._concatenates:
            return segments
        key, count = (spec.seed, spec.index, self._window), len(segments)
        return [segments[place] for place in permutation.permuted(range(count), count, key=key)]


class _Document:
    __slots__ = ("ids", "offset", "text")

    def __init__(self, offset: Any, text: bytes) -> None:
        self.offset, self.text = offset, text
        self.ids: np.ndarray | None = None


class _Memory:
    """The documents of a small split in memory, so that each is converted to ids once for all streams."""

    def __init__(self, vocabulary: Vocabulary | None) -> None:
        self.vocabulary = vocabulary
        self.parts: dict[int, list[_Document]] = {}
        self.is_small = True
        self._bytes = 0

    def keep(self, number: int, documents: list[_Document]) -> None:
        if not self.is_small or number in self.parts:
            return
        self._bytes += sum(len(document.text) + _DOCUMENT_BYTES for document in documents)
        self.parts[number] = documents
        if self._bytes > _MOST_REMEMBERED:
            self.is_small = False
            self.parts.clear()


class _Chunks(Chunks):
    def __init__(self, source: DocumentSource, spec: StreamSpec) -> None:
        self._source, self._spec = source, spec
        self._parts, self._is_shared, self._deals_chunks = source.parts(spec.split, spec.num_streams)
        self._memory = source.memory(spec)
        self._part = self._seen = self._taken = 0  # parts read; documents (or chunks) before this one; its chunks taken
        self._offset: Any = None  # offset of the current document in its part
        self._reader: Reader | None = None
        self._known: list[_Document] | None = None  # the documents of this part, if they are in memory
        self._place = 0  # index in _known of the next document
        self._read: list[_Document] | None = None  # documents of this part read so far, to be kept in memory
        self._read_bytes = 0
        self._document: list[np.ndarray] = []  # the current document's chunks; [] if none belongs to this stream
        self._size = 0  # how much the current document adds to _seen
        self._has_text = False  # whether the split has text; known once all parts were searched
        self._order = (-1, np.zeros(0, np.int64))  # epoch, and the order of its parts

    def position(self) -> dict[str, Any]:
        return {"part": self._part, "offset": self._offset, "seen": self._seen, "taken": self._taken}

    def move(self, position: Mapping[str, Any]) -> None:
        self._part, self._offset, self._seen = position["part"], position["offset"], position["seen"]
        self._reader, self._known, self._document, self._size, self._taken = None, None, [], 0, 0
        if position["taken"]:
            self._read_document()
            self._taken = position["taken"]

    def share(self) -> float | None:
        begun = 0.0
        if self._known is not None:
            begun = self._place / max(len(self._known), 1)
        elif self._reader is not None:
            if not can(self._reader, MeasuresProgress):
                return None
            begun = self._reader.fraction()
        return min(1.0, (self._part + begun) / len(self._parts))

    def next_segment(self, most: int) -> packing.Segment | None:
        assert self._spec.vocabulary is not None
        chunk = self.take(most)
        return None if chunk is None else packing.text_segment(chunk, bos_id=self._spec.vocabulary.bos_id)

    def take(self, most: int) -> np.ndarray | None:
        assert most == self._spec.length, "text that is not tokenized yet is packed"
        while True:
            while self._taken < len(self._document):
                chunk, number = self._document[self._taken], self._seen + self._taken
                self._taken += 1
                if not self._deals_chunks or self._is_ours(number):
                    return chunk
            self._seen += self._size
            if not self._read_document():
                return None

    def _is_ours(self, number: int) -> bool:
        return not self._is_shared or number % self._spec.num_streams == self._spec.index

    def _read_document(self) -> bool:
        self._taken, self._document, self._size = 0, [], 0
        if self._known is not None and self._is_shared and not self._deals_chunks:
            others = min((self._spec.index - self._seen) % self._spec.num_streams, len(self._known) - self._place)
            self._place, self._seen = self._place + others, self._seen + others
        document = self._next_document()
        if document is None:
            return False
        self._document = self._chunks(document) if self._deals_chunks or self._is_ours(self._seen) else []
        self._size = len(self._document) if self._deals_chunks else 1
        return True

    def _next_document(self) -> _Document | None:
        ended = 0
        while not self._is_through() and (ended <= len(self._parts) or self._finds_text()):
            if self._reader is None and self._known is None:
                self._open()
            if document := self._next_known() if self._reader is None else self._next_read():
                return document
            self._part, self._offset, self._reader, self._known = self._part + 1, None, None, None
            ended += 1
        spec = self._spec
        if spec.once and self._seen:
            return None
        raise UserError(
            f"{self._source.describe()}: the {spec.split} split has no document for stream {spec.index} of "
            f"{spec.num_streams}; use more text, a separate validation file, or a lower NUM_STREAMS"
        )

    def _open(self) -> None:
        number, memory = self._number(), self._memory
        self._known, self._place = memory.parts.get(number), 0
        if self._known is None:
            self._reader = self._parts[number].open(self._offset)
            self._read, self._read_bytes = [] if self._offset is None and memory.is_small else None, 0
        elif self._offset is not None:
            while self._place < len(self._known) and self._known[self._place].offset != self._offset:
                self._place += 1

    def _next_known(self) -> _Document | None:
        assert self._known is not None
        if self._place == len(self._known):
            return None
        document = self._known[self._place]
        self._place, self._offset = self._place + 1, document.offset
        return document

    def _next_read(self) -> _Document | None:
        assert self._reader is not None
        while True:
            self._offset = self._reader.offset()
            text = next(self._reader, None)
            if text is None:
                if self._read is not None:
                    self._memory.keep(self._number(), self._read)
                return None
            if text:
                document = _Document(self._offset, text)
                if self._read is not None:
                    self._read.append(document)
                    self._read_bytes += len(text) + _DOCUMENT_BYTES
                    if self._read_bytes > _MOST_REMEMBERED:
                        self._read = None
                return document

    def _is_through(self) -> bool:
        return self._spec.once and self._part >= len(self._parts)

    def _finds_text(self) -> bool:
        """Returns whether a later epoch, in another order, can give this stream a document."""
        if self._spec.seed is not None and not self._has_text:
            self._has_text = any(any(_texts(part)) for part in self._parts)
        return self._has_text

    def _number(self) -> int:
        count, spec = len(self._parts), self._spec
        running = self._part if self._is_shared else self._part * spec.num_streams + spec.index
        epoch, place = divmod(running, count)
        if spec.seed is None or count == 1:
            return place
        if self._order[0] != epoch:
            self._order = epoch, permutation.permuted(range(count), count, key=(spec.seed, epoch))
        return int(self._order[1][place])

    def _chunks(self, document: _Document) -> list[np.ndarray]:
        vocabulary, length = self._spec.vocabulary, self._spec.length
        if document.ids is None:
            assert vocabulary is not None
            document.ids = with_end(vocabulary.encode(document.text.decode()), vocabulary, where=self._source.describe)
        return [document.ids[start : start + length] for start in range(0, len(document.ids), length)]
