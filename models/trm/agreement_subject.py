"""A small recursive model, its optimizer and its batches, on which strategies are compared with one device."""

from collections.abc import Iterator, Mapping
from typing import Protocol

import numpy as np

from core import optimizers
from core.types import IGNORED, Model, can
from models import trm

LENGTH = 24
MODEL = trm.TRM(
    vocab_size=11,
    vocab_multiple=8,
    embed_dim=64,
    num_heads=8,
    num_layers=1,
    h_cycles=2,
    l_cycles=2,
    num_puzzles=5,
    puzzle_multiple=48,
    prefix_length=8,
    halt_bias=0.5,  # rows halt when exploration lets them, at different steps
    halt_max_steps=3,
    exploration=0.5,
    dtype="float32",
)
_RATE = optimizers.warmup_floor(peak=1e-3, warmup_steps=5, total_steps=20, floor=0.1)
OPTIMIZER = optimizers.averaged(
    optimizer=optimizers.with_table(dense=optimizers.adam_atan2(learning_rate=_RATE), learning_rate=_RATE), decay=0.9
)
OPTIMIZER_NAME = "Adam-atan2 with sign updates of the puzzle table and an average of the parameters"


class _HasPuzzles(Protocol):
    num_puzzles: int


def is_for(model: Model) -> bool:
    """Returns whether a model has `num_puzzles`."""
    return can(model, _HasPuzzles)


def batches_for(model: trm.TRM, *, steps: int, rows: int) -> Iterator[Mapping[str, np.ndarray]]:
    """Yields `steps` batches of `rows` random puzzles, whose ids recur."""
    rng = np.random.default_rng(0)
    for _ in range(steps):
        labels = rng.integers(1, model.vocab_size, (rows, LENGTH), dtype=np.int32)
        yield {
            "inputs": rng.integers(0, model.vocab_size, (rows, LENGTH), dtype=np.int32),
            "labels": np.where(rng.random((rows, LENGTH)) < 0.2, np.int32(IGNORED), labels),
            "puzzle_ids": rng.integers(0, model.num_puzzles, rows, dtype=np.int32),
        }
