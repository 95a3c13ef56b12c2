"""A model continues the prompts of a task's metrics as far as its positions allow."""

import jax
import pytest

from core import optimizers, slices
from core.errors import UserError
from launch.runs.task_metrics import Answers
from models.decoder import transformer
from parallel import strategies
from parallel.partitioner import Partitioner
from tasks import streams

SIZES = {"vocab_size": 29, "num_layers": 1, "embed_dim": 16, "mlp_dim": 16, "num_heads": 2, "num_kv_heads": 2}


@pytest.fixture(scope="module")
def answers():
    model = transformer.Transformer(**SIZES, dtype="float32", max_positions=12)
    at = Partitioner(strategies.data_parallel(), slice=slices.get("v4-8"), devices=jax.devices()[:4])
    program = at.program(
        model, optimizers.adamw(learning_rate=optimizers.constant(1e-3)), streams.batch_spec(8, length=12), seed=0
    )
    return Answers(program, program.init_params(), stop_ids=(), num_ids=29)


def test_rows_of_the_whole_length_have_room_for_all_but_the_last_id(answers):
    (found,) = answers.predict([[0, 5, 6, 7]], 9)
    assert len(found) == 8


def test_a_continuation_that_does_not_fit_is_an_error_and_not_cut(answers):
    with pytest.raises(UserError, match="12"):
        answers.predict([[0, 5, 6, 7]], 10)
