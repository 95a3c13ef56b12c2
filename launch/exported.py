"""Describes what `launch/run export` writes for a model."""

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
      file: name of the JSON file that contains `config`.
      config: configuration of the exported model.
      sources: the tensors to write, by parameter path; other parameters are not written.
      reads: given the function that reads the run's parameters, returns the one that reads those to write.
      others: given the dtype of floating-point values, yields name and values of further tensors.
      files: text of further files, by name.
      note: a line about what is not written; "": nothing to say.
    """

    kind: str
    file: str
    config: Mapping[str, Any]
    sources: Mapping[str, Source]
    reads: Callable[[Read], Read] = lambda read: read
    others: Callable[[np.dtype], Iterator[tuple[str, np.ndarray]]] = lambda dtype: iter(())
    files: Mapping[str, str] = MappingProxyType({})
    note: str = ""
