"""How tokens are drawn is checked where it is written."""

import math

import numpy as np
import pytest

from core.errors import UserError
from parallel.generation.sampling import Sampling


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -0.5},
        {"temperature": math.nan},
        {"temperature": "0.8"},
        {"top_k": -1},
        {"top_k": 2.5},
        {"top_p": 1.5},
        {"top_p": -0.1},
        {"min_p": 2},
    ],
    ids=str,
)
def test_a_number_outside_its_range_is_refused_by_name(wrong):
    [(name, value)] = wrong.items()
    with pytest.raises(UserError, match=f"^{name} = {value!r}: expected"):
        Sampling(**wrong)


def test_the_ends_of_the_ranges_are_legal():
    assert Sampling(temperature=0, top_k=0, top_p=0, min_p=1) == Sampling(0.0, 0, 0.0, 1.0)
    assert Sampling(temperature=np.float32(0.5), top_k=np.int64(3)) == Sampling(0.5, 3)
