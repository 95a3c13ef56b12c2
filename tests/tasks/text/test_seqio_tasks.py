"""Registered seqio tasks: one example of each source is tried before a run, and their streams are quiet."""

import functools
import os
import subprocess

import numpy as np
import pytest

from core.errors import UserError
from launch import environment
from tasks import text
from tasks.text import seqio_live, seqio_metrics, seqio_pipeline, seqio_tasks
from tasks.text.documents import StreamSpec
from tasks.text.ids import before_end

MODULE = """
import functools

import seqio, tensorflow as tf

@seqio.map_over_dataset
def misspelled(example):
    return {"targets": example["txt"]}

@seqio.map_over_dataset
def numbers(example):
    return {"targets": tf.strings.as_string(tf.strings.to_number(example["text"]))}

@seqio.map_over_dataset
def spelled(example):
    return {"targets": tf.strings.as_string(tf.strings.to_number(example["targets"]))}

def lowered(example, key):
    return {"targets": tf.strings.lower(example[key])}

def drop_all(dataset):
    return dataset.filter(lambda _: False)

rename = functools.partial(seqio.preprocessors.rekey, key_map={"targets": "text"})
TEXTS = {"train": [f"text {n}" for n in range(9)], "validation": ["text"]}

def add(name, *preprocessors):
    seqio.TaskRegistry.add(
        name,
        source=seqio.FunctionDataSource(
            lambda split, shuffle_files, seed=None: tf.data.Dataset.from_tensor_slices({"text": TEXTS[split]}),
            splits=["train", "validation"],
        ),
        preprocessors=[*preprocessors, seqio.preprocessors.tokenize, seqio.preprocessors.append_eos],
        output_features={"targets": seqio.Feature(seqio.ByteVocabulary())},
    )

add("tried_works", rename)
add("tried_misspelled", misspelled)
add("tried_numbers", numbers)
add("tried_filtered", rename, lambda dataset: dataset.filter(lambda _: True), spelled)
add("tried_mapped", rename, seqio.map_over_dataset(functools.partial(lowered, key="txt")))
add("tried_partial", functools.partial(seqio.preprocessors.rekey, key_map={"targets": "txt"}))
add("tried_empty", rename, drop_all)
add("tried_unnamed")
seqio.TaskRegistry.add(
    "of_ids",
    source=seqio.FunctionDataSource(
        lambda split, shuffle_files, seed=None: tf.data.Dataset.from_tensor_slices({"targets": [[3, 4]]}),
        splits=["train"],
    ),
    preprocessors=[],
    output_features={"targets": seqio.Feature(seqio.PassThroughVocabulary(9), add_eos=False)},
)
seqio.TaskRegistry.add(
    "of_ids_with_zero",
    source=seqio.FunctionDataSource(
        lambda split, shuffle_files, seed=None: tf.data.Dataset.from_tensor_slices({"targets": [[3, 0, 4]]}),
        splits=["train", "validation"],
    ),
    preprocessors=[],
    output_features={"targets": seqio.Feature(seqio.PassThroughVocabulary(9, eos_id=8), add_eos=False)},
    metric_fns=[lambda targets, scores: {"score": 0.0}],
)
seqio.TaskRegistry.add(
    "from_python",
    source=seqio.FunctionDataSource(
        lambda split, shuffle_files, seed=None: tf.data.Dataset.from_generator(
            lambda: iter([{"targets": [3, 4]}] * 9), output_signature={"targets": tf.TensorSpec([None], tf.int32)}
        ),
        splits=["train"],
    ),
    preprocessors=[],
    output_features={"targets": seqio.Feature(seqio.PassThroughVocabulary(9), add_eos=False)},
)
seqio.MixtureRegistry.add("tried_mixed", [("tried_works", 1.0), ("tried_misspelled", 1.0)])
for count in (2, 7):
    seqio.TaskRegistry.add(
        f"of_{count}",
        source=seqio.FunctionDataSource(
            lambda split, shuffle_files, seed=None, count=count: tf.data.Dataset.from_tensor_slices(
                {"targets": [[count]] * count, "more": [f"{count}"] * count} if count == 2 else
                {"targets": [[count]] * count}
            ),
            splits=["train", "validation"],
        ),
        preprocessors=[],
        output_features={"targets": seqio.Feature(seqio.PassThroughVocabulary(9), add_eos=False)},
    )
seqio.MixtureRegistry.add("unequal", [("of_2", 3.0), ("of_7", 1.0)])
"""

