"""Checks that the newest checkpoint fits a model and optimizer, from its metadata alone."""

from __future__ import annotations

from typing import Any

from core import paths
from core.checkpoints import description, leaves, steps


def newest(directory: str, abstract_state: Any) -> tuple[int | None, list[str]]:
    """Returns the newest complete step (None if there is none) and one line for each leaf that does not fit.

    Args:
      directory: folder of checkpoints, local or gs://.
      abstract_state: the state that a restore would request.

    Raises:
      DamagedError: the metadata differs from what was saved.
      Exception: of many types, if the file cannot be read.
    """
    folder = paths.resolve(directory)
    if not (there := steps.complete(folder)):
        return None, []
    content = description.read(folder / str(there[-1])).content
    return there[-1], leaves.differences({name: kind for name, (kind, _) in content.items()}, abstract_state)
