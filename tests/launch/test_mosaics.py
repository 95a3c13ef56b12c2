"""Mosaics of images with questions that point at cells: unambiguous, balanced, and the same each time."""

import collections
import hashlib
import json
import sys

import numpy as np
import pytest
from PIL import Image

from launch import environment
from launch.config import loader

sys.path.insert(0, str(environment.WORKSPACE / "examples"))
import easy_vqa
import mosaics

pytestmark = pytest.mark.part("vision_models")
COUNTS = {"train": 30, "validation": 6, "test": 6}


def package(folder):
    """Images of one color each in the schema of the package easy-vqa; the color says which image it is."""
    rng, known = np.random.default_rng(0), {}
    for split, count in (("train", 160), ("test", 24)):
        (folder / split / "images").mkdir(parents=True)
        questions = []
        for number in range(count):
            shape, color = str(rng.choice(easy_vqa.SHAPES)), str(rng.choice(mosaics.COLORS))
            level = (split == "test", number, 7)
            Image.fromarray(np.full((64, 64, 3), level, np.uint8)).save(folder / split / "images" / f"{number}.png")
            known[level] = (shape, color)
            if number % 2:
                questions += [
                    ["what shape is in the image?", shape, number],
                    [f"is no {color} shape present?", "no", number],
                ]
            else:
                questions += [[f"what color is the {shape}?", color, number]]
            questions.append(["is there a teal shape?", "yes" if color == "teal" else "no", number])
        (folder / split / "questions.json").write_text(json.dumps(questions))
    return folder, known


@pytest.fixture(scope="module", params=[2, 3])
def made(request, tmp_path_factory):
    folder, known = package(tmp_path_factory.mktemp("package"))
    target = tmp_path_factory.mktemp("mosaics")
    mosaics.main(folder, target, grid=request.param, mosaics=COUNTS)
    return folder, target, known, request.param


def lines_of(target, split):
    files = sorted(target.glob(f"{split}*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def cells_of(target, line, known):
    """Returns what is in the cells of a mosaic, and the images that they are, from its pixels."""
    with Image.open(target / line["image"]) as image:
        pixels = np.asarray(image)[32::64, 32::64].reshape(-1, 3)
    levels = [tuple(map(int, level)) for level in pixels]
    return [known[level] for level in levels], levels


def meant(words, cells, grid):
    """Returns every cell that some words of a question can mean."""
    where = [divmod(number, grid) for number in range(grid * grid)]
    rows, columns = (
        (("top", "middle", "bottom"), ("left", "center", "right"))
        if grid == 3
        else (("top", "bottom"), ("left", "right"))
    )
    if words[0] in ("left", "right", "above", "below"):
        found = set()
        for named in meant(words[words.index("the") :], cells, grid):
            row, column = where[named]
            found |= {
                number
                for number, (r, c) in enumerate(where)
                if {
                    "left": r == row and c < column,
                    "right": r == row and c > column,
                    "above": c == column and r < row,
                    "below": c == column and r > row,
                }[words[0]]
            }
        return found
    if words[0] == "the":
        return {number for number, cell in enumerate(cells) if words[1] in cell}
    return {number for number, (r, c) in enumerate(where) if words == [rows[r], columns[c]]}


def test_every_question_means_one_cell_and_has_its_answer(made):
    _, target, known, grid = made
    seen = collections.Counter()
    for split in COUNTS:
        for line in lines_of(target, split):
            cells, _ = cells_of(target, line, known)
            words = line["question"].split()[:-1]
            if words[0] == "what":
                asked, pointer = words[1], words[3:]
            else:
                asked, pointer, value = "shape" if words[-1] in easy_vqa.SHAPES else "color", words[1:-1], words[-1]
                pointer = pointer[:-1] if pointer[-1] == "a" else pointer
                if pointer[:2] == ["the", "shape"]:
                    pointer = pointer[2:]
                elif pointer[1] in ("top", "middle", "bottom"):
                    pointer = pointer[1:-1]
            found = meant(pointer, cells, grid)
            assert found == {line["cells"][0]}, line
            named = (
                meant(pointer[pointer.index("the") :], cells, grid)
                if "of" in pointer or pointer[0] in ("above", "below")
                else found
            )
            assert named == {line["cells"][-1]}, line
            true = cells[line["cells"][0]][asked == "color"]
            assert line["answer"] == (true if words[0] == "what" else "yes" if true == value else "no"), line
            seen[line["kind"]] += 1
    assert min(seen[kind] for kind in mosaics.KINDS) > 20


def test_a_blind_guess_is_right_half_of_the_time(made):
    _, target, *_ = made
    for split in COUNTS:
        answers = collections.defaultdict(collections.Counter)
        for line in lines_of(target, split):
            if line["kind"] == "yes_no":
                answers[line["question"]][line["answer"]] += 1
        assert answers
        assert all(counts["yes"] == counts["no"] for counts in answers.values())


def test_no_image_is_in_two_splits(made):
    _, target, known, _ = made
    images = {
        split: {level for line in lines_of(target, split) for level in cells_of(target, line, known)[1]}
        for split in COUNTS
    }
    assert not images["train"] & images["validation"]
    assert {level[0] for level in images["test"]} == {1}
    assert {level[0] for level in images["train"] | images["validation"]} == {0}


def test_the_same_files_are_written_again(made, tmp_path):
    folder, target, _, grid = made
    mosaics.main(folder, tmp_path, grid=grid, mosaics=COUNTS)
    digests = [
        {file.relative_to(where): hashlib.sha256(file.read_bytes()).digest() for file in where.rglob("*.*")}
        for where in (target, tmp_path)
    ]
    assert digests[0] == digests[1]


def test_kinds_are_drawn_equally_often(made):
    _, target, *_ = made
    weights = collections.Counter()
    for line in lines_of(target, "train"):
        weights[line["kind"]] += line["weight"]
    np.testing.assert_allclose(list(weights.values()), np.mean(list(weights.values())), rtol=1e-3)


def test_files_that_are_no_images_and_other_folders_end_the_command(tmp_path):
    with pytest.raises(SystemExit, match=r"has no train/questions\.json"):
        mosaics.main(tmp_path, tmp_path / "out")
    (tmp_path / "a.png").write_text("no image")
    with pytest.raises(SystemExit, match=r"a\.png cannot be read as an image"):
        mosaics.read_image(tmp_path / "a.png")
    Image.new("RGB", (64, 32)).save(tmp_path / "b.png")
    with pytest.raises(SystemExit, match=r"b\.png has 64 x 32 pixels; expected 64 x 64"):
        mosaics.read_image(tmp_path / "b.png")


@pytest.mark.parametrize(
    ("name", "method", "slots"),
    [
        ("learned", "gumbel", 16),
        ("unasked", "gumbel", 16),
        ("all", "all", 256),
        ("random", "random", 16),
        ("center", "center", 16),
        ("blind", "blind", 16),
    ],
)
def test_controls_train_on_the_same_questions(name, method, slots):
    spans = loader.load(f"gin/arrcoc/mosaic_controls/{name}.gin", slice_name="v5e-1").build().spans()
    assert {(span.experiment.task.image_tokens, span.experiment.task.length) for span in spans} == {(slots, slots + 12)}
    selectors = {span.experiment.model.selector for span in spans}
    assert {(one.method, one.reads_question) for one in selectors} == {(method, name != "unasked")}
    assert [len(span.experiment.task.train_files) for span in spans] == [1, 2, 3, 1]  # the last of `train_*.jsonl`
