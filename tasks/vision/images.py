"""Decodes image files, and encodes arrays as image files, on the host."""

import io
from collections.abc import Mapping
from typing import Any

import numpy as np

from core.files import paths


class UnreadableImage(ValueError):
    """Raised for content that cannot be read as an image."""


def decode(content: bytes, *, size: int) -> np.ndarray:
    """Decodes an image to [size, size, 3] uint8, without keeping its aspect ratio; raises UnreadableImage."""
    from PIL import Image

    image = opened(content)
    if image.size != (size, size):
        image = image.resize((size, size), Image.Resampling.BICUBIC)
    return np.array(image, np.uint8)


def opened(content: bytes) -> Any:
    """Returns the image in the content of a file as RGB, transparent pixels on white; raises UnreadableImage."""
    from PIL import Image, ImageOps

    try:
        with Image.open(io.BytesIO(content)) as found:
            found.load()
            image = ImageOps.exif_transpose(found)
            if image.has_transparency_data:
                image = image.convert("RGBA")
                white = Image.new("RGBA", image.size, (255, 255, 255, 255))
                image = Image.alpha_composite(white, image)
            if image.mode.startswith("I;16"):  # a plain conversion would clip 16 bits at 255
                image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
            if image.mode in ("I", "F"):  # a conversion would clip them at 255, without a word
                image = _of_wide_grays(np.asarray(image))
            return image.convert("RGB")
    except Image.UnidentifiedImageError as error:  # it names the object that was read
        raise UnreadableImage("Pillow knows no such format") from error
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:  # of broken files of all formats
        raise UnreadableImage(str(error)) from error


def _of_wide_grays(values: np.ndarray) -> Any:
    """Returns an image of 8 bits; gray values above 255 make it one of 16 bits. Raises UnreadableImage for others."""
    from PIL import Image

    if values.dtype.kind == "f" or values.min() < 0 or values.max() >= 2**16:
        raise UnreadableImage("its gray values are not whole numbers of at most 16 bits")
    return Image.fromarray((values >> 8 if values.max() > 255 else values).astype(np.uint8))


def as_file(image: Any) -> tuple[bytes, str]:
    """Returns an image as the content of a file, with the ending for its name; raises UnreadableImage.

    Args:
      image: the content of a file, or its path as text; a mapping with `bytes` or `path`, as in datasets of the
        Hugging Face hub; or a uint8 array, such as [H, W, 3]. A file's content is not changed; an array becomes PNG.
    """
    from PIL import Image

    try:
        value = image.get("bytes") or image.get("path") if isinstance(image, Mapping) else image
        content = paths.resolve(value).read_bytes() if isinstance(value, str) else value
        if isinstance(content, bytes):
            decode(content, size=1)
            with Image.open(io.BytesIO(content)) as found:
                return content, str(found.format).lower()
        pixels = np.asarray(content)
        stream = io.BytesIO()
        Image.fromarray(pixels[..., 0] if pixels.shape[2:] == (1,) else pixels).save(stream, "PNG")
        return stream.getvalue(), "png"
    except UnreadableImage:
        raise
    except (OSError, ValueError, TypeError) as error:
        raise UnreadableImage(str(error)) from error
