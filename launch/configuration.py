"""The configuration that a command works with: the experiment file, the environment's mesh, and the command line.

    file and what it includes  <  TPU_MESH_CONFIG with TPU_AXIS_NAMES  <  --gin  <  the SLICE argument

The mesh of the environment becomes gin text like any other, so it is checked, noted, kept in the run's config.gin, and
compared between hosts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from core import paths
from core.errors import UserError
from launch import environment
from launch.config import ConfigError, LoadedConfig, loader, sources

_SOURCE = "TPU_MESH_CONFIG"
_HEADER = "from __gin__ import dynamic_registration\nfrom parallel import strategies\n"


def load(path: str, *, bindings: Sequence[str] = (), slice_name: str | None = None) -> LoadedConfig:
    """Loads an experiment file, with the mesh that the environment asks for between the file and `bindings`.

    Args:
      path: local, or gs://; the includes of a file in a bucket are looked for in the workspace, then in the working
        directory.
      bindings: of the command line.
      slice_name: wins over all.

    Raises:
      UserError: a variable that makes no sense; every mistake in the configuration.
    """
    text = _content(path) if paths.is_remote(path) else None
    mesh = environment.mesh_bindings()
    between = {_SOURCE: _HEADER + "\n".join(mesh) + "\n"} if mesh else {}
    config = loader.load(path, text=text, bindings=bindings, slice_name=slice_name, between=between)
    if not mesh:
        return config
    note = (
        f"TPU_MESH_CONFIG={environment.read('TPU_MESH_CONFIG')} TPU_AXIS_NAMES={environment.read('TPU_AXIS_NAMES')} "
        f"bind {'; '.join(mesh)}, after the file and before --gin"
    )
    return dataclasses.replace(config, notes=(note, *config.notes))


def _content(path: str) -> str:
    """The text of a file in a bucket."""
    file = paths.resolve(path)
    if not file.exists():
        raise UserError(f"there is no file {path!r}; give the experiment's address, such as gs://BUCKET/first.gin")
    try:
        return file.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(path, [sources.unreadable(path, error)]) from error
