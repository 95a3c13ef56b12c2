"""Small models, with optimizers and batches, on which strategies are compared with one device."""

import importlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from core import optimizers
from core.types import Model
from models.decoder import transformer

ROWS, LENGTH = 16, 24


# It has grouped-query attention, and a vocabulary that no mesh divides unless it is rounded up.
MODEL = transformer.Transformer(
    vocab_size=203, num_layers=4, embed_dim=64, mlp_dim=176, num_heads=8, num_kv_heads=4, dtype="float32"
)
OPTIMIZER = optimizers.adamw(
    eps=1e-4,  # makes updates smooth functions of gradients; at 1e-8, those of tiny gradients depend on last bits
    learning_rate=optimizers.warmup_cosine(peak=3e-3, warmup_steps=5, total_steps=20),
    weight_decay=0.1,
)
_HERE = Path(__file__).parent
_OTHERS = {  # modules with MODEL, OPTIMIZER, OPTIMIZER_NAME, batches_for(model, steps, rows) and is_for(model)
    file.parent.name: importlib.import_module(f"{__package__}.{file.parent.name}.{file.stem}")
    for file in sorted(_HERE.glob("*/agreement_subject.py"))
}
MODELS: Mapping[str, Model] = {"transformer": MODEL, **{name: other.MODEL for name, other in _OTHERS.items()}}


def random_batches(vocab_size: int, *, steps: int, rows: int = ROWS) -> Iterator[Mapping[str, np.ndarray]]:
    """Yields `steps` batches [rows, LENGTH]; a row has two documents, then up to 5 positions of padding."""
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


def batches_for(model: Any, *, steps: int, rows: int = ROWS) -> Iterator[Mapping[str, np.ndarray]]:
    """Yields `steps` batches that fit a model."""
    if other := _other(model):
        return other.batches_for(model, steps=steps, rows=rows)
    return random_batches(model.vocab_size, steps=steps, rows=rows)


def optimizer_of(model: Model) -> optimizers.Optimizer:
    """Returns the optimizer with which a model is compared."""
    other = _other(model)
    return other.OPTIMIZER if other else OPTIMIZER


def optimizer_name(model: Model) -> str:
    """Returns the name of `optimizer_of(model)` for reports."""
    other = _other(model)
    return other.OPTIMIZER_NAME if other else "AdamW with epsilon 1e-4"


def _other(model: Model) -> Any:
    return next((other for other in _OTHERS.values() if other.is_for(model)), None)
