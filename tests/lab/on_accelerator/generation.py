"""New tokens of the large decoder, with random weights, at several batch sizes."""

import statistics
import time
from typing import Any

import jax
import numpy as np

from core import slices
from launch.hosts import machine
from parallel import strategies
from parallel.generation.generating import Generator
from parallel.partitioner import Partitioner
from tasks import streams
from tests.lab.on_accelerator import decoder, peer
from tests.lab.on_accelerator.recorder import Recorder, Request


def measure(record: Recorder, request: Request) -> None:
    """Times greedy tokens after prompts of equal length, without the time of the prompts."""
    prompt, new, turns = (peer.PROMPT, *request.sized((peer.NEW, 3), (peer.REHEARSED_NEW, 1)))
    name = machine.of_this_process().name
    place = slices.get("v5e-1" if slices.get(name).is_tpu else f"{slices.get(name).generation}:1")
    built = decoder.experiment(request)
    bound = Partitioner(strategies.data_parallel(), slice=place, devices=jax.local_devices()[:1])
    program = bound.program(built.model, built.optimizer, streams.batch_spec(1, length=prompt + new + 1), seed=0)
    generator = Generator(program, program.init_params())
    vocab: Any = built.model
    there = peer.generated(request)
    for rows in peer.BATCHES:
        prompts = np.random.default_rng(0).integers(0, vocab.vocab_size, (rows, prompt)).tolist()

        def seconds(count: int, prompts: list[list[int]] = prompts) -> float:
            begin = time.perf_counter()
            generator.generate(prompts, max_tokens=count)
            return time.perf_counter() - begin

        for count in (1, 1 + new):
            seconds(count)  # compiles
        each = statistics.median(seconds(1 + new) - seconds(1) for _ in range(turns)) / new
        speed, other = rows / each, there.get(rows)
        beside = f"transformers {other:,.0f}: {speed / other:.2f} times" if other else "transformers: not measured"
        record.figure(f"new tokens/s, batch {rows}", speed, beside=beside)
