"""Runs the pipelines of registered seqio tasks in separate processes, for token caches.

These processes import seqio, TensorFlow and the module that registers the tasks; `Processes` starts them.
"""

import atexit
import concurrent.futures
import concurrent.futures.process
import contextlib
import dataclasses
import functools
import inspect
import itertools
import json
import multiprocessing
import os
import re
import signal
import threading
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from core.errors import UserError
from tasks.text import near_duplicates, seqio_metrics, seqio_tasks
from tasks.text.failing_preprocessor import failing_preprocessor
from tasks.text.seqio_metrics import Measured
from tasks.text.token_cache import SPLITS
from tasks.text.token_writer import Converted

if TYPE_CHECKING:
    from tasks.text.decontamination import Excluded
    from tasks.text.filters import Filters

_SHOWN = 400  # characters of an error that are shown
FIRST = 64  # examples that are tried before a run


@dataclasses.dataclass(frozen=True)
class Asked:
    """A registered task or mixture.

    Attributes:
      name: its registered name.
      module: the module that registers it; None: none is imported.
      inputs, targets: maximum number of ids of each feature; `inputs` is None for a task without inputs.
    """

    name: str
    module: str | None
    inputs: int | None
    targets: int

    @property
    def lengths(self) -> dict[str, int]:
        """The maximum number of ids of each feature, as seqio's `sequence_length`."""
        return ({} if self.inputs is None else {"inputs": self.inputs}) | {"targets": self.targets}

    def measured(self, most: int) -> Measured:
        """Returns the task's own metrics, on at most `most` examples of each task."""
        return Measured(self.name, self.module, most, tuple(self.lengths.items()))

    @property
    def folder(self) -> str:
        """The default folder of its token cache."""
        lengths = "_".join(map(str, self.lengths.values()))
        return f"runs/seqio/{re.sub(r'[^A-Za-z0-9.-]', '_', self.name)}_{lengths}"


class Lane(NamedTuple):
    """A share of a split that one process reads: shard `index` of `count` of a task, in one epoch."""

    task: str
    split: str
    epoch: int
    index: int  # type: ignore[assignment]  # hides tuple.index
    count: int  # type: ignore[assignment]  # hides tuple.count
    draws: bool  # whether preprocessors draw random numbers from seqio's seed


class Found(NamedTuple):
    """Converted examples of a lane.

    Attributes:
      converted: the examples that have targets.
      read: number of examples read, with or without targets.
      is_end: whether the lane has no more examples.
    """

    converted: Converted
    read: int
    is_end: bool


def definition(asked: Asked) -> dict[str, Any]:
    """Returns what a run must know about a task or mixture, as JSON values.

    `vocabulary` is described by `seqio_tasks.described`. `tasks` has for each task its mixing `rate`, the number of
    `shards` by split, the `files` of its source, and whether it `draws` random numbers. It also has the outputs that
    its `metrics` need, and checksums of its `first` examples.

    Raises UserError if the task cannot be read.
    """
    try:
        return _definition(asked)
    except UserError:
        raise
    except Exception as error:  # a source is the user's code
        said = _shown(error)
        raise UserError(f"text.seqio.name: {asked.name} cannot be read: {type(error).__name__}: {said}") from error


def _definition(asked: Asked) -> dict[str, Any]:
    found, tasks = _registered(asked), {}
    for task in _tasks(found):
        shards = {split: task.source.list_shards(split) for split in SPLITS if split in task.splits}
        names = {name for each in shards.values() for name in map(os.fspath, each) if _is_file(name)}
        tasks[task.name] = {
            "rate": 1.0 if found is task else _rate(found, task),
            "shards": {split: len(each) for split, each in shards.items()},
            "files": sorted(names),
            "draws": _takes_seeds(task) or _differs_by_seed(asked, task.name, shards),
            "metrics": seqio_metrics.kinds(task),
            "first": {},
        }
    problems = [problem for name, about in tasks.items() for problem in _first_examples(asked, name, about)]
    return {"vocabulary": seqio_tasks.described(asked.name), "tasks": tasks, "problems": problems}


