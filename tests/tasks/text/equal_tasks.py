"""Tasks of different shapes, registered as in T5X's documentation; `FILES` is the folder of their text files."""

import functools
import os
import pathlib

import seqio
import tensorflow as tf

from tasks import text
from tasks.text import registered, vocabularies

FILES = os.environ["OWN_FILES"]
WORDS = ["a", "letter", "and", "some", "words", "that", "differ", "naïve"]
TEXTS = [" ".join(WORDS[i * k % 8] for k in range(1 + i * 5 % 11)) + f" {i}" for i in range(60)]
BYTES = seqio.ByteVocabulary()
PIECES = seqio.SentencePieceVocabulary(f"{FILES}/own.model", extra_ids=4)


def source(**features):
    return seqio.FunctionDataSource(
        lambda split, shuffle_files, seed=None: tf.data.Dataset.from_tensor_slices(
            {name: texts if split == "train" else texts[:7] for name, texts in features.items()}
        ),
        splits=["train", "validation"],
    )


def features(*names, vocabulary=BYTES, add_eos=True):
    return {name: seqio.Feature(vocabulary, add_eos=add_eos and name == "targets") for name in names}


@seqio.map_over_dataset
def question(example):
    return {"inputs": tf.strings.join(["question: ", example["text"]]), "targets": tf.strings.upper(example["text"])}


@seqio.map_over_dataset
def line(text):
    return {"targets": text}


@seqio.map_over_dataset(num_seeds=1)
def masked(example, seed):
    kept = tf.random.stateless_uniform(tf.shape(example["targets"]), seed) > 0.3
    return {"targets": tf.where(kept, example["targets"], 2)}


def masked_inside(dataset):
    """As t5's `span_corruption`: the function takes no seed, and what it applies does."""
    return masked(dataset)


