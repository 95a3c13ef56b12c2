"""Writes the metrics of a run as TensorBoard events and JSON lines, and to Weights & Biases; reads them back.

Files for a gs:// run directory are written to a local folder and copied at most every 30 s and at `close`, because a
bucket does not support appending. A full disk or an unreachable bucket delays writes and does not end the run.
"""

import contextlib
import dataclasses
import hashlib
import json
import math
import netrc
import os
import pathlib
import statistics
import tempfile
import time
import urllib.parse
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from core import extras
from core.errors import Problem, UnreachableError, UserError
from core.files import bookkeeping, foreign_json, paths
from core.files.bookkeeping import Appender

JSONL_NAME = "metrics.jsonl"
OWN_FOLDER = "metrics"
TENSORBOARD_NAME = "tensorboard"
STARTED = "started"  # tag of the text that a start writes into the JSON lines of a run that had begun; its step is done
EVALUATED_ON = "validation/of"  # tag of the text that describes the rows of the validation metrics

# The page Custom Scalars of TensorBoard: charts by category, each with regular expressions of the tags that it shows.
DASHBOARD = {
    "learning": {
        "loss": ["^loss$", "^validation/loss$"],
        "validation": ["^validation/"],
        "gradient norm": ["^gradient_norm$"],
        "learning rate": ["^learning_rate$"],
        "skipped updates and rollbacks": ["^skipped_updates$", "^rolled_back$"],
    },
    "speed": {
        "tokens per second": ["^tokens_per_second$"],
        "where a step's seconds go": ["^(step|input_wait|device|host)_seconds$"],
        "MFU": ["^mfu$"],
        "goodput over all starts": ["^goodput$"],
    },
    "hosts": {
        "own seconds by host": ["^hosts/own_seconds/"],
        "spread between hosts": ["^hosts/.*_spread$"],
        "slowest host": ["^hosts/slowest$"],
        "GiB of HBM by chip": ["^hbm_gib/"],
    },
    "checkpoints and compilation": {
        "seconds of a save": ["^checkpoint/.*_seconds$"],
        "bytes of a save": ["^checkpoint/bytes$"],
        "programs, compiled and from the cache": ["^compile/(programs|found)$"],
        "seconds of compilation": ["^compile/seconds$"],
    },
    "statistics of the update (statistics_interval)": {
        "update / parameter": ["^statistics/update_ratio/"],
        "RMS of parameters": ["^statistics/param_rms/"],
        "RMS of gradients": ["^statistics/gradient_rms/"],
        "RMS of updates": ["^statistics/update_rms/"],
    },
}

VALIDATION = "validation/"  # begins the names of an evaluation's metrics
_TRAINED_STEP = "trained_step"  # the horizontal axis of charts in Weights & Biases
_SECONDS_BETWEEN_COPIES = 30.0  # limits the rate of writes to a bucket


class Writer(Protocol):
    """Records the metrics and texts of a run."""

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Records named numbers of one step."""

    def text(self, tag: str, text: str, *, step: int = 0) -> None:
        """Records a text, such as the configuration."""

    def lost_after(self, step: int) -> None:
        """Records that the steps after `step` were lost, so that their records do not count."""

    def flush(self, *, now: bool = False) -> None:
        """Writes recorded values where readers see them; into a bucket at most every 30 s, or `now`."""

    def close(self) -> None:
        """Flushes and releases; a second call does nothing."""


class Writers:
    """Combines several writers."""

    def __init__(self, writers: Sequence[Writer] = ()):
        self._writers = tuple(writers)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Records named numbers of one step."""
        for writer in self._writers:
            writer.scalars(step, values)

    def text(self, tag: str, text: str, *, step: int = 0) -> None:
        """Records a text, such as the configuration."""
        for writer in self._writers:
            writer.text(tag, text, step=step)

    def lost_after(self, step: int) -> None:
        """Records that the steps after `step` were lost, so that their records do not count."""
        for writer in self._writers:
            writer.lost_after(step)

    def flush(self, *, now: bool = False) -> None:
        """Flushes every writer."""
        for writer in self._writers:
            writer.flush(now=now)

    def close(self) -> None:
        """Closes every writer."""
        for writer in self._writers:
            writer.close()