def _rate(mixture: Any, task: Any) -> float:
    try:
        rate = float(mixture.get_rate(task))
    except Exception as error:  # a rate may be a user's function
        raise UserError(f"the rate of {task.name} in {mixture.name} fails: {type(error).__name__}: {error}") from error
    if not 0 < rate < float("inf"):
        raise UserError(f"the rate of {task.name} in {mixture.name} is {rate}, expected a positive number")
    return rate


def _first_examples(asked: Asked, name: str, about: dict[str, Any]) -> Iterator[str]:
    """Makes the first examples of each split of a task, stores their checksum in `about`, and yields problems."""
    for split in about["shards"]:  # a mixture leaves out tasks without the split
        try:
            found = _first(asked, Lane(name, split, 0, 0, 1, about["draws"]))
        except UserError as error:
            yield str(error)
            continue
        if len(found) < FIRST and not any(len(ids) > inputs for ids, inputs in found):
            of = f"none of {len(found)} has ids" if found else "its source is empty, or its preprocessors leave none"
            yield f"task {name} has no example in its {split} split: {of}"
        lines = json.dumps([[ids.tolist(), inputs] for ids, inputs in found])
        about["first"][split] = zlib.crc32(lines.encode())


def _first(asked: Asked, lane: Lane) -> list[tuple[np.ndarray, int]]:
    return list(itertools.islice(_Examples(asked, lane, 0), FIRST))


def _differs_by_seed(asked: Asked, name: str, splits: Collection[str]) -> bool:
    """Returns whether the first examples of a task are others with another seed of seqio.

    A preprocessor without a parameter for seeds may apply `seqio.map_over_dataset` inside.
    """
    for split in splits:
        with contextlib.suppress(UserError):  # `_first_examples` reports it
            both = [_first(asked, Lane(name, split, seed, 0, 1, False)) for seed in range(2)]
            return [ids.tolist() for ids, _ in both[0]] != [ids.tolist() for ids, _ in both[1]]
    return False


def require_texts(asked: Asked) -> None:
    """Raises UserError if the vocabulary cannot convert ids to text."""
    vocabulary = seqio_tasks.registered(asked.name, module=asked.module).output_features["targets"].vocabulary
    ids = vocabulary.encode("some text")
    if isinstance(ids, str) or not isinstance(vocabulary.decode(ids), str):
        raise UserError(
            f"--deduplicate and --exclude compare texts, and a {type(vocabulary).__name__} makes none of ids: leave "
            "these flags out, and filter the source"
        )


_open: dict[Lane, "_Examples"] = {}  # the lanes that this process is reading


def close(lane: Lane) -> None:
    """Closes a lane."""
    _open.pop(lane, None)


def convert(asked: Asked, lane: Lane, begin: int, most: int, filters: "Filters | None" = None) -> Found:
    """Converts the next examples of a lane, in order.

    Args:
      asked: the task or mixture.
      lane: the lane, which the process keeps open between calls.
      begin: number of the first example, from 0.
      most: maximum number of examples to read.
      filters: compares the texts of training examples; None: not compared.
    """
    examples = _open.get(lane)
    if examples is None or examples.number != begin:
        examples = _open[lane] = _Examples(asked, lane, begin)
    found: list[tuple[np.ndarray, int]] = []
    is_end = False
    while examples.number < begin + most and not is_end:
        example = next(examples, None)
        is_end = example is None
        if example and len(example[0]) > example[1]:
            found.append(example)
    if is_end:
        del _open[lane]
    dtype = np.uint16 if examples.vocab_size <= 2**16 else np.uint32
    arrays = [ids.astype(dtype) for ids, _ in found]
    count = len(arrays)
    shares_text, signatures = np.zeros(count, bool), None
    if filters and lane.split == "train":
        texts = [_text(examples.vocabulary, ids, prompt) for ids, prompt in found]
        if excluded := _excluded(filters, asked.name):
            shares_text = np.array([excluded.shares_text(text) for text in texts], bool)
        signatures = near_duplicates.signatures(texts) if filters.near_duplicates else None
    converted = Converted(
        ids=np.concatenate([np.empty(0, dtype), *arrays]),
        sizes=np.array([len(ids) for ids in arrays], np.int64),
        text_bytes=np.zeros(count, np.int64),
        checks=np.array([zlib.crc32(ids.data) for ids in arrays], np.uint32),
        is_validation=np.full(count, lane.split == "validation"),
        shares_text=shares_text,
        signatures=signatures,
        prompts=None if asked.inputs is None else np.array([prompt for _, prompt in found], np.int32),
    )
    return Found(converted, examples.number - begin, is_end)


