"""What a run shows of its validation."""

import types

from launch import card

MEANS = {"validation/loss": 0.25, "validation/exact_accuracy": 0.75, "validation/exact_accuracy_step_01": 0.5}


def shown(**task):
    return card._validated(types.SimpleNamespace(task=types.SimpleNamespace(**task)), MEANS)


def test_text_has_its_loss():
    assert shown() == "validation loss 0.2500 nats per token"


def test_puzzles_have_every_mean_and_what_it_is_of():
    assert shown(evaluated_on=lambda: "8 of 9 puzzles, drawn with seed 0").splitlines() == [
        "validation on 8 of 9 puzzles, drawn with seed 0",
        "exact_accuracy 0.7500  loss 0.2500",
        "exact_accuracy by step: 0.500",
    ]
