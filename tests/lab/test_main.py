"""`python -m tests.lab` ends like `python -m launch`: quietly without a reader, and at once after a failure."""

import os
import runpy
import sys

import pytest

from launch import __main__ as cli
from launch import environment, terminal
from tests.lab.__main__ import main


def test_a_command_whose_reader_goes_away_ends_quietly(monkeypatch):
    def breaks(*args, **kwargs):
        raise BrokenPipeError

    monkeypatch.setattr(cli, "run_command", breaks)
    monkeypatch.setattr(terminal, "is_reader_gone", lambda: True)
    assert main(["status"]) == 141


def test_a_failed_command_does_not_wait_at_the_exit_barrier_of_jax(monkeypatch):
    def ends(code):
        raise SystemExit(f"at once with {code}")

    monkeypatch.setattr(os, "_exit", ends)
    monkeypatch.setattr(sys, "argv", ["tests.lab", "no such command"])
    with pytest.raises(SystemExit, match="at once with 2"):
        runpy.run_path(str(environment.WORKSPACE / "tests/lab/__main__.py"), run_name="__main__")
