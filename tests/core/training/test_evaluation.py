"""An evaluation pass: its sums, its answers, and reading a batch while the next one is computed."""

import numpy as np
import pytest

from core.hosts import activity
from core.training import evaluation
from core.training.evaluation import EvaluationPass
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


def evaluate(program, *, answering):
    return EvaluationPass(program, 10.0, [{"x": x} for x in (1.0, 2.0, 4.0)], answering=answering)


@pytest.mark.parametrize("answering", [True, False])
def test_sums_and_answers_of_all_batches(answering):
    found = evaluate(Program(), answering=answering)
    answers = [batch["said"].tolist() if answering else batch for batch in found.answers()]
    assert answers == ([[1.0], [2.0], [4.0]] if answering else [{}, {}, {}])
    assert (found.sums["loss"].total, found.sums["loss"].weight) == (70.0, 3.0)


def test_a_batch_is_read_after_the_next_one_is_dispatched():
    program = Program()
    found = evaluate(program, answering=True)
    seen = [(batch["said"].item(), list(program.dispatched)) for batch in found.answers()]
    assert seen == [(1.0, [1.0, 2.0]), (2.0, [1.0, 2.0, 4.0]), (4.0, [1.0, 2.0, 4.0])]


@pytest.mark.parametrize("is_counted", [True, False])
def test_the_place_of_the_process_says_which_batch(monkeypatch, is_counted):
    batches = [{"x": x} for x in (1.0, 2.0)]
    program, seen = Program(), []
    monkeypatch.setattr(program, "put", lambda batch: seen.append(activity.place().part) or batch["x"])
    list(EvaluationPass(program, 1.0, batches if is_counted else iter(batches)).answers())
    assert seen == (["batch 1 of 2", "batch 2 of 2"] if is_counted else ["batch 1", "batch 2"])


def test_without_batches_there_are_no_sums():
    found = EvaluationPass(Program(), 1.0, [], answering=False)
    assert (list(found.answers()), found.sums) == ([], {})


@pytest.mark.covers("T17")
def test_evaluate_divides_once_over_all_batches():
    class Uneven(Program):
        def eval_step(self, state, batch):
            total, weight = batch
            return {"loss": WeightedSum(np.float32(total), np.float32(weight))}

    def means(*sums):
        return evaluation.evaluate(Uneven(), None, [{"x": x} for x in sums])

    assert means((6.0, 3.0), (1.0, 1.0)) == {"loss": 7.0 / 4.0}  # the mean of the means would be 1.5
    assert means((0.0, 0.0)) == {}


@pytest.mark.parametrize(
    ("length", "ends"),
    [(8192, [128, 256, 512, 1024, 2048, 4096, 8192]), (100, [1, 3, 6, 12, 25, 50, 100]), (3, [1, 3]), (1, [1])],
)
def test_ranges_of_positions_double_and_meet(length, ends):
    assert evaluation.position_ranges(length) == [range(a, b) for a, b in zip([0, *ends], ends, strict=False)]


def test_tokens_are_counted_by_their_position_in_the_document():
    """The last document of a row begins at 0 again, and a token without weight counts nowhere."""

    class Losses(Program):
        def put(self, batch):
            return batch

        def eval_step(self, state, batch):
            return {"loss": WeightedSum(np.sum(batch["loss"] * batch["weights"]), np.sum(batch["weights"]))}

    row = {
        "positions": np.array([[0, 1, 2, 3, 0, 1]]),
        "weights": np.array([[1, 1, 1, 0, 1, 0.5]], np.float32),
        "loss": np.array([[5, 4, 3, 100, 7, 6]], np.float32),
    }
    found = evaluation.by_position(Losses(), None, [row, row], [range(0, 1), range(1, 4), range(4, 8)])
    assert [tuple(sums["loss"]) for sums in found] == [(24, 4), (20, 5), (0, 0)]


