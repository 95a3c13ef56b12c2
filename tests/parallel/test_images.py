"""A batch of images beside text: each field is laid out by its own axes."""

import dataclasses

import captions
import jax
import pytest
from jax.sharding import PartitionSpec as P

from core import logical, slices
from parallel import strategies
from parallel.partitioner import Partitioner

SPEC = captions.Squares(8).spec(8)
BY_TWO = strategies.context(sequence=2)


def bound(tables):
    return Partitioner(tables, slice=slices.get("v4-8"), devices=jax.devices())


@pytest.mark.parametrize(
    ("tables", "images", "words"),
    [
        (strategies.fsdp(), P("fsdp", None, None, None), P("fsdp", None)),
        (BY_TWO, P("fsdp", None, None, None), P("fsdp", "sequence")),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_only_words_are_sharded_by_position(tables, images, words):
    layouts = bound(tables).batch_shardings(SPEC)
    assert (layouts["pixels"].spec, layouts["targets"].spec) == (images, words)
    odd = dataclasses.replace(SPEC["pixels"], shape=(8, 5, 7, 3))  # no size of an image needs to divide
    assert bound(tables).batch_shardings({"pixels": odd})["pixels"].spec == images


def test_a_declared_axis_of_a_field_follows_the_table():
    logical.declare("scanlines", "lines of an image")
    pixels = dataclasses.replace(SPEC["pixels"], axes=("batch", "scanlines", None, None))
    by_lines = strategies.override(BY_TWO, activation_rules={"scanlines": "sequence"})
    for tables, wanted in ((BY_TWO, P("fsdp", None, None, None)), (by_lines, P("fsdp", "sequence", None, None))):
        assert bound(tables).batch_shardings({"pixels": pixels})["pixels"].spec == wanted
    with pytest.raises(ValueError, match=r"pixels: shape .* scanlines = 5 does not divide over sequence = 2"):
        bound(by_lines).batch_shardings({"pixels": dataclasses.replace(pixels, shape=(8, 5, 7, 3))})
