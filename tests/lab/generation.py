"""`tests/run.sh lab generation`: times generation against full recomputation, transformers, and the matmul peak.

Times on a shared machine vary; both sides of a ratio are measured in turns, in one run, and medians are compared.
"""

import argparse
import dataclasses
import datetime
import os
import platform
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from core.checkpoints import published_files
from core.errors import UserError
from launch import flags, terminal

HELP = "time generation: against recomputing all positions for each token, transformers, and the peak of a product"
EXAMPLE = """tests/run.sh lab generation
  tests/run.sh lab generation --folder smollm2 --python torch-environment/bin/python"""
POSITIONS, ROWS = 1024, (1, 8)
_PROMPT, _NEW = 64, 64  # beside transformers
_LONG = 1024  # ids of the prompt whose processing is measured
_SIZE, _PRODUCTS = 2048, 16  # of the matrices of the peak, and how many: they take about as long as the prompt
_NEEDS = {"transformers": ("folder", "python"), "prompts": ("folder",)}  # arguments of each measurement


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the published model and the environment of transformers."""
    parser.add_argument("--folder", help="of a published model, for the comparison with transformers and the peak")
    parser.add_argument("--python", help="of an environment with torch and transformers; needs --folder")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of --folder")
    parser.add_argument("--turns", metavar="N", type=flags.at_least(1), default=5, help="of each side (default: 5)")
    parser.add_argument("--only", choices=("recomputing", *_NEEDS), help="leave out the others")


def run(args: argparse.Namespace) -> int:
    """Measures and prints. The exit code is always 0, because timings on a shared machine are unreliable."""
    _check(args)
    os.environ["JAX_PLATFORMS"] = "cpu"
    rows = []
    if args.only in (None, "recomputing"):
        rows.append(_against_recomputing(args.turns))
    if args.folder:
        from launch import loaded_model

        model = loaded_model.load(args.folder, dtype=args.dtype)
        if args.only in (None, "prompts"):
            rows.append(_of_peak(model, args.turns))
        if args.python and args.only in (None, "transformers"):
            from tests.lab import transformers_peer

            with transformers_peer.Peer(args.python, args.folder, args.dtype) as peer:
                rows += [_against_transformers(model, peer, count, args.turns) for count in ROWS]
    headings = ("measured", "here", "compared with", "there", "ratio", "goal")
    print(f"{datetime.date.today()}, {os.cpu_count()} cores of {platform.machine()}; {_load()}\n")
    terminal.console(160).print(terminal.markdown(headings, rows, text=headings[:3]))
    return 0


def _check(args: argparse.Namespace) -> None:
    if args.python and not args.folder:
        raise UserError("--python compares a published model with transformers: give its --folder, too")
    if missing := [f"--{name}" for name in _NEEDS.get(args.only, ()) if not getattr(args, name)]:
        raise UserError(f"--only {args.only} needs {' and '.join(missing)}, too")
    if args.folder and not published_files.is_published(args.folder):
        raise UserError(f"--folder {args.folder}: expected the folder of a published model, with config.json")
    if args.python and not shutil.which(args.python):
        raise UserError(f"--python {args.python}: there is no such program")


def _load() -> str:
    return f"load {os.getloadavg()[0]:.1f} at the end, {'idle' if os.getloadavg()[0] < 2.5 else 'shared'} machine"


def _turns(turns: int, *sides: Callable[[], float]) -> list[float]:
    """Returns the median of each side, measured in turns after one turn that compiles."""
    found = [[side() for side in sides] for _ in range(turns + 1)][1:]
    return [statistics.median(times) for times in zip(*found, strict=True)]


def _seconds(fn: Callable[[], Any]) -> float:
    start = time.perf_counter()
    fn()
    return time.perf_counter() - start


def _against_recomputing(turns: int) -> list[str]:
    """The quickstart model with random parameters: 512 new tokens after 512, and full passes over all positions."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from core import optimizers, slices
    from launch.config import loader
    from parallel import strategies
    from parallel.generation.generating import Generator
    from parallel.partitioner import Partitioner
    from tasks import streams

    model: Any = loader.load("gin/quickstart.gin").build().model
    at = Partitioner(strategies.data_parallel(), slice=slices.get("v5e-1"), devices=jax.devices()[:1])
    unused = optimizers.adamw(learning_rate=optimizers.constant(0.0))
    program = at.program(model, unused, streams.batch_spec(1, length=POSITIONS), seed=0)
    params = program.init_params()
    generator, half = Generator(program, params), POSITIONS // 2
    prompt = np.random.default_rng(0).integers(0, model.vocab_size, half).tolist()

    def cached() -> float:
        return _seconds(lambda: generator.generate([prompt], max_tokens=half)) / half

    @jax.jit
    def next_id(params: Any, ids: jax.Array, last: jax.Array) -> jax.Array:
        whole = {"segment_ids": jnp.ones_like(ids), "targets": ids, "weights": jnp.ones(ids.shape)}
        batch = {"inputs": ids, "positions": jnp.arange(POSITIONS)[None], **whole}
        return jnp.argmax(model.logits(params, batch)[0, last])

    def recomputed() -> float:
        ids, new = np.zeros((1, POSITIONS), np.int32), 5
        ids[0, :half] = prompt

        def continued() -> None:
            for at in range(half, half + new):
                ids[0, at] = next_id(params, ids, at - 1)

        return _seconds(continued) / new

    here, there = _turns(turns, cached, recomputed)
    what = f"quickstart model ({model.dtype}), {half} tokens after {half}"
    return [
        what,
        _milliseconds(here),
        "all positions for each token",
        _milliseconds(there),
        f"{there / here:.0f}",
        "30",
    ]


