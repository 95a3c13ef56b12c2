"""State-space layers learn what lies outside of a window and of a chunk; without the carried state they do not."""

import contextlib

import pytest

from tasks import long_range as tasks
from tests.lab import long_range


@pytest.mark.covers("N08")
@pytest.mark.slow  # a minute: tests/models/mixers/test_s5.py holds the state itself
@pytest.mark.parametrize("carried", [True, False], ids=["carried", "lost"])
def test_retrieval_from_a_row_needs_the_carried_state(carried):
    vocabulary = tasks.rows(kind="retrieval", length=long_range.LENGTH, num_streams=1).vocabulary
    model = long_range.models(vocabulary.size)["S5"]
    trial = long_range.Trial(model, steps=500)
    with contextlib.nullcontext() if carried else long_range.without_carry():
        found = trial.accuracy(trial.trained("retrieval", rate=5e-3), "retrieval", long_range.LENGTH, seed=1)
    assert found > 0.95 if carried else found < 0.5  # a fourth of the values lie in the last chunk
