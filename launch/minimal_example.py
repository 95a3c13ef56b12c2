"""Uses the library without the launcher and gin: a mesh, a training step, an evaluation step, and correct timing.

    JAX_PLATFORMS=cpu .venv/bin/python -m launch.minimal_example

This simulates a v4-8 with four CPU devices. On a TPU, leave JAX_PLATFORMS out and set SLICE. On several hosts, start
the same program on each; `distributed.initialize()` needs no arguments there: JAX detects the hosts of a TPU slice.
"""

from __future__ import annotations

import itertools
import statistics
import time

import jax

from core import distributed, slices
from core.optimizers import adamw, warmup_cosine
from core.training import evaluation
from models.transformer import Transformer
from parallel import strategies
from parallel.partitioner import Partitioner
from tasks import synthetic

SLICE = slices.get("v4-8")  # 4 chips of one host: 4 JAX devices
STEPS, BATCH_SIZE, LENGTH = 20, 16, 64


def main() -> dict[str, float]:
    """Trains a small decoder on random tokens; returns its validation means."""
    # 1. Join the other hosts, before anything touches a device. One host joins nobody.
    distributed.initialize(single_process=True, local_cpu_devices=SLICE.chips)
    print(f"host {jax.process_index()} of {jax.process_count()}, devices {jax.devices()}")

    # 2. The parts, which do not know one another: data, a model, an optimizer, a strategy (a table).
    task = synthetic.random_tokens(vocab_size=64, length=LENGTH, num_streams=BATCH_SIZE)
    model = Transformer(vocab_size=64, num_layers=2, embed_dim=64, mlp_dim=128, num_heads=4, num_kv_heads=2)
    optimizer = adamw(learning_rate=warmup_cosine(peak=3e-3, warmup_steps=5, total_steps=STEPS))

    # 3. Bound to devices: `fsdp` splits parameters and rows over all chips. Whatever does not divide is refused here.
    #    Another way to spread the same model is another table: strategies.fsdp_tensor(tensor=2).
    partitioner = Partitioner(strategies.fsdp(), slice=SLICE, devices=jax.devices())
    program = partitioner.program(model, optimizer, task.spec(BATCH_SIZE), seed=0)
    print(f"mesh {dict(partitioner.mesh.shape)}")

    # 4. This host's rows of every batch, and the state, already spread over the chips.
    layout = partitioner.data_layout(BATCH_SIZE)
    batches = task.train(layout, seed=0)
    state = program.init()

    # 5. Steps. A jitted call returns before the device is done: block_until_ready, or the clock measures nothing.
    seconds = []
    for step in range(1, STEPS + 1):
        batch = program.put(next(batches))
        began = time.perf_counter()
        state, metrics = program.train_step(state, batch)  # the old state is donated: use the new one
        jax.block_until_ready(metrics)
        seconds.append(time.perf_counter() - began)
        if step % 5 == 0:
            print(f"step {step}  loss {metrics['loss']:.4f}")
    steady = statistics.median(seconds[1:])  # the first step compiled
    print(f"first step {seconds[0]:.2f} s, then {steady:.4f} s: {BATCH_SIZE * LENGTH / steady:,.0f} tokens/s")

    # 6. Evaluation: sums over batches and hosts, divided once.
    held_out = itertools.islice(task.evaluation(layout), 2)
    means = evaluation.evaluate(program, state, held_out)
    print("validation: " + ", ".join(f"{name} {value:.4f}" for name, value in means.items()))
    return means


if __name__ == "__main__":
    main()
