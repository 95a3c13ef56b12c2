"""Measures what share of the machine's peak a step of the recursive model reaches, and where its time is spent.

The peak is that of a float32 matrix product, timed in the same process before and after the step. Both are measured in
wall-clock time, and in CPU seconds of this process, which other work on the machine affects less.
"""

import collections
import re
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from core import optimizers, step
from models.trm import TRM

ROWS, CELLS = 8, 81
_SIZE = 2048  # rows and columns of the matrices
_PRODUCT, _MOVE = re.compile(r"(^|_)(ynn|dot)"), re.compile(r"copy|transpose")
PRODUCTS, MOVES, REST = "matrix products", "copies and transposes", "everything else"


class Seconds(NamedTuple):
    """Minimum of several measurements, by wall clock and by CPU time."""

    clock: float
    cpu: float


class Speed(NamedTuple):
    """Measurements of one variant of the model.

    Attributes:
      mixer: "mlp" or "attention".
      flops: of a step, by formula.
      step: seconds per step.
      peak: FLOP/s of a matrix product, by wall clock and by CPU seconds.
      profile: share of a step's time, by kind of operation.
    """

    mixer: str
    flops: float
    step: Seconds
    peak: Seconds
    profile: Mapping[str, float]

    @property
    def share(self) -> Seconds:
        """Share of the peak, by wall clock and by CPU seconds."""
        return Seconds(*(self.flops / s / peak for s, peak in zip(self.step, self.peak, strict=True)))


def measure(mixer: str, *, width: int = 512, times: int = 8) -> Speed:
    """Measures a step on `ROWS` 9 x 9 Sudoku puzzles in float32: 2 layers, 3 outer cycles of 6, one device.

    Args:
      mixer: "mlp" or "attention".
      width: of the model.
      times: number of measurements, of which the minimum is taken.
    """
    model = TRM(vocab_size=11, mixer=mixer, embed_dim=width, dtype="float32")
    state, batch, compiled = _compiled(model)

    def run() -> None:
        jax.block_until_ready(compiled(state, batch))

    before = _peak(times)
    seconds = _least(run, times)
    peak = Seconds(*map(max, before, _peak(times)))
    return Speed(mixer, model.flops_per_row(CELLS) * ROWS, seconds, peak, _profile(run, compiled.as_text()))


def _compiled(model: TRM):
    rng = np.random.default_rng(0)
    cells = {name: jnp.asarray(rng.integers(1, 11, (ROWS, CELLS)), jnp.int32) for name in ("inputs", "labels")}
    batch = {**cells, "puzzle_ids": jnp.zeros(ROWS, jnp.int32)}
    rate = optimizers.constant(1e-4)
    table = optimizers.with_table(dense=optimizers.adam_atan2(learning_rate=rate), learning_rate=rate)
    optimizer = optimizers.averaged(optimizer=table).for_model(model, batch)
    state = step.create(model, optimizer, model.init(jax.random.key(0), batch), batch)
    return state, batch, jax.jit(step.train_step(model, optimizer, seed=0)).lower(state, batch).compile()


def _peak(times: int) -> Seconds:
    """FLOP/s of a matrix product, the maximum of several measurements."""
    a = jnp.ones((_SIZE, _SIZE), jnp.float32)
    product = jax.jit(jnp.matmul)
    least = _least(lambda: jax.block_until_ready(product(a, a)), times)
    return Seconds(*(2 * _SIZE**3 / s for s in least))


def _least(run: Callable[[], None], times: int) -> Seconds:
    run()  # compiles, and makes allocations that happen once
    found = []
    for _ in range(times):
        clock, cpu = time.perf_counter(), time.process_time()
        run()
        found.append((time.perf_counter() - clock, time.process_time() - cpu))
    return Seconds(*map(min, zip(*found, strict=True)))


def _profile(run: Callable[[], None], text: str) -> dict[str, float]:
    """Returns the share of a profiled step's time by kind of operation; loops are left out, their bodies counted."""
    with tempfile.TemporaryDirectory(prefix="renga-bench-") as folder:
        with jax.profiler.trace(folder):
            run()
        (file,) = Path(folder).rglob("*.xplane.pb")
        events = [e for p in jax.profiler.ProfileData.from_file(str(file)).planes for ln in p.lines for e in ln.events]
        spent: collections.Counter[str] = collections.Counter()
        for event in events:
            name = event.name
            if f"%{name} = " in text and not re.match("while|call|conditional", name):
                kind = PRODUCTS if _PRODUCT.search(name) else MOVES if _MOVE.search(name) else REST
                spent[kind] += event.duration_ns
    return {kind: spent[kind] / max(spent.total(), 1) for kind in (PRODUCTS, MOVES, REST)}
