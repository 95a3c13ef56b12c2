"""`tests/run.sh lab recording`: runs the quickstart and keeps what the terminal showed, as the picture of README.md."""

import argparse
import io
import re
import subprocess
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

from launch.environment import WORKSPACE

HELP = "run the quickstart and record the terminal for README.md; --log takes the output of an earlier run"
EXAMPLE = "tests/run.sh lab recording"
COMMAND = "launch/pod.sh v4-16 gin/quickstart.gin --simulate"
PICTURE = WORKSPACE / "docs" / "pictures" / "terminal.svg"
BADGES = {"python": ("Python", "3.11 – 3.13"), "jax": ("JAX", "0.10"), "license": ("license", "Apache 2.0")}
COLUMNS = 100
SHOWN_ROWS = ("slice", "strategy", "model", "data", "batch", "predicted")  # of the summary
SHOWN_STEPS = (1, 50, 100, 150, 200)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds --log."""
    parser.add_argument("--log", type=Path, metavar="FILE", help="the output of the command, in place of a run")


def run(args: argparse.Namespace) -> int:
    """Writes the picture of the terminal, and the badges."""
    text = args.log.read_text() if args.log else _run()
    PICTURE.write_text(picture(text))
    for name, (left, right) in BADGES.items():
        PICTURE.with_name(f"{name}.svg").write_text(badge(left, right))
    return 0


def _run() -> str:
    with tempfile.TemporaryDirectory() as folder:
        command = f"COLUMNS={COLUMNS} {COMMAND} --run-dir {folder}/run"
        ended = subprocess.run(command, shell=True, cwd=WORKSPACE, capture_output=True, text=True, check=True)
    return ended.stdout + ended.stderr


def excerpt(text: str) -> list[str]:
    """Returns the lines to show: rows of the summary, some steps, and the sample of text; `…` stands for the others."""
    shown, row, is_sample = [f"$ {COMMAND}"], "", False
    for line in text.splitlines():
        row = found[1] if (found := re.match(r"│ (\w+)  ", line)) else row
        step = re.match(r"step +(\d+)/", line)
        is_sample = (is_sample or line.startswith("The model continues")) and not line.startswith("run   ")
        is_summary = line.startswith(("╭", "╰")) or (line.startswith("│") and row in SHOWN_ROWS)
        is_step = step and int(step[1]) in SHOWN_STEPS and "checkpoint" not in line
        if is_summary or is_step or (is_sample and line.strip()):
            shown.append(line)
        elif shown[-1] != "…" and line.startswith("step"):
            shown.append("…")
    return shown


def picture(text: str) -> str:
    """Returns the SVG of the terminal."""
    lines = excerpt(text)
    console = Console(record=True, width=max(map(len, lines)), file=io.StringIO())
    for line in lines:
        console.print(Text(line, style="bold" if line.startswith("$") else ""), soft_wrap=True)
    found = re.sub(
        r"@font-face \{.*?\}\n", "", console.export_svg(title="renga", unique_id="terminal"), flags=re.DOTALL
    )
    return "\n".join(line.rstrip() for line in found.splitlines()) + "\n"


def badge(left: str, right: str) -> str:
    """Returns the SVG of a badge without an address."""
    widths = [7 * len(text) + 12 for text in (left, right)]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{sum(widths)}" height="20" role="img" '
        f'aria-label="{left}: {right}">'
        f'<rect width="{widths[0]}" height="20" fill="#555"/>'
        f'<rect x="{widths[0]}" width="{widths[1]}" height="20" fill="#3b7a57"/>'
        f'<g fill="#fff" text-anchor="middle" font-family="Verdana,sans-serif" font-size="11">'
        f'<text x="{widths[0] / 2}" y="14">{left}</text>'
        f'<text x="{widths[0] + widths[1] / 2}" y="14">{right}</text></g></svg>\n'
    )
