"""`tests/run.sh lab pictures`: draws pictures of docs/: those that need no run, and with --run those of a run."""

import argparse
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import matplotlib as mpl
import matplotlib.ticker
from matplotlib.figure import Figure

from core.training import profile_reader, profiling, trainer
from launch.environment import WORKSPACE
from parallel.pipeline import schedules
from parallel.pipeline.schedules import Schedule

HELP = "draw the pictures of docs/pictures that need no run; --run draws the scalars and the profile of a run"
EXAMPLE = """tests/run.sh lab pictures
  tests/run.sh lab pictures --run runs/quickstart-v4-16"""
FOLDER = WORKSPACE / "docs" / "pictures"
STAGES = 4
SHOWN: Mapping[str, Schedule] = {
    "gpipe, 8 microbatches": schedules.gpipe(num_microbatches=8),
    "circular, 8 microbatches, 2 repeats": schedules.circular(num_microbatches=8, repeats=2),
    "one_f_one_b, 8 microbatches": schedules.one_f_one_b(num_microbatches=8),
    "zero_bubble, 8 microbatches": schedules.zero_bubble(num_microbatches=8),
}
COLORS = {"F": "#9ecae9", "B": "#ffbf79", "W": "#a5d8a2"}
NAMES = {"F": "forward", "B": "backward", "W": "gradients of matrices"}
IDLE = "#e3e3e3"
RAN = {"collectives": "#ffbf79", "computation": "#4a90c4"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds --run."""
    parser.add_argument("--run", type=Path, metavar="RUN", help="a run of several simulated hosts that has a profile")


def run(args: argparse.Namespace) -> int:
    """Draws every picture."""
    if args.run:
        save(scalars_picture(args.run), FOLDER / "scalars.svg")
        save(profile_picture(args.run), FOLDER / "profile.svg")
    for name, draw in PICTURES.items():
        print(f"docs/pictures/{name}")
        save(draw(), FOLDER / name)
    return 0


def save(figure: Figure, path: Path) -> None:
    """Writes a picture whose bytes depend on its contents alone, with text as text."""
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": path.stem}):
        figure.savefig(path, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))


def schedules_picture() -> Figure:
    """A row for each stage and a column for each tick of several schedules, with the numbers of microbatches."""
    figure = Figure(figsize=(9.5, 2.05 * len(SHOWN) + 0.4), layout="constrained")
    panels = figure.subplots(len(SHOWN), 1)
    for panel, (title, schedule) in zip(panels, SHOWN.items(), strict=True):
        draw_schedule(panel, title, schedule)
    add_legend(figure)
    return figure


def add_legend(figure: Figure) -> None:
    """Adds the colors of the kinds of work."""
    handles = [mpl.patches.Patch(facecolor=COLORS[kind], label=NAMES[kind]) for kind in COLORS]
    handles.append(mpl.patches.Patch(facecolor=IDLE, label="bubble"))
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles), frameon=False)


def draw_schedule(panel: Any, title: str, schedule: Schedule) -> None:
    """Draws a row for each stage and a column for each tick on the axes `panel`."""
    ticks = list(schedule.timeline(STAGES))
    for tick, stages in enumerate(ticks):
        for stage, works in enumerate(stages):
            for part, work in enumerate(works or (None,)):
                height = 0.9 / max(len(works), 1)
                low = stage + 0.05 + part * height
                color = COLORS[work.kind] if work else IDLE
                panel.add_patch(mpl.patches.Rectangle((tick + 0.04, low), 0.92, height, facecolor=color))
                if work:
                    panel.text(tick + 0.5, low + height / 2, work.microbatch, ha="center", va="center", fontsize=7)
    panel.set(title=f"{title}: bubble {100 * schedule.bubble(STAGES):.0f} %")
    label_stages(panel, "tick", end=len(ticks))


def label_stages(panel: Any, unit: str, *, end: float) -> None:
    """Labels the rows of a panel as stages, and its columns, from 0 to `end`, in this unit."""
    panel.set(xlim=(0, end), ylim=(STAGES, 0))
    panel.set_yticks([stage + 0.5 for stage in range(STAGES)], [f"stage {stage}" for stage in range(STAGES)])
    panel.set_xlabel(unit)
    panel.xaxis.set_major_locator(mpl.ticker.MaxNLocator(integer=True))
    panel.tick_params(length=0)
    for side in panel.spines.values():
        side.set_visible(False)


def scalars_picture(run_dir: Path) -> Figure:
    """Draws the loss of a run, and the own work of each of its hosts on one scale."""
    figure = Figure(figsize=(9.5, 3.2), layout="constrained")
    loss, work = figure.subplots(1, 2)
    metrics = _lines(run_dir / "metrics.jsonl")
    for name, label, style in (("loss", "training", "-"), ("validation/loss", "validation", "o")):
        loss.plot(*_curve(metrics, name), style, label=label)
    for file in sorted((run_dir / "metrics").glob("host_*.jsonl")):
        steps, seconds = _curve(_lines(file), "host_seconds", "input_wait_seconds")
        work.plot(steps, [1000 * each for each in seconds], label=file.stem.replace("_", " "), linewidth=1.2)
    loss.set(title="loss, nats per byte", xlabel="step", ylim=(0, None))
    work.set(title="own work of each host, ms a step", xlabel="step", ylim=(0, None))
    for panel in (loss, work):
        panel.grid(visible=True, color="#e4e4e4")
        panel.legend(frameon=False)
    return figure


def profile_picture(run_dir: Path) -> Figure:
    """Draws what each simulated chip of each host did in the steps of the latest profile."""
    hosts = [read_timeline(file.read_bytes()) for file in _profiles(run_dir)]
    common = set.intersection(*(set(host.steps) for host in hosts))
    begin = min(host.steps[step] for host in hosts for step in common)
    end = max(high for host in hosts for kinds in host.ran.values() for spans in kinds.values() for _, high in spans)
    rows = [(index, chip) for index, host in enumerate(hosts) for chip in sorted(host.ran)]
    names = [f"host {index}, chip {sorted(hosts[index].ran).index(chip)}" for index, chip in rows]
    figure = Figure(figsize=(9.5, 0.34 * len(rows) + 1.2), layout="constrained")
    panel = figure.subplots()
    for row, (index, chip) in enumerate(rows):
        panel.broken_barh([(0, 1000 * (end - begin))], (row + 0.08, 0.84), facecolor=IDLE)
        for kind in RAN:
            spans = joined(hosts[index].ran[chip][kind], gap=(end - begin) / 1500)
            bars = [(1000 * (low - begin), 1000 * (high - low)) for low, high in spans if high > begin]
            panel.broken_barh(bars, (row + 0.08, 0.84), facecolor=RAN[kind])
    for index, host in enumerate(hosts):
        mine = [row for row, (of, _) in enumerate(rows) if of == index]
        for step in common:
            panel.vlines(1000 * (host.steps[step] - begin), mine[0], mine[-1] + 1, color="black", linewidth=1.2)
    panel.set(xlim=(0, 1000 * (end - begin)), ylim=(len(rows), 0), xlabel="ms")
    panel.set_yticks([row + 0.5 for row in range(len(rows))], names)
    panel.tick_params(length=0)
    handles = [mpl.patches.Patch(facecolor=color, label=kind) for kind, color in (RAN | {"nothing": IDLE}).items()]
    handles.append(mpl.lines.Line2D([], [], color="black", label="the host begins a step"))
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles), frameon=False)
    return figure


class Timeline(NamedTuple):
    """The profile of one simulated host, in seconds since 1970.

    Attributes:
      steps: when the training loop began each step, by its number.
      ran: start and end of the operations of each chip, by kind.
    """

    steps: Mapping[int, float]
    ran: Mapping[int, Mapping[str, list[tuple[float, float]]]]


def read_timeline(serialized: bytes) -> Timeline:
    """Parses the profile of a host with CPU devices."""
    steps: dict[int, float] = {}
    ran: dict[int, dict[str, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    planes = list(jax.profiler.ProfileData.from_serialized_xspace(serialized).planes)
    began = profile_reader.began(planes)
    for event in (
        event for plane in planes if plane.name == "/host:CPU" for line in plane.lines for event in line.events
    ):
        start, stats = began + event.start_ns / 1e9, dict(event.stats)
        if event.name == trainer.STEP:
            steps[int(stats["step_num"])] = start
        name = profile_reader.base_name(event.name)
        if "hlo_op" in stats and name not in profile_reader.CONTAINERS:
            kind = "collectives" if profile_reader.COLLECTIVES.match(name) else "computation"
            ran[int(stats["device_ordinal"])][kind].append((start, start + event.duration_ns / 1e9))
    return Timeline(steps, ran)


def joined(spans: Iterable[tuple[float, float]], *, gap: float) -> list[tuple[float, float]]:
    """Returns the union of spans, in order; spans that are closer than `gap` become one."""
    found: list[tuple[float, float]] = []
    for low, high in sorted(spans):
        if found and low <= found[-1][1] + gap:
            found[-1] = (found[-1][0], max(found[-1][1], high))
        else:
            found.append((low, high))
    return found


def _profiles(run_dir: Path) -> list[Path]:
    session = profile_reader.sessions(str(run_dir))[-1]
    return sorted(run_dir.joinpath(*profiling.PROFILES, session).glob(f"*{profiling.SUFFIX}"), key=_process)


def _process(file: Path) -> int:
    return int(file.name.removesuffix(profiling.SUFFIX).rpartition("-p")[2])


def _lines(path: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _curve(lines: list[dict[str, float]], *names: str) -> tuple[list[float], list[float]]:
    """Steps, and sums of metrics, of the lines that have all of them."""
    found = [line for line in lines if all(name in line for name in names)]
    return [line["step"] for line in found], [sum(line[name] for name in names) for line in found]


PICTURES: Mapping[str, Callable[[], Figure]] = {"schedules.svg": schedules_picture}
