"""Compares two configurations binding by binding."""

import functools
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from launch.config.loader import Settings, declared_text, parse
from launch.config.names import OURS
from launch.config.statements import render

_MOST_TEXTS = 1024  # kept: a suite compares each experiment with each run
_MOST_CHARACTERS = 160  # characters of a value in a message
_SPELLING = ("text.python_source", "text.seqio")


class Difference(NamedTuple):
    """A setting in which two configurations differ, with both values as text; None: not bound."""

    name: str
    before: str | None
    after: str | None

    def __str__(self) -> str:
        was = "was not bound" if self.before is None else f"was {shortened(self.before)}"
        return (
            f"{self.name} is not bound, {was}"
            if self.after is None
            else f"{self.name} = {shortened(self.after)}, {was}"
        )


def between(before: str, after: Settings | str) -> list[Difference]:
    """Returns the settings in which two configurations differ, sorted by name.

    They are canonical texts or `Settings`. What only one of them binds is left out if `gin/defaults.gin` binds the
    same, or if it is a macro with its value in `gin/defaults.gin`: an earlier release may not have had it.
    """
    old, new = _values(before), _values(after) if isinstance(after, str) else _rendered(after)
    found = []
    for name in sorted(old.keys() | new.keys()):
        was, now = old.get(name), new.get(name)
        one_sided = now if was is None else was if now is None else None
        if was != now and not (one_sided and _is_declared(name, one_sided, old if now is None else new)):
            found.append(Difference(name, was, now))
    return found


def _is_declared(name: str, value: str, bound: Mapping[str, str]) -> bool:
    declared, macro = _values(declared_text()), value.removeprefix("%")
    if value == declared.get(name):
        return True
    return value.startswith("%") and macro in declared and bound.get(macro, declared[macro]) == declared[macro]


def among(texts: Sequence[str]) -> list[dict[str, str]]:
    """Returns, for each canonical text, the settings that not all texts share."""
    every = [_values(text) for text in texts]
    names = sorted({name for values in every for name in values})
    differing = [name for name in names if len({values.get(name) for values in every}) > 1]
    return [{name: values[name] for name in differing if name in values} for values in every]


def is_same(before: str, after: str, *, ignoring: Collection[str] = ()) -> bool:
    """Returns whether two canonical texts have the same settings, except those in `ignoring`.

    Imports of the user's own modules count, too.
    """
    if before == after:
        return True
    old, new = (_imports(text) for text in (before, after))
    both = old.keys() & new.keys()
    if any(symbol in both or not module.startswith(OURS) for symbol, module in old.items() ^ new.items()):
        return False
    return all(one.name in ignoring for one in between(before, after))


@functools.lru_cache(maxsize=_MOST_TEXTS)
def _imports(text: str) -> Mapping[str, str]:
    return parse(text).imports


@functools.lru_cache(maxsize=_MOST_TEXTS)
def _values(text: str) -> Mapping[str, str]:
    if values := _rendered(parse(text)):
        return values
    pairs = (line.removeprefix("# ").partition(" = ") for line in text.splitlines())
    return {name: value for name, mark, value in pairs if mark}


def _rendered(settings: Settings) -> dict[str, str]:
    found = {binding.name: render(binding.value) for binding in settings.bindings}
    if "text.seqio.name" not in found and any("text.python_source." in name for name in found):
        found = {name.replace(*_SPELLING): value.replace(*_SPELLING) for name, value in found.items()}
        found["text.seqio.name"] = "'renga.python_source'"
    return found


def shortened(value: str) -> str:
    """Returns the text of a value, without the middle of a long one."""
    half = _MOST_CHARACTERS // 2
    return value if len(value) <= _MOST_CHARACTERS else f"{value[:half]} … {value[-half:]}"
