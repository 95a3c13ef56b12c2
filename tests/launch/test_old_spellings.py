"""Old names of commands and flags become the current ones, and a note says so."""

import pytest

from launch import old_spellings


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("doctor v4-8 x.gin --simulate", "check v4-8 x.gin --simulate --level hosts"),
        ("validate v4-8 x.gin --run-dir r", "check v4-8 x.gin --run-dir r --level slice"),
        ("validate v4-8 --simulate", "check v4-8 gin/quickstart.gin --simulate --level slice"),
        ("pod v4-8 validate --tpu t", "pod v4-8 gin/quickstart.gin --tpu t --check slice"),
        ("pod v4-8 validate x.gin", "pod v4-8 x.gin --check slice"),
        ("pod v4-8 x.gin --simulate --smoke", "pod v4-8 x.gin --simulate --check smoke"),
        ("pod v4-8 x.gin --check --smoke", "pod v4-8 x.gin --check smoke"),
        ("check v4-8 x.gin --smoke", "check v4-8 x.gin --level smoke"),
        ("train x.gin --smoke", "train x.gin --check smoke"),
        ("suite exp01 --smoke", "suite exp01 --check smoke"),
        ("evaluate runs/a --rows 4", "evaluate runs/a --num-examples 4"),
        ("evaluate runs/a --rows=all", "evaluate runs/a --num-examples all"),
    ],
)
def test_old_names_become_the_current_ones(old, new, capsys):
    assert old_spellings.current(old.split()) == new.split()
    assert capsys.readouterr().err.startswith("note: ")


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ("pod --check v4-8 x.gin", "pod --check config v4-8 x.gin"),
        ("pod v4-8 x.gin --check hosts", "pod v4-8 x.gin --check hosts"),
        ("pod v4-8 x.gin --check --simulate", "pod v4-8 x.gin --check --simulate"),
        ("suite doctor --list", "suite doctor --list"),
        ("check", "check"),
    ],
)
def test_current_names_are_not_noted(given, read, capsys):
    assert old_spellings.current(given.split()) == read.split()
    assert not capsys.readouterr().err
