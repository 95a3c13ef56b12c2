"""Models, tasks and optimizers from outside the workspace: problems are reported in one message each."""

import types

import pytest

from core.optimizers import Optimizer
from launch.check import preflight
from launch.config import loader
from launch.runs import progress

TEXT = """
from __gin__ import dynamic_registration
import optax
import outside_parts
include 'gin/defaults.gin'
include 'gin/tasks/python_source.gin'
MODEL = @outside_parts.Model()
BATCH_SIZE = 32
LENGTH = 16
VOCAB_SIZE = 260
"""
PARTS = """
import dataclasses
import haiku as hk
import jax
import numpy as np
from core import logical, optimizers
from core.batches import Field
from models import losses
from models.haiku_model import HaikuModel
from tasks.sampled import SampledTask

logical.declare("letters", "letters of the alphabet")


@dataclasses.dataclass(frozen=True)
class Model(HaikuModel):
    reads: str = "inputs"
    axis: str = "letters"

    def sums(self, batch, *, is_training):
        table = logical.param("table", (260, 260), (self.axis, "embed"), hk.initializers.RandomNormal())
        x = table[batch[self.reads]]
        return losses.cross_entropy(x, batch["targets"], batch["weights"], vocab_size=260)


class Unpacks(Model):
    def sums(self, batch, *, is_training):
        a, b, c = (1, 2)


def unpacks():
    return Unpacks()


class Half:
    def init(self, rng, batch):
        return {}


def half():
    return Half()


class Uninformed(Model):
    def loss(self, params, carry, rng, batch):
        return carry, self.sums(batch, is_training=True)


def uninformed():
    return Uninformed()


def nothing():
    return None


def optimizer(*, rate: float = 1e-3):
    return optimizers.adamw(learning_rate=optimizers.constant(rate))


class Images(SampledTask):
    num_streams = 4
    row = None

    def spec(self, batch_size):
        return {"values": Field((batch_size, 8), np.float32, ("batch", None))}


class Bare(Images):
    def spec(self, batch_size):
        return {"values": jax.ShapeDtypeStruct((batch_size, 8), np.float32)}


class Turned(Images):
    def spec(self, batch_size):
        return {"values": Field((8, batch_size), np.float32, (None, "batch"))}


class Misspelled(Images):
    def spec(self, batch_size):
        return {"values": Field((batch_size, 8), np.float32, ("batch", "lenght"))}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("outside")
    (folder / "outside_parts.py").write_text(PARTS)
    (folder / "mine.gin").write_text(TEXT)
    return folder


def failed(folder, *bindings):
    checked = preflight.check(
        str(folder / "mine.gin"), bindings=bindings, slice_name="v4-8", run_dir=str(folder), hosts="simulated"
    )
    return {f.name: f.detail for f in checked.findings if not f.ok}, checked


def test_a_model_with_an_axis_of_its_own_fits(folder):
    assert failed(folder)[0] == {}


@pytest.mark.parametrize(
    ("binding", "name", "says"),
    [
        ("outside_parts.Model.axis = 'letter'", "layout", "unknown logical axis 'letter'; did you mean letters?"),
        (
            "outside_parts.Model.reads = 'words'",
            "layout",
            "model Model cannot be traced: KeyError: 'words' (outside_parts.py:22, in sums). A batch of this task has "
            "inputs int32[32, 16], ",
        ),
        (
            "MODEL = @outside_parts.unpacks()",
            "layout",
            "model Unpacks cannot be traced: ValueError: not enough values to unpack (expected 3, got 2) "
            "(outside_parts.py:28, in sums). A batch of this task has inputs",
        ),
        ("TASK = @outside_parts.Images()", "layout", "KeyError: 'inputs' (outside_parts.py:22, in sums). A batch of"),
        ("TASK = @outside_parts.Bare()", "layout", "is of type ShapeDtypeStruct; expected core.batches.Field("),
        ("TASK = @outside_parts.Turned()", "layout", "the first axis of every field of a batch must be 'batch'"),
        ("TASK = @outside_parts.Misspelled()", "layout", "'values' of a batch: unknown logical axis 'lenght'; did you"),
        ("MODEL = @outside_parts.nothing()", "configuration", "model is None, which lacks init(rng, batch), init_"),
        (
            "MODEL = @outside_parts.half()",
            "configuration",
            "model is of type Half, which lacks init_carry(batch), loss(params, carry, rng, batch, *, is_training): "
            "see Model in core/types.py",
        ),
        (
            "MODEL = @outside_parts.uninformed()",
            "configuration",
            "model is of type Uninformed, which lacks loss(params, carry, rng, batch, *, is_training): see Model in",
        ),
        ("MODEL = @outside_parts.Half()", "configuration", "which returns Half, which lacks init_carry, loss"),
        ("OPTIMIZER = @outside_parts.nothing()", "configuration", "optimizer is None, expected core.optimizers.base"),
        ("OPTIMIZER = @optax.lbfgs()", "layout", "the optax transformation cannot be applied:"),
        ("TASK = @outside_parts.half()", "configuration", "task is of type Half, which lacks num_streams, voc"),
    ],
)
def test_a_part_that_does_not_fit_is_one_message(folder, binding, name, says):
    found, _ = failed(folder, binding)
    assert says in found[name]


def test_a_task_without_a_vocabulary_needs_no_prompt(folder):
    images = "TASK = @outside_parts.Images()"
    _, checked = failed(folder, images)
    assert checked.experiment.data_problems(prepared=True) == []
    _, checked = failed(folder, images, "PROMPT = 'x'")
    assert (
        "PROMPT = 'x': Images has no vocabulary to read it with" in checked.experiment.data_problems(prepared=False)[0]
    )


@pytest.mark.covers("M16")
def test_a_transformation_of_optax_is_an_optimizer(folder):
    assert failed(folder, "OPTIMIZER = @optax.contrib.prodigy()")[0] == {}
    wrapped = ["optimizers.from_optax.transformation = @optax.lamb()", "optax.lamb.learning_rate = 1e-3"]
    found, checked = failed(
        folder, "OPTIMIZER = @optimizers.from_optax()", *wrapped, "optimizers.from_optax.by_layer = True"
    )
    assert found == {}
    assert isinstance(checked.experiment.optimizer, Optimizer)


@pytest.mark.parametrize("together", [True, False])
def test_a_rate_that_another_optimizer_does_not_read_is_a_note(folder, together):
    chosen = ["OPTIMIZER = @outside_parts.optimizer()", "LEARNING_RATE = 0.1"]
    config = loader.load(str(folder / "mine.gin"), bindings=chosen if together else chosen[::-1])
    assert any("LEARNING_RATE = 0.1 is left out" in note and "chose OPTIMIZER = " in note for note in config.notes)
    with pytest.raises(ValueError, match="KEEP_CHECKPOINT is not one of the macros"):
        loader.load(str(folder / "mine.gin"), bindings=[*chosen, "KEEP_CHECKPOINT = 1"])


def test_a_sample_begins_with_the_id_that_rows_begin_with(monkeypatch):
    asked = []
    continued = types.SimpleNamespace(ids=[5])
    generator = types.SimpleNamespace(
        max_positions=None, generate=lambda prompts, **_: asked.extend(prompts) or [continued]
    )
    monkeypatch.setattr(progress.generating, "Generator", lambda *_: generator)
    vocabulary = types.SimpleNamespace(bos_id=7, eos_id=1, size=10, encode=lambda text: [8, 9], decode=str)
    experiment = types.SimpleNamespace(
        evaluation=types.SimpleNamespace(prompt="ab"),
        model=types.SimpleNamespace(logits=lambda params, batch: None),
        task=types.SimpleNamespace(vocabulary=vocabulary),
        row_length=16,
    )
    optimizer = types.SimpleNamespace(evaluated=lambda params, state: params)
    program = types.SimpleNamespace(optimizer=optimizer, model=experiment.model)
    state = types.SimpleNamespace(params=None, opt_state=None)
    assert progress._sample(experiment, program, state) == "[5]"
    assert asked == [[7, 8, 9]]
    vocabulary.encode, vocabulary.added_ids = (lambda text: [7, 8]), frozenset({7})
    progress._sample(experiment, program, state)
    assert asked[1:] == [[7, 8]]


def test_the_cause_of_an_error_in_a_model_is_printed_on_request(folder, monkeypatch, capsys):
    failed(folder, "MODEL = @outside_parts.unpacks()")
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("RENGA_TRACEBACK", "1")
    failed(folder, "MODEL = @outside_parts.unpacks()")
    assert "a, b, c = (1, 2)" in capsys.readouterr().err
