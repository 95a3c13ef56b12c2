"""Makes random grids with the shapes of puzzles, for smoke runs without a dataset."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from tasks.puzzles import writing


@dataclasses.dataclass(frozen=True, kw_only=True)
class RandomGrids:
    """A `task.Recipe` that writes random tokens instead of puzzles.

    Attributes:
      seq_len: S, tokens per grid.
      vocab_size: tokens are 1 to vocab_size - 1, at most 255.
      num_train, num_test: numbers of grids in the splits.
    """

    seq_len: int
    vocab_size: int
    num_train: int = 8
    num_test: int = 8

    def about(self) -> dict[str, Any]:
        """Returns the kind and parameters of the dataset, as JSON values."""
        return {"kind": "random grids", **dataclasses.asdict(self)}

    def build(self, directory: str) -> Mapping[str, Any]:
        """Writes the dataset and returns the content of its build.json."""
        rng, bound = np.random.default_rng(0), min(self.vocab_size, 256)
        with writing.dataset(directory, vocab_size=self.vocab_size, seq_len=self.seq_len, about=self.about()) as out:
            for split, count in ((out.train, self.num_train), (out.test, self.num_test)):
                for _ in range(count):
                    split.add_group(*rng.integers(1, bound, (2, 1, self.seq_len), dtype=np.uint8))
        return self.about()
