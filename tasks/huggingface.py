"""Reads datasets of the Hugging Face hub, whose position tf.data cannot save.

Documents are read in windows of 2**18 ids and are shuffled and packed within a window. The library's own position
(`state_dict`) is recorded where a window begins. Resuming reads one window again (about a second), and the library may
have to skip rows of a file to reach the recorded position.

The library itself reads the token for gated datasets from HF_TOKEN; this code never handles it.
"""

import dataclasses
import hashlib
import importlib.util
import json
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from core.errors import UserError
from tasks import documents, packing
from tasks.documents import StreamSpec
from tasks.ids import lowest_id
from tasks.streams import Stream

WINDOW_IDS = 2**18


@dataclasses.dataclass(frozen=True)
class HuggingFace:
    """A dataset of the Hugging Face hub. The library reads the token for gated datasets from HF_TOKEN."""

    name: str
    split: str
    validation_split: str
    field: str
    streaming: bool

    def named_files(self) -> tuple[str, ...]:
        """See `Corpus`."""
        return ()

    def open_stream(self, spec: StreamSpec) -> Stream:
        """See `Corpus`."""
        return HuggingFaceStream(self, spec)

    def sample_texts(self) -> Iterator[str]:
        """See `Corpus`."""
        for number, example in enumerate(_load(self, self.split), 1):
            if text := _text(example, self, where=f"document {number} of {self.split}"):
                yield text

    def problems(self) -> list[str]:
        """See `Corpus`."""
        if importlib.util.find_spec("datasets") is None:
            return ["text.huggingface needs the package datasets: pip install datasets"]
        return []

    def describe(self) -> str:
        """See `Corpus`."""
        how = "streamed" if self.streaming else "downloaded"
        return f"text.huggingface: {self.name} ({self.split}; validation {self.validation_split}), {how}"

    def fingerprint(self) -> str:
        """See `Corpus`."""
        return hashlib.sha256(repr(self).encode()).hexdigest()


class HuggingFaceStream(packing.PackedStream):
    """A stream over an iterable dataset that has `state_dict` and `load_state_dict`."""

    KINDS = MappingProxyType({"epoch": int, "documents": int, "window": int, "library": dict})

    def __init__(self, corpus: HuggingFace, spec: StreamSpec) -> None:
        super().__init__(spec)
        self._corpus = corpus
        self._base = _load(corpus, corpus.split if spec.split == "train" else corpus.validation_split)
        self._by_file = self._base.num_shards >= spec.num_streams
        self._epoch = self._documents = self._window = 0  # _documents: number read in this epoch
        self._open()

    def _move(self, position: Mapping[str, Any]) -> None:
        self._epoch, self._documents, self._window = (position[k] for k in ("epoch", "documents", "window"))
        self._open()
        self._dataset.load_state_dict(position["library"])
        self._examples = iter(self._dataset)

    def _open(self) -> None:
        """Opens the dataset at the start of the epoch, as a new object: `load_state_dict` cannot be undone."""
        streams, index = (self._spec.num_streams, self._spec.index) if self._by_file else (1, 0)
        self._dataset = self._base.shard(num_shards=streams, index=index)
        self._dataset.set_epoch(self._epoch)
        self._examples = iter(self._dataset)

    def _position(self) -> dict[str, Any]:
        library = json.loads(json.dumps(self._dataset.state_dict()))
        return {"epoch": self._epoch, "documents": self._documents, "window": self._window, "library": library}

    def _next_window(self) -> list[packing.Segment]:
        spec = self._spec
        segments: list[packing.Segment] = []
        count = 0
        while count < WINDOW_IDS:
            ids = self._next_ids()
            count += len(ids)
            segments += packing.text_segments(ids, length=spec.length, bos_id=spec.vocabulary.bos_id)
        if spec.seed is not None:
            order = np.random.default_rng((spec.seed, spec.index, self._window)).permutation(len(segments))
            segments = [segments[i] for i in order]
        self._window += 1
        return segments

    def _next_ids(self) -> list[int]:
        """Returns the ids of this stream's next document, with the end-of-document id."""
        vocabulary = self._spec.vocabulary
        ids = [*vocabulary.encode(self._next_text()), vocabulary.eos_id]
        lowest = lowest_id(vocabulary)
        if min(ids) < lowest or max(ids) >= vocabulary.size:
            reserved = " (id 0 is reserved for padding)" if lowest else ""
            raise UserError(
                f"{self._corpus.describe()}: ids {min(ids)} to {max(ids)}, expected {lowest} to {vocabulary.size - 1}"
                + reserved
            )
        return ids

    def _next_text(self) -> str:
        spec = self._spec
        while True:
            example = next(self._examples, None)
            if example is None:
                if not self._documents:
                    raise UserError(f"{self._corpus.describe()}: the {spec.split} split has no document")
                self._epoch, self._documents = self._epoch + 1, 0
                self._open()
                continue
            number, self._documents = self._documents, self._documents + 1
            if self._by_file:
                where = f"document {number + 1} of {spec.split} stream {spec.index} of {spec.num_streams}"
            elif number % spec.num_streams == spec.index:
                where = f"document {number + 1} of {spec.split}"
            else:
                continue
            if text := _text(example, self._corpus, where=where):
                return text


def _load(corpus: HuggingFace, split: str) -> Any:
    """Loads a split as an iterable dataset. Raises UserError if the package `datasets` is not installed."""
    try:
        import datasets
    except ImportError as error:
        raise UserError(" ".join(corpus.problems())) from error
    name, _, config = corpus.name.partition(":")
    dataset = datasets.load_dataset(name, config or None, split=split, streaming=corpus.streaming)
    return dataset if corpus.streaming else dataset.to_iterable_dataset()


def _text(example: Mapping[str, Any], corpus: HuggingFace, *, where: str) -> str:
    """Returns the text of a document; empty if it holds only white space. Raises UserError if it is not text."""
    text = example.get(corpus.field)
    if not isinstance(text, str):
        raise UserError(f"text.huggingface.field: {corpus.name} has no text {corpus.field!r}, only {sorted(example)}")
    intake = documents.intake_of(corpus)
    return intake.take(documents.checked, documents.encoded(text, where=where), where=where).decode()
