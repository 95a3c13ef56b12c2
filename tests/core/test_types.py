"""Missing attributes of interfaces, and optional abilities of models, tasks and vocabularies."""

import types
from typing import Protocol

import pytest

from core.types import ChecksModel, Evaluates, HasVocabulary, Model, ReadsPublished, attribute, can, missing


class Whole:
    vocab_size = 3
    added_parameters = ()

    def evaluate(self, params, rng, batch): ...

    def published(self, folder): ...

    def model_problems(self, model, *, prepared): ...


@pytest.mark.parametrize("ability", [ChecksModel, Evaluates, HasVocabulary, ReadsPublished])
def test_abilities_are_found(ability):
    assert can(Whole(), ability)
    assert not can(object(), ability)


def test_an_ability_needs_all_of_its_members():
    assert not can(types.SimpleNamespace(added_parameters=()), ReadsPublished)
    assert not can(types.SimpleNamespace(evaluate=3), Evaluates)
    assert not can(types.SimpleNamespace(model_problems=lambda model: []), ChecksModel)
    assert not can(None, HasVocabulary)


class Declares(Protocol):
    @attribute
    def size(self) -> int:
        """A number."""


def test_a_class_that_inherits_an_attribute_may_assign_it():
    class Assigns(Declares):
        def __init__(self, size):
            self.size = size

    class Forgets(Declares):
        pass

    class Defines(Declares):
        size = 5

    assert [value.size for value in (Assigns(4), Defines())] == [4, 5]
    assert [missing(value, Declares) for value in (Assigns(4), Defines(), Forgets())] == [[], [], ["size"]]
    with pytest.raises(AttributeError, match="Forgets has no size: define it, or assign it in __init__"):
        Forgets().size  # noqa: B018


def test_missing_attributes_and_methods_are_named():
    assert missing(Whole(), ReadsPublished) == []
    assert missing(object(), ReadsPublished) == ["added_parameters", "published(folder)"]
    assert "loss(params, carry, rng, batch, *, is_training)" in missing(Whole(), Model)
