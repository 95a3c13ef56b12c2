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


def test_the_number_of_streams_is_changed_only_where_it_must():
    found = scaling.bindings("gin/trm/sudoku4.gin", slice_name="v4-16", scale_from="v4-8")
    assert [one.partition(" = ")[0] for one in found] == ["BATCH_SIZE"]


def test_streams_that_the_task_sets_itself_are_an_error_that_names_the_flag():
    given = ["from tasks import text", "text.seqio.num_streams = 32", "BATCH_SIZE = 64"]
    with pytest.raises(UserError, match=r"16 rows on v4-8 do not divide over the 32 streams .*num_streams to 16"):
        scaling.bindings("gin/quickstart.gin", slice_name="v4-8", scale_from="v4-32", given=given)


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
