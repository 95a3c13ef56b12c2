"""What a group of results says of its hypothesis: accuracy as a law in the number of parameters.

    accuracy = a - b N^-c          N in millions; 0 <= a <= 1, b >= 0, 0.01 <= c <= 10

The one idea: for a given c the rest is a straight line in N^-c, so the least squares of three numbers are a search over
one: on a grid, and finer around its best point.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from core.errors import UserError
from launch.suites.results import Row

FEWEST_SIZES = 4  # three numbers go through any three points
MILLION = 1e6
_EXPONENTS = (0.01, 10.0)
_TRIED, _ROUNDS = 200, 4


class Law(NamedTuple):
    """A fitted curve.

    Attributes:
      a, b, c: its numbers, for N in millions.
      residual: root mean square of the distances of the points from it, as a share of 1.
      farthest: the largest of them.
      points: how many points there were.
      sizes: different N among them, ascending.
    """

    a: float
    b: float
    c: float
    residual: float
    farthest: float
    points: int
    sizes: tuple[float, ...]

    def at(self, parameters: float) -> float:
        """Accuracy by the law."""
        return self.a - self.b * (parameters / MILLION) ** -self.c

    def line(self) -> list[tuple[float, float]]:
        """The curve between the smallest and the largest network."""
        return [(n, self.at(n)) for n in np.geomspace(self.sizes[0], self.sizes[-1], 60).tolist()]

    def describe(self) -> str:
        """In words."""
        if not self.b:
            law = f"accuracy does not rise with N: the nearest law is the constant {self.a:.3f}"
        else:
            at_edge = self.c < 1.01 * _EXPONENTS[0] or self.c > 0.99 * _EXPONENTS[1]
            edge = " (the exponent is at the edge of what is tried: the points do not determine it)" * at_edge
            law = f"accuracy = {self.a:.3f} - {self.b:.3g} N^-{self.c:.2f}, N in millions of parameters{edge}"
        return (
            f"{law}; {self.points} points of {len(self.sizes)} sizes lie {100 * self.residual:.2f} percentage points "
            f"from it (root mean square), {100 * self.farthest:.2f} at most"
        )


def law(parameters: Sequence[float], accuracies: Sequence[float]) -> Law:
    """The least squares of accuracy = a - b N^-c.

    Args:
      parameters: N of each point.
      accuracies: of each point, shares of 1.

    Raises:
      ValueError: fewer than four different N.
    """
    sizes = tuple(sorted(set(map(float, parameters))))
    if len(sizes) < FEWEST_SIZES:
        raise UserError(
            f"no law a - b N^-c: {len(sizes)} sizes are done, and its three numbers need at least {FEWEST_SIZES}"
        )
    n, y = np.asarray(parameters, float) / MILLION, np.asarray(accuracies, float)
    low, high = _EXPONENTS
    for _ in range(_ROUNDS):
        tried = np.geomspace(low, high, _TRIED)
        errors = [float(np.sum((y - a + b * n**-c) ** 2)) for c in tried for a, b in [_straight(n**-c, y)]]
        best = int(np.argmin(errors))
        low, high = tried[max(best - 1, 0)], tried[min(best + 1, _TRIED - 1)]
    c = float(tried[best])
    a, b = _straight(n**-c, y)
    distances = np.abs(y - a + b * n**-c)
    residual = float(np.sqrt(np.mean(distances**2)))
    return Law(a, b, c, residual, float(distances.max()), len(y), sizes)


def _straight(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """a in [0, 1] and b >= 0 of the nearest y = a - b x, for x > 0 and y in [0, 1]."""
    deviation = x - x.mean()
    spread = float(np.sum(deviation**2))
    b = max(0.0, -float(np.sum(deviation * y)) / spread) if spread else 0.0
    a = float(y.mean() + b * x.mean())
    if a > 1:
        return 1.0, max(0.0, float(np.sum(x * (1 - y)) / np.sum(x**2)))
    return a, b


def laws(table: Sequence[Row]) -> dict[str, Law | str]:
    """By group, of those that vary the size of the network alone: the law of finished runs, or why there is none."""
    found: dict[str, Law | str] = {}
    for group in dict.fromkeys(row["group"] for row in table):
        members = [row for row in table if row["group"] == group]
        if len({row["parameters"] for row in members}) < 2 or len({_beside(row) for row in members}) > 1:
            continue
        done = [row for row in members if row["exact_accuracy"] is not None and row["steps"] == row["total_steps"]]
        once = {row["run"]: row for row in done}.values()
        try:
            found[group] = law([r["parameters"] for r in once], [r["exact_accuracy"] for r in once])
        except ValueError as error:
            found[group] = str(error)
    return found


def _beside(row: Row) -> tuple:
    """What a group that varies the size alone holds fixed."""
    return tuple(row[name] for name in ("depth", "puzzles", "copies", "batch", "total_steps"))
