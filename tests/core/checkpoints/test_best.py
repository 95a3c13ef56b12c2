"""The best checkpoint by a validation metric is kept beside the latest ones, also across restarts."""

import jax
import jax.numpy as jnp
import pytest

from core.checkpoints import best, inspection, steps
from core.checkpoints.store import Checkpoints
from core.errors import UserError
from launch import __main__ as command


def train(run, values, *, asked="validation/loss", keep=2):
    """Saves steps with these validation losses, as one start of a run; None is a step that was not evaluated."""
    checkpoints = Checkpoints(str(run / "checkpoints"), keep=keep, keep_best=asked)
    for step, value in values.items():
        meta = {} if value is None else best.described(asked, {"validation/loss": value, "validation/other": -value})
        checkpoints.save(step, state={"w": jnp.full((4,), step)}, data={}, meta=meta)
    checkpoints.close()
    return steps.complete(run / "checkpoints")


def test_the_best_step_stays_until_another_is_better(tmp_path):
    assert train(tmp_path, {1: 3.0, 2: 1.5, 3: 2.0, 4: 1.9}) == [2, 3, 4]
    assert train(tmp_path, {5: 1.8, 6: None}) == [2, 5, 6]  # the values are read again
    assert steps.find(f"{tmp_path}@best").name == "2"
    assert steps.find_best(tmp_path / "checkpoints") == (2, "validation/loss 1.5000")
    assert train(tmp_path, {7: 1.2, 8: float("nan"), 9: 1.3}) == [7, 8, 9]
    assert steps.read(tmp_path / "checkpoints" / "8").meta["validation"] == {}  # read, without what is not finite
    assert train(tmp_path, {10: 1.2}) == [7, 9, 10]  # the first of equal ones


def test_a_step_that_is_evaluated_after_its_save_is_compared_as_the_others(tmp_path):
    train(tmp_path, {1: 3.0, 2: None, 3: 2.0})
    checkpoints = Checkpoints(str(tmp_path / "checkpoints"), keep=2, keep_best="validation/loss")
    assert checkpoints.unscored() == [2]
    checkpoints.score(2, best.described("validation/loss", {"validation/loss": 1.0}))
    assert checkpoints.unscored() == []
    assert steps.find_best(tmp_path / "checkpoints") == (2, "validation/loss 1.0000")
    assert not inspection.verify(tmp_path / "checkpoints" / "2").damaged
    for step in (4, 5):
        described = best.described("validation/loss", {"validation/loss": 1.5})
        checkpoints.save(step, state={"w": jnp.full((4,), step)}, data={}, meta=described)
    checkpoints.close()
    assert steps.complete(tmp_path / "checkpoints") == [2, 4, 5]
    assert train(tmp_path, {6: 1.2}) == [2, 5, 6]  # read again
    assert Checkpoints(str(tmp_path / "checkpoints"), keep=2).unscored() == []


@pytest.mark.parametrize(
    ("asked", "expected"), [("max:validation/other", 2), ("max:validation/loss", 1), ("validation/absent", None)]
)
def test_the_highest_and_a_metric_that_no_evaluation_has(tmp_path, asked, expected):
    kept = train(tmp_path, {1: 3.0, 2: 1.5, 3: 2.0, 4: 1.9}, asked=asked)
    assert kept == sorted({3, 4} | ({expected} - {None}))
    found = steps.find_best(tmp_path / "checkpoints")
    assert (found and found.step) == expected


def test_pruning_keeps_the_best_and_the_list_names_it(tmp_path, capsys):
    train(tmp_path, {1: 1.0, 2: 1.5, 3: 2.0}, keep=3)
    kept, removed = inspection.plan_pruning(tmp_path / "checkpoints", keep=1, set_aside=False, say=lambda line: None)
    assert (kept, [folder.name for folder in removed]) == ([1, 3], ["2"])
    assert command.main(["checkpoints", "ls", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if "best: validation/loss 1.0000" in line] == ["1"]


def test_without_a_metric_no_step_is_the_best(tmp_path):
    checkpoints = Checkpoints(str(tmp_path / "checkpoints"), keep=2)
    for step in (1, 2, 3):
        checkpoints.save(step, state={"w": jax.numpy.zeros(3)}, data={}, meta={})
    checkpoints.close()
    assert steps.complete(tmp_path / "checkpoints") == [2, 3]
    with pytest.raises(UserError, match=r"@best: no checkpoint in .* has a validation metric"):
        steps.find(f"{tmp_path}@best")


@pytest.mark.parametrize("text", ["loss", "validation/", "min:validation/loss", "max:"])
def test_a_malformed_metric_is_refused(text):
    with pytest.raises(UserError, match="expected a metric of evaluations"):
        best.parse(text)
