"""Attribution of HBM at the peak to values that share memory."""

import pytest

from parallel.planning import buffers

ASSIGNMENT = """BufferAssignment:
allocation 0: size 512, thread-local:
 value: <2 reduce.1 @0> (size=512,offset=0): f32[]{:T(128)}
allocation 1: size 4000, parameter 7, shape |f32[1000]| at ShapeIndex {}, maybe-live-out:
 value: <3 param.1 @0> (size=4000,offset=0): f32[1000]{0:T(1024)}
allocation 2: size 64, constant:
 value: <4 constant.1 @0> (size=64,offset=0): f32[16]{0}
allocation 3: size 1000, preallocated-temp:
 value: <5 early @0> (size=600,offset=0): f32[150]{0}
 value: <6 late @0> (size=500,offset=0): f32[125]{0}
 value: <7 alias{} @0> (size=500,offset=0): f32[125]{0}
 value: <8 beside @0> (size=300,offset=500): bf16[150]{0}
 value: <9 pair{0} @0> (size=100,offset=900): f32[25]{0}
allocation 4: size 999, color 1, preallocated-temp:
 value: <10 elsewhere @1> (size=999,offset=0): f32[249]{0:S(1)}
allocation 5: size 200, color 3, preallocated-temp:
 value: <11 other @3> (size=200,offset=0): f32[50]{0:S(3)}
"""
LIVE = """HloLiveRange (max 9):
  BufferLiveRange:
    early{}:0-2
    late{}:3-6
    alias{}:4-5
    beside{}:4-8
    pair{0}:1-9
    elsewhere{}:0-9
    other{}:5-9
  Live ranges at 5 (peak):
    early{}: 1 bytes
"""


def test_the_fullest_moment():
    found = buffers.parse(ASSIGNMENT, LIVE)
    assert found.arguments == {7: 4000}
    held = {value.name: count for value, count in buffers.fullest(found.values)}
    assert held == {"late": 500, "beside": 300, "pair": 100, "other": 200}


def test_a_place_goes_to_the_larger_of_two():
    live = LIVE.replace("early{}:0-2", "early{}:0-6")
    held = {value.name: count for value, count in buffers.fullest(buffers.parse(ASSIGNMENT, live).values)}
    assert held == {"early": 600, "beside": 200, "pair": 100, "other": 200}


def test_an_assignment_without_values_is_empty():
    assert buffers.fullest(buffers.parse("BufferAssignment:\n", "").values) == []


def test_the_largest_files_of_a_folder_are_those_of_the_program(tmp_path):
    names = ("buffer-assignment", "live-range")
    for name, text in zip(names, (ASSIGNMENT, LIVE), strict=True):
        (tmp_path / f"module_1.jit_step.after_optimizations-{name}.txt").write_text(text)
        (tmp_path / f"module_2.jit_iota.after_optimizations-{name}.txt").write_text("small")
    assert buffers.read(tmp_path) == buffers.parse(ASSIGNMENT, LIVE)
    for path in tmp_path.glob("*live-range.txt"):
        path.write_text("")
    with pytest.raises(FileNotFoundError, match="after_optimizations-live-range"):
        buffers.read(tmp_path)


def test_a_value_of_several_arrays_has_no_array_of_its_own():
    assignment = ASSIGNMENT.replace("(size=500,offset=0): f32[125]{0}", "(size=500,offset=0): (f32[100], f32[25])")
    found = {value.name: value.array for value in buffers.parse(assignment, LIVE).values}
    assert found["early"] is not None
    assert found["late"] is None
