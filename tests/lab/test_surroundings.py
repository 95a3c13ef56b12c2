"""The lines about runs in unusual surroundings, with small programs in place of the runs."""

import re
import sys

import pytest

from tests.lab import evidence, surroundings

SLOW, FAST = "import time; time.sleep(60)", "pass"


@pytest.fixture
def tried(tmp_path, monkeypatch, capsys):
    """Tries surroundings with a Python program for each name; returns the exit code and lines, without times."""

    def try_(*wanted, programs, differing=(), unreadable=()):
        def words(one, run_dir, steps, bindings):
            return [sys.executable, "-S", "-c", programs.get(one.name, FAST)]

        def difference(run_dir, undisturbed):
            if run_dir.name in unreadable:
                raise FileNotFoundError(run_dir.name)
            return "it differs" if run_dir.name in differing else ""

        monkeypatch.setattr(surroundings, "_words", words)
        monkeypatch.setattr(evidence, "difference", difference)
        code = surroundings._try_all([one for one in surroundings.ALL if one.name in wanted], tmp_path)
        printed = capsys.readouterr().out.splitlines()
        lines = [re.sub(r": \d+ s$", "", f"{line[:9].strip()} {line[10:]}") for line in printed]
        return code, lines

    return try_


ROWS = ("umask 077", "one CPU", "no HOME", "16 hosts")


def test_all_are_compared_with_the_usual_run_of_their_command(tried):
    code, lines = tried(*ROWS, programs={}, differing={"one_CPU"})
    assert code == 1
    assert lines == [
        "ok usual run on v4-16",
        "ok umask 077",
        "BAD one CPU: it differs",
        "ok usual run on v4-16 in one process",
        "ok no HOME",
        "ok usual run on v4-128",
        "ok 16 hosts",
    ]


@pytest.mark.parametrize(
    ("program", "said"), [("raise SystemExit(3)", "exit code 3: see "), (SLOW, "it did not end within 2 s: see ")]
)
def test_a_usual_run_that_fails_or_hangs_ends_only_what_needs_it(tried, monkeypatch, program, said):
    monkeypatch.setattr(surroundings, "_LIMIT_SECONDS", 2)
    code, (first, *others) = tried(*ROWS[:3], programs={"usual run on v4-16": program})
    assert code == 1
    assert first.startswith(f"BAD usual run on v4-16: {said}")
    assert others == [
        "not tried umask 077: usual run on v4-16 failed",
        "not tried one CPU: usual run on v4-16 failed",
        "ok usual run on v4-16 in one process",
        "ok no HOME",
    ]


def test_a_run_that_fails_or_hangs_ends_alone(tried, monkeypatch):
    monkeypatch.setattr(surroundings, "_LIMIT_SECONDS", 2)
    code, lines = tried(*ROWS[:3], programs={"umask 077": "raise SystemExit(3)", "one CPU": SLOW})
    assert code == 1
    assert [line.partition(":")[0] for line in lines] == [
        "ok usual run on v4-16",
        "BAD umask 077",
        "BAD one CPU",
        "ok usual run on v4-16 in one process",
        "ok no HOME",
    ]


def test_a_run_that_cannot_be_compared_ends_alone(tried):
    code, lines = tried(*ROWS[:2], programs={}, unreadable={"umask_077"})
    assert code == 1
    assert lines[1:] == ["BAD umask 077: FileNotFoundError('umask_077')", "ok one CPU"]
