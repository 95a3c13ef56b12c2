"""Pictures of chosen patches: which are pale, and how panels are arranged."""

import io

import numpy as np
from PIL import Image

from launch import __main__ as command
from launch.experiments import pictures
from tasks.vision.question_lines import Question


def test_patches_that_were_not_chosen_are_pale():
    image = np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    panel = pictures.Panel(image, np.array([True, False, False, True]), ["what is it?", "a dog (a dog)"])
    found = pictures.shaded(panel)
    assert (found[:4, :4] == image[:4, :4]).all()
    assert (found[4:, 4:] == image[4:, 4:]).all()
    np.testing.assert_array_equal(found[:4, 4:], (image[:4, 4:] * 0.25 + 191.25).astype(np.uint8))
    page = np.asarray(Image.open(io.BytesIO(pictures.sheet([[panel, panel], [panel]]))))
    assert page.shape == (12 + 2 * (192 + 64), 12 + 2 * (192 + 12), 3)
    assert (page[12 : 12 + 96 : 24, 12 : 12 + 96 : 24] == image[:4, :4]).all()
    assert (page[12 + 192 + 64 : 12 + 2 * 192 + 64, 12 + 192 + 12 :] == 255).all()  # no third panel


def test_questions_about_one_image_are_of_different_kinds():
    kinds = ("yes_no", "yes_no", "yes_no", "yes_no", "color", "shape")
    questions = [Question("", f"{n}.png", f"{n} {i}", "a", kind) for n in range(9) for i, kind in enumerate(kinds)]
    groups = list(pictures.same_image(questions))
    assert [len(group) for group in groups] == [4] * 6
    assert [question.question for question in groups[1]] == ["1 0", "1 4", "1 5", "1 1"]


def test_questions_about_one_image_are_about_different_cells():
    cells = ((0, 1), (0,), (2,), (0, 1), (1, 0), (3,))
    questions = [Question("", "a.png", str(i), "a", "x", grid=2, cells=own) for i, own in enumerate(cells)]
    assert [question.question for question in next(pictures.same_image(questions))] == ["0", "2", "4", "5"]


def test_a_run_without_images_has_no_pictures(tmp_path, capsys):
    from launch.config import loader

    (tmp_path / "config.gin").write_text(loader.load("gin/quickstart.gin").text)
    assert command.main(["evaluate", str(tmp_path), "--pictures"]) != 0
    assert "is a run of Transformer on TextTask; expected a VisionLanguageModel" in capsys.readouterr().err
