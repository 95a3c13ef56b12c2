"""Shared flags mean the same in every command, and are passed to other processes unchanged."""

import argparse
import ast

import pytest

from core.health import exit_codes
from launch import __main__ as cli
from launch import environment, flags

LAUNCH = environment.WORKSPACE / "launch"


def parsed(*argv):
    parser = argparse.ArgumentParser()
    flags.add(parser, "SLICE", "--gin", "--run-dir", "--steps", "--smoke")
    return parser.parse_args(["v4-8", *argv])


@pytest.mark.parametrize(
    "argv",
    [[], ["--gin", "A = 1", "--gin", "B = 'two words'", "--steps", "3", "--smoke"], ["--run-dir", "gs://bucket/run"]],
)
def test_another_process_gets_the_same_flags(argv):
    args = parsed(*argv)
    again = flags.passed_on(args, "--gin", "--run-dir", "--steps", "--smoke")
    assert parsed(*again) == args
    assert sorted(again) == sorted(argv)


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "many", ""])
def test_steps_are_counted_from_one(text, capsys):
    with pytest.raises(SystemExit, match="2"):
        parsed("--steps", text)
    assert f"argument --steps: {text}: expected a whole number, at least 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "flag"),
    [
        ("suite exp01 --seeds 0", "--seeds"),
        ("suite exp01 --steps 0", "--steps"),
        ("draw gpipe --microbatches 8 --stages 0", "--stages"),
        ("draw gpipe --stages 4 --microbatches 0", "--microbatches"),
        ("profile runs/first --top 0", "--top"),
        ("agreement --processes 0", "--processes"),
        ("checkpoints prune runs/first --keep 0", "--keep"),
        ("plan v4-8 gin/quickstart.gin --compile 0", "--compile"),
    ],
)
def test_counts_start_at_one_in_every_command(line, flag, capsys):
    assert cli.main(line.split()) == exit_codes.USER_ERROR
    assert capsys.readouterr().err.startswith(f"error: {flag}: 0: expected a whole number, at least 1")


def declared(path):
    """The literal names of every `add_argument` in a file."""
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    own = [call for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr == "add_argument"]
    return {argument.value for call in own for argument in call.args if isinstance(argument, ast.Constant)}


def test_no_command_declares_a_shared_flag_itself():
    shared = {"--gin", "--run-dir", "--restarts", "--simulate"}
    assert declared(LAUNCH / "flags.py") == set()
    found = {path.stem: declared(path) & shared for path in LAUNCH.rglob("*.py")}
    assert not {name: names for name, names in found.items() if names}
