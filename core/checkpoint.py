"""Checkpoints: the state, the position in the data and a description, complete or not there at all.

One step is one folder with three parts, written by all hosts together and made visible in one go:

    RUN/checkpoints/100/state   every array, sharded: each host writes its own shards (orbax)
                        data    one file per input stream, written by the host that owns the stream
                        meta    JSON: config text, versions, git revision, seed …

The one idea: nothing in a checkpoint depends on how many hosts or which mesh wrote it. The state is restored into
whatever shardings the reader asks for, and every reader gets the union of all streams.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
import urllib.parse
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from core import distributed, paths  # isort: skip (paths decides how etils reaches buckets, before orbax imports it)
import orbax.checkpoint as ocp

TIMEOUT_SECONDS = 300  # orbax waits 20 minutes for a host that failed to write; the others need not.

REMOVAL_SECONDS = 10.0  # What somebody removes may look complete for so long after its first file is gone.

_COMPLETE_MARK = "_CHECKPOINT_METADATA"
_STREAM_SUFFIX = ".bin"


class Misfit(ValueError):
    """The checkpoint is there, and does not fit what is asked of it."""


class Checkpoints:
    """The checkpoints of one run. Every method is collective: all hosts call it, in the same order."""

    def __init__(self, directory: str, *, keep: int, timeout_seconds: int = TIMEOUT_SECONDS, read_only: bool = False):
        """Opens a folder of checkpoints; makes it, and clears what an interrupted save left, unless `read_only`.

        Args:
          directory: local or gs://, the same for all hosts and shared by them.
          keep: how many of the latest to keep.
          timeout_seconds: how long hosts wait for one another in a save.
          read_only: for a reader beside a running job: makes and removes nothing.

        Raises:
          ValueError: `keep` below 1, or nothing to read.
        """
        if keep < 1:
            raise ValueError(f"checkpoints: keep is {keep}; expected at least 1")
        self._directory = paths.resolve(directory)
        if read_only and not self._directory.exists():
            raise ValueError(f"there are no checkpoints in {self._directory}: no such folder; check run_dir")
        self._saving: int | None = None
        if not read_only and distributed.is_host_zero():
            _set_incomplete_aside(self._directory)
        distributed.barrier("checkpoints/open", timeout_seconds=timeout_seconds)
        self._manager = ocp.CheckpointManager(
            self._directory,
            options=ocp.CheckpointManagerOptions(
                # For a reader what orbax makes of them anyway, warning of each: it neither saves nor removes.
                max_to_keep=None if read_only else keep,
                save_interval_steps=0 if read_only else 1,
                create=not read_only,
                read_only=read_only,
                cleanup_tmp_directories=not read_only,
                async_options=ocp.AsyncOptions(timeout_secs=timeout_seconds),
            ),
            item_handlers={
                "state": ocp.StandardCheckpointHandler(),
                "data": StreamsHandler(),
                "meta": ocp.JsonCheckpointHandler(),
            },
        )

    def save(self, step: int, *, state: Any, data: Mapping[str, bytes], meta: Mapping[str, Any]) -> None:
        """Starts saving; returns once the arrays are copied off the devices, so the caller may donate them.

        Args:
          step: the step that `state` is the result of.
          state: a pytree of jax.Arrays, sharded in any way.
          data: the streams that this host owns, by name; no two hosts give the same name.
          meta: anything JSON; host 0's is kept.

        Raises:
          ValueError: the step is already saved, or a leaf is not a jax.Array.
          RuntimeError: the save before this one failed, or this one could not start.
        """
        _require_arrays(state)
        self.wait()
        if step in self._manager.all_steps():
            raise ValueError(f"step {step} is already saved in {self._directory}; a save never overwrites")
        parts = ocp.args.Composite(
            state=ocp.args.StandardSave(state), data=StreamsSave(dict(data)), meta=ocp.args.JsonSave(dict(meta))
        )
        self._saving = step
        with self._naming_failures():
            self._manager.save(step, args=parts, force=True)

    def latest_step(self) -> int | None:
        """The latest complete step, as host 0 sees it, or None."""
        steps = complete_steps(self._directory) if distributed.is_host_zero() else []
        answer = distributed.from_host_zero(str(steps[-1]) if steps else "")
        return int(answer) if answer else None

    def restore(self, step: int, abstract_state: Any) -> tuple[Any, dict[str, bytes], dict[str, Any]]:
        """The state, the streams of all hosts, and the description, as they were saved.

        Args:
          step: a saved step.
          abstract_state: a tree like the saved one of jax.ShapeDtypeStruct, each with the sharding to restore into.

        Raises:
          ValueError: no such complete step, a leaf without sharding, or a tree, shape or dtype that differs from what
            was saved; names the leaves, before anything is read.
        """
        if step not in (steps := complete_steps(self._directory)):
            raise ValueError(f"no complete checkpoint of step {step} in {self._directory}; there are {steps or 'none'}")
        _require_shardings(abstract_state)
        self._require_same_tree(step, abstract_state)
        parts = ocp.args.Composite(
            state=ocp.args.StandardRestore(abstract_state), data=StreamsRestore(), meta=ocp.args.JsonRestore()
        )
        restored = self._manager.restore(step, args=parts)
        return restored["state"], restored["data"], restored["meta"]

    def restore_if_there(self, step: int, abstract_state: Any) -> tuple[Any, dict[str, bytes], dict[str, Any]] | None:
        """As `restore`; None, on every host, where a running job removed the step before, or while it was read."""
        if not self._is_there(step):
            return None
        restored, error = None, None
        try:
            restored = self.restore(step, abstract_state)
        except Misfit:
            raise
        except Exception as unread:  # of many types, as files vanish under the reader
            error = unread
        said = distributed.all_gather_text("checkpoints/read", f"{type(error).__name__}: {error}" if error else "")
        if not any(said):
            return restored
        if not self._is_there(step, after_seconds=REMOVAL_SECONDS):
            return None
        failed = "; ".join(f"host {host}: {text}" for host, text in enumerate(said) if text)
        raise RuntimeError(f"the checkpoint of step {step} in {self._directory} cannot be read: {failed}") from error

    def _is_there(self, step: int, *, after_seconds: float = 0.0) -> bool:
        """Whether host 0 sees the step complete, still after so many seconds."""
        is_there, end = False, time.monotonic() + after_seconds
        if distributed.is_host_zero():
            while (is_there := step in complete_steps(self._directory)) and time.monotonic() < end:
                time.sleep(0.5)
        return distributed.from_host_zero("there" if is_there else "") == "there"

    def _require_same_tree(self, step: int, abstract_state: Any) -> None:
        saved = self._manager.item_metadata(step)["state"]
        differences = _differences(_leaves(saved.tree), _leaves(abstract_state))
        if differences:
            listed = "\n  ".join(differences[:20] + [f"… and {len(differences) - 20} more"] * (len(differences) > 20))
            raise Misfit(
                f"the checkpoint of step {step} in {self._directory} does not fit this model and optimizer "
                f"({len(differences)} leaves):\n  {listed}\nUse the configuration saved with it, or another run_dir."
            )

    def wait(self) -> None:
        """Returns when the last save is on disk. Raises RuntimeError when it failed."""
        with self._naming_failures():
            self._manager.wait_until_finished()
            self._manager.check_for_errors()

    def close(self) -> None:
        """Waits for the last save and releases everything. Raises RuntimeError when that save failed."""
        try:
            self.wait()
        finally:
            self._manager.close()

    @contextlib.contextmanager
    def _naming_failures(self) -> Iterator[None]:
        """Errors of the background writer have many types, and say neither what was being saved nor where."""
        try:
            yield
        except Exception as error:
            raise RuntimeError(
                f"saving the checkpoint of step {self._saving} to {self._directory} failed: "
                f"{type(error).__name__}: {error}; earlier checkpoints are intact. "
                "Check free space and permissions, then start again."
            ) from error


class StreamsHandler(ocp.AsyncCheckpointHandler):
    """Writes the streams of this host, one file each; reads those of all hosts."""

    async def async_save(self, directory: Any, args: StreamsSave) -> list[ocp.future.Future]:
        """Starts writing; the folder is made by orbax, perhaps only after this returns."""
        return [ocp.future.CommitFutureAwaitingContractedSignals(self._write(directory, args.streams), name="streams")]

    async def _write(self, directory: Any, streams: Mapping[str, bytes]) -> None:
        for name, position in streams.items():
            (directory / (urllib.parse.quote(name, safe="") + _STREAM_SUFFIX)).write_bytes(position)

    def save(self, directory: Any, args: StreamsSave) -> None:
        """Part of the interface of a handler; `Checkpoints` only saves in the background."""
        raise NotImplementedError("streams are saved by async_save")

    def restore(self, directory: Any, args: StreamsRestore | None = None) -> dict[str, bytes]:
        """All streams of the step, by name."""
        del args
        files = sorted(directory.glob(f"*{_STREAM_SUFFIX}")) if directory.exists() else []
        return {urllib.parse.unquote(file.name.removesuffix(_STREAM_SUFFIX)): file.read_bytes() for file in files}

    def metadata(self, directory: Any) -> None:
        """Streams have none."""


@ocp.args.register_with_handler(StreamsHandler, for_save=True)
@dataclasses.dataclass
class StreamsSave(ocp.args.CheckpointArgs):
    """What this host writes: position by stream name."""

    streams: Mapping[str, bytes]


@ocp.args.register_with_handler(StreamsHandler, for_restore=True)
@dataclasses.dataclass
class StreamsRestore(ocp.args.CheckpointArgs):
    """Asks for the streams of all hosts."""


# What is complete


def complete_steps(directory: paths.Path) -> list[int]:
    """Steps that hold everything a restore needs, ascending. An empty folder named 3 is not one."""
    if not directory.exists():
        return []
    found = ocp.path.step.standard_name_format().find_all(directory)
    return sorted(step.step for step in found if _is_complete(step.path))


def _is_complete(folder: paths.Path) -> bool:
    return all((folder / name).exists() for name in (_COMPLETE_MARK, "state", "meta"))


def _set_incomplete_aside(directory: paths.Path) -> None:
    """Renames local step folders that cannot be restored: orbax would count them among the latest.

    In a bucket there are none: a step without its last object is not listed, and orbax removes it.
    """
    if paths.is_remote(directory) or not directory.exists():
        return
    for folder in sorted(directory.iterdir()):
        if folder.name.isdigit() and folder.is_dir() and not _is_complete(folder):
            folder.rename(directory / f"incomplete-{folder.name}-{time.time_ns()}")


# What fits


def _leaves(tree: Any) -> dict[str, Any]:
    """Leaves by name, equal for a NamedTuple and the dict that orbax makes of it: "params/decoder/linear/w"."""
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {
        "/".join(str(getattr(key, "name", getattr(key, "key", getattr(key, "idx", key)))) for key in path): leaf
        for path, leaf in flat
    }


def _require_arrays(state: Any) -> None:
    wrong = {name: type(leaf).__name__ for name, leaf in _leaves(state).items() if not isinstance(leaf, jax.Array)}
    if wrong:
        raise ValueError(f"a checkpoint holds jax.Arrays; these leaves are not: {wrong}; put them on the devices first")


def _differences(saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """One line for each leaf that is missing, extra, or of another shape or dtype."""
    lines = [f"{name}: not in the checkpoint, expected {_kind(wanted[name])}" for name in wanted if name not in saved]
    lines += [f"{name}: {_kind(saved[name])} in the checkpoint, not expected" for name in saved if name not in wanted]
    for name in wanted:
        if name in saved and _kind(saved[name]) != _kind(wanted[name]):
            lines.append(f"{name}: {_kind(saved[name])} in the checkpoint, expected {_kind(wanted[name])}")
    return lines


def _kind(leaf: Any) -> str:
    return f"{np.dtype(leaf.dtype).name}{list(leaf.shape)}"


def _require_shardings(abstract_state: Any) -> None:
    without = [name for name, leaf in _leaves(abstract_state).items() if getattr(leaf, "sharding", None) is None]
    if without:
        raise Misfit(f"restore needs the sharding of every leaf; missing: {', '.join(without[:20])}")
