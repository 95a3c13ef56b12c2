"""Packing with numpy fills rows as seqio's converter does."""

import numpy as np
import pytest

from tasks import packing, seqio_tasks

LENGTH = 9


def _documents():
    generator = np.random.default_rng(0)
    return [generator.integers(1, 50, size).tolist() for size in generator.integers(1, 25, 8)]


@pytest.mark.slow
def test_rows_equal_those_of_seqio():
    """seqio closes a row after every LENGTH pieces: it is given one such group at a time."""
    tf, seqio = seqio_tasks.modules()
    pieces = [piece for ids in _documents() for piece in packing.text_segments(ids, length=LENGTH, bos_id=7)]
    for start in range(0, len(pieces), LENGTH):
        group = pieces[start : start + LENGTH]
        padded = np.stack([np.pad(piece.targets, (0, LENGTH - len(piece.targets))) for piece in group])
        dataset = tf.data.Dataset.from_tensor_slices({"targets": padded})
        converted = seqio.DecoderFeatureConverter(pack=True, bos_id=7)(dataset, {"targets": LENGTH})
        theirs = [seqio_tasks.batch_of(row, zero=50) for row in converted]
        ours = packing.pack(group, length=LENGTH)
        for key, values in ours.items():
            np.testing.assert_array_equal(values, [row[key] for row in theirs], err_msg=key)
        assert (ours["targets"] != 0).sum() == sum(len(piece.targets) for piece in group)


def test_a_worked_example():
    documents = ([5, 6, 1], [7, 1], [8, 9, 10, 11, 12, 1])
    pieces = [piece for ids in documents for piece in packing.text_segments(ids, length=5, bos_id=0)]
    packed = packing.pack(pieces, length=5)
    assert packed["targets"].tolist() == [[5, 6, 1, 7, 1], [8, 9, 10, 11, 12], [1, 0, 0, 0, 0]]
    assert packed["inputs"].tolist() == [[0, 5, 6, 0, 7], [0, 8, 9, 10, 11], [0, 0, 0, 0, 0]]
    assert packed["segment_ids"].tolist() == [[1, 1, 1, 2, 2], [1, 1, 1, 1, 1], [1, 0, 0, 0, 0]]
    assert packed["positions"].tolist() == [[0, 1, 2, 0, 1], [0, 1, 2, 3, 4], [0, 0, 0, 0, 0]]
    assert packed["weights"].tolist() == [[1, 1, 1, 1, 1], [1, 1, 1, 1, 1], [1, 0, 0, 0, 0]]
