"""`launch/run check`: what each level starts, and what it returns."""

import json

import pytest

from core.hosts import exit_codes
from core.training import supervise
from launch import __main__ as cli


@pytest.mark.parametrize(("code", "ended"), [(0, exit_codes.DONE), (13, exit_codes.USER_ERROR)])
@pytest.mark.parametrize("given", [[], ["--run-dir", "gs://bucket/run"]])
def test_a_smoke_run_is_that_of_pod_with_what_the_user_gave(monkeypatch, tmp_path, capsys, code, ended, given):
    """A default directory is not named as the user's: several hosts would not see it."""
    started = []
    monkeypatch.setattr(supervise, "run_child", lambda command, requested: started.append(command[3:]) or code)
    file = tmp_path / "found.json"
    argv = ["check", "v4-8", "gin/quickstart.gin", "--level", "smoke", "--simulate", *given]
    assert cli.main([*argv, "--json", str(file)]) == ended
    assert started == [["pod", "v4-8", "gin/quickstart.gin", *given, "--simulate", "--check", "smoke"]]
    (row,) = json.loads(file.read_text())
    assert (row["name"], row["ok"]) == ("smoke run", code == 0)
    assert capsys.readouterr().out.splitlines()[-1].startswith("READY" if code == 0 else "NOT READY")


def test_only_the_level_config_is_for_a_workstation(capsys):
    assert cli.main(["check", "v4-8", "gin/quickstart.gin", "--level", "hosts", "--ship"]) == exit_codes.USER_ERROR
    assert "--check hosts" in capsys.readouterr().err
