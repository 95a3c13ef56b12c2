"""Packing fills rows as seqio's converter does, and seqio's own tasks are read."""

import sys

import numpy as np
import pytest

from core.errors import UserError
from core.types import DataLayout
from tasks import text
from tasks.text import packing, seqio_live, seqio_metrics, seqio_tasks, tfds_source

LENGTH = 9


def _documents():
    generator = np.random.default_rng(0)
    return [generator.integers(1, 50, size).tolist() for size in generator.integers(1, 25, 8)]


def cut(ids, *, length, bos_id):
    """The chunks of a document, as segments."""
    ids = np.asarray(ids, np.int32)
    return [packing.text_segment(ids[at : at + length], bos_id=bos_id) for at in range(0, len(ids), length)]


@pytest.mark.slow
def test_rows_equal_those_of_seqio():
    """Row by row: seqio fills rows in order, and closes one after every LENGTH pieces."""
    tf, seqio = tfds_source.tensorflow(), seqio_tasks.library()

    pieces = [piece for ids in _documents() for piece in cut(ids, length=LENGTH, bos_id=7)]
    rows = packing.first_fit(pieces, length=LENGTH)
    ours = packing.batch(rows, length=LENGTH)
    for number, row in enumerate(rows):
        padded = np.stack([np.pad(piece.targets, (0, LENGTH - len(piece.targets))) for piece in row])
        dataset = tf.data.Dataset.from_tensor_slices({"targets": padded})
        converted = seqio.DecoderFeatureConverter(pack=True, bos_id=7)(dataset, {"targets": LENGTH})
        (theirs,) = [seqio_live.batch_of(each) for each in converted]
        for key, values in ours.items():
            np.testing.assert_array_equal(values[number], theirs[key], err_msg=key)
    assert (ours["targets"] != 0).sum() == sum(len(piece.targets) for piece in pieces)


def test_a_worked_example():
    documents = ([5, 6, 1], [7, 1], [8, 9, 10, 11, 12, 1])
    pieces = [piece for ids in documents for piece in cut(ids, length=5, bos_id=0)]
    packed = packing.batch(packing.first_fit(pieces, length=5), length=5)
    assert packed["targets"].tolist() == [[5, 6, 1, 7, 1], [8, 9, 10, 11, 12], [1, 0, 0, 0, 0]]
    assert packed["inputs"].tolist() == [[0, 5, 6, 0, 7], [0, 8, 9, 10, 11], [0, 0, 0, 0, 0]]
    assert packed["segment_ids"].tolist() == [[1, 1, 1, 2, 2], [1, 1, 1, 1, 1], [1, 0, 0, 0, 0]]
    assert packed["positions"].tolist() == [[0, 1, 2, 0, 1], [0, 1, 2, 3, 4], [0, 0, 0, 0, 0]]
    assert packed["weights"].tolist() == [[1, 1, 1, 1, 1], [1, 1, 1, 1, 1], [1, 0, 0, 0, 0]]


SIZES = {  # of documents, in ids
    "20 bytes": lambda random, count: np.full(count, 21),
    "an article": lambda random, count: np.exp(random.normal(6.5, 1.2, count)).astype(int) + 2,
    "up to T": lambda random, count: random.integers(1, 2049, count),
    "about half of T": lambda random, count: random.integers(200, 1800, count),
}


@pytest.mark.parametrize("length", [2048, 8192])
@pytest.mark.parametrize("sizes", SIZES)
def test_rows_are_full_and_nothing_is_lost(length, sizes):
    """A window of 2^18 ids."""
    random, pieces, left = np.random.default_rng(0), [], 2**18
    for size in SIZES[sizes](random, 20_000):
        pieces += cut(np.arange(size), length=length, bos_id=0)
        left -= size
        if left <= 0:
            break
    rows = packing.first_fit(pieces, length=length)
    ids = sum(len(piece.targets) for piece in pieces)
    assert sorted(len(piece.targets) for row in rows for piece in row) == sorted(len(piece.targets) for piece in pieces)
    assert all(sum(len(piece.targets) for piece in row) <= length for row in rows)
    assert ids / (len(rows) * length) > 0.94


def test_without_seqio_the_error_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "seqio", None)
    (problem,) = text.seqio(name="own", length=32, num_streams=2, live=True).problems()
    assert problem.startswith("text.seqio and --task need the package seqio")
    assert f"{sys.executable} -m pip install --no-deps seqio" in problem
    with pytest.raises(UserError, match="need the package seqio"):
        seqio_metrics.require_metrics("own")


@pytest.mark.slow
@pytest.mark.covers("D01")
def test_a_registered_seqio_task_is_read_live_and_continues_exactly():
    tf, seqio = tfds_source.tensorflow(), seqio_tasks.library()

    vocabulary = seqio.ByteVocabulary()
    letters = ["a" * n for n in range(1, 30)]
    seqio.TaskRegistry.add(
        "own_letters",
        source=seqio.FunctionDataSource(
            lambda split, shuffle_files, seed=None: tf.data.Dataset.from_tensor_slices({"targets": letters}),
            splits=["train", "validation"],
        ),
        preprocessors=[seqio.preprocessors.tokenize, seqio.preprocessors.append_eos],
        output_features={"targets": seqio.Feature(vocabulary, add_eos=True)},
    )
    task = text.seqio(name="own_letters", length=32, num_streams=2, live=True)
    assert task.problems() == []
    assert (task.vocabulary.size, task.vocabulary.eos_id) == (259, 1)
    assert task.vocabulary.decode(task.vocabulary.encode("abc")) == "abc"
    layout = DataLayout(4, (0, 1, 2, 3), (0, 1, 2, 3))
    batches = task.train(layout, seed=3)
    first = next(batches)
    assert first["targets"].shape == (4, 32)
    assert {
        task.vocabulary.decode(row[ids == 1]) for row, ids in zip(first["targets"], first["segment_ids"], strict=True)
    } <= set(letters)
    state, expected = batches.state(), [next(batches) for _ in range(3)]
    restored = task.train(layout, seed=3)
    restored.restore(state)
    for batch in expected:
        for key, values in next(restored).items():
            np.testing.assert_array_equal(values, batch[key])
    absent = text.seqio(name="own_leters", length=32, num_streams=2, live=True)
    assert "did you mean 'own_letters'?" in absent.problems()[0]


def test_first_fit_is_that_of_one_segment_after_the_other():
    rng = np.random.default_rng(0)
    for count, length in ((1, 5), (40, 9), (300, 31), (200, 8)):
        sizes = rng.integers(1, length + 1, count)
        segments = [packing.text_segment(np.full(size, n, np.int32), bos_id=0) for n, size in enumerate(sizes)]
        rows, free = [], []
        for number in sorted(range(count), key=lambda n: -sizes[n]):
            row = next((row for row, left in enumerate(free) if left >= sizes[number]), len(rows))
            if row == len(rows):
                rows.append([])
                free.append(length)
            rows[row].append(number)
            free[row] -= sizes[number]
        found = [[int(s.targets[0]) for s in row] for row in packing.first_fit(segments, length=length)]
        assert found == sorted(map(sorted, rows))
    assert packing.first_fit([], length=4) == []
