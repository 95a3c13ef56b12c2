"""Saves and restores checkpoints: the state, the position in the data and metadata.

One step is one folder with three parts, made visible at once:

    RUN/checkpoints/100/state   arrays: each host writes its own shards (Orbax)
                        data    one file per input stream, written by the host that owns the stream
                        meta    JSON: config text, versions, git revision …, and fingerprints of arrays and streams

The parameters alone may also be saved, in RUN/params. A checkpoint can be restored with another mesh or
number of hosts.
"""

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from core import units
from core.checkpoints import best, orbax_writer, reading, steps
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
      left_out: arrays that saves leave out; a restore sets it.
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
        """Opens a folder of checkpoints; all hosts must call it.

        Args:
          directory: local or gs://, shared by all hosts.
          keep: number of latest steps to keep.
          keep_params: the same for steps with parameters alone; None: none can be saved.
          timeout_seconds: time limit of a save or a restore, after which the heartbeat ends the run; None: depends on
            the bytes per host.
          read_only: whether to leave the folder as it is; otherwise it is created, and what interrupted saves left is
            removed.
          origin: reads parameters that steps leave out; None: such a step cannot be restored.
          keep_best: also keep the best step by this metric (`best.parse`); "": only the latest.
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
        described = steps.described_steps(self._directory) if distributed.is_host_zero() else {}
        found = best.values(described, metric)
        return {int(step): value for step, value in json.loads(distributed.from_host_zero(json.dumps(found))).items()}

    def save(self, step: int, *, state: Any, data: Mapping[str, bytes], meta: Mapping[str, Any]) -> None:
        """Waits for the previous save, then starts an asynchronous one.

        When it returns, the arrays are copied off the devices and may be donated.

        Args:
          data: positions of the streams that this host owns, by name.
          meta: values that JSON can hold; those of host 0 are stored.

        Raises:
          RuntimeError: the step is already saved, or the previous save failed.
        """
        reading.require_arrays(state)
        self.wait()
        folder = self._directory / str(step)
        if distributed.decided_by_host_zero(lambda: steps.is_complete(folder)):
            raise RuntimeError(f"step {step} is already saved in {self._directory}; a save never overwrites")
        self._kept.saving(step, meta)
        self._start(self._directory, step, state=state, data=data, meta=meta, kept=self._kept)

    def save_params(self, step: int, params: Any, meta: Mapping[str, Any]) -> None:
        """Saves parameters alone, asynchronously like `save`; requires `keep_params`.

        Those saved at this step or later are removed first: a resumed run repeats these steps.
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
            alone=directory == self._params_directory,
        )
        self._quiet.enter_context(log_filters.while_saving())

        def begin() -> Callable[[], None]:
            folder, streams = directory / str(step), steps.stream_files(data)
            finish = orbax_writer.begin(folder, state, data=streams, meta=files, fail=under_way.fail)
            return lambda: _finish(finish, directory, kept)

        try:
            with self._forgetting_failures():
                self._writing.start(begin)
        except KeyboardInterrupt:
            if not under_way.has_begun:  # no thread writes, so there is nothing to wait for
                self._writing = None
                self._quiet.close()
            raise

    def unscored(self) -> list[int]:
        """Returns the complete steps without a value of `keep_best`, ascending; [] if that is "". Not collective."""
        return self._kept.unscored(steps.complete(self._directory))

    def score(self, step: int, described: Mapping[str, Any]) -> None:
        """Adds the results of a later evaluation to a complete step; for host 0, while nothing is saved.

        `described`: as `best.described` returns them.
        """
        steps.write_scores(self._directory / str(step), described)
        self._kept.saving(step, described)

    def latest_step(self) -> int | None:
        """Returns the latest complete step that host 0 sees, or None."""
        return next(reversed(self._steps()), None)

    def restore(self, step: int, abstract_state: Any) -> tuple[Any, dict[str, bytes], dict[str, Any]]:
        """Returns the state of a step, the positions of the streams of all hosts, and the metadata.

        `abstract_state` is a tree of jax.ShapeDtypeStruct with the shardings to restore into.

        Raises:
          UserError: there is no such step, or it does not fit.
          DamagedError: the step differs from what was saved.
          UnreadableError: the step could not be read, which does not prove damage.
        """
        if step not in (there := self._steps()):
            raise UserError(f"no complete checkpoint of step {step} in {self._directory}; existing: {there or 'none'}")
        restored, said = self._attempt(step, abstract_state)
        if said:
            raise DamagedError(f"the checkpoint of step {step} in {self._directory} cannot be read: {said}")
        return restored

    def restore_newest(
        self, abstract_state: Any, *, fetch: Callable[[int], int | None] = lambda step: None
    ) -> tuple[int, Any, dict[str, bytes], dict[str, Any]] | None:
        """Restores the newest intact step: its number, state, streams and metadata; None if there are no steps.

        Newer steps that are proven to be damaged are renamed. Raises RuntimeError if there are steps, but none can be
        restored.

        `fetch` is called with a step that cannot be restored; it returns the step that it copied from elsewhere, or
        None.
        """
        damaged: dict[int, str] = {}
        for step in reversed(self._steps()):
            restored, said = self._attempt(step, abstract_state)
            if said and (fetched := fetch(step)) is not None:
                step = fetched
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
        if not damaged:
            return
        if distributed.is_host_zero():
            for step, said in damaged.items():
                if (self._directory / str(step)).exists():  # it may have been removed meanwhile
                    aside = steps.set_damaged_aside(self._directory, step)
                    print(f"checkpoint {step} is damaged ({said}); it is {aside.name} now", flush=True)
        distributed.barrier(f"checkpoints/{max(damaged)} aside", timeout_seconds=reading.SLOW_SECONDS)

    def _attempt(self, step: int, abstract_state: Any, *, unread: str = "") -> tuple[Any, str]:
        """Restores a step; returns the result, and the damage or "", equal on all hosts."""
        reading.require_shardings(abstract_state)
        folder = self._directory / str(step)
        described, said = self._read(step, lambda: steps.read(folder))
        if said:
            return None, said
        described = described.without(unread) if unread else described
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
        self.left_out = self._origin.still_frozen(left_out) if self._origin and left_out else left_out
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
        return self._timeout_seconds or limit_seconds(host_bytes)

    def _read(self, step: int, read: Callable[[], Any]) -> tuple[Any, str]:
        try:
            return reading.on_all_hosts(read)
        except UnreadableError as error:
            raise UnreadableError(
                f"the checkpoint of step {step} in {self._directory} could not be read, which does not show that it is "
                f"damaged: {error}. It is left as it is; mend what is said and start again"
            ) from error

    def restore_if_there(
        self, step: int, abstract_state: Any, *, unread: str = ""
    ) -> tuple[Any, dict[str, bytes], dict[str, Any]] | None:
        """Restores a step for evaluation; returns None on every host if it does not exist.

        `unread`: the entry of the state that `abstract_state` lacks, such as the carry of the rows of a training batch.
        """
        if not self._is_there(step):
            return None
        unreadable, restored, said = None, None, ""
        try:
            restored, said = self._attempt(step, abstract_state, unread=unread)
        except UnreadableError as error:
            unreadable = error
        if restored is not None:
            return restored
        if not self._is_there(step, after_seconds=REMOVAL_SECONDS):
            return None
        with reading.refusing_damage(self._directory / str(step)):
            raise unreadable or DamagedError(said)

    def _is_there(self, step: int, *, after_seconds: float = 0.0) -> bool:
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
        """Raises RuntimeError if the current save is known to have failed. Does not wait; not collective."""
        with self._forgetting_failures():
            if self._writing is not None and self._writing.is_done():
                self._finished(self._writing)

    def wait(self) -> None:
        """Waits until the last save is complete; raises RuntimeError if it fails."""
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
        """Forgets a save that failed, so that `close` does not wait for it."""
        try:
            yield
        except WriteFailedError:
            self._writing = None
            raise

    def costs(self) -> list[Cost]:
        """Returns the costs of saves completed since the last call. Not collective."""
        costs, self._costs = self._costs, []
        return costs

    def close(self) -> None:
        """Waits for the last save; raises RuntimeError if it failed."""
        with self._quiet:
            self.wait()


