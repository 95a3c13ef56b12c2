"""Compares two configurations binding by binding."""

from typing import NamedTuple

from launch.config.loader import parse
from launch.config.statements import render

_MOST_CHARACTERS = 160  # of a value in a message


class Difference(NamedTuple):
    """A setting in which two configurations differ; a value of None is not bound."""

    name: str
    before: str | None
    after: str | None

    def __str__(self) -> str:
        was = "was not bound" if self.before is None else f"was {_shortened(self.before)}"
        return (
            f"{self.name} is not bound, {was}"
            if self.after is None
            else f"{self.name} = {_shortened(self.after)}, {was}"
        )


def between(before: str, after: str) -> list[Difference]:
    """Returns the settings in which two canonical texts differ, sorted by name.

    Texts of comments alone, which `renga.Trainer` saves, are compared line by line (`# batch_size = 8`).
    """
    old, new = _values(before), _values(after)
    names = sorted(old.keys() | new.keys())
    return [Difference(name, old.get(name), new.get(name)) for name in names if old.get(name) != new.get(name)]


def _values(text: str) -> dict[str, str]:
    if bindings := parse(text).bindings:
        return {binding.name: render(binding.value) for binding in bindings}
    pairs = (line.removeprefix("# ").partition(" = ") for line in text.splitlines())
    return {name: value for name, mark, value in pairs if mark}


def _shortened(text: str) -> str:
    half = _MOST_CHARACTERS // 2
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:half]} … {text[-half:]}"
