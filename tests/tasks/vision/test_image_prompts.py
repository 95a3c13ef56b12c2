"""Rows of questions about images as a published model reads them: ids, places and pixels, and wrong input."""

import dataclasses
import json
import pathlib

import numpy as np
import pytest

from core.errors import UserError
from core.types import DataLayout
from launch import loaded_model
from models.vision import pretrained
from tasks import vision
from tasks.text import vocabularies
from tests.models.vision.folders import FIXTURES, PHOTO, copied

LINE = {"image": str(PHOTO), "question": "what?", "answer": "ab"}


def task(folder, to, line=LINE, **changes):
    for name in ("lines", "held_out"):
        (to / f"{name}.jsonl").write_text(json.dumps(line) + "\n")
    files = {"train": str(to / "lines.jsonl"), "validation": str(to / "held_out.jsonl")}
    given = {**files, "num_streams": 1, "length": 128}
    images, vocabulary = pretrained.image_input(folder), vocabularies.tokenizer(folder)
    return vision.questions(**{**given, "image_input": images, "vocabulary": vocabulary, **changes})


def row_of(made):
    return made.row(made.questions("train")[0])


@pytest.mark.parametrize("name", ["llava", "llava_siglip", "smolvlm"])
def test_a_row_is_the_prompt_of_generation_and_the_answer(name, tmp_path):
    folder = copied(name, tmp_path)
    made = task(folder, tmp_path)
    row, vocabulary = row_of(made), vocabularies.tokenizer(folder)
    processor = made.prompts.input.processor
    if processor.frame is not None:  # a row has one frame, as prompts have if images are not split
        file = pathlib.Path(folder) / "preprocessor_config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "do_image_splitting": False}))
    model = loaded_model.load(folder)
    prompt = model.encoded("what?", is_chat=True, images=[str(PHOTO)])
    answer = [*vocabulary.encode(" ab"), vocabulary.eos_id]
    ids = [*prompt, *answer]
    used, asked = len(ids) - 1, len(prompt)
    assert row["inputs"][:used].tolist() == ids[:-1]
    assert row["targets"][asked - 1 : used].tolist() == answer
    assert np.flatnonzero(row["weights"]).tolist() == list(range(asked - 1, used))
    assert row["slots"].tolist() == [i for i, found in enumerate(prompt) if found == made.prompts.input.token_id]
    assert len(row["slots"]) == made.image_tokens == pretrained.model(folder).image_tokens
    assert row["until"][:asked].tolist() == [asked - 1] * asked
    assert row["until"][asked:].tolist() == list(range(asked, 128))
    [frames] = model.sight._prepared([str(PHOTO)])
    assert np.array_equal(row["images"], frames.pixels[0])


def test_an_answer_that_the_template_ends_has_no_second_end(tmp_path):
    for end, ends, last in (("</s>", True, 257), ("<global-img>", True, 260), ("", True, 257), ("", False, ord("b"))):
        to = tmp_path / f"{len(end)}{ends}"
        to.mkdir()
        folder = copied("llava", to, end=end)
        row, vocabulary = row_of(task(folder, to, ends=ends)), vocabularies.tokenizer(folder)
        said = row["targets"][row["weights"] > 0].tolist()
        assert said == [*vocabulary.encode(" ab"), last][: 3 + (last > 255)]


def test_a_position_does_not_depend_on_where_the_model_is(tmp_path):
    places, layout = [tmp_path / name for name in ("first", "second")], DataLayout(1, (0,), (0,))
    for place in places:
        place.mkdir()
    first, second = (task(copied("llava", place), tmp_path) for place in places)
    saved = first.train(layout, seed=0)
    next(saved)
    state = saved.state()
    second.train(layout, seed=0).restore(state)
    former = {name: as_saved_before(sealed, first) for name, sealed in state.items()}
    first.train(layout, seed=0).restore(former)
    with pytest.raises(UserError, match=f"rows = .*was .*folder='{first.prompts.input.folder}'"):
        second.train(layout, seed=0).restore(former)
    with pytest.raises(UserError, match="rows = "):
        dataclasses.replace(first, mirror=True).train(layout, seed=0).restore(state)


def as_saved_before(sealed, made):
    """The position as earlier versions saved it, with the folder of the model."""
    header, _, position = sealed.partition(b"\n")
    settings = (made.kinds, made.weighted, made.max_shift, made.mirror, made.image_size, made.image_tokens)
    return json.dumps({**json.loads(header), "rows": repr((*settings, made.prompts))}).encode() + b"\n" + position


def test_a_selector_has_fewer_tokens(tmp_path):
    made = task(copied("llava", tmp_path), tmp_path, image_tokens=4)
    row = row_of(made)
    assert len(row["slots"]) == made.image_tokens == 4
    assert (row["inputs"] == made.prompts.input.token_id).sum() == 4


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"vocabulary": vocabularies.bytes()},
            "expected @vocabularies.tokenizer.* because vision.questions.ima",
        ),
        ({"image_size": 64}, "image_size = 64: the model in .* reads images of 12 pixels; leave it out"),
        ({"image_input": None, "image_tokens": 4}, "image_size is not set: bind it, or vision.questions.image_input"),
        ({"image_input": None, "image_size": 4}, "image_tokens is not set"),
        ({"image_tokens": 0}, "image_tokens"),
        ({"length": 10}, "length = 10 has no room .* beside image_tokens = 9: set LENGTH to 11 or more"),
    ],
)
def test_settings_that_do_not_fit_are_refused(changes, says, tmp_path):
    with pytest.raises(UserError, match=says):
        task(copied("llava", tmp_path), tmp_path, **changes)


def test_a_question_that_the_template_refuses_is_named_before_a_run(tmp_path):
    folder = copied("llava", tmp_path)
    with_token = task(folder, tmp_path, {**LINE, "question": "what is <image>?"})
    [problem] = with_token.problems()
    assert "lines.jsonl:1: the chat template" in problem
    assert "writes 2 image tokens <image> for a question about one image: expected one" in problem
    assert task(folder, tmp_path).problems() == []
    in_answer = task(folder, tmp_path, {**LINE, "answer": "a <image>"})
    assert "the answer contains <image>, which stands for an image" in in_answer.problems()[0]
    too_long = task(folder, tmp_path, {**LINE, "question": "q" * 200})
    assert "set LENGTH = " in too_long.problems()[0]
    original = str(FIXTURES / "llava")  # its prompt ends with A:, its answers begin with ASSISTANT:
    [problem] = task(original, tmp_path).problems()
    assert "lines.jsonl:1: the chat template formats message 2 differently" in problem
