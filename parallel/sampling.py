"""Samples a short continuation from the trained model, to see that it learned something.

Plain and slow on purpose: each id runs the whole window again, in the layout of training, so that it works wherever
training did.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from core.train_state import TrainState
from parallel.partitioner import Program

TEMPERATURE = 0.8
GATHER_AT_MOST_BYTES = 2**30


def continue_prompt(program: Program, state: TrainState, prompt: list[int], *, count: int) -> list[int]:
    """Ids that the model writes behind a prompt, drawn with a fixed seed; equal on all hosts.

    Args:
      program: whose model has `logits(params, batch) -> [B, T, V]`.
      state: trained.
      prompt: ids, at least one; its last T are used, T the length of a row.
      count: how many ids to write; each is drawn from what the T ids before it suggest.
    """
    length = program.spec["inputs"].shape[1]
    prompt = prompt[-length:]
    written = np.zeros(max(length, len(prompt) + count), np.int32)
    written[: len(prompt)] = prompt
    params = program.optimizer.evaluated(state.params, state.opt_state)
    if sum(leaf.nbytes for leaf in jax.tree.leaves(params)) <= GATHER_AT_MOST_BYTES:
        whole = NamedSharding(program.partitioner.mesh, PartitionSpec())
        params = jax.jit(lambda tree: tree, out_shardings=whole)(params)  # once, not at every layer of every id
    with program.partitioner.tracing():
        write = jax.jit(_write, static_argnames=("model", "rows", "length", "start", "count"))
        ids = write(
            params,
            jnp.asarray(written),
            model=program.model,
            rows=program.partitioner.row_shards,
            length=length,
            start=len(prompt),
            count=count,
        )
    return np.asarray(ids)[len(prompt) : len(prompt) + count].tolist()


def _write(params, written: jax.Array, *, model, rows: int, length: int, start: int, count: int) -> jax.Array:
    """[N]: `written` once `count` ids from position `start` on have been drawn."""
    whole = (rows, length)  # the same window on every group of chips: as few rows as the layout allows
    fixed = {
        "targets": jnp.zeros(whole, jnp.int32),
        "weights": jnp.ones(whole, jnp.float32),
        "segment_ids": jnp.ones(whole, jnp.int32),
        "positions": jnp.broadcast_to(jnp.arange(length), whole),
    }

    def one(i: jax.Array, written: jax.Array) -> jax.Array:
        first = jnp.maximum(i - length, 0)
        window = jax.lax.dynamic_slice_in_dim(written, first, length)  # [T]
        logits = model.logits(params, {**fixed, "inputs": jnp.broadcast_to(window, whole)})  # [B, T, V]
        here = jax.lax.dynamic_index_in_dim(logits, i - 1 - first, axis=1, keepdims=False)[0]  # [V]
        drawn = jax.random.categorical(jax.random.fold_in(jax.random.key(0), i), here / TEMPERATURE)
        return written.at[i].set(drawn.astype(jnp.int32))

    return jax.lax.fori_loop(start, start + count, one, written)
