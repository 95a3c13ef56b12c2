"""Formatting of counts and quantities."""

import pytest

from core import units


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (units.counted(1, "host"), "1 host"),
        (units.counted(0, "host"), "0 hosts"),
        (units.counted(1024, "host"), "1,024 hosts"),
        (units.counted(1, "process", "processes"), "1 process"),
        (units.counted(2, "process", "processes"), "2 processes"),
    ],
)
def test_nouns_agree_with_their_count(text, expected):
    assert text == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (units.size(0), "0 B"),
        (units.size(422_000), "412 KiB"),
        (units.size(77_115 * 2**20), "75.3 GiB"),
        (units.size(18.452 * 2**30, digits=4), "18.45 GiB"),
        (units.size(1023.9999 * 2**20), "1 GiB"),
        (units.seconds(9.52e-6), "9.52 µs"),
        (units.seconds(0.0123), "12.3 ms"),
        (units.seconds(0.9999), "1 s"),
        (units.seconds(1234.5), "1,234 s"),
        (units.seconds(3e-10), "0.3 ns"),
        (units.flops(2.0938e10), "20.9 GFLOP"),
        (units.flops(3.2e15), "3.2 PFLOP"),
        (units.clock(245), "4:05"),
        (units.clock(3723), "1:02:03"),
    ],
)
def test_quantities_have_the_unit_that_suits_them(text, expected):
    assert text == expected


@pytest.mark.parametrize(
    ("number", "expected"),
    [(0.25, "0.25"), (9.944, "9.94"), (99.94, "99.9"), (999.6, "1,000"), (1017.6, "1,018"), (1258.3, "1,258")],
)
def test_large_numbers_have_all_their_digits(number, expected):
    assert units.significant(number) == expected


def test_a_long_list_is_shortened_with_the_number_of_omitted_items():
    assert units.shortened(["a", "b", "c"], most=3) == ["a", "b", "c"]
    assert units.shortened(["a", "b", "c"], most=1) == ["a", "… and 2 more"]
    assert units.shortened([], most=1) == []
