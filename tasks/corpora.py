"""Where documents come from: a frozen description of each source, cheap to make.

The one idea: a corpus is data (names, patterns, splits) that can tell what is wrong with it, and whether two
hosts have the same, without TensorFlow; only opening a stream imports what reads it.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.util
import sysconfig
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

from core import paths, units
from tasks import documents
from tasks.ids import Vocabulary
from tasks.listing import (
    VALIDATION_PERCENT,
    File,
    is_json,
    is_validation,
    list_files,
    pattern_problems,
    python_files,
    split_files,
)
from tasks.streams import Stream


class StreamSpec(NamedTuple):
    """One stream of one split.

    Attributes:
      split: "train" or "validation".
      index: which of `num_streams`.
      rows: R, rows of each element of the stream.
      length: T.
      seed: of the order of documents; None reads them in order.
      vocabulary: None where only texts are read.
    """

    split: str
    index: int
    num_streams: int
    rows: int
    length: int
    seed: int | None
    vocabulary: Vocabulary | None


class Corpus(Protocol):
    """What a task needs of a source of documents."""

    def open_stream(self, spec: StreamSpec) -> Stream:
        """One stream at its start. Imports what reads the source."""

    def sample_texts(self) -> Iterator[str]:
        """Training documents, in a fixed order, once each."""

    def problems(self) -> list[str]:
        """What is wrong, as far as it shows without opening the data."""

    def named_files(self) -> tuple[str, ...]:
        """Patterns and folders as the user named them."""

    def describe(self) -> str:
        """A few words for the card of a run. Holds no secret."""

    def fingerprint(self) -> str:
        """Hexadecimal; equal where the same documents come in the same order."""


class _SeqioCorpus:
    """A corpus that seqio and tf.data read."""

    def named_files(self) -> tuple[str, ...]:
        """See `Corpus`."""
        return ()

    def provider(self, spec: StreamSpec) -> Any:
        """The seqio Task (or Mixture) of one stream."""
        from tasks import seqio_tasks

        return seqio_tasks.task(self, spec)

    def open_stream(self, spec: StreamSpec) -> Stream:
        """See `Corpus`."""
        from tasks import seqio_tasks

        return seqio_tasks.SeqioStream(self, spec)

    def sample_texts(self) -> Iterator[str]:
        """See `Corpus`."""
        from tasks import readers

        spec = StreamSpec("train", index=0, num_streams=1, rows=1, length=1, seed=None, vocabulary=None)
        return readers.sample_texts(self, spec)


class _FileCorpus(_SeqioCorpus):
    """A corpus of files whose documents are whole files, or lines of JSON when `field` is a name."""

    def files(self, split: str) -> tuple[File, ...]:
        """The files of a split, sorted by name. Raises ValueError if there are none."""
        raise NotImplementedError

    def json_field(self, split: str) -> str | None:
        """The field of a JSON line that holds the text; None where a file is one document."""
        return None

    def line_split(self, split: str) -> str | None:
        """The part of the lines to keep, where lines of the same files are divided into splits."""
        return None

    def documents(self, spec: StreamSpec, *, epochs: int | None = None) -> tuple[Any, bool]:
        """See `readers.file_documents`."""
        from tasks import readers

        return readers.file_documents(self, spec, epochs=epochs)

    def fingerprint(self) -> str:
        """See `Corpus`."""
        listing = [
            (split, file.name, file.size_bytes) for split in ("train", "validation") for file in self.files(split)
        ]
        return hashlib.sha256(repr(listing).encode()).hexdigest()


@dataclasses.dataclass(frozen=True)
class PythonLibrary(_FileCorpus):
    """The .py files of a Python's own standard library, without its tests."""

    root: str

    @functools.cached_property
    def _all_files(self) -> tuple[File, ...]:
        return python_files(self.root)

    def files(self, split: str) -> tuple[File, ...]:
        """See `_FileCorpus`."""
        wanted = split == "validation"
        return tuple(file for file in self._all_files if is_validation(file.name) == wanted)

    def problems(self) -> list[str]:
        """See `Corpus`."""
        counts = {split: len(self.files(split)) for split in ("train", "validation")}
        if all(counts.values()):
            return []
        return [
            f"the standard library at {self.root} has {sum(counts.values())} .py files, too few to split: "
            "use a Python whose library is not zipped, or text.files"
        ]

    def describe(self) -> str:
        """See `Corpus`."""
        train, validation = self.files("train"), self.files("validation")
        total_bytes = sum(file.size_bytes for file in (*train, *validation))
        return (
            f"text.python_source: {len(train)} + {len(validation)} files (train + validation), "
            f"{units.size(total_bytes)} of Python's standard library"
        )


