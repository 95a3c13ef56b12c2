"""`tests/run.sh lab schedules`: compares pipeline schedules on CPU devices with their formulas, and draws a profile.

All steps are compiled first, and then take turns, so that other work on the machine slows all of them. A stage computes
in its bubbles too, so the seconds of a step follow the ticks even if the devices share two cores.
"""

import argparse
import itertools
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from rich.table import Table

from core import optimizers, slices
from core.batches import Field
from core.errors import UserError
from launch import flags, terminal
from models.decoder.transformer import Transformer
from parallel import partitioner, strategies
from parallel.compiled.hlo import program
from parallel.pipeline import schedules
from parallel.pipeline.schedules import SCOPES, OneFOneB, Schedule, Work
from tasks import streams
from tests.lab import pictures

HELP = "compare pipeline schedules with their formulas on CPU devices; --picture draws the profile of a step"
EXAMPLE = """tests/run.sh lab schedules
  tests/run.sh lab schedules --turns 3 --microbatches 8 16
  tests/run.sh lab schedules --picture"""
STAGES = 8
LAYERS = 16
PICTURE = "schedules-profiled.png"
_VOCABULARY = 256
MAKE: Mapping[str, Callable[[int], Schedule]] = {
    "gpipe": lambda m: schedules.gpipe(num_microbatches=m),
    "circular": lambda m: schedules.circular(num_microbatches=m, repeats=2),
    "one_f_one_b": lambda m: schedules.one_f_one_b(num_microbatches=m),
    "interleaved": lambda m: schedules.interleaved(num_microbatches=m, repeats=2),
    "zero_bubble": lambda m: schedules.zero_bubble(num_microbatches=m),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds --turns, --microbatches and --picture."""
    parser.add_argument("--turns", metavar="N", type=flags.at_least(1), default=5, help="of each step (default: 5)")
    parser.add_argument(
        "--microbatches", metavar="M", type=flags.at_least(STAGES), nargs="+", default=[8, 16, 32],
        help="their numbers, multiples of 8 (default: 8 16 32)",
    )  # fmt: skip
    parser.add_argument("--picture", action="store_true", help=f"instead, draw docs/pictures/{PICTURE}")


def run(args: argparse.Namespace) -> int:
    """Measures and prints, or draws; no timing fails."""
    if undivided := [m for m in args.microbatches if m % STAGES]:
        raise UserError(f"--microbatches {undivided[0]}: expected a multiple of {STAGES}, the number of stages")
    jax.config.update("jax_num_cpu_devices", STAGES)
    if args.picture:
        profiled_picture().savefig(pictures.FOLDER / PICTURE, dpi=130)
        print(f"docs/pictures/{PICTURE}")
        return 0
    terminal.console(100).print(_table(measure(args.microbatches, turns=args.turns)))
    return 0


class Step(NamedTuple):
    """A compiled training step.

    Attributes:
      run: runs it to its end.
      hlo: text of the compiled program.
    """

    run: Callable[[], None]
    hlo: str


def compiled_step(schedule: Schedule, *, stages: int, layers: int, width: int, length: int) -> Step:
    """Returns a step of a small decoder, with a row in each microbatch.

    Args:
      schedule: of the pipeline.
      stages: its stages, one on each of the first devices.
      layers, width: of the decoder.
      length: tokens of a row.
    """
    model = Transformer(
        vocab_size=_VOCABULARY, num_layers=layers, embed_dim=width, mlp_dim=3 * width, num_heads=4, num_kv_heads=4,
        remat="none", dtype="float32",
    )  # fmt: skip
    slice_ = slices.get({4: "v4-8", 8: "v4-16"}[stages])
    tables = strategies.pipeline(stage=stages, schedule=schedule)
    bound = partitioner.Partitioner(tables, slice=slice_, devices=jax.devices()[:stages])
    spec = streams.batch_spec(schedule.num_microbatches, length=length)
    built = bound.program(model, optimizers.adamw(learning_rate=optimizers.constant(1e-4)), spec, seed=0)
    step = built.lower_train_step().compile()
    state, batch = [built.init()], built.put({name: _values(name, field) for name, field in spec.items()})

    def run() -> None:
        state[0], _ = jax.block_until_ready(step(state[0], batch))

    run()
    return Step(run, step.as_text())


def _values(name: str, field: Field) -> np.ndarray:
    rows, length = field.shape
    if name == "positions":
        return np.broadcast_to(np.arange(length, dtype=field.dtype), field.shape)
    if name in ("inputs", "targets"):
        return np.random.default_rng(rows).integers(0, _VOCABULARY, field.shape).astype(field.dtype)
    return np.ones(field.shape, field.dtype)


class Measured(NamedTuple):
    """Times of the steps of a schedule.

    Attributes:
      schedule: its name.
      microbatches: M.
      formula: the time by its formula, in passes of a microbatch through a stage in both directions.
      seconds: of every turn.
    """

    schedule: str
    microbatches: int
    formula: float
    seconds: list[float]


def formula(schedule: Schedule, *, stages: int) -> float:
    """Returns the time of a step, in passes of a microbatch through all layers of a stage, forward and backward."""
    return schedule.num_microbatches / (1 - schedule.bubble(stages))


def measure(microbatches: Sequence[int], *, turns: int) -> list[Measured]:
    """Compiles every schedule for each number of microbatches, and times the steps in turns."""
    found: list[tuple[Step, Measured]] = []
    for (name, make), m in itertools.product(MAKE.items(), microbatches):
        schedule = make(m)
        step = compiled_step(schedule, stages=STAGES, layers=LAYERS, width=128, length=128)
        found.append((step, Measured(name, m, formula(schedule, stages=STAGES), [])))
        terminal.say(f"compiled: {name}, {m} microbatches")
    for _ in range(turns):
        for step, measured in found:
            began = time.perf_counter()
            step.run()
            measured.seconds.append(time.perf_counter() - began)
    return [measured for _, measured in found]


def _table(found: Iterable[Measured]) -> Table:
    table = Table(title=f"{STAGES} stages, {LAYERS} layers, on CPU devices")
    for heading in ("schedule", "microbatches", "formula", "ms a step", "measured / formula"):
        table.add_column(heading, justify="left" if heading == "schedule" else "right")
    first: dict[str, float] = {}  # seconds per unit of the formula, with the fewest microbatches
    for at in found:
        seconds = statistics.median(at.seconds)
        unit = first.setdefault(at.schedule, seconds / at.formula)
        ratio = seconds / at.formula / unit
        table.add_row(at.schedule, f"{at.microbatches}", f"{at.formula:.1f}", f"{1000 * seconds:.0f}", f"{ratio:.2f}")
    return table


class Tick(NamedTuple):
    """The time from the first operation of a stage's work in a tick to the last one, without waiting for other stages.

    Attributes:
      start, end: seconds since the first tick of any stage.
    """

    start: float
    end: float


def profiled(step: Step, *, stages: int) -> dict[tuple[str, int], list[Tick]]:
    """Runs a step under JAX's profiler; returns the ticks of each kind of work and stage, in order.

    Args:
      step: with one layer in each part of a stage, so that an operation runs once in a tick.
      stages: S; stage s is on device s.
    """
    loops = _loops(step.hlo)
    events: dict[tuple[str, int, str], list[tuple[str, Tick]]] = defaultdict(list)
    for event in _events(step):
        stats = dict(event.stats)
        if found := loops.get(str(stats.get("hlo_op"))):
            start = event.start_ns / 1e9
            ran = event.name, Tick(start, start + event.duration_ns / 1e9)
            events[found[0], int(stats["device_ordinal"]), found[1]].append(ran)
    begin = min(tick.start for rows in events.values() for _, tick in rows)
    ticks: dict[tuple[str, int], list[Tick]] = {(kind, stage): [] for kind, stage, _ in events}
    for (kind, stage, _), rows in events.items():
        ticks[kind, stage] += [Tick(tick.start - begin, tick.end - begin) for tick in _by_tick(rows)]
    return {of: sorted(row) for of, row in ticks.items()}


def _events(step: Step) -> list[Any]:
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            step.run()
        (file,) = Path(folder).rglob("*.xplane.pb")
        planes = list(jax.profiler.ProfileData.from_file(str(file)).planes)
    return [event for plane in planes for line in plane.lines for event in line.events]


def _loops(hlo: str) -> dict[str, tuple[str, str]]:
    """Returns for each operation of a tick its kind of work, and the body of the loop that it is in."""
    module = program.parse(hlo)
    every = [at for computation in module.computations.values() for at in computation.values()]
    bodies = {at.required("body").removeprefix("%") for at in every if at.opcode == "while"}
    return {
        at.name: (kind, body)
        for body in bodies
        for at in module.computations[body].values()
        for kind, scope in SCOPES.items()
        if f"/{scope}/" in at.op_name and at.opcode != "collective-permute"
    }


def _by_tick(rows: Iterable[tuple[str, Tick]]) -> list[Tick]:
    """Returns the extent of the k-th runs of all operations of a loop's body, for every k."""
    runs: dict[str, list[Tick]] = defaultdict(list)
    for name, tick in sorted(rows, key=lambda row: row[1]):
        runs[name].append(tick)
    return [Tick(min(run.start for run in at), max(run.end for run in at)) for at in zip(*runs.values(), strict=True)]


def profiled_picture() -> Figure:
    """The profile of a step of each schedule on CPU devices."""
    figure = Figure(figsize=(9.5, 2.05 * len(pictures.SHOWN) + 0.4), layout="constrained")
    panels = figure.subplots(len(pictures.SHOWN), 1)
    for panel, (title, schedule) in zip(panels, pictures.SHOWN.items(), strict=True):
        step = compiled_step(
            schedule, stages=pictures.STAGES, layers=pictures.STAGES * schedule.repeats, width=256, length=256
        )
        _draw_profile(panel, schedule, profiled(step, stages=pictures.STAGES))
        panel.set(title=title)
    pictures.add_legend(figure)
    return figure


def _draw_profile(panel: Any, schedule: Schedule, ticks: Mapping[tuple[str, int], list[Tick]]) -> None:
    lanes = (
        list(schedule.starts(pictures.STAGES)) if isinstance(schedule, OneFOneB) else [""]
    )  # work of a tick overlaps
    height = 0.9 / len(lanes)
    for (kind, stage), row in ticks.items():
        if kind not in pictures.COLORS:  # the tail belongs to no stage
            continue
        low = stage + 0.05 + (height * lanes.index(kind) if kind in lanes else 0)
        for tick, work in zip(row, works(schedule, kind, stage, stages=pictures.STAGES), strict=True):
            start, width = 1000 * tick.start, 1000 * (tick.end - tick.start)
            color = pictures.COLORS[kind] if work else pictures.IDLE
            panel.add_patch(mpl.patches.Rectangle((start, low), width, height, facecolor=color, edgecolor="white"))
            if work:
                panel.text(start + width / 2, low + height / 2, work.microbatch, ha="center", va="center", fontsize=7)
    end = max(tick.end for row in ticks.values() for tick in row)
    pictures.label_stages(panel, "ms", end=1000 * end)


def works(schedule: Schedule, kind: str, stage: int, *, stages: int) -> list[Work | None]:
    """Returns the work of this kind of a stage in each tick that has such work; None in a bubble."""
    rows = [row for row in schedule.timeline(stages) if any(work.kind == kind for of in row for work in of)]
    return [next((work for work in row[stage] if work.kind == kind), None) for row in rows]
