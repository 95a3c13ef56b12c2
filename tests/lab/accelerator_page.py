"""`tests/run.sh lab accelerator_page DIR`: makes a page of docs/results/accelerator/ from the report of an accelerator.

The report is copied beside its page, and STATUS.md reads it there. The page of rehearsals would show nothing about an
accelerator, so that there is none.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from core.errors import UserError
from launch.environment import WORKSPACE
from tests.lab.on_accelerator.report import DONE, FILE, HEADINGS, Report
from tests.lab.on_accelerator.steps import STEPS

HELP = "make a page of docs/results/accelerator/ from a report; without DIR, make its list again"
EXAMPLE = "tests/run.sh lab accelerator_page accelerator"
FOLDER = WORKSPACE / "docs" / "results" / "accelerator"
GENERATED = "<!-- Made by tests/run.sh lab accelerator_page; not written by hand. -->"
_NONE = "**No accelerator has run Renga yet.**"
_COMMAND = "tests/run.sh lab accelerator"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds DIR."""
    parser.add_argument("folder", metavar="DIR", type=Path, nargs="?", help="what `lab accelerator --out DIR` wrote")


def run(args: argparse.Namespace) -> int:
    """Writes the page and its report, and the list of all."""
    if args.folder:
        add(Report.read(args.folder / FILE), FOLDER)
    index = FOLDER / "index.md"
    index.write_text(listed(reports(FOLDER)))
    print(f"written: {index}; now run: tests/run.sh lab status --write")
    return 0


def add(report: Report, folder: Path) -> Path:
    """Writes a report and its page into a folder; returns the page.

    Raises:
      UserError: it is a rehearsal, or of a CPU.
    """
    if report.is_rehearsal or report.device["platform"] == "cpu":
        raise UserError("this is the report of a rehearsal on a CPU, which shows nothing about an accelerator")
    name = f"{report.device['slice'].replace(':', '-')}-{report.device['date']}"
    folder.mkdir(parents=True, exist_ok=True)
    found = {"device": report.device, "rehearsal": False, "steps": report.steps}
    (folder / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n")
    page = folder / f"{name}.md"
    page.write_text(rendered(report))
    return page


def reports(folder: Path = FOLDER) -> dict[str, Report]:
    """Returns the reports in a folder, by name, oldest first."""
    found = {file.stem: Report.read(file) for file in sorted(folder.glob("*.json"))}
    return dict(sorted(found.items(), key=lambda item: item[1].device["date"]))


def ran(folder: Path = FOLDER) -> dict[str, str]:
    """Returns slice and date by row of the checklist, of the newest report that shows the row to hold."""
    shown = {}
    for report in reports(folder).values():
        where = f"{report.device['slice']}, {report.device['date']}"
        shown |= {row: where for name, step in STEPS.items() if report.shown_by(name) for row in step.shows}
    return shown


def rendered(report: Report) -> str:
    """Returns the page of a report."""
    device, done = report.device, [name for name in STEPS if report.status(name) == DONE]
    own = {step["revision"] for step in report.steps.values() if "revision" in step}
    revisions = ", ".join(sorted(revision[:8] + revision[40:] for revision in own or {device["revision"]}))
    packages = ", ".join(f"{name} {text}" for name, text in device["versions"].items())
    lines = [
        GENERATED,
        "",
        f"# {device['slice']}, {device['date']}",
        "",
        f"* **Claim:** {len(done)} of {len(STEPS)} steps ended; the table has every figure, also of the others.",
        f"* **Command:** `{_COMMAND}`",
        f"* **Recorded:** {device['date']}, at revision {revisions}",
        f"* **Machine:** {device['slice']}; {packages}",
        "",
        *_table(HEADINGS, report.rows(list(STEPS))),
    ]
    return "\n".join(lines) + "\n"


def listed(found: Mapping[str, Report]) -> str:
    """Returns the list of all pages."""
    rows = [[f"[{name}]({name}.md)", *_summary(report)] for name, report in reversed(found.items())]
    headings = ("machine and date", "tokens/s of 1.1B", "MFU, %", "times transformers")
    return (
        "\n".join(
            [
                GENERATED,
                "",
                "# Accelerators",
                "",
                *(_table(headings, rows) if rows else [_NONE]),
                "",
                "[How to measure one](../../how-to/accelerator.md).",
                "",
                *(["```{toctree}", ":hidden:", "", *found, "```"] if found else []),
            ]
        ).rstrip()
        + "\n"
    )


def _summary(report: Report) -> list[str]:
    values = {step: {f.what: f.value for f in report.figures(step)} for step in ("training", "transformers")}
    ours, theirs = (values[step].get("tokens/s") for step in values)
    ratio = float(ours) / float(theirs) if ours and theirs else None
    numbers = [(ours, ",.0f"), (values["training"].get("MFU"), ".1f"), (ratio, ".2f")]
    return [format(float(value), form) if value is not None else "–" for value, form in numbers]


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    cells = [[cell.replace("|", "/").replace("\n", " ") for cell in row] for row in rows]
    return [f"| {' | '.join(row)} |" for row in (headings, ["---"] * len(headings), *cells)]
