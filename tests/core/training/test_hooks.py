"""Each hook alone, with what it is told of the run replaced by a list."""

import math
import types

import numpy as np
import pytest

from core.training import hooks, non_finite, run_lock, trainer
from core.training.profile_requests import Window
from core.training.trainer import StepReport
from core.types import WeightedSum


def report(step, *, seconds=0.5, wait=0.1, device=0.0, sums=(), **metrics):
    return StepReport(step, {"loss": 2.0, **metrics}, dict(sums), seconds, wait, device)


def test_log_writes_the_first_step_and_means_over_each_interval():
    written = []
    log = hooks.Log(lambda step, values: written.append((step, values)), every=3, items_per_step=100)
    for step, seconds in [(1, 9.0), (2, 1.0), (3, 3.0), (4, 2.0), (5, 2.0), (6, 2.0)]:
        log.after_step(report(step, seconds=seconds, wait=seconds / 4))
    assert [step for step, _ in written] == [1, 3, 6]
    assert [v["step_seconds"] for _, v in written] == [9.0, 2.0, 2.0]  # the first, which compiled, spoils no mean
    assert [v["tokens_per_second"] for _, v in written] == [pytest.approx(100 / 9), 50.0, 50.0]
    assert written[1][1]["input_wait_seconds"] == 0.5
    assert written[1][1]["loss"] == 2.0


def test_log_divides_once_over_the_interval_and_leaves_out_what_had_nothing():
    written = []
    log = hooks.Log(lambda step, values: written.append(values), every=3, items_per_step=1)
    for step, (total, weight) in enumerate([(0, 0), (3, 4), (0, 0), (1, 1), (0, 0), (0, 0), (0, 0), (0, 0), (0, 0)], 1):
        sums = {"right": WeightedSum(np.float32(total), np.float32(weight)), "all": WeightedSum(step, 1)}
        log.after_step(report(step, sums=sums, loss=float(step)))
    assert [v.get("right") for v in written] == [None, 0.75, 1.0, None]  # nobody's step is a zero
    assert [v["all"] for v in written] == [1.0, 2.5, 5.0, 8.0]
    assert [v["loss"] for v in written] == [1.0, 3.0, 6.0, 9.0]  # of the step, as it is


@pytest.mark.covers("O03")
def test_a_step_is_split_into_waiting_for_data_the_devices_and_the_hosts_own_work():
    written = []
    log = hooks.Log(lambda step, values: written.append(values), every=2, items_per_step=1)
    for step, wait, device in [(1, 0.0, 1.0), (2, 0.25, 0.5), (3, 0.0, 1.0), (4, 0.5, 0.25)]:
        log.after_step(report(step, seconds=1.0, wait=wait, device=device))
    parts = [(v["input_wait_seconds"], v["device_seconds"], v["host_seconds"]) for v in written]
    assert parts == [(0.0, 1.0, 0.0), (0.25, 0.5, 0.25), (0.25, 0.625, 0.125)]


@pytest.mark.covers("T10")
def test_stop_looks_at_loss_and_gradient_and_nothing_else():
    stop = non_finite.Stop()
    stop.after_step(report(1, gradient_norm=1.0, entropy=math.nan))
    with pytest.raises(non_finite.NonFiniteLossError, match="step 2: gradient_norm = inf"):
        stop.after_step(report(2, gradient_norm=math.inf))


@pytest.mark.covers("T17")
def test_evaluate_divides_once_over_all_batches():
    sums = iter([(6.0, 3.0), (1.0, 1.0)])  # the mean of the means would be 1.5

    def eval_step(state, batch):
        total, weight = next(sums)
        assert (state, batch) == ("state", "batch")
        return {"loss": WeightedSum(np.float32(total), np.float32(weight))}

    means = hooks.evaluate(eval_step, "state", iter(["batch", "batch"]), num_batches=2)
    assert means == {"loss": 7.0 / 4.0}
    nothing = hooks.evaluate(
        lambda *_: {"loss": WeightedSum(np.float32(0), np.float32(0))}, None, iter([0]), num_batches=1
    )
    assert nothing == {}


def test_evaluate_is_due_at_multiples_and_at_the_end():
    written = []
    hook = hooks.Evaluate(lambda state: {"loss": state}, lambda *w: written.append(w), every=4, last_step=10)
    assert [s for s in range(1, 11) if hook.needs_state(s)] == [4, 8, 10]
    hook.at_boundary(8, 1.5)
    assert written == [(8, {"validation/loss": 1.5})]
    assert hook.latest == {"validation/loss": 1.5}


class Checkpoints:
    def __init__(self):
        self.saved, self.waited, self.checked, self.finished = [], 0, 0, []

    def check(self):
        self.checked += 1

    def costs(self):
        finished, self.finished = self.finished, []
        return finished

    def save(self, step, *, state, data, meta):
        self.saved.append((step, state, dict(data), dict(meta)))

    def wait(self):
        self.waited += 1
        self.finished.append("the last")


class Costs:
    def __init__(self):
        self.told = []

    def add(self, cost):
        self.told.append(cost)

    def end(self):
        self.told.append("end")


