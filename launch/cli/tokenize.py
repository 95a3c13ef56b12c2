"""`launch/run tokenize`: converts text, or a registered seqio task, to ids once."""

import argparse
import os
from collections.abc import Mapping
from typing import Any

from core import units
from core.errors import UserError
from core.files import paths
from core.training import run_lock
from launch import flags
from tasks import text
from tasks.text import beam_parts, decontamination, near_duplicates, token_cache, tokenizing
from tasks.text.filters import Filters
from tasks.text.token_writer import Progress

COMMAND = ("runs", "tokenize")
HELP = "convert text, or a registered seqio task, to ids: a token cache for text.tokens or text.seqio"
EXAMPLE = """launch/run tokenize --task my_task --module my_tasks --length 2048 --inputs-length 512
  launch/run tokenize --data 'corpus/*.jsonl.zst' --vocabulary smollm2 --out gs://BUCKET/tokens
  launch/run tokenize --data 'books/*.parquet' --field content --vocabulary bytes --out runs/tokens --skip-bad"""
_WORDS = run_lock.Words("token cache", "two commands cannot write one cache", "--out")
_WORDS_IN_COMMON = 13
_LEFT_OUT = {
    "malformed": "malformed",
    "blank": "only white space",
    "shares_text": "text of an evaluation set",
    "near_duplicate": "near duplicates",
}
_SIMILARITY = 0.8
_OF_TASKS = ("module", "length", "inputs_length", "epochs", "runner", "runner_options")
_OF_TEXT = ("data", "validation", "vocabulary", "field", "skip_bad")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    help_ = (
        "files, local or gs://: .txt, .jsonl (both also .gz, .zst, .bz2) or .parquet; repeatable. Or one dataset: "
        "tfds:NAME, which tfds build has prepared, or hub:OWNER/NAME of the Hugging Face hub"
    )
    parser.add_argument("--data", metavar="PATTERN", action="append", default=[], help=help_)
    help_ = "files for validation, or a split of the dataset; default: 5 %% of the documents, by the hash of their text"
    parser.add_argument("--validation", metavar="PATTERN", action="append", default=[], help=help_)
    parser.add_argument("--field", help="JSON key or column of the text (default: text)")
    help_ = "folder of a published model, a SentencePiece .model, or bytes"
    parser.add_argument("--vocabulary", metavar="NAME", help=help_)
    help_ = (
        "folder to write, local or gs://; an interrupted command continues in it (default with --task: that of "
        "text.seqio)"
    )
    parser.add_argument("--out", metavar="DIR", help=help_)
    help_ = "skip and count malformed documents; by default the first is an error"
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
    own = parser.add_argument_group("a registered seqio task or mixture, in place of --data and --vocabulary")
    own.add_argument("--task", metavar="NAME", help="its name")
    own.add_argument("--module", metavar="MODULE", help="the Python module that registers it")
    own.add_argument("--length", metavar="N", type=flags.at_least(2), help="tokens per row of the runs")
    help_ = "most ids of the inputs in a row, for a task with inputs; the targets have the rest"
    own.add_argument("--inputs-length", metavar="N", type=flags.at_least(1), help=help_)
    help_ = "how many epochs to cache, if the preprocessors of the task draw random numbers"
    own.add_argument("--epochs", metavar="N", type=flags.at_least(1), help=help_)
    help_ = "run the task on Apache Beam, which makes the same cache; only DirectRunner was ever tried"
    own.add_argument("--runner", choices=beam_parts.RUNNERS, help=help_)
    help_ = "with --runner: options of Beam in one text, such as --runner-options='--direct_num_workers=8'"
    own.add_argument("--runner-options", metavar="TEXT", help=help_)


