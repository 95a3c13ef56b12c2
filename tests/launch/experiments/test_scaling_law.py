"""The scaling law: recovered from its own points, within its bounds, and refused for too few sizes."""

import numpy as np
import pytest

from launch.experiments import scaling_law

SIZES = (1_483_778, 2_666_498, 5_028_866, 9_753_602, 17_624_066, 38_083_586)


def accuracies(a, b, c):
    return [a - b * (n / 1e6) ** -c for n in SIZES]


@pytest.mark.parametrize("law", [(0.87, 0.3, 0.9), (0.95, 0.5, 0.25), (0.6, 0.05, 3.0)])
def test_the_numbers_of_a_law_are_found(law):
    found = scaling_law.fit(SIZES, accuracies(*law))
    assert (found.a, found.b, found.c) == pytest.approx(law, rel=1e-3)
    assert found.residual < 1e-6
    assert found.at(SIZES[2]) == pytest.approx(accuracies(*law)[2])
    assert found.sizes == SIZES


def test_nothing_within_the_bounds_is_nearer():
    rng = np.random.default_rng(0)
    y = np.asarray(accuracies(0.8, 0.3, 0.8)) + rng.normal(0, 0.02, len(SIZES))
    found = scaling_law.fit(SIZES, y)
    n = np.asarray(SIZES) / 1e6
    for _ in range(2000):
        a, b, c = rng.uniform(0, 1), rng.uniform(0, 2), rng.uniform(0.01, 10)
        assert np.sqrt(np.mean((y - a + b * n**-c) ** 2)) >= found.residual - 1e-9
    assert "root mean square" in found.describe()


def test_a_law_does_not_exceed_one_or_fall():
    above = scaling_law.fit(SIZES, [0.5, 0.6, 0.7, 0.8, 0.9, 1.0])
    assert 0 <= above.a <= 1
    falling = scaling_law.fit(SIZES, [0.9, 0.8, 0.7, 0.6, 0.5, 0.4])
    assert [falling.at(n) for n in SIZES] == pytest.approx([0.65] * 6, abs=1e-5)
    assert "does not increase with N" in falling.describe()


def test_several_seeds_are_points_of_one_size():
    y = accuracies(0.87, 0.3, 0.9)
    found = scaling_law.fit(SIZES * 2, [v + 0.01 for v in y] + [v - 0.01 for v in y])
    assert (found.a, found.b, found.c) == pytest.approx((0.87, 0.3, 0.9), rel=1e-3)
    assert (found.points, len(found.sizes)) == (12, 6)
    assert found.residual == pytest.approx(0.01)


def test_three_sizes_are_too_few():
    assert "3 sizes are done, at least 4 are needed" in scaling_law.fit(SIZES[:3] * 2, [0.1] * 6)


def rows(group, sizes, depths, scored=6, finished=6, batches=None):
    return [
        {
            "group": group,
            "parameters": n,
            "depth": d,
            "run": f"{group}/{i}",
            "exact_accuracy": 0.5 if i < scored else None,
            "steps": 100 if i < finished else 10,
            "total_steps": 100,
            **{"puzzles": None, "copies": None, "batch": batches[i] if batches else 8},
        }
        for i, (n, d) in enumerate(zip(sizes, depths, strict=True))
    ]


def test_only_groups_that_vary_the_size_alone_have_one():
    table = [
        *rows("width", SIZES, [42] * 6, scored=3),
        *rows("layers", SIZES, [39, 42, 45, 48, 54, 60]),
        *rows("rate", SIZES[:1] * 6, [42] * 6),
        *rows("rows too", SIZES, [42] * 6, batches=[8, 16, 32, 64, 128, 256]),
        *rows("unfinished", SIZES, [42] * 6, finished=3),
    ]
    assert list(scaling_law.of_groups(table)) == ["width", "unfinished"]
    assert scaling_law.of_groups(table)["unfinished"] == scaling_law.of_groups(table)["width"]
    assert scaling_law.of_groups(table)["width"].startswith("no law a - b N^-c fitted: 3 sizes")
