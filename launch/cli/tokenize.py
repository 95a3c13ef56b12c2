"""`launch/run tokenize`: converts text to ids once, for `text.tokens`."""

import argparse
import os
import time

from core import units
from core.errors import UserError
from core.files import paths
from core.training import run_lock
from launch import flags
from tasks.text import decontamination, near_duplicates, token_cache, token_writer, tokenizing

COMMAND = ("runs", "tokenize")
HELP = "convert text to ids, as a token cache for text.tokens"
EXAMPLE = """launch/run tokenize --data 'corpus/*.jsonl.zst' --vocabulary smollm2 --out gs://BUCKET/tokens
  launch/run tokenize --data 'books/*.parquet' --field content --vocabulary bytes --out runs/tokens --skip-bad"""
_WORDS = run_lock.Words("token cache", "two commands cannot write one cache", "--out")
_WORDS_IN_COMMON = 13
_SECONDS = 10.0  # between two lines of progress
_LEFT_OUT = {
    "malformed": "malformed",
    "blank": "only white space",
    "shares_text": "text of an evaluation set",
    "near_duplicate": "near duplicates",
}
_SIMILARITY = 0.8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    help_ = (
        "files, local or gs://: .txt, .jsonl (both also .gz, .zst, .bz2) or .parquet; repeatable. Or one dataset: "
        "tfds:NAME, which tfds build has prepared, or hub:OWNER/NAME of the Hugging Face hub"
    )
    parser.add_argument("--data", metavar="PATTERN", action="append", required=True, help=help_)
    help_ = "files for validation, or a split of the dataset; default: 5 %% of the documents, by the hash of their text"
    parser.add_argument("--validation", metavar="PATTERN", action="append", default=[], help=help_)
    parser.add_argument("--field", default="text", help="JSON key or column of the text (default: text)")
    help_ = "folder of a published model, a SentencePiece .model, or bytes"
    parser.add_argument("--vocabulary", metavar="NAME", required=True, help=help_)
    help_ = "folder to write, local or gs://; an interrupted command continues in it"
    parser.add_argument("--out", metavar="DIR", required=True, help=help_)
    help_ = "skip and count malformed documents instead of refusing them"
    parser.add_argument("--skip-bad", action="store_true", help=help_)
    help_ = "evaluation sets, .txt or .jsonl: documents for training that share text with them are left out; repeatable"
    parser.add_argument("--exclude", metavar="PATTERN", action="append", default=[], help=help_)
    help_ = "with --exclude: share N successive words (default: 13, unless --exclude-characters is given)"
    parser.add_argument("--exclude-words", metavar="N", type=flags.at_least(decontamination.LEAST_WORDS), help=help_)
    help_ = "with --exclude: share a substring of N characters, for code"
    parser.add_argument(
        "--exclude-characters", metavar="N", type=flags.at_least(decontamination.LEAST_CHARACTERS), help=help_
    )
    help_ = (
        f"leave out documents that nearly repeat an earlier one: of the runs of {near_duplicates.WORDS} words of "
        f"either, both have at least this share (default: {_SIMILARITY}), as estimated by MinHash"
    )
    parser.add_argument("--deduplicate", metavar="SHARE", type=_similarity, nargs="?", const=_SIMILARITY, help=help_)
    help_ = "that convert (default: one for each core)"
    parser.add_argument("--processes", metavar="N", type=flags.at_least(1), help=help_)


def run(args: argparse.Namespace) -> int:
    """Writes the cache, with progress, and prints what it holds."""
    words, characters = args.exclude_words, args.exclude_characters
    if (words or characters) and not args.exclude:
        raise UserError("--exclude-words and --exclude-characters belong to --exclude, which names the evaluation sets")
    job = tokenizing.Job(
        tuple(args.data),
        tuple(args.validation),
        args.field,
        args.vocabulary,
        args.out,
        args.skip_bad,
        tuple(args.exclude),
        _WORDS_IN_COMMON if words is characters is None else words,
        characters,
        args.deduplicate,
    )
    _require_free(args.out)
    processes = args.processes or len(os.sched_getaffinity(0))
    lock = run_lock.RunLock.acquire(args.out, say=_say, words=_WORDS)
    try:
        about = tokenizing.run(
            job, processes=processes, say=_say, report=_Progress(), check=lambda: lock.check(now=True)
        )
    except KeyboardInterrupt:
        _say("interrupted: run the same command again to continue")
        raise
    finally:
        lock.release()
    _summarize(args.out, about)
    return 0


def _similarity(text: str) -> float:
    """Converts the value of --deduplicate. Raises ArgumentTypeError if it is out of range."""
    least, most = near_duplicates.LEAST_SIMILARITY, near_duplicates.MOST_SIMILARITY
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not least <= value <= most:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from {least} to {most}")
    return value


def _say(text: str) -> None:
    print(text, flush=True)


def _require_free(out: str) -> None:
    """Raises UserError if the folder has files of something else."""
    folder = paths.resolve(out)
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    if names - {run_lock.FILE} and not names & {token_cache.COMPLETE, token_cache.STARTED}:
        found = ", ".join(units.shortened(sorted(names), most=3))
        raise UserError(f"--out {out} has other files ({found}): give a new folder")


class _Progress:
    """Prints a line of progress every 10 s."""

    def __init__(self) -> None:
        self._start = self._last = time.monotonic()
        self._before: tuple[int, float] | None = None  # tokens and fraction when this command began

    def __call__(self, counts: token_writer.Counts) -> None:
        now, tokens = time.monotonic(), counts.total("tokens")
        if self._before is None:
            self._before, self._start = (tokens, counts.fraction), now
        if now - self._last < _SECONDS:
            return
        self._last = now
        rate = (tokens - self._before[0]) / max(now - self._start, 1e-3)
        done = counts.fraction - self._before[1]
        left = (1 - counts.fraction) * (now - self._start) / done if done > 0 else None
        _say(
            f"{counts.fraction:6.1%}  {counts.total('documents'):,} documents  {tokens:,} tokens  "
            f"{rate:,.0f} tokens/s  ETA {units.clock(left) if left is not None else '–'}"
        )


def _summarize(out: str, about: dict) -> None:
    """Prints documents, tokens and bytes before and after the filters, and what each left out."""
    left_out = {_LEFT_OUT[key]: counts for key, counts in about["left_out"].items() if counts["documents"]}
    rows = {"read": [*about["splits"].values(), *left_out.values()]}
    rows |= {f"- {why}": [counts] for why, counts in left_out.items()}
    rows |= {name: [counts] for name, counts in about["splits"].items()}
    _say(f"{'':<28}{'documents':>14}{'tokens':>18}{'bytes of text':>20}")
    for name, parts in rows.items():
        documents, tokens, size = (sum(part[key] for part in parts) for key in ("documents", "tokens", "bytes"))
        _say(f"{name:<28}{documents:>14,}{tokens:>18,}{size:>20,}")
    name = about["vocabulary"]["name"]
    _say(f"\n{out}\n  to train on it: gin/tasks/tokens.gin with DATA = {out!r}, VOCABULARY = {name!r}")
