"""Groups, files in order, seeds, duplicates, and every mistake at once."""

import pytest

from launch.experiments import suites

TINY = """from __gin__ import dynamic_registration
include 'gin/trm/sudoku4.gin'
TOTAL_STEPS = {steps}
"""


@pytest.fixture
def folder(tmp_path):
    def write(**steps):
        (tmp_path / "mine").mkdir(exist_ok=True)
        for name, count in steps.items():
            (tmp_path / "mine" / f"{name}.gin").write_text(TINY.format(steps=count))
        return tmp_path / "mine"

    return write


def test_a_group_is_a_name_a_beginning_all_or_a_folder(folder):
    assert [path.stem for path in suites.files("exp07")] == ["exp07a", "exp07b", "exp07c"]
    assert {path.parent.name for path in suites.files("exp02")} == {"exp02a", "exp02b"}
    assert [path.stem for path in suites.files("exp04a")][:4] == [
        "exp04a_100",
        "exp04a_250",
        "exp04a_500",
        "exp04a_1000",
    ]
    every = [path.parent.name for path in suites.files("all")]
    assert len(every) == 67
    assert every[0] == "exp01"
    assert [path.stem for path in suites.files(str(folder(b2=5, b10=5)))] == ["b2", "b10"]
    with pytest.raises(ValueError, match="there is no group 'exp11': did you mean 'exp10'"):
        suites.files("exp11")
    with pytest.raises(ValueError, match=r"no experiment files \(\*\.gin\) in"):
        suites.files(str(folder().parent))


def test_duplicates_and_seeds(folder):
    entries = suites.load(suites.files(str(folder(a=50, b=60, c=50))), seeds=range(2), root="gs://bucket/runs")
    assert [entry.name for entry in entries] == ["a", "a_seed1", "b", "b_seed1", "c", "c_seed1"]
    assert [entry.same_as for entry in entries] == [None] * 4 + ["mine/a", "mine/a_seed1"]
    assert [entry.experiment.seed for entry in entries[:2]] == [0, 1]
    assert entries[1].run_dir == "gs://bucket/runs/mine/a_seed1"
    assert entries[1].bindings == ("SEED = 1",)


def test_a_run_is_built_from_its_saved_text(folder):
    one, other = suites.load(suites.files(str(folder(a=50, b=60))))
    ran = suites.as_run(one, text=other.text)
    assert (ran.name, ran.experiment.total_steps) == ("a", 60)
    assert suites.as_run(one, text=one.text) is one


def test_every_mistake_is_told_before_anything_starts(folder):
    files = folder(a=50, b=60)
    (files / "c.gin").write_text(TINY.format(steps=5) + "TOTAL_STEP = 3\n")
    (files / "d.gin").write_text(TINY.format(steps=5) + "trm.TRM.embed_dims = 3\n")
    with pytest.raises(ValueError, match=r"(?s)TOTAL_STEP .*'trm' is not imported"):
        suites.load(suites.files(str(files)))
    with pytest.raises(ValueError, match="exp07a and 2 more: DATA is not set"):
        suites.load(suites.files("exp07"))
    assert len(suites.load(suites.files("exp07"), level="smoke")) == 3
