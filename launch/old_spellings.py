"""Old names of commands and flags, which are accepted for one release and say the new one."""

import itertools
import sys
from collections.abc import Sequence

from launch import flags

_COMMANDS = {"doctor": ("check", "--level", "hosts"), "validate": ("check", "--level", "slice")}
_FLAGS = {  # by command
    ("check", "--smoke"): ("--level", "smoke"),
    ("pod", "--smoke"): ("--check", "smoke"),
    ("suite", "--smoke"): ("--check", "smoke"),
    ("train", "--smoke"): ("--check", "smoke"),
    ("evaluate", "--rows"): ("--num-examples",),
}
_EXPERIMENT = "gin/quickstart.gin"  # what `validate` took if none was named


def current(argv: Sequence[str]) -> list[str]:
    """Returns a command line with the current names; prints a note for each old one."""
    command, *words = argv
    if command == "pod" and words[1:2] == ["validate"]:  # SLICE validate [EXPERIMENT.gin] [--flags]
        named = [word for word in words[2:3] if not word.startswith("-")]
        _note("pod.sh SLICE validate", "pod.sh SLICE EXPERIMENT.gin --check slice")
        words = [words[0], *(named or [_EXPERIMENT]), *words[2 + len(named) :], "--check", "slice"]
    if command in _COMMANDS:
        new, *level = _COMMANDS[command]
        _note(f"launch/run {command}", f"launch/run {' '.join(_COMMANDS[command])}")
        if command == "validate" and not any(word.endswith(".gin") for word in words):
            words = [*words[:1], _EXPERIMENT, *words[1:]]
        command, words = new, [*words, *level]
    return [command, *_with_current_flags(command, words)]


def _with_current_flags(command: str, words: Sequence[str]) -> list[str]:
    found: list[str] = []
    for word, after in itertools.zip_longest(words, words[1:], fillvalue=""):
        flag, is_assigned, value = word.partition("=")
        if new := _FLAGS.get((command, flag)):
            _note(flag, " ".join(new))
            found += [*new, *([value] if is_assigned else [])]
        elif word == "--check" and "--smoke" in words:  # of which the level is smoke
            continue
        elif word == "--check" and after and after not in flags.LEVELS and not after.startswith("-"):
            found += [word, flags.LEVELS[0]]  # it had no value
        else:
            found.append(word)
    return found


def _note(old: str, new: str) -> None:
    print(f"note: {old} is now {new}", file=sys.stderr)