def open_writers(run_dir: str, *, is_host_zero: bool, first_step: int = 0, wandb_project: str = "") -> Writers:
    """Opens TensorBoard, JSON lines and, if configured, Weights & Biases on host 0.

    Args:
      first_step: step of the checkpoint from which the run resumes; 0: it starts. Of repeated steps, TensorBoard and
        `read` show the later records, Weights & Biases both.
      wandb_project: a project of Weights & Biases; "": do not use it.
    """
    if not is_host_zero:
        return Writers()
    directory = paths.resolve(run_dir)
    is_begun = (directory / JSONL_NAME).exists()
    lines = JsonLines(directory / JSONL_NAME)
    if is_begun:
        lines.lost_after(first_step)
    writers: list[Writer] = [TensorBoard(directory / TENSORBOARD_NAME, first_step=first_step), lines]
    if wandb_project:
        run_id = _wandb_id(directory, run_dir=os.fspath(directory), is_begun=is_begun)
        writers.append(WeightsAndBiases(wandb_project, run_dir=os.fspath(directory), run_id=run_id))
    return Writers(writers)


def open_own_lines(run_dir: str, *, process_index: int) -> Writers:
    """Opens a host's own JSON lines, for example RUN/metrics/host_2.jsonl."""
    return Writers([JsonLines(paths.resolve(run_dir) / OWN_FOLDER / f"host_{process_index}.jsonl")])


class TensorBoard:
    """Writes TensorBoard's event files, without TensorFlow."""

    def __init__(self, directory: paths.Path, *, first_step: int = 0):
        """Opens a new event file; hides earlier events of steps after `first_step`."""
        import tensorboardX  # imported here because it takes 0.3 s, which other hosts need not spend
        from tensorboardX import record_writer

        self._mirror = Mirror(directory)
        record_writer.register_writer_factory(_EventFiles.PREFIX, _EventFiles)
        self._events = tensorboardX.SummaryWriter(
            f"{_EventFiles.PREFIX}:{self._mirror.folder}",
            purge_step=first_step + 1,
            flush_secs=30,
            filename_suffix=f".{time.time_ns()}",  # otherwise two starts within a second would share a file
        )
        self._events.add_custom_scalars(
            {
                category: {title: ["Multiline", tags] for title, tags in charts.items()}
                for category, charts in DASHBOARD.items()
            }
        )
        self._closed = False

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Records named numbers of one step."""
        for name, value in values.items():
            self._events.add_scalar(name, float(value), global_step=step)

    def text(self, tag: str, text: str, *, step: int = 0) -> None:
        """Records a text verbatim: as an indented block, because TensorBoard renders Markdown."""
        self._events.add_text(tag, "\n".join(f"    {line}" for line in text.splitlines()), global_step=step)

    def lost_after(self, step: int) -> None:
        """Hides earlier events of steps after `step`."""
        from tensorboardX.proto.event_pb2 import Event, SessionLog

        self._events.file_writer.add_event(Event(session_log=SessionLog(status=SessionLog.START)), step + 1)

    def flush(self, *, now: bool = False) -> None:
        """Writes recorded values into the event file."""
        self._events.flush()
        self._mirror.push(least_seconds=0.0 if now else _SECONDS_BETWEEN_COPIES)

    def close(self) -> None:
        """Flushes and releases."""
        if not self._closed:
            self._closed = True
            self._events.close()
            self._mirror.close()


class _EventFiles:
    """Makes tensorboardX write through `Appender`: on a full disk its own thread would die and block training."""

    PREFIX = "appender"

    @classmethod
    def open(cls, path: str) -> Appender:
        return Appender(pathlib.Path(path.removeprefix(f"{cls.PREFIX}:")))

    @classmethod
    def directory_check(cls, path: str) -> None:
        pathlib.Path(path.removeprefix(f"{cls.PREFIX}:")).mkdir(parents=True, exist_ok=True)


class JsonLines:
    """Writes JSON lines: `{"step": 3, "time_seconds": …, "loss": …}`; NaN and infinity become text."""

    def __init__(self, path: paths.Path):
        self._mirror = Mirror(path.parent, fetch=path.name)
        self._file = Appender(self._mirror.folder / path.name)
        self._closed = False

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Records named numbers of one step."""
        numbers = {name: finite(float(value)) for name, value in values.items()}
        self._write({"step": step, "time_seconds": round(time.time(), 3), **numbers})

    def text(self, tag: str, text: str, *, step: int = 0) -> None:
        """Records a text under `text` with its `tag`."""
        self._write({"step": step, "time_seconds": round(time.time(), 3), "tag": tag, "text": text})

    def lost_after(self, step: int) -> None:
        """Makes `read` pass over earlier lines of steps after `step`."""
        self.text(STARTED, "records above this line of later steps are of steps that were lost", step=step)

    def _write(self, row: Mapping[str, Any]) -> None:
        self._file.write(f"{json.dumps(row, allow_nan=False)}\n".encode())

    def flush(self, *, now: bool = False) -> None:
        """Writes recorded values into the file."""
        self._file.flush()
        self._mirror.push(least_seconds=0.0 if now else _SECONDS_BETWEEN_COPIES)

    def close(self) -> None:
        """Flushes and releases."""
        if not self._closed:
            self._closed = True
            self._file.close()
            self._mirror.close()


