"""Output of commands to a terminal, to a pipe, and to a reader that has gone."""

import io
import os
import pty
import re
import subprocess
import sys

import pytest
from rich.table import Table

from core.hosts import exit_codes
from launch import __main__ as cli
from launch import environment, terminal

ESCAPE = "\x1b"


def shown_on_a_terminal(monkeypatch, *, columns=80, **variables):
    """What a console writes into a pseudo-terminal of so many columns."""
    for name, value in {"COLUMNS": str(columns), "TERM": "xterm", **variables}.items():
        monkeypatch.setenv(name, value)
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as stream:
        table = Table("[bold]strategy[/bold]", "what it does", title="strategies")
        table.add_row("[red]fsdp[/red]", "splits parameters and rows " * 5)
        terminal.console(170, file=stream).print(table)
    text = os.read(ours, 1 << 16).decode()
    os.close(ours)
    return text


def test_a_table_fits_the_terminal(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    shown = shown_on_a_terminal(monkeypatch, columns=60)
    assert ESCAPE in shown
    plain = re.sub(r"\x1b\[[0-9;]*m", "", shown)
    assert max(len(line) for line in plain.splitlines()) == 60


def test_no_color_means_no_escape_code(monkeypatch):
    assert ESCAPE not in shown_on_a_terminal(monkeypatch, NO_COLOR="1")


def test_a_pipe_gets_no_escape_code_and_its_own_width(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    page = io.StringIO()
    terminal.console(170, file=page).print("[bold]x[/bold] " + "word " * 30)
    assert page.getvalue().splitlines() == ["x " + "word " * 30]


def test_long_lines_of_an_error_are_wrapped_between_words(monkeypatch):
    monkeypatch.delenv("COLUMNS")
    path = "/" + "x" * 150
    text = "first " + "word " * 40 + "\n  second: " + "word " * 40 + f"\n{path}"
    wrapped = terminal.wrapped(text)
    assert " ".join(wrapped.split()) == " ".join(text.split())
    assert all(len(line) <= 120 for line in wrapped.splitlines() if path not in line)
    assert path in wrapped.splitlines()
    first, _, second, third, *_ = wrapped.splitlines()
    assert first.startswith("first word")
    assert (second[:9], third[:5]) == ("  second:", "    w")


def test_an_error_of_a_command_is_wrapped(capsys, monkeypatch):
    monkeypatch.delenv("COLUMNS")
    assert cli.main(["pod", "v4-99", "gin/quickstart.gin"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert all(len(line) <= 120 for line in said.splitlines())
    assert len(said) > 120


def test_findings_are_wrapped(capsys, monkeypatch, tmp_path):
    monkeypatch.delenv("COLUMNS")
    assert cli.main(["check", "v4-16", "gin/quickstart.gin", "--run-dir", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any("all 2 hosts of v4-16 must see one run directory" in line for line in lines)
    assert all(len(line) <= 120 for line in lines)


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ("a\x1b[2Jb\x07\x00c\r\n\td", "a\\x1b[2Jb\\x07\\x00c\\r\n\td"),
        ("\x9b31m \x7f \ud800", "\\x9b31m \\x7f \\ud800"),
        ("naïve – 日本 🌸", "naïve – 日本 🌸"),
    ],
)
def test_control_characters_are_escaped(raw, expected):
    assert terminal.printable(raw) == expected


def run_until_the_reader_has_enough(tmp_path, *arguments, program="-m launch"):
    """Runs a command whose reader takes one line and goes away."""
    running = subprocess.Popen(
        [sys.executable, *program.split(), *arguments],
        cwd=environment.WORKSPACE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert running.stdout.readline()
    running.stdout.close()
    said = running.stderr.read()
    running.stderr.close()
    return running.wait(timeout=60), said


def test_a_command_whose_reader_goes_away_ends_quietly(tmp_path):
    (tmp_path / "logs").mkdir()
    lines = (f"11-22 00:12:31.4 host 0 step {n} | said\n" for n in range(20000))
    (tmp_path / "logs/host_0.log").write_text("".join(lines))
    assert run_until_the_reader_has_enough(tmp_path, "pod", "logs", str(tmp_path)) == (141, "")


def test_a_table_whose_reader_goes_away_ends_quietly(tmp_path):
    script = tmp_path / "prints.py"
    script.write_text(
        "import sys\n"
        "from launch import __main__ as cli, terminal\n"
        "def prints(argv):\n"
        "    console = terminal.console(100)\n"
        "    while True: console.print('[bold]x[/bold]')\n"
        "cli._command = prints\n"
        "sys.exit(cli.main([]))\n"
    )
    environment_path = {"PYTHONPATH": str(environment.WORKSPACE)}
    os.environ.update(environment_path)
    assert run_until_the_reader_has_enough(tmp_path, program=str(script)) == (141, "")


def test_a_broken_pipe_that_is_not_standard_output_is_an_error(monkeypatch, capfd):
    def breaks(argv):
        raise BrokenPipeError("a socket")

    monkeypatch.setattr(cli, "_command", breaks)
    assert cli.main([]) == exit_codes.RAISED
    assert "BrokenPipeError: a socket" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [((1, 2, 3), []), ((1, 11, 12), ["2 of 3", "3 of 3"]), ((11, 12, 13), ["1 of 3", "3 of 3"])],
)
def test_progress_in_a_pipe_is_that_of_long_work_to_its_end(capsys, monkeypatch, seconds, shown):
    now = [0]
    monkeypatch.setattr(terminal.time, "monotonic", lambda: now[-1])
    show = terminal.progress("parts")
    for number, second in enumerate(seconds, 1):
        now.append(second)
        show("x", number, 3)
    assert capsys.readouterr().err.splitlines() == [f"reads parts: {text} (x)" for text in shown]
