"""Saves and restores checkpoints atomically: the state, the position in the data and metadata.

One step is one folder with three parts, written by all hosts together and made visible at once:

    RUN/checkpoints/100/state   every array, sharded: each host writes its own shards (Orbax)
                        data    one file per input stream, written by the host that owns the stream
                        meta    JSON: config text, versions, git revision, seed …, and fingerprints of every array and
                                stream of this step

Frozen parameters that the run read from a published folder may be left out; a restore then reads them there again
(`warm_start.Origin`).

Between such steps the parameters alone may be saved, as steps of the same form without opt_state and data:

    RUN/params/150/state, meta

A checkpoint does not depend on the number of hosts or the mesh that wrote it. The state is restored into any requested
shardings, every reader gets the union of all streams, and the fingerprints of arrays do not depend on their sharding.
"""

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from core import units
from core.checkpoints import best, reading, steps, writing
from core.checkpoints.reading import Misfit, UnreadableError
from core.checkpoints.steps import DamagedError, LeftOut
from core.checkpoints.warm_start import Origin, ParameterSource
from core.checkpoints.writing import Cost, WriteFailedError, Writing, limit_seconds
from core.errors import UserError
from core.files import paths
from core.hosts import activity, distributed, log_filters

OPEN_SECONDS = 300.0  # for the slowest host to open the folder
REMOVAL_SECONDS = 10.0  # a step that is being removed may look complete for this long


