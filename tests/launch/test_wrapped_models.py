"""A wrapped model through gin: checks, smoke sizes, plans, FLOPs and evaluation use the model inside."""

import types

import jax
import numpy as np
import pytest

from core import slices, step
from core.types import LossOutput, WeightedSum
from launch import program_identity
from launch.check import preflight
from launch.config import loader
from launch.config.changes import Changes
from launch.plan import search
from launch.runs import progress, smoke
from launch.settings import Evaluation
from models.decoder.transformer import Transformer
from parallel.planning import candidates, model_trace
from parallel.verify import agreement

PARTS = """
import dataclasses
from typing import Any


class Scaled:
    def __init__(self, model: Any, scale: float = 0.5):
        self.model, self.scale = model, scale

    def __getattr__(self, name):
        return getattr(self.model, name)

    def loss(self, *args, **kwargs):
        carry, out = self.model.loss(*args, **kwargs)
        return carry, out._replace(loss_sum=self.scale * out.loss_sum)
"""
TEXT = """
from __gin__ import dynamic_registration
import wrapping
from models.decoder import transformer
include 'gin/quickstart.gin'
MODEL = @wrapping.Scaled()
wrapping.Scaled.model = @transformer.Transformer()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wrapped")
    (folder / "wrapping.py").write_text(PARTS)
    (folder / "mine.gin").write_text(TEXT)
    return folder


@pytest.fixture
def config(folder):
    return loader.load(str(folder / "mine.gin"), slice_name="v4-8")


def test_preflight_accepts_a_wrapped_model(folder):
    checked = preflight.check(
        str(folder / "mine.gin"), bindings=(), slice_name="v4-8", run_dir=str(folder), hosts="simulated", smoked=True
    )
    assert [finding for finding in checked.findings if not finding.ok] == []


def test_a_smoke_run_is_of_the_wrapper_around_a_small_model(config):
    whole = config.build()
    small = smoke.shrink(whole)
    assert type(small.model) is type(whole.model)
    assert isinstance(small.model.model, Transformer)
    assert small.model.embed_dim < whole.model.embed_dim
    assert whole.flops_per_step == whole.model.model.flops_per_token(whole.row_length) * whole.tokens_per_step


def test_agreement_computes_in_another_dtype(config):
    model = config.build().model
    copy = agreement.computing_in(model, "float32")
    assert (copy.dtype, copy.model.dtype, type(copy)) == ("float32", "float32", type(model))


def test_plans_vary_the_rematerialization_of_the_model_inside(config):
    experiment = config.build()
    names = candidates.remats(experiment.model)
    assert names == candidates.remats(experiment.model.model)
    assert len(names) > 1
    writer = search.Writer(config, experiment)
    assert Changes(config, experiment.model).constructor("remat") == "transformer.Transformer"
    other = next(name for name in names if name != experiment.model.remat)
    candidate = candidates.Candidate(None, other, 1, experiment.batch_size)
    made = search.apply(experiment, candidate)
    assert (made.model.remat, type(made.model)) == (other, type(experiment.model))
    (_, statement) = writer.bindings(candidate)[:2]
    assert statement == f"transformer.Transformer.remat = {other!r}"


def test_a_choice_that_no_statement_expresses_is_not_tried(config):
    experiment = config.build()
    unknown = types.SimpleNamespace(imports=config.imports, bindings=[], import_line=config.import_line)
    writer = search.Writer(unknown, experiment)
    other = next(name for name in candidates.remats(experiment.model) if name != experiment.model.remat)
    assert Changes(unknown, experiment.model).constructor("remat") is None
    assert not writer.can_write(candidates.Candidate(None, other, 1, experiment.batch_size))
    assert writer.can_write(candidates.Candidate(None, experiment.model.remat, 1, experiment.batch_size))


def test_the_attention_of_a_plan_is_that_of_the_tpu(config):
    small = smoke.shrink(config.build())
    spec = small.task.spec(small.batch_size)
    traced = model_trace.trace(
        small.model, small.optimizer, spec, slice=slices.get("v4-8"), remats=[candidates.remat_of(small.model)]
    )
    (work,) = traced.works.values()
    assert (work.kernel_flops > 0) == (small.model.attention in ("auto", "splash"))


def test_wrapped_models_are_distinguished_by_their_content(folder, config):
    other = loader.load(str(folder / "mine.gin"), bindings=["wrapping.Scaled.scale = 0.25"], slice_name="v4-8")
    same = loader.load(str(folder / "mine.gin"), slice_name="v4-8")
    texts = [program_identity.program_text(c.build(), c) for c in (config, same, other)]
    assert texts[0] == texts[1] != texts[2]
    assert " at 0x" not in texts[0]


class Judged:
    """Evaluates itself; counts no FLOPs."""

    def evaluate(self, params, rng, batch):
        sums = jax.numpy.float32(3.0), jax.numpy.float32(2.0)
        return LossOutput(*sums, {"hits": WeightedSum(*sums)}, {"answers": batch["x"]})


def test_evaluation_asks_the_model_inside(folder, config):
    wrapping = type(config.build().model)
    optimizer = types.SimpleNamespace(evaluated=lambda params, state: params)
    state = types.SimpleNamespace(step=0, params=(), opt_state=())
    run = step.answer_step(wrapping(Judged()), optimizer, seed=0)
    sums, answers = run(state, {"x": np.arange(2)})
    assert {name: float(value.total) for name, value in sums.items()} == {"loss": 3.0, "hits": 3.0}
    assert answers["answers"].tolist() == [0, 1]


def test_missing_abilities_are_named_with_the_methods_to_add(config, capsys):
    experiment = config.build()
    bare = types.SimpleNamespace(
        model=Judged(),
        task=experiment.task,
        evaluation=Evaluation(prompt="abc", eval_batches=0),
        batch_size=1,
        unit="token",
    )
    run = types.SimpleNamespace(experiment=bare, program=None, run_dir="runs/x")
    progress.show_end(run, None, {}, checksum=None)
    assert "PROMPT = 'abc' is not continued: Judged lacks the ability Generates: add logits(params, batch)" in (
        capsys.readouterr().out
    )