def test_the_hook_is_due_at_multiples_and_at_the_end_and_opens_its_batches_once():
    written, opened = [], []

    def batches():
        opened.append(1)
        return evaluation.FirstBatches([{"x": 2.0}], None)

    hook = evaluation.Evaluate(Program(), batches, lambda *w: written.append(w), every=4, last_step=10)
    assert [s for s in range(1, 11) if hook.needs_state(s)] == [4, 8, 10]
    hook.read()
    hook.unless = lambda step: step == 8
    assert [s for s in range(1, 11) if hook.needs_state(s)] == [4, 10]
    hook.at_boundary(4, 1.0)
    hook.at_boundary(8, 1.5)
    assert written == [(4, {"validation/loss": 2.0}), (8, {"validation/loss": 3.0})]
    assert hook.latest == {"validation/loss": 3.0}
    assert opened == [1]
    hook.after_rollback(4)
    assert (hook.latest, hook.scored, hook.step) == ({}, None, None)
    own = evaluation.Evaluate(
        Program(), batches, lambda *w: written.append(w), every=4, last_step=4, also=lambda state: {"sums/equal": state}
    )
    own.at_boundary(4, 1.5)
    assert written[-1] == (4, {"validation/loss": 3.0, "validation/sums/equal": 1.5})


SUMS_OVER_HOSTS = """
import jax
from core.hosts import distributed
distributed.initialize(coordinator=COORDINATOR, process_index=PROCESS, process_count=HOSTS, local_cpu_devices=2)
import haiku as hk
import jax.numpy as jnp
import numpy as np
from core import logical, optimizers, slices
from core.batches import Field
from core.training import evaluation
from core.types import LossOutput
from parallel import strategies
from parallel.partitioner import Partitioner

class MeanOfTargets:
    def init(self, rng, batch):
        return hk.transform(lambda: logical.param("scale", (), (), jnp.ones)).init(rng)

    def init_carry(self, batch):
        return ()

    def loss(self, params, carry, rng, batch, *, is_training):
        total = params["~"]["scale"] * jnp.sum(batch["targets"] * batch["weights"])
        return carry, LossOutput(total, jnp.sum(batch["weights"]), {})

spec = {k: Field((4, 3), jnp.float32, ("batch", "length")) for k in ("targets", "weights")}
bound = Partitioner(strategies.data_parallel(), slice=slices.get("v4-8"), devices=jax.devices())
program = bound.program(MeanOfTargets(), optimizers.adamw(learning_rate=optimizers.constant(1e-3)), spec, seed=0)
rows = np.array(bound.data_layout(4).rows)
assert len(rows) == 2
targets = (rows[:, None] + np.arange(3)).astype(np.float32)  # [2, 3]
weights = np.repeat(rows[:, None] % 3, 3, axis=1).astype(np.float32)  # rows 0 and 3 do not count: uneven over hosts
batch = {"targets": targets, "weights": weights}
print("RESULT", evaluation.evaluate(program, program.init(), [batch] * 2)["loss"])
"""


@pytest.mark.covers("T11")
@pytest.mark.simulated(2)
def test_evaluation_sums_over_hosts(run_hosts):
    ran = run_hosts(SUMS_OVER_HOSTS, hosts=2, timeout=120)
    assert all(r.returncode == 0 for r in ran), [r.output[-2000:] for r in ran]
    means = [float(line.split()[1]) for r in ran for line in r.output.splitlines() if line.startswith("RESULT")]
    want = (1 * (1 + 2 + 3) + 2 * (2 + 3 + 4)) / (3 * 1 + 3 * 2)
    assert means == [pytest.approx(want, abs=1e-6)] * 2


def test_means_by_step_are_a_curve_in_the_order_of_the_steps():
    means = {f"accuracy_step_{step:02d}": float(step) for step in range(1, 121)} | {"loss": 3.0, "a_step_1": 1.0}
    plain, curves = evaluation.curves_apart(dict(sorted(means.items())))
    assert plain == {"loss": 3.0}
    assert curves == {"a": [1.0], "accuracy": [float(step) for step in range(1, 121)]}
