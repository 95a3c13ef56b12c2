"""Reads token caches: documents that were converted to ids before, with random access.

A cache is a folder. For each split it has these arrays in zarr3 format, which TensorStore reads:

  tokens  the ids of all documents
  ends    for each document, the number of ids of the split up to its end
  checks  for each document, the CRC-32 of its ids
  prompts only for seqio tasks with inputs: for each document, the number of ids before its targets (weight 0)

`cache.json` is written last; it has the counts, and hashes of the sources and the tokenizer.

With a seed, every epoch reads its documents in the order of a keyed permutation, otherwise in the order of the cache.
Document n of stream s is number n * S + s of this order, where S is the number of streams. A position is n and the
number of ids read of the document.
"""

import collections
import contextlib
import dataclasses
import functools
import hashlib
import zlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from core.errors import Problem, UserError
from core.files import foreign_json, paths
from tasks import permutation
from tasks.text import packing
from tasks.text.document_streams import Chunks, DocumentSource, DocumentStream
from tasks.text.documents import StreamSpec
from tasks.text.ids import Vocabulary

COMPLETE, STARTED = "cache.json", "tokenizing.json"
FORMAT = 2  # format 1 counted left-out documents differently
SPLITS = ("train", "validation")
_ABOUT = {"format": int, "vocabulary": dict, "splits": dict, "dtype": str}  # keys of `cache.json` with their types
SHARD_TOKENS, BLOCK_TOKENS = 2**23, 2**13
_SHARD_DOCUMENTS, _BLOCK_DOCUMENTS = 2**20, 2**10
_BOUNDS = 256  # number of documents whose bounds are requested at a time
_REQUEST_TOKENS = 2**15  # ids per request, plus at most one chunk
AHEAD_TOKENS = 2**18  # ids that a stream reads ahead: at most 1 MiB, or its ids of one epoch
_LEAST_AHEAD = 2**12
_BOUNDS_BYTES, _TOKENS_BYTES = 2**28, 2**26  # sizes of the caches of decompressed blocks


class Split(NamedTuple):
    """A split of a cache.

    Attributes:
      documents, tokens: counts; tokens include the end-of-document ids.
      digest: the CRC-32 of the checks of all documents.
    """

    documents: int
    tokens: int
    digest: int


def array_dtypes(about: Mapping[str, Any]) -> dict[str, str]:
    """Returns the dtype of each array of a split, given the content of `cache.json`."""
    dtypes = {"tokens": about["dtype"], "ends": "int64", "checks": "uint32"}
    return dtypes | ({"prompts": "int32"} if about.get("has_prompts") else {})


def array(
    folder: paths.Path, name: str, dtype: str, *, writes: bool = False, is_new: bool = False, cache_bytes: int = 0
):
    """Opens an array, or creates an empty one; returns a `tensorstore.TensorStore`.

    Args:
      folder: the folder of a split.
      name: `tokens`, or the name of an array with an entry per document.
      dtype: the dtype of a new array.
      writes: whether to open it for writing.
      is_new: whether to create it, which deletes an existing one; needs `writes`.
      cache_bytes: size of the cache of decompressed blocks; 0: none.
    """
    import tensorstore

    by_document = name != "tokens"
    shard, block = (_SHARD_DOCUMENTS, _BLOCK_DOCUMENTS) if by_document else (SHARD_TOKENS, BLOCK_TOKENS)
    spec: dict[str, Any] = {
        "driver": "zarr3",
        "kvstore": paths.kvstore(folder / name),
        "recheck_cached_data": False,
        "recheck_cached_metadata": False,
    }
    context = tensorstore.Context({"cache_pool": {"total_bytes_limit": cache_bytes}})
    if not writes:
        return tensorstore.open(
            spec | {"fill_missing_data_reads": False}, open=True, read=True, context=context
        ).result()
    little = {"name": "bytes", "configuration": {"endian": "little"}}
    sharding = {
        "chunk_shape": [block],
        "codecs": [little, {"name": "zstd", "configuration": {"level": 3}}],
        "index_codecs": [little, {"name": "crc32c"}],
    }
    if not is_new:
        return tensorstore.open(spec, open=True, context=context).result()
    spec["metadata"] = {
        "shape": [0],
        "data_type": dtype,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [shard]}},
        "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
    }
    return tensorstore.open(spec, create=True, delete_existing=True, context=context).result()


