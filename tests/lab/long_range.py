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

from models import s5
from models.s5 import S5
from models.transformer import Transformer
from tasks import long_range

HELP = "train small decoders with different mixers on synthetic long-range tasks, and print their accuracy"
EXAMPLE = "tests/run.sh lab long_range --steps 500 --kinds retrieval"
LENGTH, ROWS, WINDOW, LONGER = 64, 32, 8, 4


def models(vocab_size: int, length: int = LENGTH) -> dict[str, Transformer]:
    """Returns decoders that differ in their mixers."""
    sizes = {"num_layers": 2, "embed_dim": 64, "mlp_dim": 128, "num_heads": 4, "num_kv_heads": 4, "dtype": "float32"}
    dense = Transformer(vocab_size=vocab_size, **sizes)
    # Slow states of low frequency, which an input reaches alike from everywhere in the row; chunks show the carry.
    states = S5(states=64, blocks=32, min_dt=0.1 / length, max_dt=0.1, activation=None, chunk=length // 4)
    return {
        "S5": dataclasses.replace(dense, mixer="s5", s5=states),
        "window": dataclasses.replace(dense, window=WINDOW),
        "window + S5": dataclasses.replace(dense, window=WINDOW, mixer="attention+s5", s5=states),
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


def accuracy(model: Transformer, params: dict, batch: dict) -> float:
    """Returns the fraction of answers that have the largest logit."""
    right = jnp.argmax(jax.jit(model.logits)(params, batch), axis=-1) == batch["targets"]
    return float(jnp.sum(right * batch["weights"]) / jnp.sum(batch["weights"]))


def trained(model: Transformer, kind: str, *, steps: int, length: int = LENGTH, rate: float = 5e-3) -> dict:
    """Returns parameters after Adam steps with a cosine schedule."""
    data = batches(kind, length, seed=0)
    params = jax.jit(model.init)(jax.random.key(0), next(data))
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(optax.warmup_cosine_decay_schedule(0.0, rate, steps // 10, steps))
    )

    @jax.jit
    def step(params: dict, state: optax.OptState, batch: dict) -> tuple[dict, optax.OptState]:
        def mean(params: dict) -> jax.Array:
            out = model.loss(params, (), None, batch)[1]
            return out.loss_sum / out.weight_sum

        updates, state = optimizer.update(jax.grad(mean)(params), state, params)
        return optax.apply_updates(params, updates), state

    state = optimizer.init(params)
    for _ in range(steps):
        params, state = step(params, state, next(data))
    return params


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command."""
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--kinds", nargs="+", choices=long_range.KINDS, default=list(long_range.KINDS))


def run(args: argparse.Namespace) -> int:
    """Prints a line for each task and mixer."""
    print(f"| task | mixer | parameters | accuracy at {LENGTH} | at {LONGER * LENGTH} | s |\n|---|---|---|---|---|---|")
    for kind in args.kinds:
        vocabulary = long_range.rows(kind=kind, length=LENGTH, num_streams=1).vocabulary
        every = models(vocabulary.size)
        for name, model in {**every, "S5, no carry": every["S5"]}.items():
            start = time.perf_counter()
            with without_carry() if name.endswith("no carry") else contextlib.nullcontext():
                params = trained(model, kind, steps=args.steps)
                found = [
                    accuracy(model, params, next(batches(kind, length, seed=1, rows=128)))
                    for length in (LENGTH, LONGER * LENGTH)
                ]
            count = sum(leaf.size for leaf in jax.tree.leaves(params))
            scores = " | ".join(f"{score:.3f}" for score in found)
            print(f"| {kind} | {name} | {count:,} | {scores} | {time.perf_counter() - start:.0f} |", flush=True)
    return 0
