"""Flags that several commands share, and old names of commands and flags."""

import argparse
import contextlib
import itertools
import math
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from core.errors import UserError

LOCAL = "local"  # the SLICE that stands for this machine's devices
LEVELS = ("config", "hosts", "smoke", "slice")  # of a check, as described in launch/check/command.py


def at_least(minimum: int) -> Any:
    """Returns an argparse type: a whole number from `minimum` up."""

    def number(text: str) -> int:
        if not text.removeprefix("-").isdecimal() or int(text) < minimum:
            raise argparse.ArgumentTypeError(f"{text}: expected a whole number, at least {minimum}")
        return int(text)

    return number


def positive(text: str) -> float:
    """An argparse type: a finite number above 0. Raises ArgumentTypeError for other text."""
    with contextlib.suppress(ValueError):
        if 0 < float(text) < math.inf:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text}: expected a number above 0")


def output_file(text: str) -> Path:
    """An argparse type: a local file to write, in a folder that exists.

    Raises ArgumentTypeError if it cannot be written.
    """
    path = Path(text)
    folder = path.absolute().parent
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text}: this is a folder; name a file")
    if not folder.is_dir():
        raise argparse.ArgumentTypeError(f"{text}: there is no folder {folder}; create it first")
    if not os.access(folder, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text}: {folder} cannot be written to")
    return path


class _Output(argparse.Action):
    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option_string: Any = None
    ) -> None:
        setattr(namespace, self.dest, values)
        namespace.outputs = [*getattr(namespace, "outputs", ()), (option_string, values)]


# Options of a flag that names a file to write; a command with such a flag also has --overwrite.
OUTPUT: dict[str, Any] = {"metavar": "FILE", "action": _Output, "type": output_file}


def require_free(args: argparse.Namespace) -> None:
    """Raises UserError if a file to write exists, unless --overwrite is given."""
    for flag, file in getattr(args, "outputs", ()):
        if not args.overwrite and _exists(file):
            raise UserError(f"{flag} {file}: the file exists; name another, or add --overwrite")


def _exists(file: Path | str) -> bool:
    if "://" not in str(file):
        return Path(file).exists()
    from core.files import paths

    return paths.resolve(str(file)).exists()


def _folder(text: str) -> str:
    if not text.strip():
        raise argparse.ArgumentTypeError(
            f"the run directory is {text!r}: expected a folder or gs://BUCKET/…. Is the variable that it is taken from "
            "set?"
        )
    return text


def _slice(text: str) -> str:
    if text != LOCAL:
        return text
    from launch.hosts import machine  # asks JAX

    try:
        return machine.local().name
    except UserError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


_LEVELS_HELP = (
    "config: without a device; hosts: on every host; smoke: 20 steps of smallest sizes; slice: all strategies and speed"
)
_FLAGS: dict[str, dict[str, Any]] = {
    "SLICE": {"type": _slice, "help": "such as v4-32 (launch/run slices lists them); local: this machine"},
    "EXPERIMENT.gin": {"help": "an experiment file, local or gs://"},
    "RUN": {"type": _folder, "help": "a run directory, local or gs://"},
    "--slice": {"type": _slice, "metavar": "SLICE", "help": "overrides the experiment's SLICE; local: this machine"},
    "--gin": {"metavar": "BINDING", "action": "append", "default": [], "help": "overrides one binding; repeatable"},
    "--scale-from": {
        "metavar": "SLICE",
        "help": "BATCH_SIZE is for this slice: scale it, so that each device has the same rows (launch/scaling.py)",
    },
    "--run-dir": {"type": _folder, "metavar": "DIR", "help": "default: runs/EXPERIMENT-SLICE"},
    "--steps": {"metavar": "N", "type": at_least(1), "help": "stop after step N; schedules keep TOTAL_STEPS"},
    "--restarts": {
        "metavar": "N",
        "type": at_least(0),
        "default": 0,
        "help": "restart a failed run where that can help, up to N times without progress",
    },
    "--simulate": {"action": "store_true", "help": "simulate the hosts as processes and their chips as CPU devices"},
    "--level": {"choices": LEVELS, "default": LEVELS[0], "help": f"{_LEVELS_HELP} (default: config)"},
    "--check": {
        "nargs": "?",
        "choices": LEVELS,
        "const": LEVELS[0],
        "help": f"check at this level, do not train the experiment; {_LEVELS_HELP} (default: config)",
    },
    "--tune": {
        "action": "store_true",
        "help": "instead of training, measure settings of speed, write the best to RUN/tune/tuned.gin",
    },
    "--json": {**OUTPUT, "help": "also write the result to FILE as JSON"},
    "--overwrite": {"action": "store_true", "help": "replace files that exist"},
}
_POSITIONAL = {"SLICE": "slice", "EXPERIMENT.gin": "experiment", "RUN": "run_dir"}