BROKEN = {
    "tried_works": (),
    "tried_misspelled": ("tried_misspelled", "example 0, preprocessor misspelled (own_tried:6): ", "KeyError: 'txt'"),
    "tried_filtered": ("tried_filtered", "example 0, preprocessor spelled (own_tried:14): "),
    "tried_mapped": ("tried_mapped", "preprocessor lowered (own_tried:18): ", "KeyError: 'txt'"),
    "tried_partial": ("tried_partial", "preprocessor rekey (seqio.preprocessors:", "KeyError: 'txt'"),
    "tried_numbers": (
        "tried_numbers",
        "preprocessor numbers (own_tried:10): ",
        "could not correctly convert string: text",
    ),
    "tried_empty": ("tried_empty", "has no example in its train split"),
    "tried_unnamed": ("tried_unnamed", "missing expected output feature"),
    "tried_mixed": ("tried_misspelled", "KeyError: 'txt'"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a module of the user."""
    found = tmp_path_factory.mktemp("modules")
    (found / "own_tried.py").write_text(MODULE)
    return found


@pytest.fixture
def registered(folder, monkeypatch):
    """The module is imported."""
    seqio_tasks.library()
    monkeypatch.syspath_prepend(str(folder))
    import own_tried  # noqa: F401


@pytest.mark.slow
@pytest.mark.parametrize("name", BROKEN)
def test_one_example_of_each_source_is_tried(registered, name):
    problems = text.seqio(name=name, length=16, num_streams=1, live=True).example_problems()
    assert len(problems) == 2 * bool(BROKEN[name])  # of both splits
    for problem, split in zip(problems, ("train", "validation"), strict=False):
        assert all(word.replace("train", split) in problem for word in BROKEN[name]), problem


@pytest.mark.slow
def test_a_vocabulary_without_an_end_of_document_id_has_minus_one_live_as_in_a_cache(registered):
    vocabulary = seqio_tasks.SeqioVocabulary("of_ids")
    assert vocabulary.eos_id == seqio_tasks.described("of_ids")["eos_id"] == -1
    assert before_end([3, 4], vocabulary) == [3, 4]


@pytest.mark.slow
def test_an_id_zero_is_refused_in_live_rows_and_kept_in_what_metrics_ask(registered):
    """seqio packs it as padding."""
    stream = live_stream("of_ids_with_zero")
    with pytest.raises(UserError, match=r"an id is 0, which is padding in live rows: read the task from a cache"):
        next(stream)
    assert next(live_stream("of_ids"))["targets"].max() == 4
    asked = seqio_metrics.Measured("of_ids_with_zero", None).questions()
    assert asked["tasks"]["of_ids_with_zero"]["pairs"] == [([0], [3, 0, 4])]


@pytest.mark.slow
def test_a_pipeline_that_calls_python_says_that_its_position_cannot_be_saved(registered):
    stream = live_stream("from_python")
    next(stream)
    with pytest.raises(
        UserError, match=r"cannot save a position in it, as where a pipeline calls Python .*from a cache"
    ):
        stream.state()


def live_stream(name):
    task = text.seqio(name=name, length=16, num_streams=1, live=True)
    return task.corpus.open_stream(StreamSpec("train", 0, 1, 2, 16, 3, task.vocabulary))


@pytest.mark.slow
def test_opening_a_stream_shows_no_harmless_message(registered, caplog):
    task = text.seqio(name="tried_works", length=16, num_streams=1, live=True)
    spec = functools.partial(StreamSpec, index=0, num_streams=1, rows=2, length=16, vocabulary=task.vocabulary)
    rows = {split: next(task.corpus.open_stream(spec(split, seed=3))) for split in ("train", "validation")}
    assert caplog.records == []
    assert all(np.any(batch["weights"]) for batch in rows.values())


@pytest.mark.slow
def test_a_stream_without_examples_is_refused(registered):
    task = text.seqio(name="tried_works", length=16, num_streams=2, live=True)
    for once, fix in ((False, "use more examples, or a lower NUM_STREAMS"), (True, "add examples to this split")):
        spec = StreamSpec("validation", 1, 2, 2, 16, None, task.vocabulary, once=once)
        with pytest.raises(UserError, match=f"validation stream 1 of 2: no example; {fix}"):
            next(task.corpus.open_stream(spec))


@pytest.mark.slow
def test_an_evaluation_of_a_live_mixture_reads_every_example_of_every_task(registered):
    task = text.seqio(name="unequal", length=4, num_streams=1, live=True)
    spec = StreamSpec("validation", 0, 1, 1, 4, None, task.vocabulary, once=True)
    batches = iter(functools.partial(next, task.corpus.open_stream(spec), None), None)
    targets = np.concatenate([batch["targets"] for batch in batches])
    assert sorted(targets[targets > 0]) == [2] * 2 + [7] * 7


def test_inputs_leave_room_for_targets_in_the_short_rows_of_a_smoke_run():
    corpus = seqio_live.LiveSeqio(seqio_pipeline.Asked("any", None, 1024, 512))
    assert corpus.lengths(1536) == {"inputs": 1024, "targets": 512}
    assert corpus.lengths(128) == {"inputs": 64, "targets": 64}


@pytest.mark.slow
def test_check_finds_a_broken_preprocessor(folder, tmp_path):
    gin = tmp_path / "broken.gin"
    gin.write_text(
        f"""from __gin__ import dynamic_registration
from tasks import text
include '{environment.WORKSPACE}/gin/quickstart.gin'
TASK = @text.seqio()
text.seqio.name = 'tried_misspelled'
text.seqio.module = 'own_tried'
text.seqio.length = %LENGTH
text.seqio.num_streams = %NUM_STREAMS
VOCAB_SIZE = 384
"""
    )
    done = subprocess.run(
        [*environment.COMMAND, "check", "v5e-1", str(gin), "--run-dir", str(tmp_path / "run")],
        env={**os.environ, "PYTHONPATH": f"{folder}:{environment.WORKSPACE}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2, done.stderr
    assert "KeyError: 'txt'" in " ".join(done.stdout.split())