WANDB_ID = "wandb_id"  # a file in the run directory: the id, and the path for which it was made
_WANDB_SERVER = "https://api.wandb.ai"
_WANDB_SETTINGS = ("~/.config/wandb/settings", "wandb/settings")


def _wandb_id(directory: paths.Path, *, run_dir: str, is_begun: bool) -> str:
    """Returns the id of a run in Weights & Biases, which is kept in its directory.

    A copy of the directory at another path is another run. Earlier versions derived the id from the path alone, so that
    runs on machines with equal paths became one.
    """
    file = directory / WANDB_ID
    run_id, _, path = (file.read_text() if file.exists() else "").partition("\n")
    if path == run_dir:
        return run_id
    is_of_earlier_version = is_begun and not run_id
    run_id = (hashlib.sha256(run_dir.encode()).hexdigest() if is_of_earlier_version else uuid.uuid4().hex)[:16]
    paths.write_text_atomically(file, f"{run_id}\n{run_dir}")
    return run_id


def require_wandb(project: str, *, run_dir: str) -> None:
    """Raises UserError if a project of Weights & Biases is named that a run cannot log to."""
    if project and os.environ.get("WANDB_MODE") in ("offline", "dryrun") and paths.is_remote(run_dir):
        raise UserError(
            f"WANDB_MODE={os.environ['WANDB_MODE']} keeps the records of {project} in the run directory, and {run_dir} "
            "is a bucket: unset WANDB_MODE, set settings.Logging.wandb_project = '', or choose a run directory on disk"
        )
    if project:
        extras.require("wandb", extra="wandb", what=f"settings.Logging.wandb_project = {project!r}")


def require_wandb_login(project: str) -> None:
    """Raises UserError if a project of Weights & Biases is named and this host has no login, which logging needs.

    If a file of wandb's settings exists, it may name another server or mode; then `wandb.init` decides.
    """
    environ, given = os.environ, ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")
    is_offline = environ.get("WANDB_MODE") in ("offline", "dryrun", "disabled")
    if not project or is_offline or any(environ.get(name) for name in given):
        return
    if any(pathlib.Path(file).expanduser().exists() for file in _WANDB_SETTINGS):
        return
    server = urllib.parse.urlsplit(environ.get("WANDB_BASE_URL") or _WANDB_SERVER).netloc
    file = pathlib.Path(environ.get("NETRC") or "~/.netrc").expanduser()
    with contextlib.suppress(OSError, netrc.NetrcParseError):
        if netrc.netrc(file).authenticators(server):
            return
    missing = f"host 0 has no login of Weights & Biases: {given[0]} is not set, and {file} has no entry for {server}"
    setting = f"settings.Logging.wandb_project = {project!r}"
    fix = f"set {given[0]}, run `wandb login` on host 0, or set WANDB_MODE=offline or disabled"
    raise UserError(Problem(missing, setting=setting, fix=fix))


