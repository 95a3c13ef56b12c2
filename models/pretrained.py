"""Builds decoders from the folders of published models, and reads their parameters.

model = pretrained.model("gs://models/Llama-3.1-8B")     # from its config.json
folder = pretrained.folder(model, "gs://models/Llama-3.1-8B")
params = folder.load(abstract_params, axes)
"""

from __future__ import annotations

from typing import Any

from core import paths
from models import families
from models.transformer import Transformer


def model(folder: str, **changes: Any) -> Transformer:
    """Returns the decoder that the `config.json` of a folder describes, with fields replaced by `changes`.

    Args:
      folder: local, gs:// or hf://OWNER/NAME.
      **changes: fields of `Transformer`, such as `remat`.

    Raises:
      UserError: there is no such file, or it describes a model that the decoder cannot express.
    """
    found = paths.fetched(folder, paths.SMALL_FILES)
    fields = families.fields(families.read_config(found), where=str(found / families.CONFIG))
    return Transformer(**{**fields, **changes})