@dataclasses.dataclass(frozen=True)
class TokenCache(DocumentSource):
    """A `documents.Corpus` of the documents of a cache.

    Attributes:
      path: the folder of the cache.
      vocabulary: the one with which the documents were converted.
      concatenates: whether documents fill rows one after another; otherwise they are packed.
    """

    path: str
    vocabulary: Vocabulary = dataclasses.field(compare=False)
    concatenates: bool

    @functools.cached_property
    def about(self) -> Mapping[str, Any]:
        """The content of `cache.json`. Raises UserError if it is missing or of another tokenizer."""
        folder = paths.resolve(self.path)
        try:
            about = foreign_json.load_object((folder / COMPLETE).read_bytes(), _ABOUT)
        except FileNotFoundError as error:
            if (folder / STARTED).exists():
                raise UserError(
                    f"the token cache {self.path!r} is not complete: wait for the command that writes it, or run the "
                    "same `launch/run tokenize` again, which continues it"
                ) from error
            raise UserError(
                f"no token cache at {self.path!r} (no {COMPLETE}): write it with launch/run tokenize --out {self.path}"
            ) from error
        except foreign_json.MalformedError as error:
            raise UserError(f"{self.path}/{COMPLETE} is damaged: {error}; tokenize again") from error
        if about.get("format") not in (1, FORMAT):
            raise UserError(
                f"{self.path}/{COMPLETE} has format {about.get('format')}, expected 1 or {FORMAT}; tokenize again"
            )
        made = about["vocabulary"]
        if made["hash"] != self.vocabulary.hash:
            raise UserError(
                f"the token cache {self.path!r} was written with another tokenizer: {made['described']}; this run has "
                f"{self.vocabulary.describe()}. Set VOCABULARY = {made['name']!r}, or tokenize again"
            )
        return about

    def split(self, name: str) -> Split:
        about = self.about["splits"][name]
        found = Split(about["documents"], about["tokens"], about["digest"])
        if not found.documents:
            raise UserError(
                f"the token cache {self.path!r} has no document for {name}: tokenize more text, or with --validation"
            )
        return found

    @functools.cached_property
    def _opened(self) -> dict[str, dict[str, Any]]:
        return {}

    def arrays(self, split: str) -> dict[str, Any]:
        if split not in self._opened:
            folder = paths.resolve(self.path) / split
            with _reading(self.path):
                self._opened[split] = {
                    name: array(folder, name, kind, cache_bytes=_TOKENS_BYTES if name == "tokens" else _BOUNDS_BYTES)
                    for name, kind in array_dtypes(self.about).items()
                }
        return self._opened[split]

    def open_stream(self, spec: StreamSpec) -> DocumentStream:
        return DocumentStream(self.chunks(spec), spec, concatenates=self.concatenates)

    def chunks(self, spec: StreamSpec) -> Chunks:
        return _Documents(self, spec)

    def sample_texts(self) -> Iterator[str]:
        return iter(())

    def named_files(self) -> tuple[str, ...]:
        return (self.path,)

    def problems(self) -> list[str]:
        if not self.path:
            return ["DATA is not set: bind it to a token cache, which launch/run tokenize --out writes"]
        if paths.is_remote(self.path) or self.vocabulary.problems():
            return []
        try:
            for name in SPLITS:
                self.split(name)
        except UserError as error:
            return [Problem(str(error), file=self.path)]
        return []

    def describe(self) -> str:
        if not self.path or paths.is_remote(self.path) or self.problems():
            return f"text.tokens: {self.path or '(DATA is not set)'}"
        counts = " + ".join(f"{self.split(name).documents:,}" for name in SPLITS)
        tokens = sum(self.split(name).tokens for name in SPLITS)
        how = ", concatenated" if self.concatenates else ""
        return f"text.tokens: {self.path} ({counts} documents (train + validation), {tokens:,} tokens){how}"

    def train_tokens(self) -> int:
        return self.split("train").tokens

    def fingerprint(self) -> str:
        splits = [tuple(self.split(name)) for name in SPLITS]
        return hashlib.sha256(repr((splits, self.concatenates)).encode()).hexdigest()


@contextlib.contextmanager
def _reading(path: str) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        said = str(error).split(" [source locations")[0]
        raise UserError(f"the token cache {path!r} cannot be read, was it changed or removed? {said}") from error


class _Piece(NamedTuple):
    """A chunk of a document: ids start to stop - 1 of the split. `number` counts the documents of this stream."""

    number: int
    document: int
    start: int
    stop: int
    check: int | None  # the document's CRC-32 if this is its last chunk
    prompt: int  # number of the document's ids with weight 0