@pytest.mark.covers("C04")
def test_save_takes_the_position_at_that_moment():
    checkpoints, place, costs = Checkpoints(), {"stream 0": b"1"}, Costs()

    def due(step):
        return step % 5 == 0 or step == 12

    save = hooks.Save(checkpoints, lambda: place, {"seed": 7}, due=due, costs=costs)
    assert [s for s in range(1, 13) if save.needs_state(s)] == [5, 10, 12]
    save.at_boundary(5, "state 5")
    place["stream 0"] = b"2"
    save.at_boundary(10, "state 10")
    assert checkpoints.saved == [
        (5, "state 5", {"stream 0": b"1"}, {"seed": 7}),
        (10, "state 10", {"stream 0": b"2"}, {"seed": 7}),
    ]
    checkpoints.finished[:], costs.told[:] = ["the first"], []
    save.before_step(11)
    assert (checkpoints.checked, costs.told) == (1, ["the first"])
    save.close()
    assert checkpoints.waited == 3
    assert costs.told == ["the first", "the last", "end"]


@pytest.mark.covers("C04")
def test_nothing_is_saved_after_the_lock_of_the_run_was_taken_over(tmp_path):
    """Though the lock was read less than a second before, and is taken over while the save before is awaited."""
    lock = run_lock.RunLock.acquire(str(tmp_path / "run"), say=print, clock=lambda: 0.0)
    checkpoints = Checkpoints()
    save = hooks.Save(checkpoints, dict, {}, due=bool, costs=Costs(), check=lambda: lock.check(now=True))
    save.at_boundary(5, "state 5")
    wait = checkpoints.wait

    def taken_over_meanwhile():
        wait()
        (tmp_path / "run" / run_lock.FILE).write_text("{}")

    checkpoints.wait = taken_over_meanwhile
    lock.check()
    with pytest.raises(run_lock.LockLostError, match="was taken over"):
        save.at_boundary(10, "state 10")
    assert [step for step, *_ in checkpoints.saved] == [5]
    lock.release()


@pytest.mark.covers("O01")
def test_profile_windows_open_and_close_with_their_steps():
    events = []

    class Window:
        def __init__(self, step):
            events.append(f"start {step}")

        def stop(self):
            events.append("stop")

    profile = hooks.Profile(Window, at=(2, 9), num_steps=3)
    for step in range(1, 11):
        profile.before_step(step)
        events.append(f"dispatch {step}")
        if step > 1:
            profile.after_step(report(step - 1))  # read one step late, as the trainer does
    assert events.index("start 2") < events.index("dispatch 2")
    assert events.index("stop") == events.index("dispatch 5") + 1  # step 4 has finished
    profile.close()  # the run ends inside the second window
    assert [e for e in events if not e.startswith("dispatch")] == ["start 2", "stop", "start 9", "stop"]
    profile.close()
    assert events[-1] == "stop"


def test_a_window_has_its_steps_and_no_other():
    """Run by the training loop itself: the step behind the window is dispatched when the trace has ended."""
    events = []

    class Trace:
        def __init__(self, step):
            events.append(f"start {step}")

        def stop(self):
            events.append("stop")

    class Program:
        def train_step(self, state, batch):
            events.append(f"dispatch {int(state.step) + 1}")
            return types.SimpleNamespace(step=state.step + 1), {}

    class Batches:
        input_wait_seconds = 0.0

        def __next__(self):
            return {}

    profile = hooks.Profile(Trace, at=(3,), num_steps=2)
    trainer.train(Program(), Batches(), types.SimpleNamespace(step=0), total_steps=6, hooks=[profile])
    steps = [f"dispatch {n}" for n in range(1, 7)]
    assert events == [*steps[:2], "start 3", *steps[2:4], "stop", *steps[4:]]


def test_a_window_that_is_asked_for_is_traced_like_a_planned_one():
    events = []

    class Trace:
        def __init__(self, step):
            events.append(f"start {step}")

        def stop(self):
            events.append("stop")

    wanted = [Window(5, 6)]
    profile = hooks.Profile(
        Trace,
        at=(5, 9),
        num_steps=1,
        asked=lambda step: wanted.pop() if wanted and step >= wanted[0].first_step else None,
        done=lambda window: events.append(f"done {window.first_step}"),
    )
    for step in range(1, 12):
        profile.before_step(step)
        if step > 1:
            profile.after_step(report(step - 1))
    assert events == ["start 5", "stop", "done 5", "start 9", "stop"]


SUMS_OVER_HOSTS = """
import jax
from core import distributed
distributed.initialize(coordinator=COORDINATOR, process_index=PROCESS, process_count=HOSTS, local_cpu_devices=2)
import haiku as hk
import jax.numpy as jnp
import numpy as np
from core import logical, optimizers, slices
from core.batches import Field
from core.training import hooks, non_finite, trainer
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
batch = program.put({"targets": targets, "weights": weights})
print("RESULT", hooks.evaluate(program.eval_step, program.init(), iter([batch] * 2), num_batches=2)["loss"])
"""


@pytest.mark.covers("T11")
@pytest.mark.simulated(2)
def test_evaluation_sums_over_hosts(run_hosts):
    ran = run_hosts(SUMS_OVER_HOSTS, hosts=2, timeout=120)
    assert all(r.returncode == 0 for r in ran), [r.output[-2000:] for r in ran]
    means = [float(line.split()[1]) for r in ran for line in r.output.splitlines() if line.startswith("RESULT")]
    want = (1 * (1 + 2 + 3) + 2 * (2 + 3 + 4)) / (3 * 1 + 3 * 2)
    assert means == [pytest.approx(want, abs=1e-6)] * 2
