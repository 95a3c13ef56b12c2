"""What reads the files and messages of others fails only as its callers expect."""

import random

import pytest

from core.errors import UserError
from tests.lab import fuzz

KEPT = sorted(path for path in fuzz.CASES.rglob("*") if path.is_file())


@pytest.fixture(scope="module")
def targets():
    with fuzz.targets() as found:
        yield found


def test_seeds_are_valid(targets):
    for name, target in targets.items():
        for seed in target.seeds[:1]:
            target.read(seed)
            assert not fuzz.attempt(name, target, seed)


@pytest.mark.parametrize("case", KEPT, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_a_case_that_found_something_is_read_or_refused(targets, case):
    assert not fuzz.attempt(case.parent.name, targets[case.parent.name], case.read_bytes())


def test_cases_are_kept():
    assert KEPT


def test_changed_files_and_messages_are_read_or_refused(targets):
    cheap = [name for name in targets if name not in ("configuration", "model")]
    done, failures = fuzz.run_for(30.0, seed=20, names=cheap, tries=60)
    assert done > 100
    assert not failures, failures[0].said


def test_a_failure_is_found():
    def fails(case):
        if b"7" not in case:
            raise KeyError("unexpected")

    broken = fuzz.Target(fails, (UserError,), [b'{"a": 7}'])
    rng = random.Random(0)
    found = [fuzz.attempt("broken", broken, fuzz.changed(b'{"a": 7}', rng)) for _ in range(50)]
    assert any(found)
    assert "KeyError" in next(filter(None, found)).said
