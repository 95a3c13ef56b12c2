"""Generates random tokens for smoke runs, measurements of speed, and tests.

The best possible loss is ln(vocab_size - 1) nats per token.
"""

import dataclasses
from collections.abc import Mapping

import numpy as np

from core import units
from core.batches import BatchSpec
from core.errors import check_integer
from tasks import streams
from tasks.sampled import SampledTask
from tasks.text import vocabularies


@dataclasses.dataclass(frozen=True)
class SyntheticTask(SampledTask):
    """A `core.types.Task` of random tokens, with the fields of `streams.batch_spec`."""

    vocab_size: int
    length: int
    num_streams: int

    @property
    def vocabulary(self) -> vocabularies.Numbers:
        return vocabularies.Numbers(self.vocab_size)

    def spec(self, batch_size: int) -> BatchSpec:
        streams.rows_per_stream(batch_size, num_streams=self.num_streams)
        return streams.batch_spec(batch_size, length=self.length)

    def row(self, rng: np.random.Generator, *, is_training: bool) -> Mapping[str, np.ndarray]:
        """Returns a row of ids drawn uniformly from 1 to vocab_size - 1."""
        del is_training
        targets = rng.integers(1, self.vocab_size, self.length, dtype=np.int32)  # [T]
        ones = np.ones_like(targets)
        return {
            "inputs": np.pad(targets, (1, 0))[:-1],
            "targets": targets,
            "weights": ones.astype(np.float32),
            "segment_ids": ones,
            "positions": np.arange(self.length, dtype=np.int32),
        }

    def describe(self) -> str:
        streams = units.counted(self.num_streams, "stream")
        return f"synthetic.random_tokens: ids below {self.vocab_size}, length {self.length}, {streams}"

    def fingerprint(self) -> str:
        return self.vocabulary.hash


def random_tokens(*, vocab_size: int, length: int, num_streams: int) -> SyntheticTask:
    """Returns a task of random tokens.

    Args:
      vocab_size: ids are 1 to vocab_size - 1.
      length: tokens per row.
      num_streams: number of data streams; divides the batch size.
    """
    for name, value, least in (("vocab_size", vocab_size, 2), ("length", length, 1), ("num_streams", num_streams, 1)):
        check_integer(value, where=f"synthetic.random_tokens.{name}", least=least)
    return SyntheticTask(vocab_size=vocab_size, length=length, num_streams=num_streams)
