"""Samples a short continuation from the trained model, to see that it learned something.

Plain and slow on purpose: each id runs the whole window again, in the layout of training, so that it works wherever
training did.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from core.batches import BatchSpec, batch_shapes, row_length
from core.train_state import TrainState
from core.types import Batch
from parallel.partitioner import Program

TEMPERATURE = 0.8
GATHER_AT_MOST_BYTES = 2**30


def continue_prompt(program: Program, state: TrainState, prompt: list[int], *, count: int) -> list[int]:
    """Returns the ids that the model writes after a prompt, drawn with a fixed seed; equal on all hosts.

    Fields of a batch other than those of text, such as an image beside it, are zero.

    Args:
      program: whose model has `logits(params, batch) -> [B, T, V]`.
      state: trained.
      prompt: ids, at least one; its last T are used, T the length of a row.
      count: how many ids to write; each is drawn from what the T ids before it suggest.
    """
    length = row_length(program.spec)
    prompt = prompt[-length:]
    written = np.zeros(max(length, len(prompt) + count), np.int32)
    written[: len(prompt)] = prompt
    params = program.optimizer.evaluated(state.params, state.opt_state)
    if sum(leaf.nbytes for leaf in jax.tree.leaves(params)) <= GATHER_AT_MOST_BYTES:
        whole = NamedSharding(program.partitioner.mesh, PartitionSpec())
        params = jax.jit(lambda tree: tree, out_shardings=whole)(params)  # once, not at every layer of every id
    with program.partitioner.tracing():
        write = jax.jit(_write, static_argnames=("model", "fields", "rows", "start", "count"))
        ids = write(
            params,
            jnp.asarray(written),
            model=program.model,
            fields=tuple(program.spec.items()),
            rows=program.partitioner.row_shards,
            start=len(prompt),
            count=count,
        )
    return np.asarray(ids)[len(prompt) : len(prompt) + count].tolist()


def _batch(spec: BatchSpec, window: jax.Array, *, rows: int) -> Batch:
    """Returns a batch whose rows all hold the ids of `window` [T] as one segment."""
    whole = (rows, len(window))
    others = {name: jnp.zeros(s.shape, s.dtype) for name, s in batch_shapes(spec, rows=rows).items()}
    return {
        **others,
        "inputs": jnp.broadcast_to(window, whole),
        "targets": jnp.zeros(whole, jnp.int32),
        "weights": jnp.ones(whole, jnp.float32),
        "segment_ids": jnp.ones(whole, jnp.int32),
        "positions": jnp.broadcast_to(jnp.arange(len(window)), whole),
    }


def _write(params, written: jax.Array, *, model, fields: tuple, rows: int, start: int, count: int) -> jax.Array:
    """Returns `written` [N] after `count` ids from position `start` on have been drawn.

    Every group of chips computes the same window, with as few rows as the layout allows.
    """
    spec = dict(fields)
    length = row_length(spec)

    def one(i: jax.Array, written: jax.Array) -> jax.Array:
        first = jnp.maximum(i - length, 0)
        window = jax.lax.dynamic_slice_in_dim(written, first, length)  # [T]
        logits = model.logits(params, _batch(spec, window, rows=rows))  # [B, T, V]
        here = jax.lax.dynamic_index_in_dim(logits, i - 1 - first, axis=1, keepdims=False)[0]  # [V]
        drawn = jax.random.categorical(jax.random.fold_in(jax.random.key(0), i), here / TEMPERATURE)
        return written.at[i].set(drawn.astype(jnp.int32))

    return jax.lax.fori_loop(start, start + count, one, written)
