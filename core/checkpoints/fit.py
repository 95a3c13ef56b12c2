"""Whether the newest checkpoint fits a model and optimizer, by its description alone: no array is read."""

from __future__ import annotations

from typing import Any

from core import paths
from core.checkpoints import description, leaves, steps


def newest(directory: str, abstract_state: Any) -> tuple[int | None, list[str]]:
    """The newest complete step, None where there is none, and a line for each leaf that is not as expected.

    Args:
      directory: of checkpoints, local or gs://.
      abstract_state: what a restore would ask for.

    Raises:
      DamagedError: its description is not what was saved; and whatever a file that cannot be read makes.
    """
    folder = paths.resolve(directory)
    if not (there := steps.complete(folder)):
        return None, []
    content = description.read(folder / str(there[-1])).content
    return there[-1], leaves.differences({name: kind for name, (kind, _) in content.items()}, abstract_state)
