"""`tests/run.sh lab pictures`: draws pictures of docs/: those that need no run, and with --run the scalars of a run."""

import argparse
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.ticker
from matplotlib.figure import Figure

from launch.environment import WORKSPACE
from parallel.pipeline import schedules
from parallel.pipeline.schedules import Schedule

HELP = "draw the pictures of docs/pictures that need no run; --run draws the scalars of a run"
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds --run."""
    parser.add_argument("--run", type=Path, metavar="RUN", help="a run of several simulated hosts")


def run(args: argparse.Namespace) -> int:
    """Draws every picture."""
    if args.run:
        save(scalars_picture(args.run), FOLDER / "scalars.svg")
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
    """The loss of a run, and the own work of each of its hosts, on one scale."""
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


def _lines(path: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _curve(lines: list[dict[str, float]], *names: str) -> tuple[list[float], list[float]]:
    """Steps, and sums of metrics, of the lines that have all of them."""
    found = [line for line in lines if all(name in line for name in names)]
    return [line["step"] for line in found], [sum(line[name] for name in names) for line in found]


PICTURES: Mapping[str, Callable[[], Figure]] = {"schedules.svg": schedules_picture}
