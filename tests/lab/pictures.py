"""`tests/run.sh lab pictures`: draws the pictures of docs/ that need no run."""

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path

import matplotlib as mpl
import matplotlib.ticker
from matplotlib.figure import Figure

from launch.environment import WORKSPACE
from parallel.pipeline import schedules
from parallel.pipeline.schedules import Schedule

HELP = "draw the pictures of docs/pictures that need no run"
EXAMPLE = "tests/run.sh lab pictures"
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
    """Adds nothing: all pictures are drawn."""


def run(args: argparse.Namespace) -> int:
    """Draws every picture."""
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
        _draw(panel, title, schedule)
    handles = [mpl.patches.Patch(facecolor=COLORS[kind], label=NAMES[kind]) for kind in COLORS]
    handles.append(mpl.patches.Patch(facecolor=IDLE, label="bubble"))
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles), frameon=False)
    return figure


def _draw(panel, title: str, schedule: Schedule) -> None:
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
    panel.set(xlim=(0, len(ticks)), ylim=(STAGES, 0), title=f"{title}: bubble {100 * schedule.bubble(STAGES):.0f} %")
    panel.set_yticks([stage + 0.5 for stage in range(STAGES)], [f"stage {stage}" for stage in range(STAGES)])
    panel.set_xlabel("tick")
    panel.xaxis.set_major_locator(mpl.ticker.MaxNLocator(integer=True))
    panel.tick_params(length=0)
    for side in panel.spines.values():
        side.set_visible(False)


PICTURES: Mapping[str, Callable[[], Figure]] = {"schedules.svg": schedules_picture}
