"""Reads prepared TensorFlow Datasets (TFDS) as a source of documents."""

import dataclasses
import functools
import hashlib
import importlib.util
import os
import re
from collections.abc import Callable
from typing import Any

from core.errors import Problem, UserError
from core.files import paths
from core.hosts import log_filters
from tasks.text import documents
from tasks.text.document_streams import DocumentSource, Parts


@dataclasses.dataclass(frozen=True)
class Tfds(DocumentSource):
    """A dataset of TensorFlow Datasets that `tfds build` has prepared; `text.tfds` explains the fields."""

    name: str
    split: str
    validation_split: str
    field: str
    data_dir: str | None

    def named_files(self) -> tuple[str, ...]:
        return (self.data_dir,) if self.data_dir else ()

    def parts(self, split: str, num_streams: int) -> Parts:
        tensorflow()
        import tensorflow_datasets as tfds

        builder, name = prepared(self.name, self.data_dir), self.split if split == "train" else self.validation_split
        if self.field not in builder.info.features:
            raise UserError(f"text.tfds.field: {self.name} has no {self.field!r}, only {sorted(builder.info.features)}")
        try:
            whole = builder.info.splits[name]
        except (KeyError, ValueError) as error:
            raise UserError(f"text.tfds: {self.name} has no split {name!r}: {error}") from error
        count = min(max(len(whole.file_instructions), num_streams), max(whole.num_examples, 1))
        take = documents.intake_of(self).take
        parts = [_Share(builder, share, name, self.field, take) for share in tfds.even_splits(name, count)]
        return Parts(parts, is_shared=count < num_streams)

    def problems(self) -> list[str]:
        found = []
        if importlib.util.find_spec("tensorflow_datasets") is None:
            found.append("text.tfds needs the package tensorflow-datasets, which launch/setup.sh installs")
        if self.data_dir and not paths.is_remote(self.data_dir) and not paths.resolve(self.data_dir).is_dir():
            found.append(Problem(f"no folder {self.data_dir!r}", setting="text.tfds.data_dir", file=self.data_dir))
        return [*found, *_name_problems(self.name, setting="text.tfds.name")]

    def overlaps(self, *, remote: bool) -> list[Problem]:
        found = documents.split_overlaps(self.split, self.validation_split, where="text.tfds.validation_split")
        if remote and not found:
            self.parts("validation", 1)  # raises UserError before the first evaluation would
        return found

    def describe(self) -> str:
        return f"text.tfds: {self.name} ({self.split}; validation {self.validation_split})"

    def fingerprint(self) -> str:
        return hashlib.sha256(repr(dataclasses.replace(self, data_dir=None)).encode()).hexdigest()


class _Share:
    def __init__(self, builder: Any, split: Any, name: str, field: str, take: Callable[..., bytes]) -> None:
        self.builder, self.split, self.name, self.field, self.take = builder, split, name, field, take

    def open(self, offset: Any) -> "_ShareReader":
        return _ShareReader(self, offset or 0)


class _ShareReader:
    def __init__(self, part: _Share, offset: int) -> None:
        import tensorflow_datasets as tfds

        self._part, self._offset = part, offset
        read = tfds.ReadConfig(
            try_autocache=False, interleave_cycle_length=1, num_parallel_calls_for_interleave_files=1
        )
        dataset = part.builder.as_dataset(split=part.split, read_config=read).skip(offset)
        self._examples = dataset.map(lambda example: example[part.field]).as_numpy_iterator()

    def offset(self) -> int:
        return self._offset

    def __next__(self) -> bytes:
        part = self._part
        try:
            content = next(self._examples)
        except tensorflow().errors.OpError as error:
            raise UserError(
                f"text.tfds: {part.name} cannot be read: {error.message.strip().splitlines()[0]}"
            ) from error
        if not isinstance(content, bytes):
            raise UserError(f"text.tfds.field: {part.field!r} is {type(content).__name__}, expected text")
        self._offset += 1
        return part.take(documents.checked, content, where=f"the document of {part.name} that begins {content[:40]!r}")


def prepared(name: str, data_dir: str | None) -> Any:
    """Returns the builder of a prepared dataset. Raises UserError if it is not prepared."""
    for problem in _name_problems(name, setting="tfds"):
        raise UserError(problem)
    import tensorflow_datasets as tfds

    try:
        builder = tfds.builder(name, data_dir=data_dir)
    except (tfds.core.registered.DatasetNotFoundError, ValueError) as error:  # ValueError: not a dataset name
        raise UserError(f"tfds: there is no dataset {name!r}: {str(error).splitlines()[0]}") from error
    if not builder.is_prepared():
        raise UserError(f"tfds: {name} is not prepared in {builder.data_dir}: run `tfds build {name}`")
    return builder


def _name_problems(name: str, *, setting: str) -> list[Problem]:
    """Returns the problem of a name `namespace:dataset`, for which TFDS may download and run code."""
    if not re.match(r"[^/]*:[^\d*]", name):
        return []
    return [
        Problem(
            f"{name!r} has a namespace, for which TensorFlow Datasets may download code and run it",
            setting=setting,
            expected="a name without it, such as 'c4/en:3.1.0'",
            fix="prepare the dataset, and give its own name and, as data_dir, its folder",
        )
    ]


def examples(name: str, split: str, *, data_dir: str | None) -> Any:
    """Returns an iterable over the examples of a prepared dataset, in the order of its files.

    Raises UserError if there is no such split.
    """
    tensorflow()
    builder = prepared(name, data_dir)
    try:
        return builder.as_dataset(split=split, shuffle_files=False).as_numpy_iterator()
    except (KeyError, ValueError) as error:
        raise UserError(f"tfds: {name} has no split {split!r}: {error}") from error


@functools.cache
def tensorflow() -> Any:
    """Imports TensorFlow without its start-up messages, and returns it."""
    held = log_filters.Held()
    try:
        with log_filters.holding_stderr() as held:
            import tensorflow as tf

            tf.zeros([])  # the first operation looks for devices, and logs the missing ones
    finally:
        os.write(2, log_filters.without(held.content))
    return tf