def _finish(finish: Callable[[], None], directory: paths.Path, kept: best.Kept) -> None:
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
    own = {name: steps.digest(position) for name, position in data.items()}
    said = distributed.all_gather_text("checkpoints/streams", json.dumps(own))
    return dict(sorted(pair for digests in said for pair in json.loads(digests).items()))


def _read_arrays_and_streams(folder: paths.Path, abstract_state: Any) -> tuple[Any, dict[str, bytes]]:
    from core.checkpoints import arrays  # a run that starts afresh does not import it

    return arrays.read_arrays(folder, abstract_state), steps.read_streams(folder)


def _completed(state: Any, like: Any, others: Mapping[str, Any]) -> Any:
    found = {**reading.by_name(state), **others}
    return jax.tree.unflatten(jax.tree.structure(like), [found[name] for name in reading.by_name(like)])


def _sealed(described: steps.Description, state: Any, data: Mapping[str, bytes]) -> tuple[Any, dict[str, bytes]]:
    return state, described.positions(data)


def _differing(content: Mapping[str, list], state: Any) -> str:
    found = reading.describe(state)
    wrong = [name for name in content if found[name] != content[name]]
    named = ", ".join(units.shortened(wrong, most=3))
    return f"{len(wrong)} of {len(content)} arrays are not what was saved: {named}" if wrong else ""
