"""Mutants: which mistakes are made, which tests run with them, and that only a copy changes."""

import subprocess
from types import SimpleNamespace

import pytest

from core.errors import UserError
from tests.lab import mutants


def changes(source):
    """The (before, after) of every mutant, of which each is a module."""
    made = list(mutants.mutants_of("core/a.py", source))
    for mutant in made:
        text = source.encode()
        compile(text[: mutant.begin] + mutant.after.encode() + text[mutant.end :], "a", "exec")
    return {(mutant.before, mutant.after) for mutant in made}


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("a = b < c", {("b < c", "(b <= c)")}),
        ("a = b is not c", {("b is not c", "(b is c)")}),
        ("a = b + c", {("b + c", "(b - c)")}),
        ("a = b * c", {("b * c", "(b // c)")}),
        ("a = 'é', 7, True, 0.0", {("7", "(8)"), ("True", "(False)"), ("0.0", "(1.0)")}),
        ("a = b and not c", {("b and not c", "(b or not c)"), ("not c", "(c)")}),
        ("a = b if c else d", {("b if c else d", "(b if not c else d)")}),
        ("a = max(b, c)", {("max", "(min)")}),
        ("def f():\n    return False", {("False", "(True)")}),
        ("a.b(c)\nd += e", {("a.b(c)", "pass"), ("d += e", "pass")}),
        ("a.b = c", {("a.b = c", "pass")}),
        ("a = f(b, c, d=e)", {("f(b, c, d=e)", "(f(c, b, d=e))"), ("f(b, c, d=e)", "(f(b, c))")}),
        ("def f():\n    return a", {("return a", "return None")}),
        ("for a in b:\n    break", {("break", "pass")}),
        ("if a:\n    raise ValueError(f'{b + 1}')", {("raise ValueError(f'{b + 1}')", "pass")}),
    ],
)
def test_each_kind_of_mistake_is_made_and_no_other(source, expected):
    assert changes(source) == expected


@pytest.mark.parametrize(
    "source",
    [
        '"""A docstring: 1 + 2."""',
        "def f(a: 'int | None', b: tuple[int, 3] = ()) -> tuple[4, 5]:\n    pass",
        "a: dict[str, 2] = b",
        "a = f'{b + 1:>8}' + c",
        "logging.warning('no %s', 1 + 2)",
        "parser.add_argument('--a', help=b + 1)",
        "if TYPE_CHECKING:\n    a = 1",
    ],
)
def test_docstrings_messages_help_and_types_are_left_alone(source):
    assert changes(source) == set()


def test_tests_of_its_name_mirror_a_module_and_otherwise_the_nearest_that_import_it():
    tests = {
        "tests/core/a/test_b.py": "",
        "tests/core/a/test_other.py": "from core.a import b, c",
        "tests/core/test_far.py": "import core.a.c, core.a.d",
        "tests/models/test_e.py": "import core.a.e",
    }
    assert mutants.mirroring("core/a/b.py", tests) == ["tests/core/a/test_b.py"]
    assert mutants.mirroring("core/a/c.py", tests) == ["tests/core/a/test_other.py"]
    assert mutants.mirroring("core/a/d.py", tests) == ["tests/core/test_far.py"]
    assert mutants.mirroring("core/a/e.py", tests) == []


@pytest.fixture
def workspace(tmp_path, monkeypatch):
    """A workspace of three modules, whose tests know little."""
    sources = {
        "core/a.py": "def larger(a, b):\n    return a > b\n\n\ndef forever():\n    while not True:\n        pass\n",
        "core/b.py": "ONE = 1\n",
        "core/c.py": "ONE = 1\n",
        "tests/conftest.py": "",
        "tests/core/test_a.py": "from core import a\n\n\ndef test():\n    assert a.larger(2, 1)\n    a.forever()\n",
        "tests/core/test_b.py": "def test():\n    assert False\n",
        "pytest.ini": "[pytest]\npythonpath = .\nmarkers =\n    slow: x\n",
    }
    for name, text in sources.items():
        path = tmp_path / "here" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for command in (["init", "-q"], ["add", "."]):
        subprocess.run(["git", *command], cwd=tmp_path / "here", check=True)
    monkeypatch.setattr(mutants, "WORKSPACE", tmp_path / "here")
    monkeypatch.setattr(mutants, "LIBRARIES", "json")
    return {tmp_path / "here" / name: text for name, text in sources.items()}


def run(folder, **others):
    return mutants.run(
        SimpleNamespace(**{"folder": folder, "without": [], "sample": None, "seed": 0, "limit": 2, **others})
    )


@pytest.mark.slow  # the next test is quick: one line, and that files stay as they were
def test_what_no_test_notices_is_shown_and_the_working_tree_stays_as_it_was(workspace, capsys):
    assert run("core") == 0
    said = capsys.readouterr().out
    assert set(said.splitlines()) >= {
        "SURVIVED core/a.py:2: a > b -> (a >= b)",
        "caught   core/a.py:2: return a > b -> return None",
        "caught   core/a.py:6: not True -> (True)",  # the tests do not end
        "core/b.py: left out: its tests fail without a mutant:",
        "core/c.py: left out: no test mirrors it",
        "core, seed 0: 3 of 4 mutants were caught",
    }
    assert all(path.read_text() == text for path, text in workspace.items())


def test_one_line_can_be_chosen_and_folders_left_out(workspace, capsys):
    run("core/a.py:2")
    assert capsys.readouterr().out.endswith("core/a.py:2, seed 0: 1 of 2 mutants were caught\n")
    run("core", without=["core/a.py", "core/b.py"])
    assert capsys.readouterr().out == (
        "core/c.py: left out: no test mirrors it\ncore, seed 0: 0 of 0 mutants were caught\n"
    )
    assert all(path.read_text() == text for path, text in workspace.items())


@pytest.mark.parametrize("folder", ["tests", "core/missing.py", "core/a.py:x"])
def test_a_folder_without_modules_is_an_error(workspace, folder):
    with pytest.raises(UserError, match="FOLDER is"):
        run(folder)


def test_a_seed_chooses_a_sample(monkeypatch, tmp_path):
    names = [f"core/{letter}.py" for letter in "abcdefgh"]
    (tmp_path / "core").mkdir()
    for name in names:
        (tmp_path / name).write_text("a = [1, 2, 3, 4, 5, 6]")
    monkeypatch.setattr(mutants, "WORKSPACE", tmp_path)
    first, again, other = (list(mutants.drawn(names, seed, 40)) for seed in (1, 1, 2))
    assert first == again != other
    assert all(len(few) == mutants.PER_MODULE for _, few in first)
    assert [len(every) for _, every in mutants.drawn(names, 1, None)] == [6] * 8
