"""INIT_FROM: the step and the revision that are checked are those that are read, and other models are told."""

import itertools
import pathlib
import shutil

import jax
import numpy as np
import pytest
import tokenizers

from core.checkpoints.store import Checkpoints
from core.errors import UserError
from launch import loaded_model
from launch.config import loader
from launch.hosts.cluster import Host
from launch.runs import prepared_run, warm_start

FAMILY = pathlib.Path(__file__).parents[2] / "models" / "fixtures" / "families" / "llama3"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A published folder with a tokenizer."""
    found = tmp_path_factory.mktemp("published") / "tiny"
    shutil.copytree(FAMILY, found)
    words = dict(zip((f"w{i}" for i in range(83)), itertools.count()))
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w1"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    made.save(str(found / "tokenizer.json"))
    (found / "tokenizer_config.json").write_text('{"eos_token": "w82"}')
    for name in ("a", "b"):  # one is held out
        (found / f"{name}.txt").write_text("w5 w6")
    return found


def load(folder, *bindings):
    base = (f"FOLDER = '{folder}'", f"DATA = '{folder}/*.txt'", "LENGTH = 16", "INIT_FROM = ''")
    return loader.load("gin/finetune.gin", bindings=(*base, *bindings), slice_name="v4-16")


def save(folder, run, step, *bindings):
    """Saves a step of a run, whose numbers are all that of the step."""
    config = load(folder, *bindings)
    state = config.build().bind(jax.devices()).abstract_state
    (run / "config.gin").write_text(config.text)
    checkpoints = Checkpoints(run / "checkpoints", keep=3)
    filled = jax.tree.map(lambda a: jax.numpy.asarray(np.full(a.shape, step, a.dtype)), state)
    checkpoints.save(step, state=filled, data={}, meta={"config": config.text})
    checkpoints.close()


def prepare(folder, run_dir, *bindings):
    config = load(folder, *bindings)
    return prepared_run.prepare_run(
        config.build(), config_text=config.text, revision="", run_dir=str(run_dir), last_step=3, host=Host(0, 1, True)
    )


def test_a_run_starts_from_the_step_that_was_checked_although_the_source_goes_on(folder, tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    save(folder, source, 3)
    run = prepare(folder, tmp_path / "run", f"INIT_FROM = '{source}'")
    save(folder, source, 5)
    state = warm_start.first_state(run.experiment, run.program, run.initial, is_host_zero=True)
    assert {float(a.min()) for a in jax.tree.leaves(state.params)} == {3.0}
    assert {float(a.max()) for a in jax.tree.leaves(state.params)} == {3.0}
    assert run.meta["init_from"] == f"step 3 of {source}/checkpoints"
    assert not run.initial.notes
    shutil.rmtree(source / "checkpoints" / "3")
    with pytest.raises(UserError, match=r"step 3 of .* was removed after it was chosen.*KEEP_CHECKPOINTS"):
        warm_start.first_state(run.experiment, run.program, run.initial, is_host_zero=True)


def test_fields_of_the_source_that_no_shape_shows_are_listed(folder, tmp_path, capsys):
    source = tmp_path / "source"
    source.mkdir()
    lora = ("include 'gin/models/lora.gin'", "lora.adapted.targets = ('query',)")
    averaged = ("import core.optimizers", "OPTIMIZER = @core.optimizers.averaged()")
    averaged += ("core.optimizers.averaged.optimizer = @core.optimizers.adamw()",)
    save(folder, source, 3, *lora, "lora.adapted.alpha = 32.0", *averaged)
    theta = "pretrained.model.rope_theta = 12345.0"
    same = ("pretrained.model.head_dim = 8", "pretrained.model.remat = 'full'", "pretrained.model.dtype = 'float32'")
    prepare(folder, tmp_path / "run", f"INIT_FROM = '{source}'", *lora, theta, *same)
    said = capsys.readouterr().out
    where = f"step 3 of {source}/checkpoints"
    assert f"note: INIT_FROM:\n  rope_theta = 500000.0 in {where}, 12345.0 in the model\n" in said
    assert f"  lora.alpha = 32.0 in {where}, 16.0 in the model\n" in said
    assert f"  the optimizer of {where} averages parameters: the parameters are taken, not their average\n" in said
    assert said.count(where) == 3
    assert loaded_model.load(str(source)).where == f"step 3 of {source} (averaged by its optimizer)"