def _against_transformers(model: Any, peer: Any, count: int, turns: int) -> list[str]:
    """Greedy tokens of both, after prompts of `_PROMPT` ids; the ids must be equal."""
    prompts = [list(range(100 + row, 100 + row + _PROMPT)) for row in range(count)]
    ids: dict[str, list[list[int]]] = {}

    def of_tokens(generate: Callable[[int], list[list[int]]], name: str) -> Callable[[], float]:
        def measured() -> float:
            first = _seconds(lambda: generate(1))

            def all_of_them() -> None:
                ids[name] = generate(1 + _NEW)

            return (_seconds(all_of_them) - first) / _NEW

        return measured

    def ours(new: int) -> list[list[int]]:
        return [one.ids for one in model.generator.generate(prompts, max_tokens=new)]

    here, there = _turns(turns, of_tokens(ours, "here"), of_tokens(lambda n: peer.generate(prompts, n), "there"))
    equal = sum(a == b for a, b in zip(ids["here"], ids["there"], strict=True))
    what = f"{Path(model.where).name} ({model.model.dtype}), batch {count}, {_NEW} tokens after {_PROMPT}"
    versions = f"{peer.versions}; {equal} of {count} rows equal"
    return [what, _milliseconds(here), versions, _milliseconds(there), f"{there / here:.2f}", "1"]


def _of_peak(model: Any, turns: int) -> list[str]:
    """Processing a long prompt, and a product of matrices, in FLOP/s."""
    import jax
    import jax.numpy as jnp

    decoder: Any = dataclasses.replace(model.model, vocab_size=1, vocab_multiple=1)  # logits of the last id alone
    flops = decoder.flops_per_token(_LONG) / 3 * _LONG  # of the forward pass
    a = jnp.ones((_SIZE, _SIZE), model.model.dtype)
    product = jax.jit(jnp.matmul)
    prompt = [i % 1000 for i in range(_LONG)]
    here, there = _turns(
        turns,
        lambda: _seconds(lambda: model.generator.generate([prompt], max_tokens=1)),
        lambda: _seconds(lambda: [jax.block_until_ready(product(a, a)) for _ in range(_PRODUCTS)]),
    )
    speed, peak = flops / here / 1e9, 2 * _SIZE**3 * _PRODUCTS / there / 1e9
    what = f"{Path(model.where).name} ({model.model.dtype}), prompt of {_LONG}"
    return [what, f"{speed:.0f} GFLOP/s", "peak of a product", f"{peak:.0f} GFLOP/s", f"{speed / peak:.2f}", "0.6"]


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.2f} ms"
