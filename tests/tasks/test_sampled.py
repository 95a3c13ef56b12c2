"""A task that draws rows; positions and splits are tested with its subclass `synthetic.random_tokens`."""

import collections
import copy
import dataclasses
import datetime
import decimal
import functools
import hashlib
import os
import pathlib
import re
import subprocess
import sys
from typing import Any

import captions
import numpy as np
import pytest

from core.batches import Field
from core.types import DataLayout
from tasks.sampled import SampledTask

LAYOUT = DataLayout(8, (0, 1, 4, 5), (0, 4))


def test_a_host_draws_its_rows_of_every_field():
    task = captions.Squares(num_streams=4)
    whole, part = (next(task.train(at, seed=3)) for at in (DataLayout(8, tuple(range(8)), (0, 2, 4, 6)), LAYOUT))
    for name, field in task.spec(8).items():
        assert (whole[name].shape, whole[name].dtype) == (field.shape, field.dtype)
        np.testing.assert_array_equal(part[name], whole[name][list(LAYOUT.rows)])
    assert len({row.tobytes() for row in whole["pixels"]}) == 8
    assert task.fingerprint() != captions.Squares(num_streams=8).fingerprint()


class Wrong(captions.Squares):
    def row(self, rng, *, is_training):
        row = super().row(rng, is_training=is_training)
        return {"pixels": row["pixels"][..., :1], "inputs": row["inputs"].astype(np.int64), "words": row["targets"]}


Pair = collections.namedtuple("Pair", "a b")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (range(3), range(4)),
        (datetime.date(2026, 1, 1), datetime.date(2026, 1, 2)),
        (decimal.Decimal("1.5"), decimal.Decimal("2.5")),
        (collections.deque([1]), collections.deque([2])),
        (bytearray(b"a"), bytearray(b"b")),
        (re.compile("a"), re.compile("b")),
        ({1, 2}, {1, 3}),
        (frozenset("ab"), frozenset("ac")),
        (Pair(1, [2]), Pair(1, [3])),
        (collections.OrderedDict(a=np.zeros(2000)), collections.OrderedDict(a=np.ones(2000))),
        (np.array([1, "x"], dtype=object), np.array([2, "x"], dtype=object)),
    ],
)
def test_what_a_field_holds_is_told_apart(one, other):
    prints = [Holding(data).fingerprint() for data in (one, copy.deepcopy(one), other)]
    assert prints[0] == prints[1] != prints[2]


def test_a_row_that_differs_from_the_spec_is_refused():
    with pytest.raises(ValueError, match=r"^Wrong\.row: 'pixels' is uint8\[8, 8, 1\], spec says uint8\[8, 8, 3\]") as e:
        next(Wrong(num_streams=4).train(LAYOUT, seed=0))
    assert "'inputs' is int64[4], spec says int32[4]" in str(e.value)
    assert "'words' is int32[4], spec says no such field" in str(e.value)
    assert "'targets' is missing, spec says int32[4]" in str(e.value)


class Plain(SampledTask):
    """A task that is no dataclass."""

    num_streams = 4

    def __init__(self, size: Any = 1):
        self.size = size

    @functools.cached_property
    def table(self):
        return np.arange(self.size)

    def spec(self, batch_size):
        return {"x": Field((batch_size, 2), np.float32, ("batch", None))}

    def row(self, rng, *, is_training):
        return {"x": rng.normal(size=2).astype(np.float32) + len(self.table)}


@dataclasses.dataclass(frozen=True)
class Holding(Plain):
    """A task whose fields contain anything."""

    data: Any
    scale: float = 1.0


@dataclasses.dataclass(frozen=True)
class Hiding(Holding):
    """A task whose `repr` leaves out a field that was given, and one that follows from it."""

    hidden: Any = dataclasses.field(default=None, repr=False)
    derived: list = dataclasses.field(default_factory=list, init=False, repr=False)


def changed(array, at):
    other = array.copy()
    other[at] += 1
    return other


LARGE = np.zeros((2000, 2), np.float32)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Plain(1), Plain(2)),
        (Holding(LARGE), Holding(changed(LARGE, 1000))),  # numpy's repr leaves these elements out
        (Holding((LARGE,)), Holding((changed(LARGE, 1000),))),
        (Holding(np.float32([1])), Holding(np.nextafter(np.float32([1]), np.float32(2)))),
        (Holding(Plain(1)), Holding(Plain(2))),
        (Hiding(1, hidden=LARGE), Hiding(1, hidden=changed(LARGE, 1000))),
        (Holding(LARGE), Holding(LARGE, scale=2.0)),
    ],
)
def test_other_data_has_another_fingerprint_and_the_same_has_the_same(one, other):
    assert one.fingerprint() != other.fingerprint()
    again = Plain(one.size) if type(one) is Plain else dataclasses.replace(one)
    assert again.fingerprint() == one.fingerprint()
    match again:  # fills what is no data
        case Hiding():
            again.derived.append(1)
        case Plain(size=int()):
            next(again.train(LAYOUT, seed=0))
    assert (again.fingerprint(), again.describe()) == (one.fingerprint(), one.describe())


def test_the_fingerprint_of_plain_values_is_as_in_runs_that_were_saved_before():
    fields = (1, "a", None, (2.5, [b"c", {"d": True}]), pathlib.PurePosixPath("e"), np.float32, np.float32(0.1))
    for task in (captions.Squares(num_streams=4), Holding(fields), Holding(captions.Squares(num_streams=8))):
        assert task.describe() == repr(task)
        assert task.fingerprint() == hashlib.sha256(repr(task).encode()).hexdigest()[:16]


PRINTS = """
import test_sampled as made
for held in (made.Plain(1), {"a", "b", "c"}, made.LARGE, lambda: 3):
    print(made.Holding(held).fingerprint(), made.Holding(held).describe())
"""


def test_every_process_finds_the_same_fingerprint():
    """One with another seed of hashes and other addresses, as another host or a later start."""
    folders = os.pathsep.join([str(pathlib.Path(__file__).parent), *sys.path])
    said = {
        subprocess.run(
            [sys.executable, "-c", PRINTS],
            env={**os.environ, "PYTHONPATH": folders, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(said) == 1
    assert " at 0x" not in said.pop()
