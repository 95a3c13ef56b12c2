"""Loads the configuration of a command from the experiment file, the environment variables and the command line.

    file and its includes  <  TPU_MESH_CONFIG with TPU_AXIS_NAMES  <  --gin  <  the SLICE argument

Each source overrides those to its left. The mesh in the environment variables is converted to gin bindings, so it is
checked, printed, saved in the run's config.gin and compared between hosts like all others.
"""

import dataclasses
from collections.abc import Sequence

from core import paths
from core.errors import UserError
from launch import environment
from launch.config import ConfigError, LoadedConfig, loader, sources

_SOURCE = "TPU_MESH_CONFIG"
_HEADER = "from __gin__ import dynamic_registration\nfrom parallel import strategies\n"


def load(path: str, *, bindings: Sequence[str] = (), slice_name: str | None = None) -> LoadedConfig:
    """Loads an experiment file, local or gs://; the environment's mesh overrides it, and `bindings` override both.

    Includes of a file in a bucket are searched for in the workspace, then in the working directory.

    Raises:
      UserError: an environment variable is malformed, or the configuration has mistakes; lists all of them.
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
    """Reads the text of a file in a bucket."""
    file = paths.resolve(path)
    if not file.exists():
        raise UserError(f"there is no file {path!r}; give the experiment's address, such as gs://BUCKET/first.gin")
    try:
        return file.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(path, [sources.unreadable(path, error)]) from error
