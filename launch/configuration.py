"""The configuration that a command works with: the experiment file, the environment's mesh, and the command line.

    file and what it includes  <  TPU_MESH_CONFIG with TPU_AXIS_NAMES  <  --gin  <  the SLICE argument

The one idea: what the environment says becomes gin text like any other, so it is checked, noted, kept in the run's
config.gin, and compared between hosts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from launch import environment, gin_config
from launch.gin_config import LoadedConfig

_SOURCE = "TPU_MESH_CONFIG"
_HEADER = "from __gin__ import dynamic_registration\nfrom parallel import strategies\n"


def load(path: str, *, bindings: Sequence[str] = (), slice_name: str | None = None) -> LoadedConfig:
    """As `gin_config.load`, with what the environment says of the mesh between the file and `bindings`.

    Raises:
      ValueError: a variable that makes no sense; every mistake in the configuration.
    """
    mesh = environment.mesh_bindings()
    if not mesh:
        return gin_config.load(path, bindings=bindings, slice_name=slice_name)
    between = {_SOURCE: _HEADER + "\n".join(mesh) + "\n"}
    config = gin_config.load(path, bindings=bindings, slice_name=slice_name, between=between)
    note = (
        f"TPU_MESH_CONFIG={environment.read('TPU_MESH_CONFIG')} TPU_AXIS_NAMES={environment.read('TPU_AXIS_NAMES')} "
        f"bind {'; '.join(mesh)}, after the file and before --gin"
    )
    return dataclasses.replace(config, notes=(note, *config.notes))