class WeightsAndBiases:
    """Writes to Weights & Biases; a run directory is one run there.

    The library reads WANDB_API_KEY for the login; WANDB_MODE=offline keeps everything in RUN/wandb until `wandb sync`.
    For a run directory in a bucket, its files are in a temporary folder, which `close` removes.
    """

    def __init__(self, project: str, *, run_dir: str, run_id: str):
        """Starts or resumes the run of this run directory; `run_id` names it in the project.

        Raises UserError if that fails; UnreachableError if another start can help.
        """
        require_wandb(project, run_dir=run_dir)
        import wandb

        name = "/".join(pathlib.PurePath(run_dir).parts[-2:])
        self._local = None if not paths.is_remote(run_dir) else tempfile.TemporaryDirectory(prefix="renga-wandb-")
        try:
            self._run = wandb.init(
                project=project,
                name=name,
                id=run_id,
                resume="allow",
                dir=self._local.name if self._local else run_dir,
            )
        except wandb.errors.Error as error:
            is_refused = isinstance(error, wandb.errors.AuthenticationError)
            can_help = isinstance(error, wandb.errors.CommError) and not is_refused
            raise (UnreachableError if can_help else UserError)(
                f"settings.Logging.wandb_project = {project!r}: wandb.init failed ({type(error).__name__}: {error}). "
                "Check WANDB_API_KEY or `wandb login` and the project, or set WANDB_MODE=offline or disabled"
            ) from error
        self._run.define_metric(_TRAINED_STEP)
        self._run.define_metric("*", step_metric=_TRAINED_STEP)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Records named numbers of one step."""
        # Without the library's `step`, because it drops numbers of steps before its newest.
        self._run.log({**{name: float(value) for name, value in values.items()}, _TRAINED_STEP: step})

    def text(self, tag: str, text: str, *, step: int = 0) -> None:
        """Adds a text to the configuration of the run."""
        del step
        self._run.config.update({tag: text}, allow_val_change=True)

    def lost_after(self, step: int) -> None:
        """Does nothing: both records are shown."""
        del step

    def flush(self, *, now: bool = False) -> None:
        """Does nothing."""
        del now

    def close(self) -> None:
        """Sends the rest and releases."""
        if self._run is not None:
            self._run.finish()
            self._run = None
            if self._local:
                self._local.cleanup()


_NOT_FINITE = ("nan", "inf", "-inf")  # as text, because JSON has no such numbers


def finite(value: Any) -> Any:
    """Returns a JSON value with NaN and infinity as text."""
    if isinstance(value, Mapping):
        return {name: finite(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [finite(one) for one in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


class Mirror:
    """A local folder for files that are appended to, copied to the destination if that is a bucket.

    Attributes:
      folder: where to write: the destination, or a temporary folder if files are copied.
    """

    def __init__(self, destination: paths.Path, *, fetch: str | None = None, copies: bool | None = None):
        """Continues the file `fetch`, if it exists.

        `copies`: whether to write to a temporary folder and copy; None: only for a bucket.
        """
        self._destination = destination
        self._bookkeeping = bookkeeping.Bookkeeping(os.fspath(destination))
        self._temporary = None
        self._pushed: dict[str, int] = {}
        self._pushed_at = -math.inf
        if not (paths.is_remote(destination) if copies is None else copies):
            self.folder = pathlib.Path(destination)
            self.folder.mkdir(parents=True, exist_ok=True)
            return
        self._temporary = tempfile.TemporaryDirectory(prefix="renga-metrics-")
        self.folder = pathlib.Path(self._temporary.name)
        if fetch is not None and (destination / fetch).exists():
            (self.folder / fetch).write_bytes((destination / fetch).read_bytes())

    def push(self, *, least_seconds: float = 0.0) -> None:
        """Copies the files whose size has changed; an error is only printed.

        It does nothing within `least_seconds` of the last attempt.
        """
        if self._temporary is not None and time.monotonic() - self._pushed_at >= least_seconds:
            self._pushed_at = time.monotonic()
            self._bookkeeping.attempt(self._copy)

    def _copy(self) -> None:
        for file in sorted(self.folder.iterdir()):
            size_bytes = file.stat().st_size
            if self._pushed.get(file.name) != size_bytes:
                paths.copy_file(file, to=self._destination / file.name)
                self._pushed[file.name] = size_bytes

    def close(self) -> None:
        """Copies a last time, and removes the temporary folder."""
        self.push()
        if self._temporary is not None:
            self._temporary.cleanup()
            self._temporary = None


@dataclasses.dataclass(frozen=True)
class RunMetrics:
    """The metrics of a run.

    Attributes:
      step: the highest recorded step; 0 if there is none.
      by_step: numbers by step and name.
      texts: recorded texts, by tag.
    """

    step: int = 0
    by_step: Mapping[int, Mapping[str, float]] = dataclasses.field(default_factory=dict)
    texts: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def has_evaluation(self, step: int) -> bool:
        """Returns whether an evaluation at this step is recorded."""
        return any(name.startswith(VALIDATION) for name in self.by_step.get(step, {}))

    def curve(self, name: str) -> list[tuple[int, float]]:
        """Returns the (step, value) pairs of a metric whose values are finite."""
        return [(step, value) for step, value in self._recorded(name) if math.isfinite(value)]

    def last(self, name: str) -> float | None:
        """Returns the latest value of a metric, which may be NaN or infinite, or None."""
        found = self._recorded(name)
        return found[-1][1] if found else None

    def _recorded(self, name: str) -> list[tuple[int, float]]:
        return [(step, values[name]) for step, values in sorted(self.by_step.items()) if name in values]

    def best(self, name: str) -> tuple[int, float] | None:
        """Returns the step and value of a metric's first finite maximum, or None."""
        return max(self.curve(name), key=lambda point: (point[1], -point[0]), default=None)

    def first_at(self, name: str, *, least: float) -> int | None:
        """Returns the first step at which a metric is at least `least`, or None."""
        return next((step for step, value in self.curve(name) if value >= least), None)

    def median(self, name: str) -> float | None:
        """Returns the median of a metric's finite values, or None."""
        values = [value for _, value in self.curve(name)]
        return statistics.median(values) if values else None


