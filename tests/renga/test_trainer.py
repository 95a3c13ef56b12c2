"""A run from Python trains, resumes, evaluates, and refuses what the launcher refuses; its process goes on."""

import dataclasses
import itertools
import re
import sys
import time
import types
import weakref

import haiku as hk
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import renga
from core.checkpoints import steps
from core.errors import UserError
from core.files import paths
from core.hosts import distributed
from core.hosts.heartbeat import DivergedError
from core.training import goodput, replicas
from core.training.hooks import PreemptedError
from core.training.run_lock import RunLock
from launch.phases import Phase


@dataclasses.dataclass(frozen=True)
class Points(renga.SampledTask):
    """Points of a plane, and whether they lie above its diagonal."""

    num_streams: int = 4
    dims: int = 2

    def spec(self, batch_size):
        position = renga.Field((batch_size, self.dims), np.float32, ("batch", None))
        return {"position": position, "label": renga.Field((batch_size,), np.int32, ("batch",))}

    def row(self, rng, *, is_training):
        position = rng.normal(size=self.dims).astype(np.float32)
        return {"position": position, "label": np.int32(position[1] > position[0])}


@dataclasses.dataclass(frozen=True)
class Line(renga.HaikuModel):
    """A linear classifier."""

    names = types.MappingProxyType({"linear/w": (None, None), "linear/b": (None,)})

    def sums(self, batch, *, is_training):
        logits = hk.Linear(2)(batch["position"])
        each = optax.losses.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        return renga.LossOutput(jnp.sum(each), jnp.float32(each.size), {})


class Carrying(Line):
    """Its carry counts the steps of each row of a batch."""

    def init_carry(self, batch):
        return {"steps": jnp.zeros_like(batch["label"])}

    def loss(self, params, carry, rng, batch, *, is_training):
        _, out = super().loss(params, (), rng, batch, is_training=is_training)
        return {"steps": carry["steps"] + 1}, out


