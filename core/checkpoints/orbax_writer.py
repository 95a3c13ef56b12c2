"""Writes steps in the background with Orbax, whose experimental V1 only this module imports."""

import asyncio
import functools
import itertools
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from core.files import paths  # isort: skip (it decides how etils reaches buckets, before orbax imports it)
import orbax.checkpoint.experimental.v1 as ocp

from core.checkpoints import steps

_NEVER_SECONDS = 10**6  # disables Orbax's own timeout; `writing.Writing` enforces the limit
_numbers = itertools.count()


class _Files:
    """Files for this host to write, by name; all hosts construct these in the same order."""

    def __init__(self, content: Mapping[str, bytes], fail: Callable[[BaseException], None]):
        self.content, self.fail, self.number = content, fail, next(_numbers)


class _FilesHandler(ocp.handlers.CheckpointableHandler):
    def is_handleable(self, checkpointable: Any) -> bool:
        return isinstance(checkpointable, _Files)

    async def save(self, directory: Any, checkpointable: _Files) -> Coroutine[Any, Any, None]:
        """Returns the coroutine that Orbax awaits in the background; the folder exists only then."""
        return self._write(directory, checkpointable)

    async def _write(self, directory: Any, files: _Files) -> None:
        folder = await directory.await_creation()
        try:
            await asyncio.to_thread(_write_files, folder, files.content)
        except Exception as error:  # Orbax raises it when all parts have ended, for which it may wait for other hosts
            files.fail(error)
            raise
        # Host 0 makes the step complete as soon as its own parts are written.
        await ocp.multihost.sync_global_processes("files", operation_id=str(files.number), timeout=_NEVER_SECONDS)


def _write_files(folder: paths.Path, content: Mapping[str, bytes]) -> None:
    for name, written in content.items():
        (folder / name).write_bytes(written)


@functools.cache
def _context() -> Any:
    context = ocp.Context()
    context.array.saving.use_zarr3 = False  # `arrays` reads zarr 2, as do earlier revisions
    context.asynchronous.timeout_secs = _NEVER_SECONDS
    context.file.skip_sync_file_validations = True  # `store` has looked
    registry = ocp.handlers.local_registry()
    registry.add(_FilesHandler)
    context.checkpointables.registry = registry
    return context


def begin(
    folder: paths.Path,
    state: Any,
    *,
    data: Mapping[str, bytes],
    meta: Mapping[str, bytes],
    fail: Callable[[BaseException], None],
) -> Callable[[], None]:
    """Copies a step's arrays off the devices, then writes them in the background.

    The arrays may be donated when this returns. The returned function waits until all hosts have written, and raises an
    error of this host.

    Args:
      state: a pytree of jax.Arrays; None in place of arrays that are left out.
      data, meta: files that this host writes, content by name.
      fail: called with an error in writing these files.
    """
    parts = {steps.STATE_PART: state, steps.STREAMS_PART: _Files(data, fail), steps.PART: _Files(meta, fail)}
    with _context():
        return ocp.save_checkpointables_async(folder, parts).result
