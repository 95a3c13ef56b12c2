"""Fits accuracy as a power law in the number of parameters.

accuracy = a - b N^-c          N in millions; 0 <= a <= 1, b >= 0, 0.01 <= c <= 10
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from scipy import optimize

from launch.experiments.results import ResultRow

FEWEST_SIZES = 4  # three free parameters fit any three points
MILLION = 1e6
_EXPONENTS = (0.01, 10.0)
_BOUNDS = ((0.0, 0.0, _EXPONENTS[0]), (1.0, np.inf, _EXPONENTS[1]))
_STARTS = (0.03, 0.1, 0.3, 1.0, 3.0)  # the error has several local minima in c
_FLAT = 1e-6  # a smaller rise over all sizes counts as none
_SAME_IN_GROUP = ("depth", "puzzles", "copies", "batch", "total_steps")  # of a group that varies only the size


class ScalingLaw(NamedTuple):
    """A fitted curve.

    Attributes:
      a, b, c: its coefficients, for N in millions.
      residual: root mean square error of the points.
      points: number of points.
      sizes: the distinct N, ascending.
    """

    a: float
    b: float
    c: float
    residual: float
    points: int
    sizes: tuple[float, ...]

    def at(self, parameters: float) -> float:
        """Returns the accuracy that the law predicts."""
        return self.a - self.b * (parameters / MILLION) ** -self.c

    def line(self) -> list[tuple[float, float]]:
        """Returns points on the curve, from the smallest to the largest fitted size, for plotting."""
        return [(n, self.at(n)) for n in np.geomspace(self.sizes[0], self.sizes[-1], 60).tolist()]

    def describe(self) -> str:
        """Returns the law and its error as text."""
        if self.at(self.sizes[-1]) - self.at(self.sizes[0]) < _FLAT:
            law = f"accuracy does not increase with N: the best fit is the constant {self.a:.3f}"
        else:
            at_bound = self.c < 1.01 * _EXPONENTS[0] or self.c > 0.99 * _EXPONENTS[1]
            note = " (the exponent is at its bound: the points do not determine it)" * at_bound
            law = f"accuracy = {self.a:.3f} - {self.b:.3g} N^-{self.c:.2f}, N in millions of parameters{note}"
        return (
            f"{law}; error of {self.points} points of {len(self.sizes)} sizes: {100 * self.residual:.2f} percentage "
            "points (root mean square)"
        )


def fit(parameters: Sequence[float], accuracies: Sequence[float]) -> ScalingLaw | str:
    """Fits the law to points (N, accuracy from 0 to 1) by least squares; returns the reason if there are too few."""
    sizes = tuple(sorted(set(map(float, parameters))))
    if len(sizes) < FEWEST_SIZES:
        return f"no law a - b N^-c fitted: {len(sizes)} sizes are done, at least {FEWEST_SIZES} are needed"
    n, y = np.asarray(parameters, float) / MILLION, np.asarray(accuracies, float)

    def errors(abc: np.ndarray) -> np.ndarray:
        return y - abc[0] + abc[1] * n ** -abc[2]

    highest = np.clip(y.max(), 0.01, 0.99)
    # Where b is 0 nothing determines c: the limit of evaluations ends the search with a fit that is as good as any.
    limits = {"xtol": 1e-10, "ftol": 1e-12, "gtol": 1e-12, "max_nfev": 1000}
    fits = [optimize.least_squares(errors, (highest, 0.1, c), bounds=_BOUNDS, **limits) for c in _STARTS]
    best = min(fits, key=lambda found: found.cost)
    residual = float(np.sqrt(np.mean(best.fun**2)))
    return ScalingLaw(*map(float, best.x), residual, len(y), sizes)


def of_groups(table: Sequence[ResultRow]) -> Mapping[str, ScalingLaw | str]:
    """Fits a law to each group of experiments that differ only in model size; a reason where that is not possible."""
    found: dict[str, ScalingLaw | str] = {}
    for group in dict.fromkeys(row["group"] for row in table):
        members = [row for row in table if row["group"] == group]
        fixed = {tuple(row[name] for name in _SAME_IN_GROUP) for row in members}
        if len({row["parameters"] for row in members}) < 2 or len(fixed) > 1:
            continue
        done = [row for row in members if row["exact_accuracy"] is not None and row["steps"] == row["total_steps"]]
        once = {row["run"]: row for row in done}.values()
        found[group] = fit([row["parameters"] for row in once], [row["exact_accuracy"] for row in once])
    return found
