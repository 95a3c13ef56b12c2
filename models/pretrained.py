"""Builds decoders from the folders of published models, and reads their parameters.

model = pretrained.model("gs://models/Llama-3.1-8B")     # from its config.json
folder = pretrained.folder(model, "gs://models/Llama-3.1-8B")
params = folder.load(abstract_params, axes)
"""

from __future__ import annotations

import json
from typing import Any

from core import paths
from core.errors import UserError
from models import families
from models.transformer import Transformer

CONFIG = "config.json"


def model(folder: str, **changes: Any) -> Transformer:
    """Returns the decoder that the `config.json` of a folder describes, with fields replaced by `changes`.

    Args:
      folder: local, gs:// or hf://OWNER/NAME.
      **changes: fields of `Transformer`, such as `remat`.

    Raises:
      UserError: there is no such file, or it describes a model that the decoder cannot express.
    """
    return Transformer(**{**families.fields(read_config(paths.fetched(folder, paths.SMALL_FILES))), **changes})


def read_config(folder: paths.Path) -> dict[str, Any]:
    """Reads the `config.json` of a folder.

    Raises:
      UserError: it is missing or malformed.
    """
    if not (folder / CONFIG).exists():
        raise UserError(
            f"{folder} has no {CONFIG}: expected the folder of a published model, with {CONFIG} and *.safetensors"
        )
    try:
        return json.loads((folder / CONFIG).read_text())
    except ValueError as error:
        raise UserError(f"{folder / CONFIG}: malformed JSON ({error})") from error
