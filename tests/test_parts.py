"""No file outside of an optional part needs the part: see `tests/run.sh lab without`, which deletes each."""

import fnmatch
import pathlib

import pytest

from tests.lab import without

ROOT = pathlib.Path(__file__).resolve().parent.parent
FILES = sorted(
    path.relative_to(ROOT).as_posix()
    for folder in (*without.PRODUCT, "gin")
    for path in (ROOT / folder).rglob("*")
    if path.suffix in (".py", ".gin")
)


def needing(part, sources):
    """{file outside of a part: what of the part it imports or includes}, also inside functions."""
    own = set(without.files_of(part, sources))
    modules = {without.module_of(name) for name in own}
    found = {}
    for name, text in sources.items():
        if name.endswith(".py"):
            used = modules & without.imported(text)
        else:
            used = {n for n in without.named_in_gin(text) if n in own or n.replace("/", ".") in modules}
        if used and name not in own:
            found[name] = sorted(used)
    return found


@pytest.mark.parametrize("part", without.PARTS)
def test_nothing_outside_needs_an_optional_part(part):
    assert needing(part, {name: (ROOT / name).read_text() for name in FILES}) == {}


@pytest.fixture
def blue(monkeypatch):
    monkeypatch.setattr(without, "PARTS", {"blue": ("models/blue.py", "models/preset_sky_blue.py", "gin/blue/*")})


def test_what_needs_a_part_is_found(blue):
    sources = {
        "models/blue.py": "from models import blue",
        "models/decoder/presets.py": "def f():\n  from models.blue import Blue",
        "launch/a.py": "def f():\n  import models.blue",
        "tasks/b.py": "from models import bluer; from models.decoder import parts",
        "gin/defaults.gin": "from models import blue",
        "gin/blue/chunks.gin": "from models import blue",
        "gin/c.gin": "include 'gin/blue/chunks.gin'\nfrom models import parts",
    }
    assert needing("blue", sources) == {
        "models/decoder/presets.py": ["models.blue"],
        "launch/a.py": ["models.blue"],
        "gin/defaults.gin": ["models/blue"],
        "gin/c.gin": ["gin/blue/chunks.gin"],
    }


def test_every_pattern_of_a_part_matches_unless_a_part_is_gone():
    """Parts share files, so that the files of one go with another."""
    unmatched = {p for patterns in without.PARTS.values() for p in patterns if not fnmatch.filter(FILES, p)}
    gone = [patterns for patterns in without.PARTS.values() if not fnmatch.filter(FILES, patterns[0])]
    assert unmatched <= {pattern for patterns in gone for pattern in patterns}


def test_tests_go_with_the_part_that_they_import_or_whose_files_they_name(blue):
    own = without.files_of("blue", ["models/blue.py", "models/preset_sky_blue.py", "gin/blue/x.gin", "gin/bluer.gin"])
    tests = {
        "tests/a.py": "from models import blue",
        "tests/b.py": "from tests.a import case",
        "tests/c.py": "FILE = 'gin/blue/x.gin'",
        "tests/d.py": "CODE = 'import models.blue; print()'",
        "tests/e.py": "transformer.preset('sky-blue')",
        "tests/f.py": "from models import bluer",
        "tests/g/conftest.py": "import models.blue\n@pytest.fixture(scope='x')\ndef sky(): ...\ndef sea(): ...",
        "tests/g/h.py": "def test_a(tmp_path, sky): ...",
        "tests/g/i.py": "def test_a(sea): ...",
        "tests/j.py": "def test_a(sky): ...",
    }
    gone = ["a.py", "b.py", "c.py", "d.py", "e.py", "g/conftest.py", "g/h.py"]
    assert without.tests_of(own, tests) == [f"tests/{name}" for name in gone]
