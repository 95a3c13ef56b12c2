"""Memory and cost of mixers by row length: the record, and the page that shows it."""

import json

import pytest

from core.errors import UserError
from launch import environment
from tests.lab import long_context


@pytest.mark.covers("N09", "E05")
def test_the_page_has_the_recorded_figures():
    page = (environment.WORKSPACE / "docs/results/mixers.md").read_text()
    found = long_context.lines()
    assert {name for name, *_ in found} >= {"S5", "window", "BigBird", "dense"}
    for line in found:
        assert f"| {' | '.join(line)} |\n" in page, line


def test_results_of_another_compiler_are_not_overwritten(tmp_path, monkeypatch):
    record = tmp_path / "long_context.json"
    record.write_text(json.dumps({"versions": {"libtpu": "0.0.1"}, "results": {"S5": {}}}))
    monkeypatch.setattr(long_context, "RECORD", record)
    with pytest.raises(UserError, match=r"long_context.json is of \{'libtpu': '0.0.1'\}, and installed are"):
        long_context.require_own_compiler()
