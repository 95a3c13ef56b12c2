"""`--scale-from`: the same rows per device on another slice, or an error."""

import pytest

from core.errors import UserError
from launch import scaling
from launch.config import loader

FILE = "gin/quickstart_phases.gin"
WHERE = {"slice_name": "v4-8", "scale_from": "v4-16"}


def test_a_smaller_slice_gets_fewer_rows():
    found = scaling.bindings("gin/quickstart.gin", **WHERE)
    scaled, own = (loader.load("gin/quickstart.gin", bindings=more).build().batch_size for more in (found, []))
    assert scaled == own / 2


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ([], "PHASES of .* set batch sizes"),
        (["PHASE = 2"], "the phase that PHASE names sets its batch size; scale it by hand"),
    ],
)
def test_rows_of_phases_are_not_scaled_in_part(given, says):
    with pytest.raises(UserError, match=says):
        scaling.bindings(FILE, **WHERE, given=given)
