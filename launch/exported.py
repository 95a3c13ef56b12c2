"""Describes an exported model, of which `launch/run export` writes the files.

`launch.cli.export` makes the description for decoders; modules that set EXPORTS make it for other models.
"""

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from core.checkpoints.tensor_map import Source

Read = Callable[[str, int | None], np.ndarray]  # reads a parameter, given its path and a layer (None: all layers)


class Exported(NamedTuple):
    """The files of an exported model.

    Attributes:
      kind: the `model_type` of the exported model.
      file: the name of the JSON file that contains `config`.
      config: the configuration of the exported model.
      sources: by path of a parameter, the tensors that are written for it; parameters without an entry are not written.
      reads: given the function that reads parameters of the run, returns the function that reads those to write.
      others: given the dtype of the export, yields name and values of further tensors; this is the dtype of those with
        floating-point numbers.
      files: the text of further files, by name.
      note: a line about what is not written; "" if there is none.
    """

    kind: str
    file: str
    config: Mapping[str, Any]
    sources: Mapping[str, Source]
    reads: Callable[[Read], Read] = lambda read: read
    others: Callable[[np.dtype], Iterator[tuple[str, np.ndarray]]] = lambda dtype: iter(())
    files: Mapping[str, str] = MappingProxyType({})
    note: str = ""
