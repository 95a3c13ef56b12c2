"""Makes questions about images with `launch/run make-dataset questions`."""

import argparse
from collections.abc import Mapping
from typing import Any

from rich.progress import Progress, TextColumn

from core import units
from launch import terminal
from tasks.vision import question_sets

DATASETS = ("questions",)
EXAMPLE = "launch/run make-dataset questions --data hub:OWNER/NAME --validation validation --out /data/questions"


def add_arguments(_: str, parser: argparse.ArgumentParser) -> None:
    """Adds arguments named as the fields of `QuestionSet`."""
    parser.description = "Questions about images, from a dataset of the Hugging Face hub or one prepared by TFDS."
    parser.add_argument("--data", metavar="NAME", required=True, help="hub:OWNER/NAME[:CONFIGURATION], or tfds:NAME")
    parser.add_argument("--split", help="for training (default train)")
    parser.add_argument(
        "--validation", metavar="SPLIT", help="for validation (default: none; 5 %% of the images are held out)"
    )
    for name in ("image", "question", "answer"):
        parser.add_argument(f"--{name}", metavar="FIELD", help=f"the field of the {name} (default {name})")
    parser.add_argument(
        "--kind", metavar="FIELD", help="the field of the kind of question, if evaluations count by kind"
    )
    parser.add_argument("--skip-bad", action="store_true", help="leave out, and count, examples that cannot be used")
    parser.add_argument("--data-dir", metavar="DIR", help="where tfds: datasets are prepared (default: TFDS's own)")


def run(_: str, given: Mapping[str, Any], out: str) -> int:
    """Builds the dataset in the folder `out`, and prints a summary."""
    source = question_sets.QuestionSet(**given)
    with Progress(TextColumn("{task.description}"), console=terminal.console(80)) as progress:
        bar = progress.add_task("")
        found = source.write(
            out, report=lambda done: progress.update(bar, description=f"{units.counted(done, 'example')} read")
        )
    for split, counts in found.items():
        skipped = f"; {units.counted(counts.skipped, 'example')} skipped" if counts.skipped else ""
        print(
            f"{split}: {units.counted(counts.questions, 'question')}, {units.counted(counts.images, 'image')}{skipped}"
        )
    print(f"\n{out}\n  to train on it: vision.questions.folder = {out!r}")
    for file in question_sets.FILES[: len(found)]:
        print(f"    vision.questions.{file.removesuffix('.jsonl')} = {file!r}")
    return 0
