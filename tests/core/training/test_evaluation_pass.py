"""An evaluation pass: its sums, its answers, and reading a batch while the next one is computed."""

import numpy as np
import pytest

from core.training.evaluation_pass import EvaluationPass
from core.types import WeightedSum


class Program:
    """A batch is a number: its sum, and its answer."""

    def __init__(self):
        self.dispatched = []

    def put(self, batch):
        return batch["x"]

    def eval_step(self, state, batch):
        self.dispatched.append(batch)
        return {"loss": WeightedSum(np.float32(state * batch), np.float32(1))}

    def answer_step(self, state, batch):
        return self.eval_step(state, batch), {"said": np.asarray([batch])}


def evaluation(program, *, answering):
    return EvaluationPass(program, 10.0, [{"x": x} for x in (1.0, 2.0, 4.0)], answering=answering)


@pytest.mark.parametrize("answering", [True, False])
def test_sums_and_answers_of_all_batches(answering):
    found = evaluation(Program(), answering=answering)
    answers = [batch["said"].tolist() if answering else batch for batch in found.answers()]
    assert answers == ([[1.0], [2.0], [4.0]] if answering else [{}, {}, {}])
    assert (found.sums["loss"].total, found.sums["loss"].weight) == (70.0, 3.0)


def test_a_batch_is_read_after_the_next_one_is_dispatched():
    program = Program()
    found = evaluation(program, answering=True)
    seen = [(batch["said"].item(), list(program.dispatched)) for batch in found.answers()]
    assert seen == [(1.0, [1.0, 2.0]), (2.0, [1.0, 2.0, 4.0]), (4.0, [1.0, 2.0, 4.0])]


def test_without_batches_there_are_no_sums():
    found = EvaluationPass(Program(), 1.0, [], answering=False)
    assert (list(found.answers()), found.sums) == ([], {})
