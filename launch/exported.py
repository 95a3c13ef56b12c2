"""What `launch/run export` writes of a model: `launch.cli.export` for decoders, modules that set EXPORTS for others."""

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from core.checkpoints.tensor_map import Source

Read = Callable[[str, int | None], np.ndarray]  # of a parameter by its path, and a layer or None for all layers


class Exported(NamedTuple):
    """The files of an exported model.

    Attributes:
      kind: its `model_type`.
      file: the name of the file with `config`.
      config: the content of this file.
      sources: the tensors of each parameter, by path; parameters without an entry are not written.
      reads: returns what reads the parameters that are written, given what reads those of the run.
      others: returns further tensors, by name, with floating-point numbers in the given dtype.
      files: further files, by name.
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
