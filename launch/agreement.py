"""The table of agreement: every strategy on 16 CPU devices against one device, by one model.

`parallel.agreement` compares two programs; here are the model, the batches and the loop over strategies. The batches
are packed rows with uneven padding, different at every step, so that weights, segments and positions all matter.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from core import optimizers, slices
from core.types import Model
from models import transformer
from parallel import agreement, strategies
from parallel.agreement import EXAMPLES, Batch, Difference, Example
from parallel.partitioner import Partitioner, Program

__all__ = ["EXAMPLES", "MODEL", "Example", "bind", "measure", "random_batches"]

ROWS, LENGTH = 16, 24

# Grouped-query attention, and a vocabulary that no mesh divides before it is rounded up.
MODEL = transformer.Transformer(
    vocab_size=203, num_layers=3, embed_dim=64, mlp_dim=176, num_heads=8, num_kv_heads=4, dtype="float32"
)
OPTIMIZER = optimizers.adamw(
    learning_rate=optimizers.warmup_cosine(peak=3e-3, warmup_steps=5, total_steps=20), weight_decay=0.1
)
ONE_DEVICE = Example("v5e-1", strategies.data_parallel())


def random_batches(vocab_size: int, *, steps: int) -> Iterator[Batch]:
    """Two documents to a row, then padding; lengths differ from row to row and step to step."""
    rng = np.random.default_rng(0)
    position = np.arange(LENGTH)[None]
    for _ in range(steps):
        first = rng.integers(4, LENGTH // 2, (ROWS, 1))
        second = position >= first
        padding = position >= LENGTH - rng.integers(0, 6, (ROWS, 1))
        yield {
            "inputs": rng.integers(0, vocab_size, (ROWS, LENGTH), dtype=np.int32),
            "targets": rng.integers(0, vocab_size, (ROWS, LENGTH), dtype=np.int32),
            "weights": (~padding).astype(np.float32),
            "segment_ids": np.where(padding, 0, 1 + second).astype(np.int32),
            "positions": np.where(second, position - first, position).astype(np.int32),
        }


def bind(model: Model, example: Example, batch: Batch, **options) -> Program:
    """The model under a strategy, on CPU devices that play the example's slice."""
    spec = {k: jax.ShapeDtypeStruct(a.shape, a.dtype) for k, a in batch.items()}
    bound = Partitioner(example.strategy, slice=slices.get(example.slice), devices=jax.devices())
    return bound.program(model, OPTIMIZER, spec, seed=7, **options)


class Row(NamedTuple):
    """How far one strategy is from one device, by part of the trajectory."""

    name: str
    slice: str
    float32: Mapping[str, Difference]
    bfloat16: Mapping[str, Difference] | None


def measure(model: Any, examples: Mapping[str, Example], *, steps: int, bfloat16: bool) -> list[Row]:
    """Every example against one device, on 16 CPU devices.

    Args:
      model: over batches of tokens; for the bfloat16 column it must be a dataclass with a field `dtype`.
      examples: by name.
      steps: AdamW steps.
      bfloat16: also compare the model computing in bfloat16 with itself on one device.
    """
    data = list(random_batches(model.vocab_size, steps=steps))
    dtypes = ["float32", *(["bfloat16"] if bfloat16 else [])]
    models = {d: dataclasses.replace(model, dtype=d) if hasattr(model, "dtype") else model for d in dtypes}
    want = {d: agreement.run(bind(m, ONE_DEVICE, data[0]), data) for d, m in models.items()}
    rows = []
    for name, example in examples.items():
        found = {
            d: agreement.compare(agreement.run(bind(m, example, data[0]), data), want[d]) for d, m in models.items()
        }
        rows.append(Row(name, example.slice, found["float32"], found.get("bfloat16")))
    return rows
