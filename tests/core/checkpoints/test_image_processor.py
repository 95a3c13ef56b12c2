"""`preprocessor_config.json` and `processor_config.json`: every key is read, without effect, or an error."""

import json

import numpy as np
import pytest

from core.checkpoints import image_processor
from core.checkpoints.image_processor import ImageProcessor
from core.errors import UserError
from core.files import paths

CLIP = {"image_processor_type": "CLIPImageProcessor"}
SPLIT = {"image_processor_type": "SmolVLMImageProcessor"}


def read(tmp_path, given, usual="LlavaImageProcessor", name="preprocessor_config.json"):
    (tmp_path / name).write_text(json.dumps(given))
    return image_processor.read(paths.resolve(tmp_path), usual)


@pytest.mark.parametrize(
    ("given", "fields"),
    [
        (CLIP, {"shortest_edge": 224, "crop": (224, 224)}),
        ({}, {"shortest_edge": 224, "crop": (224, 224)}),
        ({"feature_extractor_type": "CLIPFeatureExtractor", "size": 30, "crop_size": 20}, {"crop": (20, 20)}),
        ({**CLIP, "do_center_crop": False, "size": {"height": 9, "width": 9}}, {"size": (9, 9), "crop": None}),
        ({"image_processor_type": "SiglipImageProcessorFast", "resample": 2}, {"size": (224, 224), "resample": 2}),
        ({**CLIP, "do_pad": None, "do_convert_rgb": False}, {"crop": (224, 224)}),
        (SPLIT, {"longest_edge": 1456, "frame": 364, "splits": True, "resample": 1}),
        ({**SPLIT, "do_image_splitting": False, "do_pad": True}, {"splits": False}),
    ],
)
def test_keys_are_read(tmp_path, given, fields):
    found = read(tmp_path, given)
    assert {name: getattr(found, name) for name in fields} == fields


@pytest.mark.parametrize(
    "given",
    [
        {**CLIP, "rescale_factor": 1 / 127.5, "image_mean": [0.1, 0.2, 0.3], "image_std": [1.0, 2.0, 3.0]},
        {**CLIP, "do_rescale": False, "image_mean": [9.0, 8.0, 7.0]},
        {**CLIP, "do_normalize": False},
    ],
)
def test_scales_and_shifts_are_one(tmp_path, given):
    found, pixel = read(tmp_path, given), np.arange(0.0, 256, 15)[:, None]
    factor = given.get("rescale_factor", 1 / 255) if given.get("do_rescale", True) else 1
    want = pixel * factor * np.ones(3)
    if given.get("do_normalize", True):
        want = (want - given["image_mean"]) / given.get("image_std", image_processor.CLIP_COLORS["image_std"])
    np.testing.assert_allclose((pixel / 255 - np.asarray(found.mean)) / np.asarray(found.std), want)


def test_the_processor_of_newer_folders_is_read_first(tmp_path):
    inside = {"image_processor": {**CLIP, "size": {"shortest_edge": 50}, "crop_size": 40}, "patch_size": 4}
    read(tmp_path, {**CLIP, "crop_size": 30})
    assert read(tmp_path, inside, name="processor_config.json").crop == (40, 40)
    assert read(tmp_path, {"patch_size": 4}, name="processor_config.json").crop == (30, 30)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({**CLIP, "do_pad": True}, "do_pad = true is not supported (expected false)"),
        ({**CLIP, "do_resize": False}, "do_resize = false is not supported"),
        ({**CLIP, "do_resize": "no"}, 'do_resize = "no": expected true or false'),
        ({**CLIP, "size": {"longest_edge": 9}}, 'size = {"longest_edge": 9}: expected a whole number, shortest_edge'),
        ({**SPLIT, "size": 9}, "size = 9: expected longest_edge"),
        ({**CLIP, "crop_size": {"height": 0, "width": 9}}, "expected a whole number, or height and width"),
        ({**CLIP, "size": 20, "crop_size": 30}, "size = 20 is below crop_size = 30"),
        ({**CLIP, "size": {"height": 30, "width": 20}, "crop_size": 25}, '"width": 20} is below crop_size = 25'),
        ({**CLIP, "resample": 9}, "resample = 9: expected a filter of Pillow"),
        ({**CLIP, "image_mean": [0.5]}, "image_mean = [0.5]: expected three numbers"),
        ({**CLIP, "image_std": [0.5, 0, 1]}, "image_std = [0.5, 0, 1]: expected three numbers"),
        ({**CLIP, "rescale_factor": 0}, "rescale_factor = 0: expected a number above 0"),
        ({**CLIP, "image_grid_pinpoints": [[1, 2]]}, "image_grid_pinpoints = [[1, 2]] is not supported"),
        ({"image_processor_type": "ViTImageProcessor"}, 'image_processor_type = "ViTImageProcessor" is not supported'),
    ],
)
def test_other_values_are_refused_by_name(tmp_path, given, says):
    with pytest.raises(UserError) as caught:
        read(tmp_path, given)
    assert says in str(caught.value)
    assert "preprocessor_config.json: " in str(caught.value)


def test_a_folder_without_both_files_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"has no preprocessor_config\.json, nor processor_config\.json"):
        image_processor.read(paths.resolve(tmp_path), "LlavaImageProcessor")


def test_images_of_one_size_are_known():
    sizes = [ImageProcessor(size=(4, 5)), ImageProcessor(shortest_edge=9, crop=(3, 3)), ImageProcessor(frame=7)]
    assert [each.prepared_size for each in [*sizes, ImageProcessor(shortest_edge=9)]] == [(4, 5), (3, 3), (7, 7), None]
