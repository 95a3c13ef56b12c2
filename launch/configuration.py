"""The configuration that a command works with: the experiment file, the environment's mesh, and the command line.

    file and what it includes  <  TPU_MESH_CONFIG with TPU_AXIS_NAMES  <  --gin  <  the SLICE argument

The one idea: what the environment says becomes gin text like any other, so it is checked, noted, kept in the run's
config.gin, and compared between hosts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import tempfile
from collections.abc import Iterator, Sequence

from core import paths
from core.errors import UserError
from launch import environment
from launch.config import LoadedConfig, loader

_SOURCE = "TPU_MESH_CONFIG"
_HEADER = "from __gin__ import dynamic_registration\nfrom parallel import strategies\n"


def load(path: str, *, bindings: Sequence[str] = (), slice_name: str | None = None) -> LoadedConfig:
    """As `loader.load`, with what the environment says of the mesh between the file and `bindings`.

    Args:
      path: local, or gs://; what a file in a bucket includes is looked for in the workspace.
      bindings: of the command line.
      slice_name: wins over all.

    Raises:
      ValueError: a variable that makes no sense; every mistake in the configuration.
    """
    if not paths.is_remote(path):
        return _load(path, bindings=bindings, slice_name=slice_name)
    with _copied(path) as copy:
        try:
            config = _load(copy, bindings=bindings, slice_name=slice_name)
        except ValueError as error:
            raise UserError(str(error).replace(copy, path)) from error
    return dataclasses.replace(config, experiment=path)


@contextlib.contextmanager
def _copied(path: str) -> Iterator[str]:
    """A file of a bucket on this disk: gin reads from disks."""
    file = paths.resolve(path)
    if not file.exists():
        raise UserError(f"there is no file {path!r}; give the experiment's address, such as gs://BUCKET/first.gin")
    with tempfile.TemporaryDirectory(prefix="renga-config-") as folder:
        copy = pathlib.Path(folder).resolve() / file.name
        copy.write_bytes(file.read_bytes())
        yield str(copy)


def _load(path: str, *, bindings: Sequence[str], slice_name: str | None) -> LoadedConfig:
    mesh = environment.mesh_bindings()
    if not mesh:
        return loader.load(path, bindings=bindings, slice_name=slice_name)
    between = {_SOURCE: _HEADER + "\n".join(mesh) + "\n"}
    config = loader.load(path, bindings=bindings, slice_name=slice_name, between=between)
    note = (
        f"TPU_MESH_CONFIG={environment.read('TPU_MESH_CONFIG')} TPU_AXIS_NAMES={environment.read('TPU_AXIS_NAMES')} "
        f"bind {'; '.join(mesh)}, after the file and before --gin"
    )
    return dataclasses.replace(config, notes=(note, *config.notes))
