"""A task that draws rows; positions and splits are tested with its subclass `synthetic.random_tokens`."""

import captions
import numpy as np
import pytest

from core.types import DataLayout

LAYOUT = DataLayout(8, (0, 1, 4, 5), (0, 4))


def test_a_host_draws_its_rows_of_every_field():
    task = captions.Squares(num_streams=4)
    whole, part = (next(task.train(at, seed=3)) for at in (DataLayout(8, tuple(range(8)), (0, 2, 4, 6)), LAYOUT))
    for name, field in task.spec(8).items():
        assert (whole[name].shape, whole[name].dtype) == (field.shape, field.dtype)
        np.testing.assert_array_equal(part[name], whole[name][list(LAYOUT.rows)])
    assert len({row.tobytes() for row in whole["pixels"]}) == 8
    assert task.fingerprint() != captions.Squares(num_streams=8).fingerprint()


class Wrong(captions.Squares):
    def row(self, rng, *, is_training):
        row = super().row(rng, is_training=is_training)
        return {"pixels": row["pixels"][..., :1], "inputs": row["inputs"].astype(np.int64), "words": row["targets"]}


def test_a_row_that_differs_from_the_spec_is_refused():
    with pytest.raises(ValueError, match=r"^Wrong\.row: 'pixels' is uint8\[8, 8, 1\], spec says uint8\[8, 8, 3\]") as e:
        next(Wrong(num_streams=4).train(LAYOUT, seed=0))
    assert "'inputs' is int64[4], spec says int32[4]" in str(e.value)
    assert "'words' is int32[4], spec says no such field" in str(e.value)
    assert "'targets' is missing, spec says int32[4]" in str(e.value)
