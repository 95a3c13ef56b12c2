"""`python -m launch`: finds commands, imports only the chosen one, and prints user errors in one line."""

import subprocess
import sys

import pytest

from launch import __main__ as cli
from launch import environment

COMMANDS = list(cli.commands())


@pytest.fixture
def commands(tmp_path, monkeypatch):
    """A family of two commands: one that raises errors, one that cannot be imported."""
    (tmp_path / "wrong.py").write_text(
        "from core.errors import UserError\nHELP = 'goes wrong'\nEXAMPLE = 'launch/run wrong'\n"
        "def add_arguments(parser): parser.add_argument('--n', type=int)\n"
        "def run(args):\n    if args.n is not None: return args.n or int('no number')\n"
        "    raise UserError('rows=3: expected 4')\n"
    )
    (tmp_path / "broken.py").write_text("HELP = 'cannot be imported'\nimport no_such_module_anywhere\n")
    declared = {
        "COMMAND": {"wrong": ("fail", "wrong"), "broken": ("fail", "broken")},
        "HELP": {"wrong": "goes wrong", "broken": "cannot be imported"},
    }
    monkeypatch.setattr(cli, "FAMILIES", {"fail": "Commands that fail."})
    monkeypatch.setattr(cli.environment, "declared", declared.__getitem__)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("wrong", None)


def test_the_list_shows_every_command_without_importing_any(commands, capsys):
    assert cli.main([]) == 0
    out = capsys.readouterr().out
    assert "\nCommands that fail.\n" in out
    assert "broken  cannot be imported" in out
    assert "wrong   goes wrong" in out


def test_a_user_s_mistake_is_a_message_and_code_2(commands, capsys, monkeypatch):
    monkeypatch.delenv("RENGA_TRACEBACK", raising=False)
    assert cli.main(["wrong"]) == 2
    assert capsys.readouterr().err == "error: rows=3: expected 4\n"
    monkeypatch.setenv("RENGA_TRACEBACK", "1")
    assert cli.main(["wrong"]) == 2
    assert "Traceback" in capsys.readouterr().err


def test_the_command_s_code_is_the_code(commands):
    assert cli.main(["wrong", "--n", "7"]) == 7


def test_an_unknown_command_and_flag_are_code_2(commands, capsys):
    assert cli.main(["wrnog"]) == 2
    assert "unknown command 'wrnog': did you mean 'wrong'?" in capsys.readouterr().err
    assert cli.main(["wrong", "--m", "1"]) == 2
    assert capsys.readouterr().err == "error: unrecognized arguments: --m 1 (see launch/run wrong --help)\n"


def test_the_process_ends_with_that_code():
    for argv, code in ((["--help"], 0), (["pod", "v4-16"], 2), (["pod", "--help"], 0)):
        command = [sys.executable, "-m", "launch", *argv]
        assert subprocess.run(command, cwd=environment.WORKSPACE, capture_output=True, check=False).returncode == code


@pytest.mark.parametrize(
    "line",
    ["train gin/quickstart.gin --run-dir", "pod v4-8 gin/quickstart.gin --simulate --run-dir", "evaluate"],
)
def test_an_empty_run_directory_is_refused(line, capsys):
    assert cli.main([*line.split(), ""]) == 2
    assert "the run directory is '" in capsys.readouterr().err


def test_python_without_assertions_is_refused():
    code = "from launch import __main__ as cli; raise SystemExit(cli.main(['check', 'v4-8', 'gin/quickstart.gin']))"
    command = [sys.executable, "-O", "-c", code]
    ended = subprocess.run(command, cwd=environment.WORKSPACE, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert ended.stderr.startswith("error: Python runs without assert statements (-O, or PYTHONOPTIMIZE is set)")
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.part("puzzles", "vision_tasks")] * (name == "make-dataset"))
        for name in COMMANDS
    ],
)
def test_every_command_has_help_and_example(name, capsys):
    family, _ = environment.declared("COMMAND")[cli.commands()[name]]
    assert family in cli.FAMILIES
    assert "\n" not in environment.declared("HELP")[cli.commands()[name]]
    with pytest.raises(SystemExit, match="0"):
        cli.main([name, "--help"])
    out = capsys.readouterr().out
    assert "example:\n  launch/" in out
