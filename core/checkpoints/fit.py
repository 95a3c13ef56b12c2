"""Whether the newest checkpoint fits a model and optimizer, by its description alone: no array is read."""

from __future__ import annotations

from typing import Any

from core import paths  # isort: skip (paths decides how etils reaches buckets, before orbax imports it)
import orbax.checkpoint as ocp

from core.checkpoints import leaves, steps


def newest(directory: str, abstract_state: Any) -> tuple[int | None, list[str]]:
    """The newest complete step, None where there is none, and a line for each leaf that is not as expected.

    Args:
      directory: of checkpoints, local or gs://.
      abstract_state: what a restore would ask for.
    """
    folder = paths.resolve(directory)
    if not (there := steps.complete(folder)):
        return None, []
    content = ocp.JsonCheckpointHandler().restore(folder / str(there[-1]) / "meta")["content"]
    return there[-1], leaves.differences({name: kind for name, (kind, _) in content.items()}, abstract_state)