class _Documents(Chunks):
    def __init__(self, cache: TokenCache, spec: StreamSpec) -> None:
        self._cache, self._spec, self._split = cache, spec, cache.split(spec.split)
        self._arrays = cache.arrays(spec.split)
        self._most_ahead = min(AHEAD_TOKENS, max(self._split.tokens // spec.num_streams, _LEAST_AHEAD))
        self._epochs = np.cumsum([0, *cache.about["splits"][spec.split].get("epochs", [self._split.documents])])
        self.move({"document": 0, "id": 0})

    def position(self) -> dict[str, int]:
        return {"document": self._number, "id": self._id}

    def move(self, position: Mapping[str, int]) -> None:
        self._number, self._id = position["document"], position["id"]
        self._pieces = self._all_pieces(self._number)
        self._requested: collections.deque[tuple[list[_Piece], Any]] = collections.deque()
        self._ahead = 0  # number of ids requested but not yet returned
        self._ready: Iterator[tuple[_Piece, np.ndarray]] = iter(())
        self._piece: tuple[_Piece, np.ndarray] | None = None  # a piece of which a part was taken
        self._skipped = self._id  # ids of the first document that are read again only to check it
        self._crc = 0  # CRC-32 of this document so far

    def share(self) -> float:
        return min(1.0, self._number * self._spec.num_streams / self._split.documents)

    def next_segment(self, most: int) -> packing.Segment | None:
        assert self._spec.vocabulary is not None
        before, chunk = self._id, self.take(most)
        if chunk is None:
            return None
        return packing.text_segment(chunk, bos_id=self._spec.vocabulary.bos_id, prompt=self._prompt - before)

    def take(self, most: int) -> np.ndarray | None:
        """Returns the ids of the next chunk, int32 [at most `most`]; None at the end."""
        taken: list[np.ndarray] = []
        while most:
            if (found := self._piece or self._next_piece()) is None:
                return None  # the end comes after a whole document
            piece, ids = found
            self._prompt = piece.prompt
            taken.append(ids[:most])
            self._piece = (piece, ids[most:]) if len(ids) > most else None
            most -= len(taken[-1])
            self._id += len(taken[-1])
            if self._piece is None and piece.check is not None:  # the document ends
                self._number, self._id = piece.number + 1, 0
                break
        return np.concatenate(taken).astype(np.int32)

    def _next_piece(self) -> tuple[_Piece, np.ndarray] | None:
        while (found := self._verified_piece()) is not None:
            piece, ids = found
            skipped = min(self._skipped, len(ids))
            self._skipped -= skipped
            if skipped < len(ids):
                return piece, ids[skipped:]
            if piece.check is not None:
                raise UserError(
                    f"the token cache {self._cache.path!r}: the saved position is after id {self._id} of document "
                    f"{piece.document}, which has fewer; is the checkpoint of another cache?"
                )
        return None

    def _verified_piece(self) -> tuple[_Piece, np.ndarray] | None:
        found = next(self._ready, None)
        if found is None:
            while self._ahead < self._most_ahead and self._request():
                pass
            if not self._requested:
                return None
            pieces, future = self._requested.popleft()
            with _reading(self._cache.path):
                ids = future.result()
            self._ahead -= len(ids)
            cuts = np.cumsum([piece.stop - piece.start for piece in pieces])[:-1]
            self._ready = zip(pieces, np.split(ids, cuts), strict=True)
            found = next(self._ready)
        self._verify(*found)
        return found

    def _verify(self, piece: _Piece, ids: np.ndarray) -> None:
        self._crc = zlib.crc32(np.ascontiguousarray(ids).data, self._crc)
        if piece.check is None:
            return
        if self._crc != piece.check:
            shards = {(at - 1) // SHARD_TOKENS for at in (piece.start + 1, piece.stop)}
            files = ", ".join(f"{self._spec.split}/tokens/c/{shard}" for shard in sorted(shards))
            raise UserError(
                f"the token cache {self._cache.path!r} is not what was written: document {piece.document} differs. "
                f"{files} was changed or is damaged; restore it, or tokenize again"
            )
        self._crc = 0

    def _request(self) -> bool:
        pieces: list[_Piece] = []
        size = 0
        while size < min(_REQUEST_TOKENS, self._most_ahead) and (piece := next(self._pieces, None)):
            pieces.append(piece)
            size += piece.stop - piece.start
        if not pieces:
            return False
        places = np.concatenate([np.arange(piece.start, piece.stop) for piece in pieces])
        self._requested.append((pieces, self._arrays["tokens"][places].read()))
        self._ahead += size
        return True

    def _all_pieces(self, number: int) -> Iterator[_Piece]:
        length = self._spec.length
        following = self._request_bounds(number)
        while following:
            (documents, *futures), following = following, self._request_bounds(number + _BOUNDS)
            with _reading(self._cache.path):
                begins, *others = (future.result() for future in futures)
            begins = np.where(documents > 0, begins, 0)
            for document, begin, end, check, *prompt in zip(
                *(values.tolist() for values in (documents, begins, *others)), strict=True
            ):
                for start in range(begin, end, length):
                    stop = min(start + length, end)
                    yield _Piece(number, document, start, stop, check if stop == end else None, *(prompt or [0]))
                number += 1

    def _request_bounds(self, number: int) -> tuple[Any, ...]:
        spec, end = self._spec, number + _BOUNDS
        if spec.once:
            end = min(end, -(-(self._split.documents - spec.index) // spec.num_streams))
        if number >= end:
            return ()
        documents = self._order(np.arange(number, end))
        begins, *others = (array for name, array in self._arrays.items() if name != "tokens")
        wanted = (begins[np.maximum(documents - 1, 0)], *(array[documents] for array in (begins, *others)))
        return documents, *(view.read() for view in wanted)

    def _order(self, numbers: np.ndarray) -> np.ndarray:
        spec, starts = self._spec, self._epochs
        rounds, places = np.divmod(numbers * spec.num_streams + spec.index, starts[-1])
        if spec.seed is None:
            return places
        within = np.searchsorted(starts, places, side="right") - 1  # index of the cached epoch
        epochs = rounds * (len(starts) - 1) + within
        for epoch in np.unique(epochs):
            now = epochs == epoch
            start, stop = starts[within[now][0] :][:2]
            places[now] = start + permutation.permuted(places[now] - start, int(stop - start), key=(spec.seed, epoch))
        return places