@pytest.fixture(autouse=True, scope="module")
def shared_programs(tmp_path_factory):
    """A program that several runs of this file have is compiled once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path_factory.mktemp("compiled")))
        yield


def trainer(run_dir, **changes):
    parts = {"model": Line(), "task": Points(), "optimizer": optax.adam(0.1), "batch_size": 16}
    rest = {
        "strategy": renga.strategies.data_parallel(),
        "eval_batches": 1,
        "log_interval": 1,
        "replica_check_interval": 0,
    }
    return renga.Trainer(run_dir=run_dir, **{**parts, **rest, **changes})


def test_a_preemption_in_the_last_step_saves_its_parameters_alone_too(tmp_path, monkeypatch):
    """No later start would: nothing is left to train."""
    made = trainer(tmp_path / "run", params_checkpoint_interval=4)
    with monkeypatch.context() as patch:
        patch.setattr(distributed, "preempted", lambda step: step == 6)
        with pytest.raises(PreemptedError):
            made.fit(6)
    run = paths.resolve(tmp_path / "run")
    assert [steps.complete(run / folder) for folder in (steps.FOLDER, steps.PARAMS_FOLDER)] == [[6], [4, 6]]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model": Line}, "model is the class Line, not called"),
        ({"task": None}, "task is None, which lacks"),
        ({"optimizer": "adam"}, "optimizer is of type str, expected core.optimizers.base.Optimizer or optax"),
        ({"strategy": "fsdp"}, "strategy is of type str, expected parallel.strategy.Strategy"),
        ({"batch_size": 0}, "batch_size = 0: expected an integer of at least 1"),
        ({"batch_size": "16"}, "batch_size = '16': expected an integer"),
        ({"batch_size": 16.0, "seed": "x"}, "batch_size = 16.0: expected an integer of at least 1; seed = 'x'"),
        ({"eval_batches": "2"}, "eval_batches = '2': expected an integer of at least 0"),
        (
            {"keep_best": "validation/loss", "checkpoint_interval": 3, "eval_interval": 2},
            "checkpoint_interval (now 3) a multiple of eval_interval (now 2)",
        ),
        ({"keep_best": "loss"}, "keep_best = 'loss': expected a metric of evaluations"),
        ({"keep_checkpoints": "a"}, "keep_checkpoints = 'a': expected an integer"),
        ({"eval_interval": 1.5}, "eval_interval = 1.5: expected an integer"),
        ({"accum_steps": True}, "accum_steps = True: expected an integer"),
        ({"max_epochs": "2"}, "max_epochs = '2': expected a finite number above 0"),
        ({"save_limit_seconds": "9"}, "save_limit_seconds = '9': expected a finite number above 0"),
        ({"gather_once": "no"}, "gather_once = 'no': expected True or False"),
        ({"phases": 3}, "phases = 3: expected a sequence of launch.phases.Phase"),
        ({"phases": None}, "phases = None: expected a sequence of launch.phases.Phase"),
        ({"phases": [4]}, "phases = [4]: expected a sequence of launch.phases.Phase"),
        ({"phases": [Phase(after="2", batch_size=32)]}, "phases[0].after = '2': expected an integer"),
        ({"phases": [Phase(after=2, batch_size="32")]}, "phase 2: Experiment: batch_size = '32': expected an integer"),
        ({"init_from": 3}, "init_from is of type int: expected text or {module: {name: array}}"),
        ({"frozen": "linear/w"}, "frozen = 'linear/w': expected a sequence of texts, such as ('linear/w',)"),
        ({"frozen": [1]}, "frozen = [1]: expected a sequence of texts"),
        ({"init_patterns": None}, "init_patterns = None: expected a sequence of texts"),
        ({"init_renames": "a"}, "init_renames = 'a': expected a dictionary of texts"),
        ({"init_layers": (0, 0)}, "init_layers = (0, 0): expected layers from 0, or None, by pattern"),
        ({"init_layers": {"layers/*": (0, -1)}}, "expected layers from 0, or None, by pattern"),
        ({"init_layers": {"layers/*": (0, True)}}, "expected layers from 0, or None, by pattern"),
        ({"profile_steps": 4}, "profile_steps = 4: expected a sequence of steps"),
        ({"memory_profile_steps": ("4",)}, "memory_profile_steps = ('4',): expected a sequence of steps"),
        ({"compiler_options": 3}, "compiler_options = 3: expected a dictionary"),
        ({"run_dir": None}, "run_dir = None: expected a local path or gs://"),
        ({"run_dir": 5}, "run_dir = 5: expected a local path or gs://"),
        ({"run_dir": ""}, "run_dir = '': expected a local path or gs://"),
        ({"eval_batchs": 2}, "unknown setting 'eval_batchs': did you mean 'eval_batches'?"),
        ({"slice": "v4-8"}, "unknown setting 'slice': a trainer uses the devices of this process"),
        ({"phase": 1}, "unknown setting 'phase': fit trains all phases"),
        ({"total_steps": 100}, "unknown setting 'total_steps': fit(steps) takes it"),
        ({"steps": 100}, "unknown setting 'steps': fit(steps) takes it"),
        ({"step_limit_seconds": 5.0}, "step_limit_seconds = 5.0: nothing watches a process of Trainer"),
        ({"compile_limit_seconds": 5.0}, "compile_limit_seconds = 5.0: nothing watches a process of Trainer"),
        ({"heartbeat_timeout_seconds": None}, "heartbeat_timeout_seconds = None: nothing watches a process of"),
        ({"apart_limit_seconds": 5.0}, "apart_limit_seconds = 5.0: nothing watches a process of Trainer"),
        ({"watchdog": "end"}, "watchdog = 'end': nothing watches a process of Trainer"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_written(tmp_path, changes, said):
    with pytest.raises(UserError, match=re.escape(said)):
        trainer(**{"run_dir": tmp_path / "run", **changes})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("value", ["x", 1.5, 0])
@pytest.mark.parametrize("name", ["rows", "step"])
def test_wrong_arguments_of_an_evaluation_are_refused_before_the_run_is_read(tmp_path, name, value):
    with pytest.raises(UserError, match=f"{name} = {value!r}: expected an integer of at least 1"):
        trainer(tmp_path / "run").evaluate(**{name: value})


def test_the_carry_of_the_rows_of_training_does_not_matter_to_an_evaluation(tmp_path):
    trained = trainer(tmp_path, model=Carrying())
    trained.fit(2)
    larger = trainer(tmp_path, model=Carrying(), batch_size=32)
    assert trained.evaluate(rows=64)["loss"] == pytest.approx(larger.evaluate(rows=64)["loss"], rel=1e-6)
    with pytest.raises(UserError, match="carry/steps"):
        larger.fit(3)


def test_rows_that_an_evaluation_lacks_are_asked_for_as_an_argument(tmp_path):
    run = trainer(tmp_path, eval_batches=0)
    run.fit(1)
    with pytest.raises(UserError, match=r"no evaluations of its own \(EVAL_BATCHES = 0\): give rows=N$"):
        run.evaluate()
    with pytest.raises(UserError, match=r"^rows='all': .* has no end: give rows=N$"):
        run.evaluate(rows="all")


def test_a_run_starts_from_parameters_in_memory(tmp_path):
    given = {"linear": {"w": np.float32([[1, 2], [3, 4]]), "b": jnp.float32([5, 6])}}
    still = optax.sgd(0.0)
    first = trainer(tmp_path / "first", init_from=given, optimizer=still)
    first.fit(1)
    again = trainer(tmp_path / "again", init_from=first.params, optimizer=still)
    again.fit(1)
    for name, leaf in given["linear"].items():
        np.testing.assert_array_equal(again.params["linear"][name], leaf)
        np.testing.assert_array_equal(first.params["linear"][name], leaf)
    assert steps.read(steps.find(str(tmp_path / "again"))).meta["init_from"] == "2 parameters in memory"
    wrong = trainer(tmp_path / "wrong", init_from={"linear": {"w": given["linear"]["w"]}})
    with pytest.raises(UserError, match=r"linear/b: not in memory, expected float32\[2\]"):
        wrong.fit(1)
    assert not (tmp_path / "wrong" / "checkpoints").exists()


def test_a_run_resumes_evaluates_and_survives_its_errors(tmp_path):
    run_dir, hook = tmp_path / "run", sys.excepthook
    with pytest.raises(UserError, match="no complete checkpoint"):
        trainer(run_dir).evaluate()
    with pytest.raises(UserError, match="batch_size"):  # 16 devices
        trainer(run_dir, batch_size=4).fit(1)
    (loss,), before = trainer(run_dir).fit(2).values(), time.time()
    again = trainer(run_dir)
    assert again.fit(3)["validation/loss"] < loss
    assert steps.complete(steps.folder_of(str(run_dir))) == [2, 3]
    assert again.evaluate()["loss"] == pytest.approx(again.fit(3)["validation/loss"])
    assert {name: leaf.shape for name, leaf in again.params["linear"].items()} == {"w": (2, 2), "b": (2,)}
    with pytest.raises(UserError, match="lacks the ability Generates"):
        again.generate("1 2")
    with pytest.raises(UserError, match="trained on other data"):
        trainer(run_dir, task=Points(num_streams=8)).fit(4)
    held = RunLock.acquire(str(run_dir), say=print)
    with pytest.raises(UserError, match="is in use by another launch"):
        again.fit(4)
    held.release()
    assert sys.excepthook is hook
    assert goodput.read(str(run_dir))[1].started > before  # not when the process started
    assert steps.complete(steps.folder_of(str(run_dir))) == [2, 3]


def test_the_parameters_that_a_trainer_has_loaded_are_its_own_and_dropped_by_fit(tmp_path, monkeypatch):
    class Loaded:
        def __init__(self, experiment, folder, *, slice_name):
            self.folder, self.program = str(folder), types.SimpleNamespace(spec={})

    def interrupt(*_, **__):
        raise InterruptedError

    monkeypatch.setattr(renga.trainer.loaded_model, "load_step", Loaded)
    monkeypatch.setattr(renga.trainer.steps, "find", lambda place: place.replace("@", "/"))
    one, other = trainer(tmp_path / "a"), trainer(tmp_path / "b")
    first = weakref.ref(one.loaded(step=1))
    assert other.loaded(step=1).folder == f"{tmp_path}/b/1"
    assert one.loaded(step=1) is first()  # that of the other trainer has not replaced it
    assert one.loaded(step=2) is not first()
    held = weakref.ref(one.loaded(step=2))
    monkeypatch.setattr(renga.trainer.RunLock, "acquire", interrupt)
    with pytest.raises(InterruptedError):
        one.fit(1)
    assert first() is held() is None  # their arrays would take memory from the training


def test_the_parameters_of_a_model_that_is_split_to_generate_are_all_of_them(tmp_path, monkeypatch):
    whole = types.SimpleNamespace(params="of images and text")
    monkeypatch.setattr(renga.trainer.loaded_model, "load_step", lambda *_, **__: whole)
    monkeypatch.setattr(renga.trainer.loaded_model, "split", lambda *_: types.SimpleNamespace(params="of text"))
    monkeypatch.setattr(renga.trainer.steps, "find", str)
    made = trainer(tmp_path)
    assert (made.params, made.loaded().params) == ("of images and text", "of text")


def test_with_phases_a_run_may_stop_in_the_first_and_is_scored_on_the_last(tmp_path):
    phased = trainer(tmp_path, batch_size=16, phases=(Phase(after=2, batch_size=32),))
    assert phased.fit(1)
    assert phased.fit(2)
    loss = phased.fit(3)["validation/loss"]
    assert steps.complete(steps.folder_of(str(tmp_path))) == [1, 2, 3]
    assert phased.evaluate()["loss"] == pytest.approx(loss)
    assert phased.fit(1) == {}  # done already
    assert [(one.first_step, one.last_step) for one in goodput.read(str(tmp_path))] == [(0, 1), (1, 2), (2, 3)]
    trainer(tmp_path / "at_once", batch_size=16, phases=(Phase(after=2, batch_size=32),)).fit(3)
    (start,) = goodput.read(str(tmp_path / "at_once"))
    assert (start.first_step, start.last_step, start.finished) == (0, 3, True)


def test_on_another_machine_a_run_continues_from_its_mirror(tmp_path, capsys):
    """Without the copy, it would begin anew, and the first save would remove the later steps of the mirror."""
    mirror = str(tmp_path / "mirror")
    trainer(tmp_path / "first", checkpoint_mirror=mirror).fit(2)
    trainer(tmp_path / "fresh", checkpoint_mirror=mirror).fit(3)
    assert f"checkpoint 2 was copied back from {mirror}" in capsys.readouterr().out
    for place in ("fresh", "mirror"):
        assert steps.complete(tmp_path / place / "checkpoints") == [2, 3]
    trainer(tmp_path / "other", seed=1).fit(1)
    with pytest.raises(UserError, match="has checkpoints of another run than"):
        trainer(tmp_path / "other", checkpoint_mirror=mirror).fit(2)


def test_a_mirror_that_cannot_be_used_is_refused_before_a_device_is_used(tmp_path, monkeypatch):
    monkeypatch.setattr(renga.trainer.machine, "of_this_process", lambda: pytest.fail("a device was used"))
    with pytest.raises(UserError, match="checkpoints are copied from a local run directory to another place"):
        trainer(tmp_path / "run", checkpoint_mirror=str(tmp_path / "run")).fit(1)
    assert not list(tmp_path.iterdir())


def test_a_lock_and_missing_data_are_found_before_a_device_is_used(tmp_path, monkeypatch):
    monkeypatch.setattr(renga.trainer.machine, "of_this_process", lambda: pytest.fail("a device was used"))
    held = RunLock.acquire(str(tmp_path / "run"), say=print)
    with pytest.raises(UserError, match="is in use by another launch"):
        trainer(tmp_path / "run").fit(1)
    held.release()
    absent = renga.text.files(train=tmp_path / "absent.txt", length=16, num_streams=8)
    with pytest.raises(UserError, match=r"absent\.txt"):
        trainer(tmp_path / "run", task=absent).fit(1)
    assert not (tmp_path / "run").exists()


def test_copies_that_differ_end_the_training_without_a_checkpoint_of_them(tmp_path, monkeypatch):
    numbers = iter([[7, 7], [7, 8]])
    monkeypatch.setattr(replicas.Replicas, "hash", lambda *_: lambda: {"params/w": next(numbers)})
    with pytest.raises(DivergedError, match=r"^after step 4, copies .* differ: params/w"):
        trainer(tmp_path, replica_check_interval=2, checkpoint_interval=3).fit(9)
    assert steps.complete(tmp_path / "checkpoints") == [3]


class Failing(Points):
    """Its training data fails once, at the fifth batch of a process."""

    left = itertools.count(-4 * 16)

    def row(self, rng, *, is_training):
        if is_training and next(self.left) == 0:
            raise KeyboardInterrupt
        return super().row(rng, is_training=is_training)


@pytest.mark.slow
def test_a_run_that_was_interrupted_goes_on_in_the_same_process(tmp_path):
    interrupted = trainer(tmp_path, task=Failing(), checkpoint_interval=2)
    with pytest.raises(KeyboardInterrupt):
        interrupted.fit(8)
    assert 2 in steps.complete(steps.folder_of(str(tmp_path)))
    again = interrupted.fit(8)["validation/loss"]
    assert steps.complete(steps.folder_of(str(tmp_path)))[-1] == 8
    assert again == pytest.approx(trainer(tmp_path / "undisturbed", task=Failing()).fit(8)["validation/loss"], rel=1e-6)


@pytest.mark.slow
def test_another_model_in_a_run_directory_is_refused(tmp_path):
    trainer(tmp_path).fit(1)
    with pytest.raises(UserError, match="linear/w"):
        trainer(tmp_path, task=Points(dims=3)).fit(2)


def test_steps_marked_as_averaged_hold_the_average_and_readers_that_announce_it_use_it(tmp_path):
    saves = {"checkpoint_interval": 4, "params_checkpoint_interval": 1, "keep_params_checkpoints": 4}
    plain = renga.optimizers.adamw(learning_rate=renga.optimizers.constant(0.1))
    raw = trainer(tmp_path / "raw", optimizer=plain, **saves)
    averaging = trainer(tmp_path / "mean", optimizer=renga.optimizers.averaged(optimizer=plain, decay=0.75), **saves)
    for run in (raw, averaging):
        run.fit(4)
    of_raw, of_mean = (
        [run.loaded(step=step).params["linear"]["w"] for step in (1, 2, 3, 4)] for run in (raw, averaging)
    )
    for before, newest, mean in zip(of_mean, of_raw[1:], of_mean[1:], strict=False):  # the last is of a whole state
        np.testing.assert_allclose(mean, 0.75 * before + 0.25 * newest, rtol=1e-6)
    marks = [steps.read(steps.find(f"{tmp_path}/mean@{step}")).meta.get(steps.AVERAGED) for step in (1, 2, 3, 4)]
    assert marks == [True, True, True, None]
    assert "averaged by its optimizer" in averaging.loaded().where
    scores = [run.evaluate(rows=64)["loss"] for run in (raw, averaging)]
    assert abs(scores[0] - scores[1]) > 1e-3  # their trained parameters are the same


def test_the_best_checkpoint_is_kept(tmp_path):
    """The loss rises from step to step, also after a restart."""
    often = {"eval_interval": 2, "checkpoint_interval": 2, "keep_checkpoints": 1, "keep_best": "validation/loss"}
    made = trainer(str(tmp_path), optimizer=optax.sgd(-0.1), **often)
    assert made.fit(4)["validation/loss"] < made.fit(6)["validation/loss"]
    assert steps.complete(tmp_path / "checkpoints") == [2, 6]
    assert steps.find(f"{tmp_path}@best").name == "2"
