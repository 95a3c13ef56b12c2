"""Builds models of images and text from the folders of published models.

model = pretrained.model("hf://llava-hf/llava-1.5-7b-hf")
folder = model.published("hf://llava-hf/llava-1.5-7b-hf")    # its parameters
images = pretrained.image_input("hf://llava-hf/llava-1.5-7b-hf")    # how it reads images
"""

import dataclasses
from typing import Any

from core.checkpoints import image_processor, published_files
from core.checkpoints.image_processor import ImageInput, ImageProcessor
from core.errors import UserError, check_fields
from models.decoder.published import families
from models.decoder.transformer import Transformer
from models.vision.model import VisionLanguageModel
from models.vision.published import FAMILIES, fields, image_token
from models.vision.tower import VisionTower


def model(folder: str, *, dtype: str = "bfloat16", **changes: Any) -> VisionLanguageModel:
    """Returns the model that a folder describes.

    Args:
      folder: local, gs:// or hf://OWNER/NAME.
      dtype: compute dtype, `bfloat16` or `float32`.
      **changes: fields of `VisionLanguageModel` or of its decoder to replace.

    Raises:
      UserError: the folder is malformed or not supported, or a field is unknown.
    """
    files = published_files.small_files(folder)
    config, where = families.read_config(files), str(files / published_files.CONFIG)
    found = fields(config, where=where)
    processor = image_processor.read(files, FAMILIES[config["model_type"]].processor)
    _check_size(processor, found["vision"]["image_size"], where)
    tower = VisionTower(**{**found["vision"], "mean": processor.mean, "std": processor.std})
    check_fields(changes, VisionLanguageModel, Transformer, where="models.vision.pretrained.model")
    own = {field.name for field in dataclasses.fields(VisionLanguageModel)}
    of_decoder = {name: value for name, value in changes.items() if name not in own}
    decoder = Transformer(**{**found["decoder"], "dtype": dtype, **of_decoder})
    of_model = {name: value for name, value in changes.items() if name in own}
    return VisionLanguageModel(**{**found, "vision": tower, "decoder": decoder, **of_model})


def image_input(folder: str) -> ImageInput:
    """Returns how the model of a folder reads images.

    Raises UserError if its files are incomplete, malformed or not supported.
    """
    described = model(folder)
    files = published_files.small_files(folder)
    config = families.read_config(files)
    family, token_id = FAMILIES[config["model_type"]], image_token(config)
    if token_id >= described.decoder.vocab_size:
        raise UserError(
            f"{files / published_files.CONFIG}: the image token has the id {token_id}, and the decoder has "
            f"{described.decoder.vocab_size} ids (vocab_size): download the file again"
        )
    return ImageInput(
        folder=folder,
        processor=image_processor.read(files, family.processor),
        image_size=described.vision.image_size,
        image_tokens=described.image_tokens,
        token_id=token_id,
        has_frames=family.has_frames,
    )


def _check_size(processor: ImageProcessor, size: int, where: str) -> None:
    if processor.prepared_size != (size, size):
        prepared = "x".join(map(str, processor.prepared_size)) if processor.prepared_size else "several sizes"
        raise UserError(
            f"{where}: vision_config.image_size = {size}, and the image processor of the folder prepares images of "
            f"{prepared}; expected {size}x{size}"
        )
