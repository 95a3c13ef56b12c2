"""Tasks with images, with and without text: smoke runs, token counts and summary follow the spec."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from core.batches import Field
from launch import program_identity
from launch.config import loader
from launch.runs import progress, smoke
from launch.settings import Evaluation
from parallel.generation import decoding
from tasks import streams
from tasks.sampled import SampledTask
from tasks.text import vocabularies


def images(rows):
    return Field((rows, 5, 7, 3), np.uint8, ("batch", None, None, None))


@dataclasses.dataclass(frozen=True)
class Captions(SampledTask):
    length: int = 16
    num_streams: int = 4
    row = None  # no test draws one

    def spec(self, batch_size):
        return {"images": images(batch_size), **streams.batch_spec(batch_size, length=self.length)}


@dataclasses.dataclass(frozen=True)
class Classes(SampledTask):
    num_streams: int = 4
    vocabulary: Any = None
    row = None

    def spec(self, batch_size):
        return {"images": images(batch_size), "label": Field((batch_size,), np.int32, ("batch",))}


@pytest.fixture
def quickstart():
    return loader.load("gin/quickstart.gin", slice_name="v4-8").build()


def test_images_beside_text(quickstart):
    run = dataclasses.replace(quickstart, task=Captions(), batch_size=8)
    assert (run.unit, run.row_length, run.tokens_per_step) == ("token", 16, 128)
    assert progress._batch(run) == "8 rows x 16 tokens = 128 tokens, with images [5, 7, 3]"
    small = smoke.shrink(run)
    assert small.task == Captions(length=smoke.LENGTH, num_streams=small.batch_size)


@dataclasses.dataclass(frozen=True)
class Patches(Classes):
    def spec(self, batch_size):
        return {"left": Field((batch_size, 5, 7), np.float32, ("batch", "length", None))}


class Coupled:
    couples_rows = True

    def __init__(self, model):
        self.model = model

    def __getattr__(self, name):
        return getattr(self.__dict__["model"], name)


def test_a_loss_of_rows_is_counted_in_rows(quickstart):
    for changes in ({"task": Patches()}, {"task": Captions(), "model": Coupled(quickstart.model)}):
        run = dataclasses.replace(quickstart, batch_size=8, **changes)
        assert (run.unit, run.items_per_step) == ("row", 8)
    assert quickstart.items_per_step == quickstart.tokens_per_step > 8


def test_images_without_text_are_counted_in_rows(quickstart):
    run = dataclasses.replace(quickstart, task=Classes(), batch_size=8)
    assert (run.unit, run.tokens_per_step) == ("row", 8)
    assert progress._batch(run) == "8 rows, with images [5, 7, 3]"
    small = smoke.shrink(run)
    assert small.task == Classes(num_streams=small.batch_size)


def test_a_task_that_cannot_shrink_is_told_which_fields_it_lacks(quickstart):
    class Plain(SampledTask):
        num_streams, length = 4, 16
        spec, row = Captions.spec, None

    run = dataclasses.replace(quickstart, task=Plain())
    with pytest.raises(
        ValueError,
        match=r"Plain lacks the ability Rehearses: add .* with length and num_streams",
    ):
        smoke.shrink(run)


def test_missing_images_are_not_replaced_by_random_text(quickstart):
    class Missing(Classes):
        def problems(self):
            return ["no folder /data/images"]

    small = smoke.shrink(dataclasses.replace(quickstart, task=Missing(), batch_size=8))
    assert isinstance(small.task, Missing)


def test_a_prompt_needs_inputs(quickstart):
    task = Classes(vocabulary=vocabularies.bytes())
    run = dataclasses.replace(quickstart, task=task, evaluation=Evaluation(prompt="abc"))
    assert "PROMPT = 'abc': a batch of Classes has no field `inputs`" in run.data_problems(prepared=False)[0]


def test_axes_are_part_of_the_identity_of_a_program_if_they_are_not_rows_and_positions():
    assert program_identity._field(Field((8, 16), np.int32, ("batch", "length"))) == ((8, 16), "int32")
    assert program_identity._field(Field((8,), np.int32, ("batch",))) == ((8,), "int32")
    assert program_identity._field(Field((8, 5), np.int32, ("batch", None))) == ((8, 5), "int32", ("batch", None))


def test_a_sample_is_written_beside_blank_images():
    batch = decoding.text_batch(Captions().spec(8), jnp.broadcast_to(jnp.arange(16), (2, 16)))
    assert batch["images"].shape == (2, 5, 7, 3)
    assert not batch["images"].any()
    assert batch["inputs"].tolist() == [list(range(16))] * 2
    assert set(batch) == set(Captions().spec(8))