@functools.lru_cache(maxsize=1)
def _excluded(filters: "Filters", name: str) -> "Excluded | None":
    vocabulary = seqio_tasks.registered(name).output_features["targets"].vocabulary
    return filters.excluded(lambda text: _decoded(vocabulary, vocabulary.encode(text)))


def _text(vocabulary: Any, ids: np.ndarray, prompt: int) -> str:
    return "\n".join(_decoded(vocabulary, part) for part in np.split(ids, [prompt]) if len(part))


def _decoded(vocabulary: Any, ids: Sequence[int] | np.ndarray) -> str:
    """Decodes ids document by document, because seqio decodes only up to the first end-of-document id."""
    documents = np.split(ids, np.flatnonzero(np.equal(ids, vocabulary.eos_id)) + 1)
    return "\n".join(vocabulary.decode(part.tolist()) for part in documents if len(part))


class _Examples(Iterator):
    """The examples of a lane: the ids of `inputs` and `targets` together, and how many are of `inputs`."""

    def __init__(self, asked: Asked, lane: Lane, begin: int) -> None:
        self._lane, self._features, self.number = lane, tuple(asked.lengths), begin
        _registered(asked)
        task = self._task = seqio_tasks.library().get_mixture_or_task(lane.task)
        vocabulary = self.vocabulary = task.output_features["targets"].vocabulary
        self.vocab_size, self._lowest = int(vocabulary.vocab_size), 1 if seqio_tasks.reserves_zero(vocabulary) else 0
        self._dataset_of = functools.partial(_dataset, asked, lane)
        with self._failing():
            self._iterator = self._dataset_of(task).skip(begin).as_numpy_iterator()

    def __next__(self) -> tuple[np.ndarray, int]:
        with self._failing():
            example = next(self._iterator)
            parts = [np.asarray(example[name]) for name in self._features]
        ids = np.concatenate(parts)
        if len(ids) and not (self._lowest <= ids.min() and ids.max() < self.vocab_size):
            reserved = " (id 0 is reserved for padding)" if self._lowest else ""
            raise UserError(
                f"{self._where()}: ids {ids.min()} to {ids.max()}, expected {self._lowest} to {self.vocab_size - 1}"
                f"{reserved}: does a preprocessor use another vocabulary than the feature?"
            )
        self.number += 1
        return ids, len(ids) - len(parts[-1])

    def _where(self) -> str:
        shard = f", shard {self._lane.index} of {self._lane.count}" if self._lane.count > 1 else ""
        return f"task {self._lane.task}, {self._lane.split} split{shard}, example {self.number}"

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except StopIteration:
            raise
        except Exception as error:
            found = failing_preprocessor(self._task, self._dataset_of, self.number)
            by = f", preprocessor {found}" if found else ""
            raise UserError(f"{self._where()}{by}: {type(error).__name__}: {_shown(error)}") from error


def _dataset(asked: Asked, lane: Lane, task: Any) -> Any:
    _seed_tensorflow(None if lane.draws else 0)
    return task.get_dataset(
        asked.lengths,
        split=lane.split,
        use_cached=task.requires_caching,
        shuffle=False,
        seed=lane.epoch,
        num_epochs=1,
        shard_info=seqio_tasks.library().ShardInfo(lane.index, lane.count),
        try_in_mem_cache=False,
    )