def read(run_dir: str) -> RunMetrics:
    """Reads the metrics of a run; empty if it recorded none.

    The last value for a step wins; malformed lines, and steps that a later start did not continue from, are skipped.
    """
    file = paths.resolve(run_dir) / JSONL_NAME
    if not file.exists():
        return RunMetrics()
    by_step: dict[int, dict[str, float]] = {}
    texts: dict[str, str] = {}
    for line in file.read_bytes().splitlines():
        row = _parsed(line)
        step = row.get("step")
        if row.get("tag") == STARTED and isinstance(step, int):
            by_step = {done: values for done, values in by_step.items() if done <= step}
        elif "tag" in row:
            texts[str(row["tag"])] = str(row.get("text", ""))
        elif isinstance(step, int):
            numbers = {k: v for k, v in row.items() if isinstance(v, (int, float))}
            not_finite = {k: float(v) for k, v in row.items() if v in _NOT_FINITE}
            by_step.setdefault(step, {}).update(numbers | not_finite)
    return RunMetrics(max(by_step, default=0), by_step, texts)


def _parsed(line: bytes) -> Mapping[str, object]:
    try:
        row = foreign_json.loads(line, strict=False)
    except foreign_json.MalformedError:  # the run was interrupted while it wrote this line
        return {}
    return row if isinstance(row, dict) else {}
