"""Mixes several sources of documents, sampled by weight."""

import dataclasses
import hashlib
from collections.abc import Iterator

from tasks.document_streams import DocumentSource, DocumentStream
from tasks.documents import StreamSpec
from tasks.streams import Stream


@dataclasses.dataclass(frozen=True)
class Mixture:
    """A `documents.Corpus` of several sources; weights are shares of chunks of at most T tokens, not of documents."""

    sources: tuple[DocumentSource, ...]
    weights: tuple[float, ...]

    def named_files(self) -> tuple[str, ...]:
        """See `Corpus`."""
        return tuple(name for source in self.sources for name in source.named_files())

    def open_stream(self, spec: StreamSpec) -> Stream:
        """See `Corpus`."""
        return DocumentStream(self.sources, self.weights, spec)

    def sample_texts(self) -> Iterator[str]:
        """See `Corpus`. Takes one document of each source in turn, until one source has no more."""
        for texts in zip(*(source.sample_texts() for source in self.sources), strict=False):
            yield from texts

    def problems(self) -> list[str]:
        """See `Corpus`."""
        return [problem for source in self.sources for problem in source.problems()]

    def describe(self) -> str:
        """See `Corpus`."""
        total = sum(self.weights)
        parts = [
            f"{weight / total:.0%} {source.describe()}"
            for source, weight in zip(self.sources, self.weights, strict=True)
        ]
        return f"text.mixture: {'; '.join(parts)}"

    def fingerprint(self) -> str:
        """See `Corpus`."""
        return hashlib.sha256(repr((self.weights, [s.fingerprint() for s in self.sources])).encode()).hexdigest()
