"""`tests/run.sh lab long_range`: trains small decoders on rows that only distant tokens answer; compares mixers."""

import argparse
import contextlib
import dataclasses
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from launch import flags
from models.decoder.layers import Attention
from models.decoder.parts import Sum
from models.decoder.transformer import Transformer
from models.mixers import s5
from models.mixers.s5 import S5
from tasks import long_range

HELP = "train small decoders with different mixers on synthetic long-range tasks, and print their accuracy"
EXAMPLE = "tests/run.sh lab long_range --steps 500 --kinds retrieval"
LENGTH, ROWS, WINDOW, LONGER = 64, 32, 8, 4
LOST = "S5, state lost between chunks"
MIXERS = ("S5", "window", "window + S5", "dense", LOST)
RATES = (2e-3, 6e-3)  # each mixer is trained with all of them


def models(vocab_size: int, length: int = LENGTH) -> dict[str, Transformer]:
    """Returns decoders that differ in their mixers."""
    sizes = {"num_layers": 2, "embed_dim": 64, "mlp_dim": 128, "num_heads": 4, "num_kv_heads": 4, "dtype": "float32"}
    dense = Transformer(vocab_size=vocab_size, **sizes)
    # Slow states of low frequency, which an input reaches alike from everywhere in the row; chunks show the carry.
    states = S5(states=64, blocks=32, min_dt=0.1 / length, max_dt=0.1, activation=None, chunk=length // 4)
    return {
        "S5": dataclasses.replace(dense, mixer=states),
        "window": dataclasses.replace(dense, mixer=Attention(window=WINDOW)),
        "window + S5": dataclasses.replace(dense, mixer=Sum((Attention(window=WINDOW), states))),
        "dense": dense,
    }


@contextlib.contextmanager
def without_carry() -> Iterator[None]:
    """Context in which S5 layers lose their state between chunks, as a control."""

    def chunk_alone(decay: s5.Complex, powers: s5.Complex, inputs: s5.Complex, groups: jax.Array, *before: Any):
        return prefix(decay, powers, inputs, groups, *jax.tree.map(jnp.zeros_like, before))

    prefix = s5._prefix
    s5._prefix = chunk_alone
    try:
        yield
    finally:
        s5._prefix = prefix


def batches(kind: str, length: int, seed: int, rows: int = ROWS) -> Iterator[dict[str, np.ndarray]]:
    """Returns an endless iterator of batches."""
    task, rng = long_range.rows(kind=kind, length=length, num_streams=1), np.random.default_rng(seed)
    while True:
        drawn = [task.row(rng, is_training=True) for _ in range(rows)]
        yield {name: np.stack([row[name] for row in drawn]) for name in drawn[0]}


class Trial:
    """Trains a decoder with one compiled step for all tasks and learning rates."""

    def __init__(self, model: Transformer, *, steps: int):
        self.model, self.steps = model, steps
        schedule = optax.warmup_cosine_decay_schedule(0.0, 1.0, steps // 10, steps)
        self._optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))
        self._init = jax.jit(model.init)
        self._step = jax.jit(self._updated, donate_argnums=(0, 1))
        self._share = jax.jit(self._share_right)

    def trained(self, kind: str, *, rate: float, length: int = LENGTH) -> dict:
        """Returns parameters after Adam steps with a cosine schedule from the peak `rate`."""
        data = batches(kind, length, seed=0)
        params = self._init(jax.random.key(0), next(data))
        state = self._optimizer.init(params)
        for _ in range(self.steps):
            params, state = self._step(params, state, rate, next(data))
        return params

    def accuracy(self, params: dict, kind: str, length: int, *, seed: int, rows: int = 256) -> float:
        """Returns the fraction of answers that have the largest logit."""
        return float(self._share(params, next(batches(kind, length, seed, rows))))

    def _updated(self, params: dict, state: optax.OptState, rate: jax.Array, batch: dict) -> tuple:
        def mean(params: dict) -> jax.Array:
            out = self.model.loss(params, (), None, batch)[1]
            return out.loss_sum / out.weight_sum

        updates, state = self._optimizer.update(jax.grad(mean)(params), state, params)
        return optax.apply_updates(params, jax.tree.map(lambda leaf: rate * leaf, updates)), state

    def _share_right(self, params: dict, batch: dict) -> jax.Array:
        right = jnp.argmax(self.model.logits(params, batch), axis=-1) == batch["targets"]
        return jnp.sum(right * batch["weights"]) / jnp.sum(batch["weights"])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command."""
    parser.add_argument("--steps", type=flags.at_least(10), default=500)
    parser.add_argument("--kinds", nargs="+", choices=long_range.KINDS, default=list(long_range.KINDS))
    parser.add_argument("--mixers", nargs="+", choices=MIXERS, default=list(MIXERS))


def run(args: argparse.Namespace) -> int:
    """Prints a line for each mixer and task; the best rate is chosen on other rows than the accuracies are of."""
    headings = ("mixer", "parameters", "task", "best rate", f"accuracy at {LENGTH}", f"at {LONGER * LENGTH}", "s")
    print(f"| {' | '.join(headings)} |\n|{'---|' * len(headings)}")
    vocabulary = max(long_range.rows(kind=k, length=LENGTH, num_streams=1).vocabulary.size for k in long_range.KINDS)
    every = models(vocabulary)
    trials = {name: Trial(every.get(name, every["S5"]), steps=args.steps) for name in args.mixers}
    for kind in args.kinds:
        for name, trial in trials.items():
            start = time.perf_counter()
            with without_carry() if name == LOST else contextlib.nullcontext():
                found = {rate: trial.trained(kind, rate=rate) for rate in RATES}
                best = max(RATES, key=lambda rate: trial.accuracy(found[rate], kind, LENGTH, seed=1))
                scores = [trial.accuracy(found[best], kind, length, seed=2) for length in (LENGTH, LONGER * LENGTH)]
            count = sum(leaf.size for leaf in jax.tree.leaves(found[best]))
            cells = (name, f"{count:,}", kind, f"{best:g}", *(f"{score:.3f}" for score in scores))
            print(f"| {' | '.join(cells)} | {time.perf_counter() - start:.0f} |", flush=True)
    return 0