def add(parser: Any, *names: str, **changes: Any) -> None:
    """Adds shared flags to a parser or group; `changes` replace their options, such as `help`."""
    for name in names:
        options = {**_FLAGS[name], **changes}
        if name in _POSITIONAL:
            parser.add_argument(_POSITIONAL[name], metavar=name, **options)
        else:
            parser.add_argument(name, **options)


def passed_on(args: argparse.Namespace, *names: str) -> list[str]:
    """Returns arguments that give the values of these flags to another command."""
    words: list[str] = []
    for name in names:
        value = getattr(args, name.removeprefix("--").replace("-", "_"))
        if value is True:
            words.append(name)
        elif isinstance(value, Iterable) and not isinstance(value, str):
            words += [word for item in value for word in (name, str(item))]
        elif value is not None and value is not False:
            words += [name, str(value)]
    return words


# Old names of commands and flags, which are accepted for one release.
_OLD_COMMANDS = {
    "build": ("make-dataset",),
    "doctor": ("check", "--level", "hosts"),
    "hidden": ("cache-hidden-states",),
    "validate": ("check", "--level", "slice"),
}
_OLD_FLAGS = {  # by command
    ("check", "--smoke"): ("--level", "smoke"),
    ("pod", "--smoke"): ("--check", "smoke"),
    ("suite", "--smoke"): ("--check", "smoke"),
    ("train", "--smoke"): ("--check", "smoke"),
    ("evaluate", "--rows"): ("--num-examples",),
    ("plan", "--batch"): ("--batch-size",),
    ("generate", "--batch"): ("--batch-size",),
    ("cache-hidden-states", "--batch"): ("--batch-size",),
    ("evaluate", "--seqio"): ("--task",),
}
_VALIDATED = "gin/quickstart.gin"  # the default experiment of `validate`
_WITH_NAMES = ("--run-dir", "--tpu", "--zone", "--project", "--gin")  # flags whose values are free text


def current(argv: Sequence[str]) -> list[str]:
    """Replaces old names in a command line, and prints notes about them."""
    command, *words = argv
    # SLICE validate [EXPERIMENT.gin] [--flags]; after some flags, the word is a value
    places = [i for i, word in enumerate(words[1:], 1) if word == "validate" and words[i - 1] not in _WITH_NAMES]
    if command == "pod" and places:
        at = places[0]
        named = [word for word in words[at + 1 : at + 2] if word.endswith(".gin")]
        _note("pod.sh SLICE validate", "pod.sh SLICE EXPERIMENT.gin --check slice")
        words = [*words[:at], *(named or [_VALIDATED]), *words[at + 1 + len(named) :], "--check", "slice"]
    if command in _OLD_COMMANDS:
        new, *level = _OLD_COMMANDS[command]
        _note(f"launch/run {command}", f"launch/run {' '.join(_OLD_COMMANDS[command])}")
        if command == "validate" and not any(word.endswith(".gin") for word in words):
            words = [*words, _VALIDATED]
        command, words = new, [*words, *level]
    return [command, *_with_current_flags(command, words)]


def _with_current_flags(command: str, words: Sequence[str]) -> list[str]:
    found: list[str] = []
    for word, after in itertools.zip_longest(words, words[1:], fillvalue=""):
        flag, is_assigned, value = word.partition("=")
        if new := _OLD_FLAGS.get((command, flag)):
            _note(flag, " ".join(new))
            found += [*new, *([value] if is_assigned else [])]
        elif word == "--check" and "--smoke" in words:  # --smoke sets the level
            continue
        elif word == "--check" and (after == LOCAL or after.endswith(".gin") or any(map(str.isdigit, after))):
            found += [word, LEVELS[0]]  # the old flag had no value: a slice or an experiment follows
        else:
            found.append(word)
    return found


def _note(old: str, new: str) -> None:
    print(f"note: {old} is now {new}", file=sys.stderr)
