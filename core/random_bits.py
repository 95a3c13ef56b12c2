"""Random bits that belong to rows of the global batch.

A model that draws (dropout, noise) must draw the same bits for a row wherever the row is computed: on one chip or
sixteen, in one batch or in microbatches. The one idea: bits are keyed by (seed, step, layer, global row), never by the
shape of what happens to be here.

    keys = row_keys(hk.next_rng_key(), row_ids(batch))                                    # [B]
    kept = jax.vmap(lambda key: jax.random.bernoulli(key, 0.9, x.shape[1:]))(keys)        # [B, ...]

Seed and step are in the key that the step hands to the model, the layer in the one that `layer_stack` hands to a block,
and the rows in the batch: `core.step` puts `row_ids` there. A block gets them through its `side`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from core.types import Batch

ROW_IDS = "row_ids"


def with_row_ids(batch: Batch) -> Batch:
    """The batch with `row_ids` [B], int32: 0, 1, … of a whole global batch."""
    return {**batch, ROW_IDS: jnp.arange(_rows(batch), dtype=jnp.int32)}


def row_ids(batch: Batch) -> jax.Array:
    """[B], int32: the rows of the global batch that these are; those of a whole batch where no step numbered them."""
    return batch[ROW_IDS] if ROW_IDS in batch else jnp.arange(_rows(batch), dtype=jnp.int32)


def row_keys(key: jax.Array, rows: jax.Array) -> jax.Array:
    """A key for each row, [B], from one key and the rows' ids [B]."""
    return jax.vmap(jax.random.fold_in, (None, 0))(key, rows)


def _rows(batch: Batch) -> int:
    return next(iter(batch.values())).shape[0]
