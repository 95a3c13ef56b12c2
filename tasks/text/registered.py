"""Registers Renga's text tasks with seqio, so that seqio mixtures can contain them.

Importing this module registers `renga.python_source`. Your own module adds others:

  registered.add("notes", text.files(train="/data/notes/*.jsonl", length=512, num_streams=1))
  seqio.MixtureRegistry.add("all", [("notes", 1.0), ("renga.python_source", 0.2)])

A document becomes ids with the end-of-document id, split to seqio's sequence length. A conversation gives one example
per answer: `inputs` has all ids before the answer, and `targets` those of the answer.
"""

import functools
from collections.abc import Iterator, Mapping
from typing import Any, cast

import numpy as np

from core.errors import UserError
from tasks import text
from tasks.text import chat_files, seqio_tasks, vocabularies
from tasks.text.chat_files import ChatFiles
from tasks.text.constructors import SHIPPED, TextTask
from tasks.text.document_streams import DocumentSource, with_end
from tasks.text.ids import ChatVocabulary, Vocabulary
from tasks.text.seqio_cache import SeqioCache
from tasks.text.tfds_source import tensorflow
from tasks.text.token_cache import TokenCache


def add(name: str, task: TextTask, **options: Any) -> Any:
    """Registers a task of documents or conversations as a seqio Task, and returns it.

    Args:
      name: the name in seqio's registry.
      task: `text.files`, `python_source`, `tfds` or `huggingface`; or `chats`, which also has `inputs`. Its length and
        number of streams are not used.
      **options: those of `seqio.TaskRegistry.add`, such as `metric_fns`.

    Raises:
      UserError: the task has neither documents nor conversations.
    """
    seqio, tf, source = seqio_tasks.library(), tensorflow(), task.corpus
    features = ["inputs", "targets"] if isinstance(source, ChatFiles) else ["targets"]
    if isinstance(source, ChatFiles):
        examples, preprocessor = _answers, leave_out_long
    elif isinstance(source, DocumentSource) and not isinstance(source, (TokenCache, SeqioCache)):
        examples, preprocessor = _documents, split
    else:
        raise UserError(
            f"{name}: expected text.files, text.python_source, text.tfds, text.huggingface or text.chats, found "
            f"{source.describe()}, which has no documents"
        )

    def dataset(split: str, shuffle_files: bool, seed: int | None = None) -> Any:
        task.require_apart()
        signature = {feature: tf.TensorSpec([None], tf.int32) for feature in features}
        return tf.data.Dataset.from_generator(functools.partial(examples, task, split), output_signature=signature)

    return seqio.TaskRegistry.add(
        name,
        source=seqio.FunctionDataSource(dataset, splits=["train", "validation"]),
        preprocessors=[preprocessor],
        output_features={feature: seqio.Feature(vocabulary(task.vocabulary)) for feature in features},
        **options,
    )


def vocabulary(ours: Vocabulary) -> Any:
    """Returns one of Renga's vocabularies as a seqio Vocabulary."""
    seqio = seqio_tasks.library()
    if ours.hash == vocabularies.bytes().hash:
        return seqio.ByteVocabulary()
    return seqio_tasks.own_vocabulary()(ours)


def split(dataset: Any, sequence_length: Mapping[str, int] | None) -> Any:
    """A seqio preprocessor that splits `targets` to their length in `sequence_length`, if there is one."""
    if not sequence_length:
        return dataset
    tf, length = tensorflow(), sequence_length["targets"]

    def pieces(example: Mapping[str, Any]) -> Any:
        ids = example["targets"]
        starts = tf.data.Dataset.range(0, tf.size(ids, tf.int64), length)
        return starts.map(lambda start: {"targets": ids[start : start + length]})

    return dataset.flat_map(pieces)


def leave_out_long(dataset: Any, sequence_length: Mapping[str, int] | None) -> Any:
    """A seqio preprocessor that leaves out examples whose `inputs` are longer than in `sequence_length`.

    seqio would cut them, and an answer needs all of them.
    """
    if not sequence_length:
        return dataset
    tf, most = tensorflow(), sequence_length["inputs"]
    return dataset.filter(lambda example: tf.size(example["inputs"]) <= most)


def _documents(task: TextTask, split: str) -> Iterator[Mapping[str, np.ndarray]]:
    task.vocabulary.prepare("", is_host_zero=False, sample=lambda: ())
    assert isinstance(task.corpus, DocumentSource)
    for part in task.corpus.parts(split, 1).parts:
        reader = part.open(None)
        while (content := next(reader, None)) is not None:
            if content:
                ids = task.vocabulary.encode(content.decode())
                yield {"targets": with_end(ids, task.vocabulary, where=task.corpus.describe)}


def _answers(task: TextTask, split: str) -> Iterator[Mapping[str, np.ndarray]]:
    assert isinstance(task.corpus, ChatFiles)
    for line in task.corpus.lines(split):
        inputs, targets, weights = chat_files.segment(line.chat(), cast(ChatVocabulary, task.vocabulary))
        ids, learned = np.concatenate([inputs[:1], targets]), np.concatenate([[0], weights, [0]])
        for begin, end in np.flatnonzero(np.diff(learned)).reshape(-1, 2) + 1:
            yield {"inputs": ids[:begin], "targets": ids[begin:end]}


for _name in SHIPPED:
    add(_name, text.seqio(name=_name, length=2, num_streams=1))
