"""Every optional ability says what it enables; docs/reference/abilities.md is made from that."""

import pytest

from core import types
from tests.lab.reference import abilities, enables


def test_there_are_abilities():
    assert len(abilities()) >= 18


@pytest.mark.parametrize("ability", abilities(), ids=lambda ability: ability.__name__)
def test_an_ability_says_what_it_enables(ability):
    assert types.missing(object(), ability)
    assert len(enables(ability)) > 10
