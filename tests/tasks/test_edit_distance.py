"""The stand-in for the package editdistance has its distances, and is used only where the package is missing."""

import importlib
import importlib.util
import subprocess
import sys

import pytest

from launch import config, environment
from tasks import edit_distance

SEQIO = """
import importlib.util
found = importlib.util.find_spec
importlib.util.find_spec = lambda name: None if name == "editdistance" else found(name)
from tasks import edit_distance
from tasks.text import seqio_tasks
assert seqio_tasks.library().dataset_providers.editdistance is edit_distance
"""


@pytest.mark.parametrize(
    ("first", "second", "distance"),
    [("", "", 0), ("", "abc", 3), ("abc", "", 3), ("kitten", "sitting", 3), ("flaw", "lawn", 2), ("ab", "ba", 2)],
)
def test_the_distance_is_the_fewest_edits(first, second, distance):
    assert edit_distance.eval(first, second) == distance


@pytest.fixture
def _not_installed(monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "editdistance" else found(name))
    monkeypatch.setitem(sys.modules, "editdistance", edit_distance)  # what a test adds is undone
    monkeypatch.delitem(sys.modules, "editdistance")


def test_a_package_that_is_installed_is_used(monkeypatch):
    theirs = importlib.util.module_from_spec(importlib.util.spec_from_loader("editdistance", None))
    monkeypatch.setitem(sys.modules, "editdistance", theirs)
    edit_distance.stand_in()
    assert importlib.import_module("editdistance") is theirs


@pytest.mark.usefixtures("_not_installed")
def test_a_module_that_gin_imports_has_it(tmp_path):
    (tmp_path / "imports_as_seqio.py").write_text("import editdistance\nassert editdistance.eval('ab', 'b') == 1\n")
    (tmp_path / "own.gin").write_text("import imports_as_seqio\ninclude 'gin/quickstart.gin'\n")
    assert config.load(str(tmp_path / "own.gin")).text
    assert sys.modules["imports_as_seqio"].editdistance is edit_distance


@pytest.mark.slow
def test_seqio_has_it():
    subprocess.run([sys.executable, "-c", SEQIO], cwd=environment.WORKSPACE, check=True)
