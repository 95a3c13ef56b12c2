"""STATUS.md agrees with the markers of the tests."""

import textwrap

import pytest

from tests.lab import status


@pytest.mark.covers("E07")
@pytest.mark.part("all")
def test_status_is_current():
    page = status.render(status.capabilities(), list(status.marked_tests()), status.ran())
    assert status.STATUS.read_text() == page, "run: tests/run.sh lab status --write"


@pytest.mark.covers("E07")
def test_the_checklist_is_whole():
    names = status.capabilities()
    groups = {"R": 12, "M": 19, "D": 15, "T": 17, "C": 17, "X": 17, "O": 13, "L": 12, "E": 12, "N": 15}
    assert list(names) == [f"{letter}{n:02}" for letter, count in groups.items() for n in range(1, count + 1)]
    assert len(set(names.values())) == len(names)
    assert not [name for name in names.values() if "|" in name or not name]


def test_markers_are_read_from_functions_classes_and_modules(tmp_path):
    (tmp_path / "core").mkdir()
    (tmp_path / "core" / "test_x.py").write_text(
        textwrap.dedent(
            """
            import pytest
            pytestmark = [pytest.mark.covers("R01")]

            @pytest.mark.parametrize("n", [1, 2])
            @pytest.mark.covers("R02", "M01")
            @pytest.mark.simulated(4)
            def test_a(n): ...

            @pytest.mark.compiled("v4-32", "v4-8")
            class TestB:
                @pytest.mark.covers("M01")
                def test_c(self): ...
                def helper(self): ...
            """
        )
    )
    a, c = status.marked_tests(tmp_path)
    assert a.name.endswith("core/test_x.py::test_a")
    assert (a.covers, a.hosts, a.slices) == (("R01", "R02", "M01"), 4, ())
    assert c.name.endswith("core/test_x.py::TestB::test_c")
    assert (c.covers, c.hosts, c.slices) == (("R01", "M01"), 0, ("v4-32", "v4-8"))


NAMES = {"R01": "first", "R02": "second", "M01": "third"}


def test_the_page_counts_and_lists_what_is_missing():
    tests = [
        status.Marked("tests/core/test_t.py::a", ("R01",), 0, ()),
        status.Marked("tests/core/test_t.py::B::b", ("R01", "M01"), 4, ()),
        status.Marked("tests/test_u.py::c", ("R01",), 2, ("v4-32",)),
    ]
    page = status.render(NAMES, tests)
    assert "**2 of 3 capabilities are shown by a test**, 2 of them on several simulated hosts and 1 by the real" in page
    assert "| R01 | first | yes | 2, 4 hosts | v4-32 | never | core/test_t.py, test_u.py |\n" in page
    assert "| M01 | third |  | 4 hosts |  | never | core/test_t.py |\n" in page
    assert "Not yet: R02 second.\n" in page
    assert "Not yet" not in status.render({row: name for row, name in NAMES.items() if row != "R02"}, tests)


def test_a_row_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match=r"t::a covers 'R99', which tests/capabilities.toml does not have"):
        status.render(NAMES, [status.Marked("t::a", ("R99",), 0, ())])
