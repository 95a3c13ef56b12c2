"""Fields of a batch: validation of a spec, and sizes derived from it."""

import jax.numpy as jnp
import numpy as np
import pytest

from core import batches
from core.batches import Field

TOKENS = Field((6, 5), np.int32, ("batch", "length"))
IMAGES = Field((6, 4, 7, 3), jnp.bfloat16, ("batch", None, None, None))


def test_a_field_has_the_shape_and_the_dtype_of_an_array():
    assert (IMAGES.shape, IMAGES.dtype, IMAGES.size) == ((6, 4, 7, 3), jnp.dtype("bfloat16"), 6 * 4 * 7 * 3)
    assert Field([6, 5], "int32", ["batch", "length"]) == TOKENS
    assert {TOKENS: 1}[Field((6, 5), jnp.int32, ("batch", "length"))] == 1


@pytest.mark.parametrize(
    ("axes", "says"),
    [
        (("length", "batch"), "the first axis of every field of a batch must be 'batch', its rows"),
        ((None, "length"), "the first axis of every field of a batch must be 'batch', its rows"),
        (("batch",), r"Field\(\(6, 5\), int32, \('batch',\)\): 1 axes for 2 dimensions; expected one for each"),
    ],
)
def test_axes_that_do_not_fit_are_refused(axes, says):
    with pytest.raises(ValueError, match=says):
        Field((6, 5), np.int32, axes)


def test_a_scalar_for_all_rows_is_refused():
    with pytest.raises(ValueError, match="Repeat what all rows share for each row"):
        Field((), np.float32, ())


def test_a_spec_has_fields_of_equal_height():
    batches.check_spec({"inputs": TOKENS, "images": IMAGES})
    with pytest.raises(ValueError, match=r"'inputs' has 6, 'label' has 4\); expected the batch size"):
        batches.check_spec({"inputs": TOKENS, "label": Field((4,), np.int32, ("batch",))})
    bare = batches.batch_shapes({"inputs": TOKENS})
    with pytest.raises(ValueError, match=r"'inputs' is of type ShapeDtypeStruct; expected core\.batches\.Field\("):
        batches.check_spec(bare)
    with pytest.raises(ValueError, match="the name 'row_ids' is reserved"):
        batches.check_spec({"row_ids": Field((6,), np.int32, ("batch",))})


def test_the_tokens_of_a_row_are_counted_along_the_axis_length():
    assert batches.row_length({"images": IMAGES, "inputs": TOKENS}) == 5
    assert batches.row_length({"images": IMAGES}) == 1
    wide = Field((6, 4, 9), np.float32, ("batch", None, "length"))
    assert batches.row_length({"inputs": TOKENS, "frames": wide}) == 9


def test_shapes_of_a_batch_with_other_rows():
    shapes = batches.batch_shapes({"inputs": TOKENS, "images": IMAGES}, rows=2)
    assert {name: (s.shape, s.dtype) for name, s in shapes.items()} == {
        "inputs": ((2, 5), np.int32),
        "images": ((2, 4, 7, 3), jnp.bfloat16),
    }
    assert batches.batch_size(shapes) == 2
