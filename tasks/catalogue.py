"""Reads prepared TensorFlow Datasets (TFDS) as a source of documents."""

import dataclasses
import functools
import hashlib
import importlib.util
from typing import Any

from core import paths
from core.errors import UserError
from tasks import documents, seqio_tasks
from tasks.documents import StreamSpec
from tasks.seqio_tasks import SeqioCorpus, plain


@dataclasses.dataclass(frozen=True)
class Tfds(SeqioCorpus):
    """A dataset of the TensorFlow Datasets catalogue that `tfds build` has prepared."""

    name: str
    split: str
    validation_split: str
    field: str
    data_dir: str | None

    def named_files(self) -> tuple[str, ...]:
        """See `Corpus`."""
        return (self.data_dir,) if self.data_dir else ()

    def documents(self, spec: StreamSpec, *, epochs: int | None = None) -> tuple[Any, bool]:
        """See `SeqioCorpus`.

        Raises:
          UserError: the dataset is not prepared, or has no such field.
        """
        tf, _ = seqio_tasks.modules()
        import tensorflow_datasets as tfds

        builder = self._builder()
        split = self.split if spec.split == "train" else self.validation_split
        by_file = len(builder.info.splits[split].file_instructions) >= spec.num_streams
        read = tfds.ReadConfig(
            shuffle_seed=spec.seed,
            shuffle_reshuffle_each_iteration=False,  # otherwise a second iterator would read in a different order
            try_autocache=False,
            interleave_cycle_length=1,
            num_parallel_calls_for_interleave_files=1,
            input_context=tf.distribute.InputContext(spec.num_streams, spec.index) if by_file else None,
        )
        examples = builder.as_dataset(split=split, shuffle_files=spec.seed is not None, read_config=read)
        if self.field not in examples.element_spec:
            raise UserError(f"text.tfds.field: {self.name} has no {self.field!r}, only {sorted(examples.element_spec)}")
        read_text = seqio_tasks.reader(self, functools.partial(_read, split))
        texts = examples.map(plain(lambda example: {"text": read_text(example[self.field])}))
        texts = texts.filter(plain(lambda document: tf.strings.length(document["text"]) > 0)).repeat(epochs)
        if not by_file and spec.seed is not None:
            return texts.shard(spec.num_streams, spec.index), True
        return texts, by_file

    def problems(self) -> list[str]:
        """See `Corpus`."""
        found = []
        if importlib.util.find_spec("tensorflow_datasets") is None:
            found.append("text.tfds needs the package tensorflow-datasets: pip install tensorflow-datasets")
        if self.data_dir and not paths.is_remote(self.data_dir) and not paths.resolve(self.data_dir).is_dir():
            found.append(f"text.tfds.data_dir: no folder {self.data_dir!r}")
        return found

    def describe(self) -> str:
        """See `Corpus`."""
        return f"text.tfds: {self.name} ({self.split}; validation {self.validation_split})"

    def fingerprint(self) -> str:
        """See `Corpus`."""
        return hashlib.sha256(repr(dataclasses.replace(self, data_dir=None)).encode()).hexdigest()

    def _builder(self) -> Any:
        import tensorflow_datasets as tfds

        builder = tfds.builder(self.name, data_dir=self.data_dir)
        if not builder.is_prepared():
            raise UserError(
                f"text.tfds: {self.name} is not prepared in {builder.data_dir}: run `tfds build {self.name}`"
            )
        return builder


def _read(split: str, content: bytes) -> bytes:
    return documents.checked(content, where=f"the document of {split} that begins {content[:40]!r}")