@dataclasses.dataclass(frozen=True)
class TextFiles(_FileCorpus):
    """The user's own .txt files (a document each) or .jsonl files (a document a line)."""

    train: tuple[str, ...]
    validation: tuple[str, ...]
    field: str

    def named_files(self) -> tuple[str, ...]:
        """See `Corpus`."""
        return (*self.train, *self.validation)

    @functools.cached_property
    def _listed(self) -> dict[str, tuple[File, ...]]:
        train, validation = (_with_text(list_files(patterns)) for patterns in (self.train, self.validation))
        if self.validation:
            return {"train": train, "validation": validation}
        if is_json(train):
            return {"train": train, "validation": train}
        return dict(zip(("train", "validation"), split_files(train), strict=True))

    def files(self, split: str) -> tuple[File, ...]:
        """See `_FileCorpus`."""
        files = self._listed[split]
        if not files:
            raise ValueError(" ".join(self.problems()) or f"text.files: no {split} file")
        return files

    def json_field(self, split: str) -> str | None:
        """See `_FileCorpus`."""
        return self.field if is_json(self.files(split)) else None

    def line_split(self, split: str) -> str | None:
        """See `_FileCorpus`."""
        return split if not self.validation and is_json(self.files(split)) else None

    def problems(self) -> list[str]:
        """See `Corpus`. What is on gs:// is not looked for."""
        if not self.train:
            return [
                "DATA is not set: bind it to your text, e.g. --gin \"DATA = '/data/*.jsonl'\" (or gs://bucket/*.txt)"
            ]
        found = []
        for name, patterns in (("train", self.train), ("validation", self.validation)):
            local = [pattern for pattern in patterns if not paths.is_remote(pattern)]
            found += pattern_problems(f"text.files.{name}", local)
        if found:
            return found
        for name, patterns in (("train", self.train), ("validation", self.validation)):
            files = list_files(tuple(pattern for pattern in patterns if not paths.is_remote(pattern)))
            field = self.field if is_json(files) else None
            found += documents.first_problems(files, field=field, where=f"text.files.{name}")
        if not found and not any(map(paths.is_remote, self.train)) and not self._listed["validation"]:
            found.append(
                f"text.files.train: {len(self._listed['train'])} .txt file leaves none for validation; "
                "give text.files.validation, or more files, or one .jsonl with a document a line"
            )
        return found

    def describe(self) -> str:
        """See `Corpus`."""
        validation = ", ".join(self.validation) or f"{VALIDATION_PERCENT} % of it"
        return (
            f"text.files: train {', '.join(self.train) or '(DATA is not set)'}{self._size()}; validation {validation}"
        )

    def _size(self) -> str:
        """` (2 files, 12,345 bytes)` of training files on a disk, exact, for a resumed run compares it; else empty."""
        files = () if any(map(paths.is_remote, self.train)) else self._listed["train"]
        total = sum(file.size_bytes for file in files)
        return f" ({units.counted(len(files), 'file')}, {total:,} bytes)" if files else ""


@dataclasses.dataclass(frozen=True)
class Tfds(_SeqioCorpus):
    """A dataset of the TensorFlow Datasets catalogue, prepared beforehand."""

    name: str
    split: str
    validation_split: str
    field: str
    data_dir: str | None

    def named_files(self) -> tuple[str, ...]:
        """See `Corpus`."""
        return (self.data_dir,) if self.data_dir else ()

    def documents(self, spec: StreamSpec, *, epochs: int | None = None) -> tuple[Any, bool]:
        """See `readers.tfds_documents`."""
        from tasks import readers

        return readers.tfds_documents(self, spec, epochs=epochs)

    def problems(self) -> list[str]:
        """See `Corpus`."""
        found = []
        if importlib.util.find_spec("tensorflow_datasets") is None:
            found.append("text.tfds needs the package tensorflow-datasets: pip install tensorflow-datasets")
        if self.data_dir and not paths.is_remote(self.data_dir) and not paths.resolve(self.data_dir).is_dir():
            found.append(f"text.tfds.data_dir: no folder {self.data_dir!r}")
        return found

    def describe(self) -> str:
        """See `Corpus`."""
        return f"text.tfds: {self.name} ({self.split}; validation {self.validation_split})"

    def fingerprint(self) -> str:
        """See `Corpus`."""
        return hashlib.sha256(repr(dataclasses.replace(self, data_dir=None)).encode()).hexdigest()


@dataclasses.dataclass(frozen=True)
class HuggingFace:
    """A dataset of the Hugging Face hub. A token for gated ones is read from HF_TOKEN by the library itself."""

    name: str
    split: str
    validation_split: str
    field: str
    streaming: bool

    named_files = _SeqioCorpus.named_files  # none

    def open_stream(self, spec: StreamSpec) -> Stream:
        """See `Corpus`."""
        from tasks import huggingface

        return huggingface.HuggingFaceStream(self, spec)

    def sample_texts(self) -> Iterator[str]:
        """See `Corpus`."""
        from tasks import huggingface

        return huggingface.texts(self, self.split)

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


@dataclasses.dataclass(frozen=True)
class Mixture(_SeqioCorpus):
    """Several corpora, sampled by weight. A weight counts chunks of at most T tokens, not documents."""

    corpora: tuple[_SeqioCorpus, ...]
    weights: tuple[float, ...]

    def named_files(self) -> tuple[str, ...]:
        """See `Corpus`."""
        return tuple(name for corpus in self.corpora for name in corpus.named_files())

    def provider(self, spec: StreamSpec) -> Any:
        """See `_SeqioCorpus`."""
        from tasks import seqio_tasks

        return seqio_tasks.mixture(self, spec)

    def sample_texts(self) -> Iterator[str]:
        """See `Corpus`: in turns, while every corpus has more."""
        for texts in zip(*(corpus.sample_texts() for corpus in self.corpora), strict=False):
            yield from texts

    def problems(self) -> list[str]:
        """See `Corpus`."""
        return [problem for corpus in self.corpora for problem in corpus.problems()]

    def describe(self) -> str:
        """See `Corpus`."""
        total = sum(self.weights)
        parts = [
            f"{weight / total:.0%} {corpus.describe()}"
            for corpus, weight in zip(self.corpora, self.weights, strict=True)
        ]
        return f"text.mixture: {'; '.join(parts)}"

    def fingerprint(self) -> str:
        """See `Corpus`."""
        return hashlib.sha256(repr((self.weights, [c.fingerprint() for c in self.corpora])).encode()).hexdigest()


def _with_text(files: tuple[File, ...]) -> tuple[File, ...]:
    return tuple(file for file in files if file.size_bytes or paths.is_remote(file.path))


def python_library() -> PythonLibrary:
    """The standard library of the running interpreter."""
    return PythonLibrary(root=sysconfig.get_paths()["stdlib"])
