"""Gates decide whether a chunk is read with the adapter (UPDATE) or by the base alone (SKIP).

A `Gate` has two pure functions, for use inside jit: `init()` returns its state, `decide(state, signals, key)` the next
state and a decision.

"When to Ponder: Adaptive Compute Allocation for Code Generation via Test-Time Training", 2026, and its code.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from core.errors import UserError, check_integer, check_number

SKIP_COST, UPDATE_COST = 1.0, 3.0  # cost of a chunk, in the units of the paper
State = Any  # a tree of scalars, which a carry may hold; () if the gate has no state


class Signals(NamedTuple):
    """The signals from which a gate decides; [] for one chunk, [B] for rows.

    Attributes:
      loss: mean cross-entropy of the base alone, in nats.
      initial, step_0, step_1: mean reconstruction losses of the inner models, with the weights before the chunk, with
        those before each mini-batch, and with those after it.
    """

    loss: Any
    initial: Any
    step_0: Any
    step_1: Any


class Gate(Protocol):
    """Decides for each chunk, in order, whether it is an UPDATE or a SKIP."""

    @property
    def reads(self) -> str:
        """The signals that the gate reads: "loss", "reconstruction", or "" for none."""

    def init(self) -> State:
        """Returns the state before the first chunk."""

    def decide(self, state: State, signals: Signals, key: jax.Array) -> tuple[State, jax.Array]:
        """Returns the next state, and whether the chunk is an UPDATE, [] bool; `key` is the chunk's own."""


@dataclasses.dataclass(frozen=True)
class Constant(Gate):
    """Decides the same for every chunk."""

    updates: bool
    reads = ""

    def init(self) -> State:
        return ()

    def decide(self, state: State, signals: Signals, key: jax.Array) -> tuple[State, jax.Array]:
        del signals, key
        return state, jnp.asarray(self.updates)


SKIP, UPDATE = Constant(False), Constant(True)


@dataclasses.dataclass(frozen=True)
class Random(Gate):
    """Decides UPDATE at random, with a fixed probability."""

    probability: float = 0.5
    reads = ""

    def __post_init__(self):
        check_number(self.probability, where="gates.Random.probability", least=0.0, most=1.0)

    def init(self) -> State:
        return ()

    def decide(self, state: State, signals: Signals, key: jax.Array) -> tuple[State, jax.Array]:
        del signals
        return state, jax.random.uniform(key) < self.probability


@dataclasses.dataclass(frozen=True)
class LossThreshold(Gate):
    """Decides UPDATE if the loss of the base is above a threshold.

    Attributes:
      threshold: mean cross-entropy per supervised token, in nats.
    """

    threshold: float = 2.0
    reads = "loss"

    def __post_init__(self):
        check_number(self.threshold, where="gates.LossThreshold.threshold")

    def init(self) -> State:
        return ()

    def decide(self, state: State, signals: Signals, key: jax.Array) -> tuple[State, jax.Array]:
        del key
        return state, signals.loss > self.threshold


@dataclasses.dataclass(frozen=True)
class Average(Gate):
    """Decides UPDATE if a signal is above its exponential average; the first chunk is an UPDATE.

    Attributes:
      signal: "loss", or "reconstruction" for `Signals.step_0`.
      decay: weight of the past in the average.
    """

    signal: str = "loss"
    decay: float = 0.9

    def __post_init__(self):
        if self.signal not in ("loss", "reconstruction"):
            raise UserError(f"gates.Average.signal = {self.signal!r}: expected 'loss' or 'reconstruction'")
        check_number(self.decay, where="gates.Average.decay", least=0.0, most=1.0)

    @property
    def reads(self) -> str:
        return self.signal

    def init(self) -> State:
        return {"average": jnp.zeros(()), "chunks": jnp.zeros((), jnp.int32)}

    def decide(self, state: State, signals: Signals, key: jax.Array) -> tuple[State, jax.Array]:
        del key
        signal = signals.loss if self.signal == "loss" else signals.step_0
        is_first = state["chunks"] == 0
        updates = is_first | (signal > state["average"])
        average = jnp.where(is_first, signal, self.decay * state["average"] + (1 - self.decay) * signal)
        return {"average": average, "chunks": state["chunks"] + 1}, updates


