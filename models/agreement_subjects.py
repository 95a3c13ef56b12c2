"""Small models, their optimizers and batches, by which strategies are compared with one device.

Batches of the decoder are packed rows with uneven padding, different at every step, so that weights, segments and
positions all matter; those of the recursive model have puzzles that recur, and labels that are left out.
"""

from collections.abc import Iterator, Mapping

import numpy as np

from core import optimizers
from core.types import IGNORED, HasPuzzles, Model, can
from models import transformer, trm

ROWS, LENGTH = 16, 24


# Grouped-query attention, and a vocabulary that no mesh divides before it is rounded up.
MODEL = transformer.Transformer(
    vocab_size=203, num_layers=4, embed_dim=64, mlp_dim=176, num_heads=8, num_kv_heads=4, dtype="float32"
)
OPTIMIZER = optimizers.adamw(
    eps=1e-4,  # an update is a smooth function of its gradient: at 1e-8 one that is nearly 0 rests on its last bits
    learning_rate=optimizers.warmup_cosine(peak=3e-3, warmup_steps=5, total_steps=20),
    weight_decay=0.1,
)
RECURSIVE = trm.TRM(
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
RECURSIVE_OPTIMIZER = optimizers.averaged(
    optimizer=optimizers.with_table(dense=optimizers.adam_atan2(learning_rate=_RATE), learning_rate=_RATE), decay=0.9
)
MODELS: Mapping[str, Model] = {"transformer": MODEL, "trm": RECURSIVE}


def random_batches(vocab_size: int, *, steps: int, rows: int = ROWS) -> Iterator[Mapping[str, np.ndarray]]:
    """Returns batches with two documents per row and padding; lengths differ between rows and steps."""
    rng = np.random.default_rng(0)
    position = np.arange(LENGTH)[None]
    for _ in range(steps):
        first = rng.integers(4, LENGTH // 2, (rows, 1))
        second = position >= first
        padding = position >= LENGTH - rng.integers(0, 6, (rows, 1))
        yield {
            "inputs": rng.integers(0, vocab_size, (rows, LENGTH), dtype=np.int32),
            "targets": rng.integers(0, vocab_size, (rows, LENGTH), dtype=np.int32),
            "weights": (~padding).astype(np.float32),
            "segment_ids": np.where(padding, 0, 1 + second).astype(np.int32),
            "positions": np.where(second, position - first, position).astype(np.int32),
        }


def batches_for(model: Model, *, steps: int, rows: int = ROWS) -> Iterator[Mapping[str, np.ndarray]]:
    """Returns batches for a model: packed documents, or puzzles that recur."""
    if not can(model, HasPuzzles):
        return random_batches(model.vocab_size, steps=steps, rows=rows)
    rng = np.random.default_rng(0)

    def puzzles() -> Mapping[str, np.ndarray]:
        labels = rng.integers(1, model.vocab_size, (rows, LENGTH), dtype=np.int32)
        return {
            "inputs": rng.integers(0, model.vocab_size, (rows, LENGTH), dtype=np.int32),
            "labels": np.where(rng.random((rows, LENGTH)) < 0.2, np.int32(IGNORED), labels),
            "puzzle_ids": rng.integers(0, model.num_puzzles, rows, dtype=np.int32),
        }

    return (puzzles() for _ in range(steps))


def optimizer_of(model: Model) -> optimizers.Optimizer:
    """Returns the optimizer for measuring the agreement of a model."""
    return RECURSIVE_OPTIMIZER if can(model, HasPuzzles) else OPTIMIZER


def optimizer_name(model: Model) -> str:
    """Returns the name of `optimizer_of(model)` for reports."""
    if can(model, HasPuzzles):
        return "Adam-atan2 with sign updates of the puzzle table and an average of the parameters"
    return "AdamW with epsilon 1e-4"
