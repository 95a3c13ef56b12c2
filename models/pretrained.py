"""Builds decoders from the folders of published models.

model = pretrained.model("gs://models/Llama-3.1-8B")     # from its config.json
folder = model.published("gs://models/Llama-3.1-8B")     # its parameters
params = folder.load(abstract_params, specs)
"""

from typing import Any

from core.checkpoints import published_files
from core.errors import check_fields
from models.decoder.published import families
from models.decoder.transformer import Transformer


def model(folder: str, **changes: Any) -> Transformer:
    """Returns the decoder that the `config.json` of a folder describes, with fields replaced by `changes`.

    `folder` is local, gs:// or hf://OWNER/NAME.

    Raises:
      UserError: the file cannot be read, the decoder cannot express the model, or a field is unknown.
    """
    check_fields(changes, Transformer, where="pretrained.model")
    found = published_files.small_files(folder)
    fields = families.fields(families.read_config(found), where=str(found / published_files.CONFIG))
    return Transformer(**{**fields, **changes})
