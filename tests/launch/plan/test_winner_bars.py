"""Bars of a plan's winner: their lengths and legends say what the metrics say."""

import re

import pytest

from core.slices import GIB
from launch.plan import search, winner_bars


@pytest.fixture(scope="module")
def best(options):
    return next(one for one in options if not one.reason)


def bar(line):
    (drawn,) = re.findall(r"\|(.*)\|", line)
    assert len(drawn) == winner_bars._WIDTH
    return drawn


def legend(line):
    found = re.findall(r"([█▓▒░]) (.+?) ([\d.e+-]+)(?:, (?=[█▓▒░])|$)", line)
    return {name: (mark, float(size)) for mark, name, size in found}


def test_bars_of_arithmetic_have_the_parts_of_the_estimate(question, best):
    metrics = search.metrics(question, best)
    memory, kinds, step, times = winner_bars.lines(metrics, best.estimate.hbm)
    have = metrics.slice.chip.usable_hbm_bytes
    used = len(bar(memory).rstrip()) / winner_bars._WIDTH
    assert used == pytest.approx(metrics.used_bytes / have, abs=1 / winner_bars._WIDTH)
    assert sum(size for _, size in legend(kinds).values()) == pytest.approx(metrics.used_bytes / GIB, rel=0.02)
    largest = max(best.estimate.hbm, key=best.estimate.hbm.__getitem__)
    assert legend(kinds)[largest][1] == pytest.approx(best.estimate.hbm[largest] / GIB, rel=0.01)
    assert " " not in bar(step)
    found = legend(times)
    assert found["traffic, if none is hidden"][1] == pytest.approx(1e3 * metrics.time.traffic_seconds, rel=0.01)
    assert sum(size for _, size in found.values()) == pytest.approx(1e3 * metrics.time.exposed, rel=0.02)


def test_bars_of_a_compiled_winner_have_its_peak_and_its_scheduled_step(question, best, compiled_as):
    metrics = search.metrics(question, best, compiled_as(best, 2.0))
    _, kinds, _, times = winner_bars.lines(metrics, best.estimate.hbm)
    assert "gradients, activations and buffers" in legend(kinds)
    assert sum(size for _, size in legend(kinds).values()) == pytest.approx(metrics.used_bytes / GIB, rel=0.02)
    assert sum(size for _, size in legend(times).values()) == pytest.approx(1e3 * metrics.time.scheduled, rel=0.02)


def test_small_parts_are_one_and_what_exceeds_the_chip_is_cut():
    parts = winner_bars._largest([("a", 8), ("b", 4), ("c", 2), ("d", 1), ("e", 1), ("none", 0)])
    assert parts == [("a", 8), ("b", 4), ("c", 2), ("other", 2)]
    assert winner_bars._bar(parts, 16) == "█" * 20 + "▓" * 10 + "▒" * 5 + "░" * 5
    assert winner_bars._bar(parts, 8) == "█" * 40
    assert winner_bars._bar([("a", 1)], 2) == "█" * 20 + " " * 20