class Checkpoints:
    """The checkpoints of one run. All hosts must call its methods, in the same order, except those that say otherwise.

    Attributes:
      left_out: arrays that saves leave out; None: none. A restore sets it to those of the restored step.
    """

    def __init__(
        self,
        directory: str,
        *,
        keep: int,
        keep_params: int | None = None,
        timeout_seconds: float | None = None,
        read_only: bool = False,
        origin: Origin | None = None,
        keep_best: str = "",
    ):
        """Opens a folder of checkpoints; unless `read_only`, creates it and removes what interrupted saves left.

        All hosts must call it.

        Args:
          directory: local or gs://, shared by all hosts.
          keep: number of latest steps to keep.
          keep_params: number of latest steps with parameters alone to keep; None: none can be saved.
          timeout_seconds: time limit of a save, and of a restore, after which the hosts' heartbeat ends the run; None:
            depends on the bytes per host (`writing.limit_seconds`).
          read_only: whether to create and remove nothing now, so that a run may be using the folder.
          origin: reads the parameters that steps leave out; None: such a step cannot be restored.
          keep_best: also keep the best step by this metric of its metadata (`best.parse`); "": only the latest.

        Raises:
          UserError: `keep` or `keep_params` is below 1, `keep_best` is malformed, or the folder to read does not exist.
        """
        for name, value in (("keep", keep), ("keep_params", keep_params)):
            if value is not None and value < 1:
                raise UserError(f"checkpoints: {name} is {value}; expected at least 1")
        self._directory = paths.resolve(directory)
        if read_only and not self._directory.exists():
            raise UserError(f"there are no checkpoints in {self._directory}: no such folder; check run_dir")
        self._origin = origin
        self.left_out: LeftOut | None = None
        self._writing: Writing | None = None
        self._timeout_seconds = timeout_seconds
        self._costs: list[Cost] = []
        self._quiet = contextlib.ExitStack()  # from the start of a save until it is complete, or until `close`
        metric = best.parse(keep_best) if keep_best else None
        self._kept = best.Kept(keep, metric, self._values(metric) if metric else None)
        self._params_directory = self._directory.parent / steps.PARAMS_FOLDER
        self._params_kept = best.Kept(keep_params) if keep_params else None
        for folder in () if read_only else (self._directory, *([self._params_directory] if keep_params else [])):
            if distributed.is_host_zero():
                folder.mkdir(parents=True, exist_ok=True)
                steps.clear(folder)
            distributed.barrier(f"checkpoints/open {folder.name}", timeout_seconds=OPEN_SECONDS)

    def _values(self, metric: best.Metric) -> dict[int, float]:
        """Returns the metric's value for each step that host 0 sees, on every host."""
        described = steps.described_steps(self._directory) if distributed.is_host_zero() else {}
        found = best.values(described, metric)
        return {int(step): value for step, value in json.loads(distributed.from_host_zero(json.dumps(found))).items()}

    def save(self, step: int, *, state: Any, data: Mapping[str, bytes], meta: Mapping[str, Any]) -> None:
        """Waits for the previous save, then starts an asynchronous one.

        Returns when the arrays are copied off the devices and may be donated.

        Args:
          step: the step that produced `state`.
          state: a pytree of jax.Arrays with any shardings.
          data: the positions of the streams that this host owns, by name; names differ between hosts.
          meta: values that JSON can hold; those of host 0 are stored.

        Raises:
          TypeError: a leaf is not a jax.Array.
          RuntimeError: the step is already saved, the previous save failed, or this one could not start.
        """
        reading.require_arrays(state)
        self.wait()
        folder = self._directory / str(step)
        if distributed.decided_by_host_zero(lambda: steps.is_complete(folder)):
            raise RuntimeError(f"step {step} is already saved in {self._directory}; a save never overwrites")
        self._kept.saving(step, meta)
        self._start(self._directory, step, state=state, data=data, meta=meta, kept=self._kept)

    def save_params(self, step: int, params: Any, meta: Mapping[str, Any]) -> None:
        """Waits for the previous save, then starts an asynchronous one of parameters alone, as `save` does.

        Parameters that were saved at this step or later are removed first: a resumed run repeats these steps.
        Requires `keep_params`.
        """
        assert self._params_kept is not None, "opened without keep_params"
        self.wait()
        if distributed.is_host_zero():
            for repeated in [there for there in steps.complete(self._params_directory) if there >= step]:
                steps.remove(self._params_directory / str(repeated))
        self._start(self._params_directory, step, state={"params": params}, data={}, meta=meta, kept=self._params_kept)

    def _start(
        self,
        directory: paths.Path,
        step: int,
        *,
        state: Any,
        data: Mapping[str, bytes],
        meta: Mapping[str, Any],
        kept: best.Kept,
    ) -> None:
        began = time.monotonic()
        content, left_out = reading.describe(state), self.left_out
        state = reading.without(state, left_out.arrays if left_out else ())
        described = steps.sealed(
            meta, step=step, content=content, streams=_digests_of_all_hosts(data), left_out=left_out
        )
        files = steps.metadata_files(described) if distributed.is_host_zero() else {}
        described_seconds = time.monotonic() - began
        size_bytes = sum(leaf.nbytes for leaf in reading.by_name(state).values())
        host_bytes = reading.host_bytes(state)
        self._writing = under_way = Writing(
            step,
            directory,
            size_bytes=size_bytes,
            host_bytes=host_bytes,
            limit_seconds=self._limit_seconds(host_bytes),
            blocked_seconds=described_seconds,
        )
        self._quiet.enter_context(log_filters.while_saving())

        def begin() -> Callable[[], None]:
            folder, streams = directory / str(step), steps.stream_files(data)
            finish = writing.begin(folder, state, data=streams, meta=files, fail=under_way.fail)
            return lambda: _finish(finish, directory, kept)

        with self._forgetting_failures():
            self._writing.start(begin)

    def latest_step(self) -> int | None:
        """Returns the latest complete step that host 0 sees, or None."""
        return next(reversed(self._steps()), None)

    def restore(self, step: int, abstract_state: Any) -> tuple[Any, dict[str, bytes], dict[str, Any]]:
        """Restores a step: returns the state, the positions of the streams of all hosts, and the metadata.

        Args:
          step: a saved step.
          abstract_state: a tree of jax.ShapeDtypeStruct like the saved state, each with the sharding to restore into.

        Raises:
          UserError: there is no such complete step, a leaf has no sharding, or the tree, a shape or a dtype
            differs; names the leaves, before any array is read. Also if arrays that the step leaves out are no longer
            in their source, or differ there, or there is no `origin` to read them.
          DamagedError: an array or the metadata differs from what was saved.
          UnreadableError: the step could not be read, for a reason that does not prove damage.
        """
        if step not in (there := self._steps()):
            raise UserError(f"no complete checkpoint of step {step} in {self._directory}; existing: {there or 'none'}")
        restored, said = self._attempt(step, abstract_state)
        if said:
            raise DamagedError(f"the checkpoint of step {step} in {self._directory} cannot be read: {said}")
        return restored

    def restore_newest(self, abstract_state: Any) -> tuple[int, Any, dict[str, bytes], dict[str, Any]] | None:
        """Restores the newest intact step: returns it with its state, streams and metadata; None if there are no steps.

        Newer steps that are proven to be damaged are then renamed, so that they can be trained and saved again; host 0
        prints this.

        Args:
          abstract_state: as in `restore`.

        Raises:
          Misfit: a leaf of `abstract_state` has no sharding, or the step does not fit it.
          UserError: arrays that the step leaves out are no longer in their source, or differ there, or there is no
            `origin` to read them.
          UnreadableError: a step could not be read, for a reason that does not prove damage; nothing is renamed.
          RuntimeError: there are steps, but none can be restored; nothing is renamed.
        """
        damaged: dict[int, str] = {}
        for step in reversed(self._steps()):
            restored, said = self._attempt(step, abstract_state)
            if not said:
                self._set_aside(damaged)
                return step, *restored
            damaged[step] = said
            if distributed.is_host_zero():
                print(f"checkpoint {step} cannot be restored; the one before it is tried, if there is one", flush=True)
        if not damaged:
            return None
        reasons = "\n  ".join(units.shortened([f"step {step}: {said}" for step, said in damaged.items()], most=5))
        raise RuntimeError(
            f"no checkpoint in {self._directory} can be restored, and none was renamed:\n  {reasons}\nEither all "
            "are damaged, or this revision of the code or its libraries cannot read them. `launch/run checkpoints ls` "
            "names the revision that saved each: start with that one and its requirements.txt. To start afresh, give "
            "another run_dir"
        )

    def _steps(self) -> list[int]:
        """Returns the complete steps that host 0 sees, ascending, on every host."""
        there = steps.complete(self._directory) if distributed.is_host_zero() else []
        return json.loads(distributed.from_host_zero(json.dumps(there)))

    def _set_aside(self, damaged: Mapping[int, str]) -> None:
        """Renames damaged steps, and prints why."""
        if not damaged:
            return
        if distributed.is_host_zero():
            for step, said in damaged.items():
                if (self._directory / str(step)).exists():  # it may have been removed meanwhile
                    aside = steps.set_damaged_aside(self._directory, step)
                    print(f"checkpoint {step} is damaged ({said}); it is {aside.name} now", flush=True)
        distributed.barrier(f"checkpoints/{max(damaged)} aside", timeout_seconds=reading.SLOW_SECONDS)

    def _attempt(self, step: int, abstract_state: Any) -> tuple[Any, str]:
        """Restores a step; returns the result and, if the step is damaged, a description of it, equal on all hosts.

        Raises Misfit, and UnreadableError if the step could not be read for a reason that does not prove damage.
        """
        reading.require_shardings(abstract_state)
        folder = self._directory / str(step)
        described, said = self._read(step, lambda: steps.read(folder))
        if said:
            return None, said
        self._require_same_tree(step, described, abstract_state)
        left_out = described.left_out
        source = self._opened(step, left_out) if left_out else None
        own = reading.without(abstract_state, left_out.arrays if left_out else ())
        seconds = self._limit_seconds(reading.host_bytes(abstract_state))
        with activity.enter(activity.RESTORING, limit_seconds=seconds):
            parts, said = self._read(step, lambda: _sealed(described, *_read_arrays_and_streams(folder, own)))
            if said:
                return None, said
            state, data = parts
            if said := reading.agreed(_differing(described.saved, state)):
                return None, said
            if self._origin and source:
                state = _completed(state, abstract_state, self._origin.read(source, described, abstract_state))
        self.left_out = left_out
        return (state, data, described.meta), ""

    def _opened(self, step: int, left_out: LeftOut) -> ParameterSource:
        if self._origin is None:
            raise UserError(
                f"the checkpoint of step {step} in {self._directory} does not contain its "
                f"{units.counted(len(left_out.arrays), 'frozen parameter')}, which the run read from "
                f"{left_out.source}: give `Checkpoints` an `origin` to read them"
            )
        return self._origin.open_source(left_out)

    def _limit_seconds(self, host_bytes: int) -> float:
        """Returns the time limit of a save or a restore, in seconds."""
        return self._timeout_seconds or limit_seconds(host_bytes)

    def _read(self, step: int, read: Callable[[], Any]) -> tuple[Any, str]:
        try:
            return reading.on_all_hosts(read)
        except UnreadableError as error:
            raise UnreadableError(
                f"the checkpoint of step {step} in {self._directory} could not be read, which does not show that it is "
                f"damaged: {error}. It is left as it is; mend what is said and start again"
            ) from error

    def restore_if_there(self, step: int, abstract_state: Any) -> tuple[Any, dict[str, bytes], dict[str, Any]] | None:
        """Restores a step for evaluation, as `restore` does.

        Returns None on every host if there is no such step: a run that is training may have removed it, even while it
        was read.

        Raises:
          UserError: the step does not fit, as `restore` says, or is damaged.
          UnreadableError: the step could not be read, for a reason that does not prove damage.
        """
        if not self._is_there(step):
            return None
        unreadable, restored, said = None, None, ""
        try:
            restored, said = self._attempt(step, abstract_state)
        except UnreadableError as error:
            unreadable = error
        if restored is not None:
            return restored
        if not self._is_there(step, after_seconds=REMOVAL_SECONDS):
            return None
        with reading.refusing_damage(self._directory / str(step)):
            raise unreadable or DamagedError(said)

    def _is_there(self, step: int, *, after_seconds: float = 0.0) -> bool:
        """Returns True if host 0 sees the step complete, and still does after `after_seconds`."""
        is_there, end = False, time.monotonic() + after_seconds
        if distributed.is_host_zero():
            while (is_there := step in steps.complete(self._directory)) and time.monotonic() < end:
                time.sleep(0.5)
        return distributed.from_host_zero("there" if is_there else "") == "there"

    def _require_same_tree(self, step: int, described: steps.Description, abstract_state: Any) -> None:
        differences = reading.differences(described.kinds, abstract_state)
        if differences:
            advice = reading.advice(described.kinds, abstract_state)
            listed = "\n  ".join([*units.shortened(differences, most=20), *advice])
            raise Misfit(
                f"the checkpoint of step {step} in {self._directory} does not fit this model and optimizer "
                f"({len(differences)} leaves):\n  {listed}\nUse the configuration saved with it, or another run_dir."
            )

    def check(self) -> None:
        """Raises RuntimeError if the current save is known to have failed on a host. Does not wait; not collective."""
        with self._forgetting_failures():
            if self._writing is not None and self._writing.is_done():
                self._finished(self._writing)

    def wait(self) -> None:
        """Waits until the last save is complete. Raises RuntimeError soon after it fails on any host."""
        with self._forgetting_failures():
            if self._writing is not None:
                self._writing.wait()
                self._finished(self._writing)

    def _finished(self, writing: Writing) -> None:
        self._costs.append(writing.cost)
        self._writing = None
        self._quiet.close()

    @contextlib.contextmanager
    def _forgetting_failures(self) -> Iterator[None]:
        """Forgets a save that failed in this context, so that `close` does not wait for it."""
        try:
            yield
        except WriteFailedError:
            self._writing = None
            raise

    def costs(self) -> list[Cost]:
        """Returns the costs of the saves that were completed since the last call. Not collective."""
        costs, self._costs = self._costs, []
        return costs

    def close(self) -> None:
        """Waits for the last save. Raises RuntimeError if it failed."""
        with self._quiet:
            self.wait()


