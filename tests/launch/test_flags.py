"""Shared flags mean the same in every command, and are passed to other processes unchanged; old names are converted."""

import argparse
import ast
import json

import pytest

from core.hosts import exit_codes
from launch import __main__ as cli
from launch import environment, flags

LAUNCH = environment.WORKSPACE / "launch"


def parsed(*argv):
    parser = argparse.ArgumentParser()
    flags.add(parser, "SLICE", "--gin", "--run-dir", "--steps", "--simulate")
    return parser.parse_args(["v4-8", *argv])


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["--gin", "A = 1", "--gin", "B = 'two words'", "--steps", "3", "--simulate"],
        ["--run-dir", "gs://bucket/run"],
    ],
)
def test_another_process_gets_the_same_flags(argv):
    args = parsed(*argv)
    again = flags.passed_on(args, "--gin", "--run-dir", "--steps", "--simulate")
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


WRITES = {  # the file of each command, and a command line to which the flag and a file are added
    ("generate", "--out"): "generate no_such_model --prompt-ids 1",
    ("compiled_report", "--json"): "report v4-8 gin/quickstart.gin",
    ("session", "--json"): "plan v4-8 gin/quickstart.gin",
    ("session", "--write"): "plan v4-8 gin/quickstart.gin",
    ("session", "--record"): "plan v4-8 gin/quickstart.gin",
    ("agreement", "--json"): "agreement",
    ("command", "--json"): "check v4-8 gin/quickstart.gin",
    ("benchmarks", "--json"): "evaluate no_such_run",
    ("evaluate", "--submission"): "evaluate no_such_run",
}
FOLDERS = {
    (name, "--out") for name in ("cache_hidden_states", "export", "make_dataset", "tokenize")
}  # new, or what the command continues
FOLDERS |= {("results", "--out")}  # the folder of a suite, which grows with its runs
OTHERS = {("generate", "--json")}  # a switch
OTHERS |= {(name, "--record") for name in ("agreement", "bisect")}  # folders of a command's own processes
READS = {("generate", "--file"), ("generate", "--image"), ("humaneval", "--humaneval"), ("gates", "--against")}


def named_files():
    """(module, flag) of every flag that names a file or is called like one that does, in all commands."""
    names = {flag for _, flag in WRITES}
    for path in LAUNCH.rglob("*.py"):
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, ast.FunctionDef) and function.name.strip("_").startswith("add_"):
                calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
                reads = {
                    c
                    for c in calls
                    for k in c.keywords
                    if k.arg == "metavar" and getattr(k.value, "value", "") == "FILE"
                }
                for node in ast.walk(function):
                    if isinstance(node, ast.Constant) and (node.value in names or any(node in c.args for c in reads)):
                        yield path.stem, node.value


@pytest.mark.part("all")
def test_no_flag_that_names_a_file_is_missing_in_the_table():
    assert set(named_files()) == WRITES.keys() | FOLDERS | OTHERS | READS


@pytest.mark.parametrize(("command", "flag"), WRITES, ids=" ".join)
def test_a_file_that_exists_is_not_replaced_without_being_asked(command, flag, tmp_path, capsys):
    kept = tmp_path / "kept"
    kept.write_text("mine")
    assert cli.main([*WRITES[command, flag].split(), flag, str(kept)]) == exit_codes.USER_ERROR
    said = " ".join(capsys.readouterr().err.split())
    assert said == f"error: {flag} {kept}: the file exists; name another, or add --overwrite"
    assert kept.read_text() == "mine"


def test_a_file_is_replaced_where_that_is_asked_for(tmp_path):
    kept = tmp_path / "found.json"
    kept.write_text("mine")
    argv = ["check", "v4-8", "no_such.gin", "--json", str(kept), "--overwrite"]
    assert cli.main(argv) == exit_codes.USER_ERROR
    assert "configuration" in {check["name"] for check in json.loads(kept.read_text())}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("doctor v4-8 x.gin --simulate", "check v4-8 x.gin --simulate --level hosts"),
        ("validate v4-8 x.gin --run-dir r", "check v4-8 x.gin --run-dir r --level slice"),
        ("validate v4-8 --simulate", "check v4-8 --simulate gin/quickstart.gin --level slice"),
        ("validate --run-dir d v4-8", "check --run-dir d v4-8 gin/quickstart.gin --level slice"),
        ("pod --simulate v4-8 validate", "pod --simulate v4-8 gin/quickstart.gin --check slice"),
        ("pod v4-8 validate --tpu t", "pod v4-8 gin/quickstart.gin --tpu t --check slice"),
        ("pod v4-8 validate x.gin", "pod v4-8 x.gin --check slice"),
        ("pod v4-8 x.gin --simulate --smoke", "pod v4-8 x.gin --simulate --check smoke"),
        ("pod v4-8 x.gin --check --smoke", "pod v4-8 x.gin --check smoke"),
        ("check v4-8 x.gin --smoke", "check v4-8 x.gin --level smoke"),
        ("train x.gin --smoke", "train x.gin --check smoke"),
        ("suite exp01 --smoke", "suite exp01 --check smoke"),
        ("evaluate runs/a --rows 4", "evaluate runs/a --num-examples 4"),
        ("build sudoku --out d", "make-dataset sudoku --out d"),
        ("hidden x.gin --batch 4", "cache-hidden-states x.gin --batch-size 4"),
        ("plan v4-8 x.gin --batch 8 16", "plan v4-8 x.gin --batch-size 8 16"),
        ("generate runs/a --batch 2", "generate runs/a --batch-size 2"),
        ("evaluate runs/a --rows=all", "evaluate runs/a --num-examples all"),
    ],
)
def test_old_names_become_the_current_ones(old, new, capsys):
    assert flags.current(old.split()) == new.split()
    assert capsys.readouterr().err.startswith("note: ")


def test_a_value_with_the_name_of_an_old_command_stays(capsys):
    words = ["pod", "v4-8", "x.gin", "--run-dir", "validate"]
    assert flags.current(words) == words
    assert not capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ("pod --check v4-8 x.gin", "pod --check config v4-8 x.gin"),
        ("pod v4-8 x.gin --check hosts", "pod v4-8 x.gin --check hosts"),
        ("pod v4-8 x.gin --check --simulate", "pod v4-8 x.gin --check --simulate"),
        ("suite doctor --list", "suite doctor --list"),
        ("pod v4-8 x.gin --check slices", "pod v4-8 x.gin --check slices"),
        ("check", "check"),
    ],
)
def test_current_names_are_not_noted(given, read, capsys):
    assert flags.current(given.split()) == read.split()
    assert not capsys.readouterr().err
