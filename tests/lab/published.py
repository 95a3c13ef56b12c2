"""`tests/run.sh lab published`: compiles published training steps, and compares predicted with published seconds.

`gin/published/` restates them: models, chips, meshes and rows as their sources give them. What the compiler predicts is
kept in `parallel/planning/published.json`, from which the interval of every printed prediction is computed.
"""

import argparse
import json
import math
import re
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from core import slices, units, versions
from core.errors import UserError
from core.files import paths
from launch.config import loader
from launch.environment import WORKSPACE
from parallel.compiled import analysis, compiling
from parallel.compiled.compiling import OutOfHbmError
from parallel.planning import calibration, cost
from parallel.planning.calibration import PublishedRun
from parallel.planning.cost import StepTime
from tests.lab import golden, pictures

HELP = "compile published training steps, and compare predicted with published seconds"
EXAMPLE = """tests/run.sh lab published                    the table; compiles nothing
  tests/run.sh lab published --write            compile those that have no prediction yet, one by one
  tests/run.sh lab published --write mistral_7b_v6e_8"""
PAGE = WORKSPACE / "docs" / "results" / "prediction-error.md"
PICTURE = WORKSPACE / "docs" / "pictures" / "predicted-against-published.svg"
SUMMARIZING = (PAGE, WORKSPACE / "README.md", WORKSPACE / "docs" / "results" / "index.md")
_SUMMARY = r"Over \d+ published steps, the median error of predicted times is [\d.]+%; nine in ten are within [\d.]+%\."
_BEGIN, _END = "<!-- made by tests/run.sh lab published --write -->", "<!-- end -->"
_HEADINGS = (
    "step",
    "slice",
    "published s",
    "predicted s",
    "error",
    "computation",
    "kernels",
    "exposed",
    "kernels differ",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the names and --write."""
    parser.add_argument("names", metavar="NAME", nargs="*", help="files of gin/published, without .gin (default: all)")
    parser.add_argument("--write", action="store_true", help="compile, and write the predictions, page and picture")


def run(args: argparse.Namespace) -> int:
    """Prints the table, after compiling with --write. Returns 1 if a step does not fit."""
    rows = calibration.rows()
    known = {row["name"]: row for row in rows}
    if unknown := sorted(set(args.names) - set(known)):
        raise UserError(f"no published step {', '.join(unknown)}: there are {', '.join(known)}")
    code = 0
    if args.write:
        due = args.names or [row["name"] for row in rows if "predicted" not in row]
        for number, name in enumerate(due, start=1):
            print(f"[{number}/{len(due)}] compiling gin/published/{name}.gin …", end="", flush=True)
            start = time.perf_counter()
            try:
                known[name]["predicted"] = predicted(name)
            except OutOfHbmError as error:
                code = 1
                print(f"\n{name}: {error}", file=sys.stderr, flush=True)
                continue
            print(f" {time.perf_counter() - start:.0f} s", flush=True)
            write(rows)
        write(rows)
    print("\n".join(table(rows)))
    return code


def predicted(name: str) -> dict[str, Any]:
    """Compiles a published step, and returns what its prediction consists of.

    Raises:
      OutOfHbmError: it does not fit.
    """
    experiment = loader.load(f"gin/published/{name}.gin").build()
    program = experiment.bind(compiling.devices_of(slices.get(experiment.slice)))
    found = analysis.analyze(program)
    for warning in found.warnings:
        print(f"\n  compiler warning: {warning}", flush=True)
    return {
        **parts(cost.step_time(found, program)),
        "tokens_per_step": experiment.tokens_per_step,
        "libtpu": versions.version("libtpu"),
    }


def parts(time: StepTime) -> dict[str, Any]:
    """Returns the seconds of computation, of kernels, and of all and of overlapped traffic by network."""
    traffic: dict[str, dict[str, float]] = defaultdict(lambda: {"all": 0.0, "beside": 0.0})
    for axis in time.traffic:
        traffic[axis.network]["all"] += axis.seconds
        traffic[axis.network]["beside"] += axis.beside
    rounded = {network: {part: _rounded(s) for part, s in both.items()} for network, both in traffic.items()}
    return {"compute": _rounded(time.compute), "kernels": _rounded(time.kernels), "traffic": rounded}


def _rounded(number: float) -> float:
    return float(f"{number:.4g}")


def write(rows: Sequence[PublishedRun]) -> None:
    """Writes published.json, the page, the picture, sentences of other pages, and the headers of experiment files."""
    paths.write_text_atomically(paths.resolve(calibration.FILE), json.dumps(rows, indent=1) + "\n")
    calibration.known_error.cache_clear()
    before, _, rest = PAGE.read_text().partition(_BEGIN)
    _, _, after = rest.partition(_END)
    PAGE.write_text(f"{before}{_BEGIN}\n\n" + "\n".join(table(rows)) + f"\n\n{_END}{after}")
    for page in SUMMARIZING:
        page.write_text(re.sub(_SUMMARY, lambda _: summary(rows), page.read_text()))
    pictures.save(picture(rows), PICTURE)
    golden.write_headers()


def table(rows: Sequence[PublishedRun]) -> list[str]:
    """Returns Markdown: each compiled step, each family of sources, all, and the steps that are not compiled."""
    lines = [f"| {' | '.join(_HEADINGS)} |", "|---|---|---|---|---|---|---|---|---|"]
    for row in rows:
        if "predicted" not in row:
            continue
        lines.append(f"| {' | '.join([row['of'], row['slice'], *_cells(row)])} |")
    lines += ["", "| source | steps | median error | largest |", "|---|---|---|---|"]
    for family, found in by_family(rows).items():
        lines.append(f"| {family} | {found.runs} | {found.median:.1%} | {found.largest:.1%} |")
    if (every := calibration.error(rows)) is not None:
        lines.append(f"| all | {every.runs} | {every.median:.1%} | {every.largest:.1%} |")
    if missing := [f"{row['of']} on {row['slice']}" for row in rows if "predicted" not in row]:
        lines += ["", f"Restated and not compiled yet: {'; '.join(missing)}."]
    return lines


def summary(rows: Sequence[PublishedRun]) -> str:
    """Returns the sentence that other pages have of the error."""
    found = calibration.error(rows)
    assert found is not None
    shares = units.significant(100 * found.median, 2), math.ceil(100 * found.nine_in_ten)
    text = "Over {} published steps, the median error of predicted times is {}%; nine in ten are within {}%."
    return text.format(found.runs, *shares)


def _cells(row: PublishedRun) -> list[str]:
    time, published = calibration.step_time(row), calibration.published_seconds(row)
    numbers = (units.significant(s) for s in (published, time.scheduled))
    parts = (f"{s:.2f}" for s in (time.compute, time.kernels, time.scheduled - time.busy))
    return [*numbers, f"{time.scheduled / published - 1:+.1%}", *parts, row.get("kernel_note", "")]


def by_family(rows: Sequence[PublishedRun]) -> Mapping[str, calibration.Error]:
    """Returns the error of each family: steps of one kind of chip, from one source."""
    families = dict.fromkeys(row["family"] for row in rows)
    found = {family: calibration.error([row for row in rows if row["family"] == family]) for family in families}
    return {family: error for family, error in found.items() if error is not None}


def picture(rows: Sequence[PublishedRun]) -> Figure:
    """Predicted against published seconds, by family, between the 5th and 95th percentile."""
    figure = Figure(figsize=(6.5, 5), layout="constrained")
    panel = figure.subplots()
    groups: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for row in rows:
        if "predicted" in row:
            groups[row["family"]].append((calibration.published_seconds(row), calibration.predicted_seconds(row)))
    every = [s for pairs in groups.values() for pair in pairs for s in pair] or [1.0]
    ends = [min(every) / 1.3, max(every) * 1.3]
    if (error := calibration.error(rows)) is not None:
        low, high = ([end / ratio for end in ends] for ratio in (error.longest, error.shortest))
        panel.fill_between(ends, low, high, color="#e3e3e3", label="5th to 95th percentile")
    panel.plot(ends, ends, color="#999999", linewidth=1)
    for family, pairs in groups.items():
        panel.plot(*zip(*pairs, strict=True), "o", markersize=5, label=family)
    panel.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
    panel.set(xlabel="published, seconds a step", ylabel="predicted, seconds a step")
    panel.legend(frameon=False)
    return figure