def _registered(asked: Asked) -> Any:
    found = seqio_tasks.registered(asked.name, module=asked.module)
    has_inputs = "inputs" in found.output_features
    if has_inputs != (asked.inputs is not None):
        raise UserError(
            f"text.seqio.inputs_length is {asked.inputs}, and {asked.name} has the features "
            f"{sorted(found.output_features)}: give it for a task with inputs, and for no other"
        )
    missing = [split for split in SPLITS if not any(split in task.splits for task in _tasks(found))]
    if missing:
        has = sorted({split for task in _tasks(found) for split in task.splits})
        raise UserError(f"text.seqio.name: {asked.name} has no split {' and no '.join(missing)}, only {has}")
    return found


def _tasks(found: Any) -> Sequence[Any]:
    return seqio_tasks.library().get_subtasks(found)


def _shown(error: Exception) -> str:
    said = " ".join(str(error).split())
    return said if len(said) <= _SHOWN else f"… {said[-_SHOWN:]}"


def _is_file(name: str) -> bool:
    return name.startswith("gs://") or os.path.isfile(name)  # noqa: PTH113 (a shard may be any text)


def _seed_tensorflow(seed: int | None) -> None:
    """Sets TensorFlow's seed, so that random operations without one repeat; None: sets none."""
    import tensorflow as tf

    tf.random.set_seed(seed)


def _takes_seeds(task: Any) -> bool:
    """Returns whether seqio gives a task's preprocessors seeds, which differ in each epoch."""
    for function in filter(callable, task.preprocessors):
        bound = function.keywords if isinstance(function, functools.partial) else {}
        if {"seed", "seeds"} & (inspect.signature(function).parameters.keys() - bound.keys()):
            return True
    return False


# The calling process


class Processes:
    """Processes that call the functions of this module; each starts at its first call."""

    def __init__(self) -> None:
        self._pools: dict[int, concurrent.futures.ProcessPoolExecutor] = {}
        self._pids: dict[int, concurrent.futures.Future] = {}
        self._last: dict[int, concurrent.futures.Future] = {}

    def submit(self, number: int, call: Callable[..., Any], *arguments: Any) -> concurrent.futures.Future:
        """Submits a call to process `number`; calls for a lane must go to the same process."""
        if number not in self._pools:
            context = multiprocessing.get_context("spawn")  # a fork would break the threads of JAX and TensorStore
            self._pools[number] = concurrent.futures.ProcessPoolExecutor(1, context, _prepare)
            self._pids[number] = self._pools[number].submit(os.getpid)
        self._last[number] = self._pools[number].submit(call, *arguments)
        return self._last[number]

    def close(self) -> None:
        """Ends the processes, even while they work; a later call starts new ones."""
        for number, pool in self._pools.items():
            if number in self._last and not self._last[number].done():  # it only reads, so nothing is lost
                with contextlib.suppress(concurrent.futures.process.BrokenProcessPool, ProcessLookupError):
                    os.kill(self._pids[number].result(), signal.SIGKILL)
            pool.shutdown(cancel_futures=True)
        self._pools.clear()


_FEWER = "fill the cache with launch/run tokenize --task and fewer --processes; it continues"
PROCESSES = Processes()  # those started by this process
atexit.register(PROCESSES.close)


def answer(future: concurrent.futures.Future, *, fix: str = _FEWER) -> Any:
    """Returns the result of a call; raises UserError, with `fix`, if its process ended."""
    try:
        return future.result()
    except concurrent.futures.process.BrokenProcessPool as error:
        raise UserError(
            f"a process that runs the seqio pipeline ended, often for lack of memory: {fix}. A program of your own "
            "must call Renga below if __name__ == '__main__'"
        ) from error


def _prepare() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ["JAX_PLATFORMS"] = "cpu"  # seqio imports JAX, but the accelerators belong to the run


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)  # the parent was killed, so nobody uses what this process reads