def run(args: argparse.Namespace) -> int:
    """Writes the cache, and prints a summary. Raises UserError if options are missing or need --task."""
    if args.task:
        return _run_task(args)
    if alone := [f"--{name.replace('_', '-')}" for name in _OF_TASKS if getattr(args, name) is not None]:
        raise UserError(f"{' and '.join(alone)} must be given with --task, which names a registered seqio task")
    if missing := [f"--{name}" for name in ("data", "vocabulary", "out") if getattr(args, name) in (None, [])]:
        raise UserError(f"{' and '.join(missing)} must be given, or --task with a registered seqio task")
    job = tokenizing.Job(
        tuple(args.data),
        tuple(args.validation),
        args.field or "text",
        args.vocabulary,
        args.out,
        args.skip_bad,
        _filters(args),
    )
    _require_free(args.out)
    processes = args.processes or len(os.sched_getaffinity(0))
    lock = run_lock.RunLock.acquire(args.out, say=_say, words=_WORDS)
    try:
        about = tokenizing.run(
            job, processes=processes, say=_say, report=Progress(_say), check=lambda: lock.check(now=True)
        )
    except KeyboardInterrupt:
        _say("interrupted: run the same command again to continue")
        raise
    finally:
        lock.release()
    _summarize(args.out, about)
    return 0


def _run_task(args: argparse.Namespace) -> int:
    if alone := [f"--{name.replace('_', '-')}" for name in _OF_TEXT if getattr(args, name) not in (None, [], False)]:
        raise UserError(f"{' and '.join(alone)} cannot be given with --task, which defines its own sources and ids")
    if args.length is None:
        raise UserError("--length must be given with --task: the tokens per row of the runs, at which features are cut")
    from tasks.text.constructors import SHIPPED
    from tasks.text.seqio_cache import SeqioCache

    if args.task in SHIPPED and args.module is None:
        raise UserError(f"--task {args.task} needs no cache: runs read its files, with text.seqio.name = {args.task!r}")
    if args.runner_options and not args.runner:
        raise UserError("--runner-options must be given with --runner, which names a runner of Apache Beam")
    filters = _filters(args)
    beam = beam_parts.Beam(args.runner, args.runner_options or "") if args.runner else None
    named = {"name": args.task, "module": args.module, "inputs_length": args.inputs_length, "epochs": args.epochs}
    task = text.seqio(**named, cache=args.out, length=args.length, num_streams=1)
    if problems := [*task.problems(), *task.example_problems()]:
        raise UserError("\n".join(problems))
    assert isinstance(task.corpus, SeqioCache)
    is_complete = task.corpus.saved is not None
    try:
        task.corpus.fill(processes=args.processes, say=_say, beam=beam, filters=filters)
    except KeyboardInterrupt:
        _say("interrupted: run the same command again to continue")
        raise
    if is_complete:
        _say(f"{task.corpus.describe()}: is complete")
    for reason, count in task.corpus.left_out().items():
        _say(f"  left out: {units.counted(count, 'example')}, {_LEFT_OUT[reason]}")
    _say(f"  to train on it: gin/tasks/seqio.gin with TASK_NAME = {args.task!r}, TASK_MODULE = {args.module!r}")
    return 0


def _filters(args: argparse.Namespace) -> Filters:
    words, characters = args.exclude_words, args.exclude_characters
    if (words or characters) and not args.exclude:
        raise UserError("--exclude-words and --exclude-characters belong to --exclude, which names the evaluation sets")
    words = _WORDS_IN_COMMON if words is characters is None else words
    excluded = tuple(str(paths.resolve(pattern)) for pattern in args.exclude)  # workers run in other folders
    return Filters(excluded, words, characters, args.deduplicate)


def _similarity(text: str) -> float:
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
    folder = paths.resolve(out)
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    if names - {run_lock.FILE} and not names & {token_cache.COMPLETE, token_cache.STARTED}:
        found = ", ".join(units.shortened(sorted(names), most=3))
        raise UserError(f"--out {out} has other files ({found}): give a new folder")


def _summarize(out: str, about: Mapping[str, Any]) -> None:
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
