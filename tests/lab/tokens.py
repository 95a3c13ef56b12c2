"""`tests/run.sh lab tokens`: times `launch/run tokenize` against the tokenizers library, and reading of the result.

Times on a shared machine vary; both sides of a ratio are measured in turns, in one run, and medians are compared.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from core.types import DataLayout
from launch import flags, terminal
from tasks import text
from tasks.text import text_files, tokenizing, vocabularies
from tasks.text.filters import Filters

HELP = "time launch/run tokenize against the tokenizers library, and reading what it wrote"
EXAMPLE = "tests/run.sh lab tokens --folder smollm2"
_HOST_RATE = 25_000  # tokens/s that a host of v5p-128 consumes with a 7B model (predicted)
_ROWS, _LENGTH, _STREAMS, _BATCHES = 8, 2048, 4, 400


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the tokenizer and the text."""
    parser.add_argument("--folder", required=True, help="of a published model, whose tokenizer is used")
    help_ = "pattern of .jsonl files (default: the source of Python's standard library)"
    parser.add_argument("--data", metavar="PATTERN", help=help_)
    parser.add_argument("--turns", metavar="N", type=flags.at_least(1), default=3, help="of each side (default: 3)")


def run(args: argparse.Namespace) -> int:
    """Measures and prints. The exit code is always 0, because timings on a shared machine are unreliable."""
    with tempfile.TemporaryDirectory() as folder:
        data = args.data or _standard_library(Path(folder))
        rows = _tokenizing(args.folder, data, folder, args.turns)
        rows.append(_reading(f"{folder}/cache", args.folder))
        rows.append(_small_documents(folder))
    headings = ("measured", "tokens/s", "compared with", "tokens/s", "ratio", "goal")
    print(f"{os.cpu_count()} cores; load {os.getloadavg()[0]:.1f} at the end\n")
    terminal.console(160).print(terminal.markdown(headings, rows, text=headings[:3:2]))
    return 0


def _standard_library(folder: Path) -> str:
    """Writes the documents of `text.python_source` as lines of JSON."""
    texts = text.python_source(length=8, num_streams=1).corpus.sample_texts()
    file = folder / "data.jsonl"
    file.write_text("".join(json.dumps({"text": each}) + "\n" for each in texts))
    return str(file)


def _tokenizing(vocabulary: str, data: str, folder: str, turns: int) -> list[list[str]]:
    """Compares the whole command, and its steady part, with `encode_batch` of texts that are in memory."""
    import tokenizers

    theirs = tokenizers.Tokenizer.from_file(f"{vocabulary}/tokenizer.json")
    corpus = text_files.TextFiles((data,), (data,), "text")
    texts = list(corpus.sample_texts())
    found: dict[str, list[float]] = {}
    for turn in range(turns):
        for name, encode in {
            "encode_batch": theirs.encode_batch,
            "encode_batch_fast": theirs.encode_batch_fast,
        }.items():
            start = time.perf_counter()
            count = sum(len(each.ids) for at in range(0, len(texts), 1000) for each in encode(texts[at : at + 1000]))
            found.setdefault(name, []).append(count / (time.perf_counter() - start))
        whole, steady = _ours(vocabulary, data, f"{folder}/cache{turn or ''}")
        found.setdefault("whole", []).append(whole)
        found.setdefault("steady", []).append(steady)
    median = {name: statistics.median(rates) for name, rates in found.items()}
    sides = [
        ("tokenize after its start", "steady", "encode_batch", "0.8"),
        ("tokenize after its start", "steady", "encode_batch_fast", ""),
        ("tokenize, whole command", "whole", "encode_batch", ""),
    ]
    return [
        [what, f"{median[ours]:,.0f}", other, f"{median[other]:,.0f}", f"{median[ours] / median[other]:.2f}", goal]
        for what, ours, other, goal in sides
    ]


def _ours(vocabulary: str, data: str, out: str) -> tuple[float, float]:
    """Returns tokens/s of a whole command, and after its first batch."""
    job = tokenizing.Job((data,), (), "text", vocabulary, out, False, Filters())
    marks: list[tuple[float, int]] = []
    start = time.perf_counter()
    tokenizing.run(
        job,
        processes=len(os.sched_getaffinity(0)),
        say=lambda _: None,
        report=lambda counts: marks.append((time.perf_counter(), counts.total("tokens"))),
        check=lambda: None,
    )
    end, (first, before), (_, tokens) = time.perf_counter(), marks[0], marks[-1]
    return tokens / (end - start), (tokens - before) / (end - first)


def _reading(cache: str, vocabulary: str, what: str = "reading packed rows") -> list[str]:
    task = text.tokens(cache=cache, length=_LENGTH, num_streams=_STREAMS, vocabulary=vocabularies.named(vocabulary))
    batches = task.train(DataLayout(_ROWS, tuple(range(_ROWS)), tuple(range(_ROWS))), seed=0)
    rate, full = _rate(lambda: next(batches)["weights"])
    goal = 20 * _HOST_RATE
    what = f"{what} of {_LENGTH}, {full:.1%} full"
    return [what, f"{rate:,.0f}", "20 x a host of v5p-128 with 7B", f"{goal:,}", f"{rate / goal:.1f}", "1"]


def _rate(weights: Callable) -> tuple[float, float]:
    """Returns tokens/s, and the share of the rows that they fill."""
    weights()
    start, tokens, places = time.perf_counter(), 0.0, 0
    for _ in range(_BATCHES):
        found = weights()
        tokens, places = tokens + found.sum(), places + found.size
    return tokens / (time.perf_counter() - start), tokens / places


def _small_documents(folder: str) -> list[str]:
    """Reads 200,000 documents of 20 bytes."""
    file = Path(folder) / "small.jsonl"
    file.write_text("".join(f'{{"text": "{number:020d}"}}\n' for number in range(200_000)))
    _ours("bytes", str(file), f"{folder}/small")
    return _reading(f"{folder}/small", "bytes", "reading documents of 20 bytes in rows")
