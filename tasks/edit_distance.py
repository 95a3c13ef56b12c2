"""Stands in for the package editdistance, which seqio imports, and which has no wheel for Python 3.13."""

import importlib.util
import sys
from collections.abc import Hashable, Sequence


def stand_in() -> None:
    """Makes `import editdistance` import this module, unless the package is installed."""
    if "editdistance" not in sys.modules and importlib.util.find_spec("editdistance") is None:
        sys.modules["editdistance"] = sys.modules[__name__]


def eval(first: Sequence[Hashable], second: Sequence[Hashable]) -> int:
    """Returns the fewest insertions, deletions and replacements that turn one sequence into the other."""
    row = list(range(len(second) + 1))  # distances between what was read of `first` and each prefix of `second`
    for i, left in enumerate(first):
        above, row = row, [i + 1]
        for j, right in enumerate(second):
            row.append(min(above[j + 1] + 1, row[j] + 1, above[j] + (left != right)))
    return row[-1]
