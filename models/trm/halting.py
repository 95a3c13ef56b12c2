"""The carry of the Tiny Recursive Model, and the loss of one supervised step.

A training step is one round of recursion for every row of the batch. A row keeps its puzzle until it halts; then it
takes the puzzle that the next batch has in this row.

    where halted:  states <- initial, steps <- 0, data <- incoming
    recursion;  steps += 1;  halted <- steps = max, or (q_halt > 0 and steps >= m)

max is `halt_max_steps`. For each row and step, m is drawn uniformly from 2 to max with the exploration probability,
else it is 0.

B batch, T positions with prefix, S positions of a puzzle, D embed, V vocab as stored.
"""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from core import random_bits
from core.types import IGNORED, Batch, LossOutput, WeightedSum
from models import losses
from models.trm.net import States

DATA = ("inputs", "labels", "puzzle_ids")


class Carry(NamedTuple):
    """The state between training steps.

    Attributes:
      states: answer and latents, each [B, T, D].
      steps: [B], int32, steps done on the current puzzle.
      halted: [B], bool: whether the row takes a new puzzle next.
      data: the current puzzles: inputs, labels [B, S] and puzzle_ids [B], int32.
      trained: [], int32, training steps done.
    """

    states: States
    steps: jax.Array
    halted: jax.Array
    data: Mapping[str, jax.Array]
    trained: jax.Array


class Outputs(NamedTuple):
    """The outputs of the heads.

    Attributes:
      logits: [B, S, V].
      q_halt, q_continue: logits of the halting head, [B], float32; `q_continue` is not used.
    """

    logits: jax.Array
    q_halt: jax.Array
    q_continue: jax.Array


def all_halted(batch: Batch, states: States) -> Carry:
    """Returns a carry in which every row takes a new puzzle next; `states` are placeholders."""
    rows = batch["inputs"].shape[0]
    data = {name: jnp.zeros_like(batch[name]) for name in DATA}
    return Carry(states, jnp.zeros((rows,), jnp.int32), jnp.ones((rows,), bool), data, jnp.zeros((), jnp.int32))


def refill(carry: Carry, batch: Batch, fresh: States) -> Carry:
    """Gives halted rows their puzzle of `batch` and the initial states `fresh`."""

    def choose(new: jax.Array, old: jax.Array) -> jax.Array:
        halted = carry.halted.reshape((-1,) + (1,) * (old.ndim - 1))
        return jnp.where(halted, new, old)

    return Carry(
        jax.tree.map(choose, fresh, carry.states),
        jnp.where(carry.halted, 0, carry.steps),
        jnp.zeros_like(carry.halted),
        {name: choose(batch[name], carry.data[name]) for name in DATA},
        carry.trained,
    )


def halts(
    q_halt: jax.Array,
    steps: jax.Array,
    key: jax.Array,
    rows: jax.Array,
    *,
    most: int,
    exploration: float | jax.Array,
) -> jax.Array:
    """Returns which rows halt in training, [B] bool.

    Args:
      q_halt: [B], logit.
      steps: [B], steps done on each row's puzzle, including this one.
      rows: [B], indices of the rows in the global batch.
      most: maximum number of steps of a row.
      exploration: probability of a minimum number of steps.
    """
    last = steps >= most
    if most == 1:
        return last

    def at_least(key: jax.Array) -> jax.Array:
        explore, draw = jax.random.split(key)
        drawn = jax.random.randint(draw, (), 2, most + 1)
        return jnp.where(jax.random.bernoulli(explore, exploration), drawn, 0)

    minimum = jax.vmap(at_least)(random_bits.row_keys(key, rows))
    return (last | (q_halt > 0)) & (steps >= minimum)


class Scores(NamedTuple):
    """Losses and correctness of each row, [B].

    Attributes:
      token_loss: mean loss over the row's labeled positions.
      halt_loss: binary cross-entropy of q_halt with target `right`.
      accuracy: fraction of labeled positions that are right.
      right: whether all labeled positions are right.
      labeled: whether the row has a labeled position.
    """

    token_loss: jax.Array
    halt_loss: jax.Array
    accuracy: jax.Array
    right: jax.Array
    labeled: jax.Array


def tokens(outputs: Outputs, *, vocab_size: int) -> jax.Array:
    """Returns the most likely token of every cell, [B, S], padding of the vocabulary excluded."""
    exists = jnp.arange(outputs.logits.shape[-1]) < vocab_size
    return jnp.argmax(jnp.where(exists, outputs.logits.astype(jnp.float32), -jnp.inf), axis=-1)


def score(outputs: Outputs, labels: jax.Array, *, vocab_size: int, log_probabilities) -> Scores:
    """Returns losses and correctness of each row.

    Args:
      labels: [B, S]; `core.types.IGNORED` does not count.
      vocab_size: without padding.
    """
    known = labels != IGNORED  # [B, S]
    count = jnp.sum(known, axis=-1)  # [B]
    predicted = tokens(outputs, vocab_size=vocab_size)
    correct = jnp.sum(known & (predicted == labels), axis=-1)
    right = correct == count
    token_loss = losses.negative_log_likelihood(log_probabilities(outputs.logits, vocab_size=vocab_size), labels)
    divisor = jnp.maximum(count, 1)
    return Scores(
        jnp.sum(token_loss, axis=-1) / divisor,
        losses.binary_cross_entropy(outputs.q_halt, right),
        correct / divisor,
        right,
        count > 0,
    )


def sums(scores: Scores, q_halt: jax.Array, steps: jax.Array, *, rows: jax.Array, counted: jax.Array) -> LossOutput:
    """Returns the sums of losses and metrics over rows.

    Args:
      q_halt, steps: as in `halts`.
      rows: [B], bool: rows included in the losses.
      counted: [B], bool: rows included in the other metrics.
    """
    weight, count = jnp.sum(rows, dtype=jnp.float32), jnp.sum(counted, dtype=jnp.float32)

    def over(mask: jax.Array, values: jax.Array, weight: jax.Array) -> WeightedSum:
        return WeightedSum(jnp.sum(jnp.where(mask, values.astype(jnp.float32), 0.0)), weight)

    token, halt = over(rows, scores.token_loss, weight), over(rows, scores.halt_loss, weight)
    metrics = {
        "accuracy": over(counted, scores.accuracy, count),
        "exact_accuracy": over(counted, scores.right, count),
        "q_halt_accuracy": over(counted, (q_halt >= 0) == scores.right, count),
        "steps": over(counted, steps, count),
        "halted": WeightedSum(count, weight),
        "lm_loss": token,
        "q_halt_loss": halt,
    }
    return LossOutput(token.total + 0.5 * halt.total, weight, metrics)  # type: ignore[arg-type]  # traced
