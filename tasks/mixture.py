"""Mixes several sources of documents, sampled by weight."""

import dataclasses
import hashlib
from collections.abc import Iterator
from typing import Any

from tasks import seqio_tasks
from tasks.documents import StreamSpec
from tasks.seqio_tasks import SeqioCorpus


@dataclasses.dataclass(frozen=True)
class Mixture(SeqioCorpus):
    """Several corpora, sampled by weight. Weights are shares of chunks of at most T tokens, not of documents."""

    corpora: tuple[SeqioCorpus, ...]
    weights: tuple[float, ...]

    @property
    def parts(self) -> tuple[SeqioCorpus, ...]:
        """See `SeqioCorpus`."""
        return self.corpora

    def named_files(self) -> tuple[str, ...]:
        """See `Corpus`."""
        return tuple(name for corpus in self.corpora for name in corpus.named_files())

    def provider(self, spec: StreamSpec) -> Any:
        """See `SeqioCorpus`."""
        _, seqio = seqio_tasks.modules()
        providers = [corpus.provider(spec) for corpus in self.corpora]
        return seqio.Mixture("mixture", list(zip(providers, self.weights, strict=True)))

    def sample_texts(self) -> Iterator[str]:
        """See `Corpus`. Takes one document of each corpus in turn, until one corpus has no more."""
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
