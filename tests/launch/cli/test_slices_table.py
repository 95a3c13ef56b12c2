"""`launch/run slices` prints one slice, or all of a generation."""

import pytest

from launch import __main__ as cli


@pytest.mark.parametrize(
    ("name", "shown", "hidden"),
    [("v5p-8", ["v5p-8"], ["v5p-16"]), ("v5", ["v5p-8", "v5e-256"], ["v4-8"]), ("2xv4-32", ["2xv4-32"], ["v4-8"])],
)
def test_the_slices_of_a_name(name, shown, hidden, capsys):
    assert cli.main(["slices", name]) == 0
    rows = {line.split()[0] for line in capsys.readouterr().out.splitlines() if line.strip()}
    assert rows >= set(shown)
    assert not rows & set(hidden)


def test_a_name_that_counts_chips_is_an_error_with_the_right_one(capsys):
    assert cli.main(["slices", "tpu7x-4"]) != 0
    assert "tpu7x-8 has 4 chips (8 devices)" in " ".join(capsys.readouterr().err.split())
