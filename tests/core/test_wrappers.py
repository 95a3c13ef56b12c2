"""A wrapper that forwards attributes has the abilities of its model, and is copied around a changed model."""

import dataclasses
from typing import Any

import pytest

from core import wrappers
from core.types import ChoosesDtype, CountsFlops, Evaluates, Model, Shrinks, can, lacking, missing


@dataclasses.dataclass(frozen=True)
class Inner:
    width: int = 64
    dtype: str = "bfloat16"

    def init(self, rng, batch): ...

    def init_carry(self, batch): ...

    def loss(self, params, carry, rng, batch, *, is_training): ...

    def evaluate(self, params, rng, batch): ...

    def shrink(self, multiples):
        return dataclasses.replace(self, width=multiples["embed"])

    def flops_per_token(self, length):
        return 6.0 * self.width


class Plain:
    """Keeps the model in an attribute."""

    def __init__(self, inner, scale):
        self.inner, self.scale = inner, scale

    def __getattr__(self, name):
        return getattr(self.inner, name)


@dataclasses.dataclass(frozen=True)
class Frozen:
    """Is a dataclass, with a field of its own."""

    model: Any
    scale: float = 2.0

    def __getattr__(self, name):
        return getattr(self.model, name)

    def loss(self, *args, **kwargs):
        return self.model.loss(*args, **kwargs)


class Closed:
    """Keeps the model where nobody finds it."""

    def __init__(self, inner):
        type(self).__getattr__ = lambda _, name: getattr(inner, name)


WRAPPED = [Inner(), Plain(Inner(), 2.0), Frozen(Inner()), Frozen(Plain(Inner(), 3.0))]
NAMES = ["model", "plain", "dataclass", "two"]


def inside(model):
    while not isinstance(model, Inner):
        model = vars(model).get("inner") or vars(model)["model"]
    return model


@pytest.mark.parametrize("model", [*WRAPPED, Closed(Inner())], ids=[*NAMES, "closed"])
def test_a_wrapper_has_the_abilities_of_the_model(model):
    assert missing(model, Model) == []
    assert all(can(model, ability) for ability in (Evaluates, Shrinks, CountsFlops, ChoosesDtype))
    assert model.flops_per_token(8) == 6.0 * 64


@pytest.mark.parametrize("model", WRAPPED, ids=NAMES)
def test_a_copy_computes_in_another_dtype(model):
    copy = wrappers.with_field(model, "dtype", "float32")
    assert (copy.dtype, model.dtype) == ("float32", "bfloat16")
    assert type(copy) is type(model)
    assert getattr(copy, "scale", None) == getattr(model, "scale", None)
    assert inside(copy) == dataclasses.replace(Inner(), dtype="float32")


@pytest.mark.parametrize("model", WRAPPED, ids=NAMES)
def test_a_small_copy_is_wrapped_as_before(model):
    small = wrappers.shrunk(model, {"embed": 4})
    assert type(small) is type(model)
    assert inside(small).width == 4
    assert inside(model).width == 64


def test_an_unregistered_model_shrinks_itself():
    assert wrappers.shrunk(Closed(Inner()), {"embed": 4}) == Inner(width=4)


def test_fields_of_unrelated_parts_are_not_found():
    @dataclasses.dataclass
    class Schedule:
        steps: int = 3

    class Holder:
        def __init__(self):
            self.schedule, self.dtype = Schedule(), "bfloat16"  # no field of a dataclass

    assert wrappers.field_path(Holder(), "dtype") is None
    assert wrappers.field_path(Plain(Holder(), 1.0), "dtype") is None
    assert wrappers.field_path(Plain(Inner(), 1.0), "dtype") == ("inner",)
    assert wrappers.field_path(Inner(), "dtype") == ()


def test_missing_abilities_are_named():
    assert lacking(object(), Shrinks) == "object lacks the ability Shrinks: add shrink(multiples)"


def test_what_a_wrapper_or_subclass_redefines_is_outside_of_what_it_passes_on():
    class Evaluating(Plain):
        def evaluate(self, params, rng, batch): ...

    class Narrow(Inner):
        def evaluate(self, params, rng, batch): ...

    for model in (Evaluating(Inner(), 2.0), Narrow(), Plain(Narrow(), 2.0), Evaluating(Plain(Inner(), 1.0), 2.0)):
        assert wrappers.is_outside(model, "evaluate", "shrink")
        assert not wrappers.is_outside(model, "shrink", "evaluate")
    for model in (Inner(), Plain(Inner(), 2.0)):
        assert not wrappers.is_outside(model, "evaluate", "shrink")
