"""Compares gates (`models.ttt.gates`) on the chunks of an evaluation.

advantage = loss of SKIP - loss of UPDATE
recovery = (SKIP - gate) / (SKIP - oracle)          losses; the oracle has as many updates as the gate
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from models.ttt import gates
from models.ttt.gates import SKIP_COST, UPDATE_COST, Signals

RESAMPLES = 2000
_PERCENT = (2.5, 97.5)


class Chunks(NamedTuple):
    """The chunks of an evaluation, [chunks] each; the comparison decides about them in this order, row by row.

    Attributes:
      document, place: number of the document, and of the chunk in its row.
      tokens: number of supervised positions.
      loss_skip, loss_update: cross-entropy with SKIP and with UPDATE, summed over supervised positions, in nats.
      initial, step_0, step_1: reconstruction losses; see `models.ttt.gates.Signals`.
    """

    document: np.ndarray
    place: np.ndarray
    tokens: np.ndarray
    loss_skip: np.ndarray
    loss_update: np.ndarray
    initial: np.ndarray
    step_0: np.ndarray
    step_1: np.ndarray

    @property
    def signals(self) -> Signals:
        """The signals from which gates decide."""
        return Signals(self.loss_skip / self.tokens, self.initial, self.step_0, self.step_1)

    @property
    def gain(self) -> np.ndarray:
        """The loss with SKIP minus that with UPDATE, summed over the chunk's supervised positions, in nats."""
        return self.loss_skip - self.loss_update

    @property
    def advantage(self) -> np.ndarray:
        """The mean loss per token with SKIP minus that with UPDATE, in nats."""
        return (self.loss_skip - self.loss_update) / self.tokens


def collected(answers: Sequence[Mapping[str, np.ndarray]]) -> Chunks:
    """Returns the chunks that have supervised positions, given the extras of `AdaptedDecoder.evaluate` of each batch.

    Without `documents`, every row is a document.
    """
    found: dict[str, list[np.ndarray]] = {name: [] for name in Chunks._fields}
    rows = 0
    for batch in answers:
        tokens = np.asarray(batch["tokens"])
        count, places = tokens.shape
        documents = batch.get("documents", np.arange(rows, rows + count))
        rows += count
        values = {**batch, "document": np.repeat(np.asarray(documents)[:, None], places, axis=1)}
        values["place"] = np.broadcast_to(np.arange(places), (count, places))
        for name in Chunks._fields:
            found[name].append(np.asarray(values[name])[tokens > 0])
    return Chunks(*(np.concatenate(found[name]) for name in Chunks._fields))


class Decided(NamedTuple):
    """A gate's decisions about the chunks of an evaluation.

    Attributes:
      updates: [chunks], bool: whether the chunk is an UPDATE.
      thresholds: [chunks], after each chunk, for a `gates.Reconstruction`; None for other gates.
    """

    updates: np.ndarray
    thresholds: np.ndarray | None


def decide(gate: Any, chunks: Chunks, *, seed: int = 0) -> Decided:
    """Returns the decisions of a gate, a `gates.Gate` or one with `decide_all`."""
    if hasattr(gate, "decide_all"):
        return Decided(gate.decide_all(chunks.signals, chunks.gain), None)
    key = jax.random.key(seed)

    def one(state: Any, item: tuple[Signals, jax.Array]) -> tuple[Any, tuple[jax.Array, jax.Array]]:
        signals, number = item
        state, updates = gate.decide(state, signals, jax.random.fold_in(key, number))
        has_threshold = isinstance(state, dict) and "threshold" in state
        return state, (updates, state["threshold"] if has_threshold else jnp.zeros(()))

    signals = Signals(*(jnp.asarray(s, jnp.float32) for s in chunks.signals))
    numbers = jnp.arange(len(chunks.tokens))
    _, (updates, thresholds) = jax.jit(lambda: jax.lax.scan(one, gate.init(), (signals, numbers)))()
    has_threshold = isinstance(gate, gates.Reconstruction)
    return Decided(np.asarray(updates), np.asarray(thresholds) if has_threshold else None)


def score(chunks: Chunks, updates: np.ndarray) -> dict[str, float]:
    """Returns the scores of the decisions `updates`, [chunks] bool, by name.

    The loss is a mean per token, in nats. Recovery is NaN if the oracle gains nothing. Agreement is the share of chunks
    about which the oracle decides alike.
    """
    total = np.sum(chunks.tokens)
    rate = float(np.mean(updates))
    skip = float(np.sum(chunks.loss_skip) / total)
    loss = float(np.sum(np.where(updates, chunks.loss_update, chunks.loss_skip)) / total)
    oracle = gates.Oracle(rate).decide_all(chunks.signals, chunks.gain)
    best = float(np.sum(np.where(oracle, chunks.loss_update, chunks.loss_skip)) / total)
    return {
        "loss": loss,
        "perplexity": float(np.exp(loss)),
        "gain": skip - loss,
        "update_rate": rate,
        "recovery": (skip - loss) / (skip - best) if skip > best else float("nan"),
        "agreement": float(np.mean(oracle == updates)),
        "cost": SKIP_COST + (UPDATE_COST - SKIP_COST) * rate,
    }


def correlation(signal: np.ndarray, advantage: np.ndarray) -> float:
    """Returns Pearson's correlation of a signal and the advantage, [chunks] each; NaN if one of them is constant."""
    if min(np.std(signal), np.std(advantage)) == 0:
        return float("nan")
    return float(np.corrcoef(signal, advantage)[0, 1])


def interval(
    chunks: Chunks, ours: np.ndarray, theirs: np.ndarray, *, seed: int = 0, resamples: int = RESAMPLES
) -> tuple[float, float, float]:
    """Returns the mean loss per token of `theirs` minus that of `ours`, and its 95% interval.

    The interval is by the bootstrap over documents, because chunks of one document are alike.

    Args:
      ours, theirs: summed losses, [chunks].
    """
    _, places = np.unique(chunks.document, return_inverse=True)
    count = int(places.max()) + 1
    gains, tokens = (np.bincount(places, weights=values, minlength=count) for values in (theirs - ours, chunks.tokens))
    drawn = np.random.default_rng(seed).multinomial(count, np.full(count, 1 / count), size=resamples)  # [draws, count]
    weights = drawn @ tokens
    means = (drawn @ gains) / np.where(weights > 0, weights, 1)
    low, high = np.percentile(means, _PERCENT)
    return float(np.sum(gains) / np.sum(tokens)), float(low), float(high)
