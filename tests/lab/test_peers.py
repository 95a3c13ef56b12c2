"""`tests/run.sh lab peers` compares each turn with the reference of its own turn and number of devices."""

import pytest

from tests.lab import peers
from tests.lab.__main__ import main


class Measured(peers.Program):
    """A program whose turns are given."""

    def __init__(self, name, devices, seconds):
        self.name, self.devices, self.first = name, devices, 4.25
        self.turns = [{"seconds": s, "processor": 2 * s, "faults": 1500, "peak": 3 * 2**20} for s in seconds]


def test_ratios_are_to_the_unrolled_step_of_as_many_devices_in_the_same_turn():
    measured = [
        Measured("ours", 1, [0.5, 1.0, 2.0]),
        Measured("unrolled", 1, [0.25, 1.0, 1.0]),
        Measured("ours", 8, [1.0, 1.0, 1.0]),
        Measured("unrolled", 8, [2.0, 2.0, 2.0]),
    ]
    found = peers.table(measured)
    cells = [list(column.cells) for column in found.columns]
    assert cells[0] == ["ours", "unrolled", "ours", "unrolled"]
    assert cells[2] == ["2,048", "2,048", "2,048", "1,024"]  # tokens/s, of 8 rows x 256
    assert cells[3] == ["0.50", "1.00", "2.00", "1.00"]
    assert cells[4:] == [["2.000", "2.000", "2.000", "4.000"], ["1,500"] * 4, ["4.2"] * 4, ["3"] * 4]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--devices 8 --transformers python3", "--transformers runs on one device: add 1 to --devices"),
        ("--cores 9999", "--cores 9999: expected some of"),
        ("--turns 1", "--turns: 1: expected a whole number, at least 2"),
    ],
)
def test_settings_that_measure_nothing_are_refused(words, message, capsys):
    assert main(["peers", *words.split()]) == 2
    assert message in capsys.readouterr().err.replace("\n", " ").replace("  ", " ")