@dataclasses.dataclass(frozen=True)
class Reconstruction(Gate):
    """Decides UPDATE if `Signals.step_0` is above a threshold theta: the gate of the paper.

    The first `calibration` chunks are updates; a quantile of their signals sets theta, with about the share rho =
    (budget - 1) / 2 above it. From the last of these chunks on, each decision u, 1 for UPDATE and 0 for SKIP, changes
    theta and the rate r of updates, which begins at rho:

        r <- (1 - alpha) r + alpha u;    theta <- max(least, theta + (r - rho) alpha max(floor, |theta|))

    Attributes:
      budget: mean cost of a chunk, from 1 (all SKIP) to 3 (all UPDATE).
      calibration: number of chunks at the start that set the threshold.
      alpha: weight of the latest decision in the rate r, and step of the threshold.
      floor, least: least scale of a change of the threshold, and least threshold.
    """

    budget: float = 2.0
    calibration: int = 16
    alpha: float = 0.1
    floor: float = 0.1
    least: float = 0.01
    reads = "reconstruction"

    def __post_init__(self):
        check_number(self.budget, where="gates.Reconstruction.budget", least=SKIP_COST, most=UPDATE_COST)
        check_number(self.alpha, where="gates.Reconstruction.alpha", least=0.0, most=1.0)
        check_number(self.floor, where="gates.Reconstruction.floor", least=0.0)
        check_number(self.least, where="gates.Reconstruction.least", least=0.0)
        check_integer(self.calibration, where="gates.Reconstruction.calibration", least=1)

    @property
    def rate(self) -> float:
        """rho, the share of chunks for which the budget allows an UPDATE."""
        return (self.budget - SKIP_COST) / (UPDATE_COST - SKIP_COST)

    def init(self) -> State:
        """Returns scalars, because an array in a carry would be taken for one with a row axis."""
        zero = jnp.zeros(())
        return {
            "chunks": jnp.zeros((), jnp.int32),
            "rate": zero + self.rate,
            "threshold": zero,
            "seen": (zero,) * self.calibration,
        }

    def decide(self, state: State, signals: Signals, key: jax.Array) -> tuple[State, jax.Array]:
        del key
        signal, chunks = signals.step_0, state["chunks"] + 1
        seen = jnp.stack(state["seen"])
        seen = jnp.where(jnp.arange(self.calibration) == state["chunks"], signal, seen)
        below = int(round((1 - self.rate) * self.calibration, 9))  # 40% of 5 chunks are 2, not 1.9999999999999996
        quantile = jnp.sort(seen)[min(below, self.calibration - 1)]
        updates = (chunks <= self.calibration) | (signal > state["threshold"])
        threshold = jnp.where(chunks == self.calibration, quantile, state["threshold"])
        rate = (1 - self.alpha) * state["rate"] + self.alpha * updates
        step = (rate - self.rate) * self.alpha * jnp.maximum(self.floor, jnp.abs(threshold))
        is_open = chunks >= self.calibration
        after = {
            "chunks": chunks,
            "rate": jnp.where(is_open, rate, state["rate"]),
            "threshold": jnp.where(is_open, jnp.maximum(self.least, threshold + step), threshold),
            "seen": tuple(seen),
        }
        return after, updates


def decide_rows(
    gate: Gate,
    state: State,
    signals: Signals,
    real: jax.Array,
    key: jax.Array,
    *,
    numbers: jax.Array,
    per_batch: bool = False,
) -> tuple[State, jax.Array]:
    """Returns a gate's next state, and its decisions about a chunk of each row, [B] bool.

    Args:
      signals: [B] each.
      real: [B], bool, whether the row's chunk counts; others are SKIP and leave the state as it is.
      key: of the draws; each row's depends on its entry of `numbers`, too.
      numbers: [B], int32.
      per_batch: whether all rows get one decision, from the mean signals of the real ones.
    """
    if per_batch:
        count = jnp.maximum(jnp.sum(real), 1)
        mean = Signals(*(jnp.sum(jnp.where(real, s, 0)) / count for s in signals))
        after, updates = gate.decide(state, mean, key)
        return _kept(after, state, jnp.any(real)), real & updates

    def one(state: State, row: tuple) -> tuple[State, jax.Array]:
        signals, is_real, number = row
        after, updates = gate.decide(state, signals, jax.random.fold_in(key, number))
        return _kept(after, state, is_real), is_real & updates

    return jax.lax.scan(one, state, (signals, real, numbers))


def _kept(after: State, before: State, is_real: jax.Array) -> State:
    return jax.tree.map(lambda a, b: jnp.where(is_real, a, b).astype(b.dtype), after, before)


@dataclasses.dataclass(frozen=True)
class Oracle:
    """Decides UPDATE, with hindsight, for the chunks that gain most by it.

    Attributes:
      rate: the share of all chunks that are updates, from 0 to 1; None: every chunk that gains.
    """

    rate: float | None = 0.5

    def __post_init__(self):
        if self.rate is not None:
            check_number(self.rate, where="gates.Oracle.rate", least=0.0, most=1.0)

    def decide_all(self, signals: Signals, gain: np.ndarray) -> np.ndarray:
        """Returns whether each chunk of an evaluation is an UPDATE, [chunks] bool; `gain` is summed over its tokens."""
        del signals
        return gain > 0 if self.rate is None else _top(gain, self.rate)


@dataclasses.dataclass(frozen=True)
class Improvement:
    """Decides UPDATE for the share of chunks with the largest fall from `Signals.step_0` to `Signals.step_1`."""

    rate: float = 0.5

    def __post_init__(self):
        check_number(self.rate, where="gates.Improvement.rate", least=0.0, most=1.0)

    def decide_all(self, signals: Signals, gain: np.ndarray) -> np.ndarray:
        """Returns whether each chunk of an evaluation is an UPDATE, [chunks] bool."""
        del gain
        return _top(np.asarray(signals.step_0) - np.asarray(signals.step_1), self.rate)


def _top(values: np.ndarray, rate: float) -> np.ndarray:
    chosen = np.zeros(len(values), bool)
    chosen[np.argsort(-values, kind="stable")[: round(rate * len(values))]] = True
    return chosen


def named(name: str, *, budget: float = 2.0) -> Any:
    """Returns the gate that commands call `name`, such as "skip", "random" or "oracle".

    `budget` is the mean cost of a chunk, from 1 (every chunk SKIP) to 3 (every chunk UPDATE); not all gates read it.
    Raises UserError if `name` is unknown or `budget` is out of range.
    """
    check_number(budget, where="gates.budget", least=SKIP_COST, most=UPDATE_COST)
    rate = (budget - SKIP_COST) / (UPDATE_COST - SKIP_COST)
    made = {
        "skip": lambda: SKIP,
        "update": lambda: UPDATE,
        "random": lambda: Random(rate),
        "loss": LossThreshold,
        "average": Average,
        "reconstruction_average": lambda: Average("reconstruction"),
        "reconstruction": lambda: Reconstruction(budget),
        "oracle": lambda: Oracle(rate),
        "greedy": lambda: Oracle(None),
        "improvement": lambda: Improvement(rate),
    }
    if name not in made:
        raise UserError(f"no gate {name!r}: expected some of {', '.join(made)}")
    return made[name]()
