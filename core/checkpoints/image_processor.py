"""Reads how the processor of a published model prepares images.

    resize -> cut out the center, or split into frames -> pixel * rescale_factor -> (value - mean) / std

The host does the first two steps, with uint8; a model does the others as (pixel / 255 - mean) / std.
"""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from core.checkpoints import published_files
from core.errors import UserError
from core.files import paths

FILES = (published_files.PROCESSOR, published_files.PREPROCESSOR)  # in the order in which transformers reads them
CLIP_COLORS = {"image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711]}
_HALF = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
_ALL = {"do_resize": True, "do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True, "resample": 3}
_SQUARE = {"height": 224, "width": 224}
_CLIP = {**_ALL, **CLIP_COLORS, "size": {"shortest_edge": 224}, "crop_size": _SQUARE, "do_center_crop": True}
_SIGLIP = {**_ALL, **_HALF, "size": _SQUARE, "crop_size": None, "do_center_crop": False}
_SPLIT = {"do_image_splitting": True, "size": {"longest_edge": 4 * 364}, "max_image_size": {"longest_edge": 364}}
# The values that transformers gives absent keys, by `image_processor_type`.
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "CLIPImageProcessor": _CLIP,
    "LlavaImageProcessor": {**_CLIP, "do_pad": False},
    "SiglipImageProcessor": _SIGLIP,
    "Idefics3ImageProcessor": {**_ALL, **_HALF, **_SPLIT, "resample": 1},
    "SmolVLMImageProcessor": {**_ALL, **_HALF, **_SPLIT, "resample": 1},
}
# Keys that change no pixel of an image in three colors: who reads the file, how it computes, and what it returns.
_WITHOUT_EFFECT = {
    *("image_processor_type", "feature_extractor_type", "processor_class", "auto_map", "do_convert_rgb", "data_format"),
    *("input_data_format", "return_tensors", "device", "disable_grouping", "_valid_processor_keys"),
    *("return_row_col_info", "video_sampling"),
}
_PAD = "do_pad"  # frames of Idefics3 have one size, so that nothing is padded
_RESAMPLES = range(6)  # of Pillow


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageProcessor:
    """How the processor of a published model prepares an image; lengths are in pixels.

    Attributes:
      size: rows and columns after resizing. One of `size`, `shortest_edge` and `longest_edge` is given.
      shortest_edge, longest_edge: length of this edge after resizing; the proportions are kept.
      crop: rows and columns cut out of the center; None: nothing is cut off.
      frame: edge of the square frames; None: the processor has none.
      splits: whether a larger image is split into frames; otherwise it is resized to one.
      resample: Pillow's number of the filter, 0 to 5.
      mean, std: one number per color.
    """

    size: tuple[int, int] | None = None
    shortest_edge: int | None = None
    longest_edge: int | None = None
    crop: tuple[int, int] | None = None
    frame: int | None = None
    splits: bool = False
    resample: int = 3
    mean: tuple[float, ...] = (0.0, 0.0, 0.0)
    std: tuple[float, ...] = (1.0, 1.0, 1.0)

    @property
    def prepared_size(self) -> tuple[int, int] | None:
        """Rows and columns of every prepared image, or of every frame if images are split; None if they vary."""
        if self.frame is not None:
            return self.frame, self.frame
        return self.crop or self.size


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageInput:
    """How a published model reads images.

    Attributes:
      folder: the folder of the model, as it was given.
      image_size: pixels along a side of a prepared image or frame.
      image_tokens: number of tokens for such an image or frame.
      has_frames: whether the text has a marker before each frame.
    """

    folder: str
    processor: ImageProcessor
    image_size: int
    image_tokens: int
    token_id: int
    has_frames: bool


def read(folder: paths.Path, usual: str) -> ImageProcessor:
    """Reads how the processor of a published model prepares images.

    `usual` is the `image_processor_type` of a folder that names none. Raises UserError if the settings are missing,
    malformed or not supported.
    """
    found = {name: published_files.read_object(folder / name) for name in FILES if (folder / name).exists()}
    inside = found.get(published_files.PROCESSOR, {}).get("image_processor")
    name, given = published_files.PROCESSOR, inside
    if inside is None:
        name, given = published_files.PREPROCESSOR, found.get(published_files.PREPROCESSOR)
    if given is None:
        raise UserError(
            f"{folder} has no {published_files.PREPROCESSOR}, nor {published_files.PROCESSOR} with image_processor: "
            "one of them is needed, which says how images are prepared; download the whole folder"
        )
    where = f"{folder / name}"
    if not isinstance(given, Mapping):
        raise UserError(f"{where}: image_processor = {json.dumps(given)}: expected an object")
    kind = str(given.get("image_processor_type") or given.get("feature_extractor_type") or usual)
    kind = kind.removesuffix("Fast").removesuffix("Pil").replace("FeatureExtractor", "ImageProcessor")
    if kind not in _DEFAULTS:
        raise UserError(
            f"{where}: image_processor_type = {json.dumps(kind)} is not supported; supported are {', '.join(_DEFAULTS)}"
        )
    defaults = _DEFAULTS[kind]
    values = {**defaults, **{key: value for key, value in given.items() if value is not None}}
    problems = _problems(values, defaults)
    if not problems:
        processor = _of(values)
        edge = processor.shortest_edge or 0
        if processor.crop and any(a < b for a, b in zip(processor.size or (edge, edge), processor.crop, strict=True)):
            problems = [f"size = {json.dumps(values['size'])} is below crop_size = {json.dumps(values['crop_size'])}"]
    if problems:
        raise UserError(f"{where}: {'; '.join(problems)}")
    return processor


def _problems(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> list[str]:
    lines = []
    for key, value in values.items():
        if (key in defaults and key != _PAD) or key in _WITHOUT_EFFECT:
            continue
        if key == _PAD and (_shape(defaults) == "frame" or value is False):
            continue
        expected = "expected false" if key == _PAD else "it is not known"
        lines.append(f"{key} = {_shortened(value)} is not supported ({expected})")
    for key in ("do_resize", "do_rescale", "do_normalize", "do_center_crop", "do_image_splitting"):
        if key in values and not isinstance(values[key], bool):
            lines.append(f"{key} = {_shortened(values[key])}: expected true or false")
    if values["do_resize"] is False:
        lines.append("do_resize = false is not supported: the tower reads images of one size (expected true)")
    for key in ("image_mean", "image_std"):
        if not _are_colors(values[key], positive=key == "image_std"):
            lines.append(f"{key} = {_shortened(values[key])}: expected three numbers")
    if not _is_number(values["rescale_factor"]) or values["rescale_factor"] <= 0:
        lines.append(f"rescale_factor = {_shortened(values['rescale_factor'])}: expected a number above 0")
    if values["resample"] not in _RESAMPLES or isinstance(values["resample"], bool):
        lines.append(f"resample = {_shortened(values['resample'])}: expected a filter of Pillow, 0 to 5")
    shapes = {"size": _shape(defaults)} | ({"crop_size": "square"} if values.get("do_center_crop") else {})
    shapes |= {"max_image_size": "frame"} if "max_image_size" in values else {}
    for key, shape in shapes.items():
        if _edges(values[key], shape) is None:
            lines.append(f"{key} = {_shortened(values[key])}: expected {_EXPECTED[shape]}")
    return lines


_EXPECTED = {
    "shortest": "a whole number, shortest_edge, or height and width",
    "square": "a whole number, or height and width",
    "frame": "longest_edge",
}


def _shape(values: Mapping[str, Any]) -> str:
    return "frame" if "max_image_size" in values else "shortest"


def _edges(value: Any, shape: str) -> dict[str, int] | None:
    if isinstance(value, int) and not isinstance(value, bool) and shape != "frame":
        value = {"shortest_edge": value} if shape == "shortest" else {"height": value, "width": value}
    if not isinstance(value, Mapping) or not all(type(edge) is int and 0 < edge < 2**15 for edge in value.values()):
        return None
    allowed = [{"longest_edge"}] if shape == "frame" else [{"height", "width"}]
    allowed += [{"shortest_edge"}] if shape == "shortest" else []
    return dict(value) if set(value) in allowed else None


def _of(values: Mapping[str, Any]) -> ImageProcessor:
    size = _edges(values["size"], _shape(values))
    assert size is not None
    fields: dict[str, Any] = {edge: length for edge, length in size.items() if edge.endswith("_edge")}
    if "height" in size:
        fields["size"] = size["height"], size["width"]
    if values.get("do_center_crop"):
        crop = _edges(values["crop_size"], "square")
        assert crop is not None
        fields["crop"] = crop["height"], crop["width"]
    if "max_image_size" in values:
        fields |= {"frame": values["max_image_size"]["longest_edge"], "splits": values["do_image_splitting"]}
    factor = 255.0 * (values["rescale_factor"] if values["do_rescale"] else 1)
    factor = 1.0 if abs(factor - 1) < 1e-12 else factor
    mean, std = ([0.0] * 3, [1.0] * 3) if not values["do_normalize"] else (values["image_mean"], values["image_std"])
    # pixel * r is (pixel / 255) * (255 r)
    fields |= {"mean": tuple(m / factor for m in mean), "std": tuple(s / factor for s in std)}
    return ImageProcessor(resample=values["resample"], **fields)


def _are_colors(value: Any, *, positive: bool) -> bool:
    return (
        isinstance(value, list)
        and len(value) == 3
        and all(_is_number(each) and (each > 0 or not positive) for each in value)
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e9


def _shortened(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
