"""WORKSPACE.md lists every optional ability with the text of its Protocol."""

import inspect
import re
from pathlib import Path

import pytest

from core import types

REQUIRED = {"Model", "Batches", "Task", "AnswerJudge"}
PAGE = Path(__file__).parents[2] / "WORKSPACE.md"


def abilities():
    """Every Protocol of `core.types` that nobody needs."""
    found = [value for value in vars(types).values() if getattr(value, "_is_protocol", False)]
    return [value for value in found if value.__module__ == types.__name__ and value.__name__ not in REQUIRED]


def enables(ability):
    """The paragraph of a docstring that says what an ability enables."""
    found = re.search(r"^Enables: (.*)\.$", inspect.getdoc(ability), re.MULTILINE | re.DOTALL)
    assert found, ability.__name__
    return " ".join(found[1].split())


def table():
    """The table of WORKSPACE.md."""
    rows = ["| ability | to add | what it enables |", "|---|---|---|"]
    for ability in abilities():
        adds = ", ".join(f"`{name}`" for name in types.missing(object(), ability))
        rows.append(f"| `{ability.__name__}` | {adds} | {enables(ability)} |")
    return "\n".join(rows)


def test_the_page_lists_every_ability():
    assert len(abilities()) >= 18
    assert table() in PAGE.read_text()


@pytest.mark.parametrize("ability", abilities(), ids=lambda ability: ability.__name__)
def test_an_ability_says_what_it_enables(ability):
    assert types.missing(object(), ability)
    assert len(enables(ability)) > 10
