"""What the trained model writes: a short continuation, to see that it learned something.

Plain and slow on purpose: each token runs the whole window again, in the layout of training, so that it works wherever
training did.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from core.train_state import TrainState
from parallel.partitioner import Program

TEMPERATURE = 0.8


def continue_prompt(program: Program, state: TrainState, prompt: list[int], *, count: int) -> list[int]:
    """Ids that the model writes behind a prompt, drawn with a fixed seed; equal on all hosts.

    Args:
      program: whose model has `logits(params, batch) -> [B, T, V]`.
      state: trained.
      prompt: ids, at least one; its last `T - count` are used.
      count: how many ids to write; at most T - 1 for windows of T.
    """
    rows, length = program.spec["inputs"].shape
    count = min(count, length - 1)
    prompt = prompt[-(length - count) :]
    window = np.zeros((rows, length), np.int32)
    window[:, : len(prompt)] = prompt
    with program.partitioner.tracing():
        written = jax.jit(_write, static_argnums=(0, 3, 4))(
            program.model, state.params, jnp.asarray(window), len(prompt), count
        )
    return np.asarray(written)[len(prompt) : len(prompt) + count].tolist()


def _write(model, params, window: jax.Array, start: int, count: int) -> jax.Array:
    """[T]: the first row once `count` ids from position `start` on have been drawn."""
    positions = jnp.broadcast_to(jnp.arange(window.shape[1]), window.shape)
    fixed = {
        "targets": window,
        "weights": jnp.ones(window.shape, jnp.float32),
        "segment_ids": jnp.ones_like(window),
        "positions": positions,
    }

    def one(i: jax.Array, window: jax.Array) -> jax.Array:
        logits = model.logits(params, {**fixed, "inputs": window})  # [B, T, V]
        here = jax.lax.dynamic_index_in_dim(logits, i - 1, axis=1, keepdims=False)[0]  # [V]
        drawn = jax.random.categorical(jax.random.fold_in(jax.random.key(0), i), here / TEMPERATURE)
        return window.at[:, i].set(drawn.astype(jnp.int32))

    return jax.lax.fori_loop(start, start + count, one, window)[0]
