"""Requests for a profile of a running job: written, refused and withdrawn."""

import json

import pytest

from core.training import profile_request as request
from core.training import run_lock
from launch import __main__ as cli


def test_a_request_that_no_run_accepts_is_withdrawn(tmp_path):
    with pytest.raises(ValueError, match=r"is not a run directory: it has no config\.gin"):
        request.request(str(tmp_path), steps=1)
    (tmp_path / "config.gin").touch()
    with pytest.raises(ValueError, match="no run is training in"):  # at once
        request.request(str(tmp_path), seconds=5.0)
    (tmp_path / run_lock.FILE).touch()
    with pytest.raises(ValueError, match=r"no run accepted the request within 0.2 s: is the run of .* training now"):
        request.request(str(tmp_path), seconds=5.0, taken_seconds=0.2)
    assert {file.name for file in tmp_path.iterdir()} == {"config.gin", run_lock.FILE}
    with pytest.raises(ValueError, match="either --seconds S or --steps N"):
        request.request(str(tmp_path))


@pytest.mark.parametrize(
    ("flag", "length"),
    [("--steps", "0"), ("--steps", "-1"), *(("--seconds", text) for text in ("0", "-1", "nan", "inf"))],
)
def test_a_length_of_zero_or_less_is_refused(tmp_path, capsys, flag, length):
    assert cli.main(["pod", "profile", str(tmp_path), f"{flag}={length}"]) == 2
    expected = "a whole number, at least 1" if flag == "--steps" else "a number above 0"
    assert f"error: {flag}: {length}: expected {expected}" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_the_request_is_written_as_json(tmp_path, monkeypatch):
    (tmp_path / "config.gin").touch()
    (tmp_path / run_lock.FILE).touch()
    seen = []

    def nobody(folder, name, states, *, within_seconds):
        seen.append(json.loads((tmp_path / "profile_request.json").read_text()))
        assert seen[-1]["id"] == name

    monkeypatch.setattr(request, "_answer", nobody)
    for length in ({"steps": 3}, {"seconds": 2.5}):
        with pytest.raises(ValueError, match="no run accepted"):
            request.request(str(tmp_path), **length)
    assert [{k: v for k, v in asked.items() if k != "id"} for asked in seen] == [{"steps": 3}, {"seconds": 2.5}]
    assert seen[0]["id"] != seen[1]["id"]