def _finish(finish: Callable[[], None], directory: paths.Path, kept: best.Kept) -> None:
    """Waits until a step is complete; then host 0 removes the steps that are no longer kept."""
    finish()
    if not distributed.is_host_zero():
        return
    try:
        for step in kept.others(steps.complete(directory)):
            with contextlib.suppress(FileNotFoundError):  # somebody else has removed it
                steps.remove(directory / str(step))
    except Exception as error:  # disks and buckets raise many types; the new step is complete
        said = steps.said(error)
        old = f"a checkpoint in {directory} that is no longer kept"
        print(f"{old} was not removed: {said}; the next save tries again", flush=True)


def _digests_of_all_hosts(data: Mapping[str, bytes]) -> dict[str, str]:
    """Returns the SHA-256 of the data position of each stream of all hosts, by name."""
    own = {name: steps.digest(position) for name, position in data.items()}
    said = distributed.all_gather_text("checkpoints/streams", json.dumps(own))
    return dict(sorted(pair for digests in said for pair in json.loads(digests).items()))


def _read_arrays_and_streams(folder: paths.Path, abstract_state: Any) -> tuple[Any, dict[str, bytes]]:
    from core.checkpoints import arrays  # a run that starts afresh does not import it

    return arrays.read_arrays(folder, abstract_state), steps.read_streams(folder)


def _completed(state: Any, like: Any, others: Mapping[str, Any]) -> Any:
    """Returns a tree like `like` with the leaves of `state` and, by name, the others."""
    found = {**reading.by_name(state), **others}
    return jax.tree.unflatten(jax.tree.structure(like), [found[name] for name in reading.by_name(like)])


def _sealed(described: steps.Description, state: Any, data: Mapping[str, bytes]) -> tuple[Any, dict[str, bytes]]:
    """Returns the state, and the data positions that belong to its step. Raises as `Description.positions`."""
    return state, described.positions(data)


def _differing(content: Mapping[str, list], state: Any) -> str:
    found = reading.describe(state)
    wrong = [name for name in content if found[name] != content[name]]
    named = ", ".join(units.shortened(wrong, most=3))
    return f"{len(wrong)} of {len(content)} arrays are not what was saved: {named}" if wrong else ""
