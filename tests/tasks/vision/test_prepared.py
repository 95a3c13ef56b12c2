"""Images are prepared as transformers' processors with Pillow do, whose results `fixtures/images/make.py` wrote."""

import pathlib

import numpy as np
import pytest

from core.checkpoints import image_processor
from core.files import paths
from tasks.vision import images, prepared

HERE = pathlib.Path(__file__).parents[2] / "models" / "fixtures" / "images"
PREPARED = np.load(HERE / "prepared.npz")


def processor_of(name):
    return image_processor.read(paths.resolve(HERE / name), "")  # these files name their type


@pytest.mark.parametrize("case", [name for name in PREPARED.files if "split" not in name])
def test_pixels_equal_those_of_transformers(case):
    name, shape = case.split("/")
    height, width = map(int, shape.split("x"))
    image = np.random.default_rng(1000 * height + width).integers(0, 256, (height, width, 3), dtype=np.uint8)
    found = prepared.prepare(images.as_file(image)[0], processor_of(name))
    np.testing.assert_array_equal(found.pixels, PREPARED[case])
    if f"{case}/split" in PREPARED:
        assert [found.rows, found.columns] == PREPARED[f"{case}/split"].tolist()


@pytest.mark.parametrize("name", ["llava", "llava_siglip", "smolvlm", "idefics3"])
def test_normalized_pixels_equal_those_of_transformers(name):
    processor = processor_of(name)
    found = prepared.prepare((HERE / "photo.png").read_bytes(), processor).pixels
    values = (found / 255 - np.asarray(processor.mean)) / np.asarray(processor.std)
    want = np.load(HERE / name / "reference.npz")["pixels"].transpose(0, 2, 3, 1)
    np.testing.assert_allclose(values, want, atol=1e-6)


def test_a_very_long_image_stays_within_the_largest_edge():
    processor = image_processor.ImageProcessor(longest_edge=5000, frame=2048, splits=True, resample=0)
    found = prepared.prepare(images.as_file(np.zeros((3, 60, 3), np.uint8))[0], processor)
    assert (found.rows, found.columns, found.pixels.shape) == (1, 2, (3, 2048, 2048, 3))


def test_what_is_no_image_is_an_error():
    with pytest.raises(images.UnreadableImage):
        prepared.prepare(b"no image", image_processor.ImageProcessor(size=(4, 4)))