def split_long(dataset, sequence_length):
    """Splits `targets` into pieces of the length of a row, the last one shorter."""
    length = sequence_length["targets"]

    def pieces(example):
        ids = example["targets"]
        count = -(-tf.size(ids) // length)
        return tf.data.Dataset.range(tf.cast(count, tf.int64)).map(
            lambda n: {"targets": ids[tf.cast(n, tf.int32) * length : (tf.cast(n, tf.int32) + 1) * length]}
        )

    return dataset.flat_map(pieces)


TOKENIZE, EOS = seqio.preprocessors.tokenize, seqio.preprocessors.append_eos
RENAME = functools.partial(seqio.preprocessors.rekey, key_map={"targets": "text"})
add = seqio.TaskRegistry.add
add(
    "prefix",
    source=source(text=TEXTS),
    preprocessors=[question, TOKENIZE, EOS],
    output_features=features("inputs", "targets"),
)
add(
    "lines",
    source=seqio.TextLineDataSource({"train": f"{FILES}/part-*.txt", "validation": f"{FILES}/part-0.txt"}),
    preprocessors=[line, TOKENIZE, EOS],
    output_features=features("targets", vocabulary=PIECES),
)
add(
    "several",
    source=source(text=TEXTS),
    preprocessors=[
        question,
        lambda dataset: dataset.filter(lambda example: tf.strings.length(example["targets"]) > 12),
        functools.partial(TOKENIZE, copy_pretokenized=True),
        seqio.CacheDatasetPlaceholder(),
        EOS,
    ],
    output_features=features("inputs", "targets", vocabulary=PIECES),
)
add(
    "truncated",
    source=source(inputs=[text * 3 for text in TEXTS], targets=[text * 4 for text in TEXTS]),
    preprocessors=[TOKENIZE, EOS],
    output_features=features("inputs", "targets"),
)
add(
    "trimmed",
    source=source(inputs=[text * 3 for text in TEXTS], targets=[text * 4 for text in TEXTS]),
    preprocessors=[TOKENIZE, seqio.preprocessors.append_eos_after_trim],
    output_features=features("inputs", "targets"),
)
add(
    "empty",
    source=source(text=["" if i % 3 else text for i, text in enumerate(TEXTS)]),
    preprocessors=[RENAME, TOKENIZE],
    output_features=features("targets", add_eos=False),
)
add(
    "long",
    source=source(text=[text * (1 + i % 9) for i, text in enumerate(TEXTS)]),
    preprocessors=[RENAME, TOKENIZE, EOS, split_long],
    output_features=features("targets"),
)
add(
    "random",
    source=source(text=TEXTS),
    preprocessors=[RENAME, TOKENIZE, EOS, masked],
    output_features=features("targets"),
)
add(
    "random_inside",
    source=source(text=TEXTS),
    preprocessors=[RENAME, TOKENIZE, EOS, masked_inside],
    output_features=features("targets"),
)
add(
    "without_seed",
    source=source(text=TEXTS),
    preprocessors=[RENAME, lambda dataset: dataset.filter(lambda _: tf.random.uniform([]) < 0.5), TOKENIZE, EOS],
    output_features=features("targets"),
)
add(
    "passed_on",
    source=source(targets=[[3, 4, 5, 2 + n % 7] for n in range(60)]),
    preprocessors=[],
    output_features=features("targets", vocabulary=seqio.PassThroughVocabulary(9, eos_id=1)),
)
seqio.MixtureRegistry.add("mixed", [("empty", 3.0), ("long", lambda task: 1.0 + len(task.name) / 4)])


def length(targets, predictions):
    return {"length": sum(map(len, predictions))}


add(
    "measured_without_validation",
    source=seqio.TextLineDataSource({"train": f"{FILES}/part-*.txt", "test": f"{FILES}/part-0.txt"}),
    preprocessors=[line, TOKENIZE, EOS],
    output_features=features("targets"),
    metric_fns=[length],
)
add(
    "needs_cache",
    source=source(text=TEXTS),
    preprocessors=[RENAME, TOKENIZE, seqio.CacheDatasetPlaceholder(required=True), EOS],
    output_features=features("targets"),
)
add(
    "not_shuffled",
    source=source(text=TEXTS),
    preprocessors=[RENAME, TOKENIZE, EOS],
    output_features=features("targets"),
    shuffle_buffer_size=None,
)

# Errors


@seqio.map_over_dataset
def fails(example):
    return {"targets": tf.strings.as_string(tf.strings.to_number(example["text"]))}


NUMBERS = [str(i) for i in range(9)]
add(
    "fails_later",
    source=source(text=[*(NUMBERS * 8)[:70], "text", *NUMBERS]),
    preprocessors=[fails, TOKENIZE],
    output_features=features("targets"),
)
add(
    "outside",
    source=source(text=TEXTS),
    preprocessors=[RENAME, functools.partial(TOKENIZE, output_features=features("targets", vocabulary=PIECES)), EOS],
    output_features=features("targets", vocabulary=seqio.PassThroughVocabulary(9, eos_id=1)),
)
add(
    "all_empty",
    source=source(text=["" for _ in TEXTS]),
    preprocessors=[RENAME, TOKENIZE],
    output_features=features("targets", add_eos=False),
)
add(
    "no_validation",
    source=seqio.TextLineDataSource({"train": f"{FILES}/part-*.txt"}),
    preprocessors=[line, TOKENIZE],
    output_features=features("targets"),
)
add(
    "no_files",
    source=seqio.TextLineDataSource({"train": f"{FILES}/absent-*.txt", "validation": f"{FILES}/part-0.txt"}),
    preprocessors=[line, TOKENIZE],
    output_features=features("targets"),
)
add(
    "two_vocabularies",
    source=source(inputs=TEXTS, targets=TEXTS),
    preprocessors=[TOKENIZE],
    output_features=features("inputs") | features("targets", vocabulary=PIECES),
)
add(
    "continuous",
    source=source(text=TEXTS),
    preprocessors=[RENAME, TOKENIZE],
    output_features={"targets": seqio.ContinuousFeature(dtype=tf.float32)},
)
add(
    "encoder",
    source=source(inputs=TEXTS, targets=TEXTS),
    preprocessors=[TOKENIZE],
    output_features=features("inputs", "targets", "labels"),
)


# Tasks of this workspace

BPE = vocabularies.tokenizer(f"{pathlib.Path(__file__).parent}/fixtures/tokenizers/bpe")
OWN = {"length": 2, "num_streams": 1}
LINES = {"train": f"{FILES}/part-[12].jsonl", "validation": f"{FILES}/part-0.jsonl"}
registered.add("own_files", text.files(**LINES, **OWN))
registered.add("overlapping", text.files(train=f"{FILES}/*-0.jsonl", validation=LINES["validation"], **OWN))
registered.add("own_tokenizer", text.files(**LINES, **OWN, vocabulary=BPE))
registered.add("own_chats", text.chats(train=f"{FILES}/chats.jsonl", **OWN, vocabulary=BPE))
add(
    "hugging_face",
    source=source(text=TEXTS),
    preprocessors=[question, TOKENIZE, EOS],
    output_features=features("inputs", "targets", vocabulary=registered.vocabulary(BPE)),
)
seqio.MixtureRegistry.add("with_library", [("own_files", 1.0), ("renga.python_source", 1.0)])
