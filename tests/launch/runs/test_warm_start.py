"""INIT_FROM: the step and the revision that are checked are those that are read, and other models are told."""

import functools
import itertools
import pathlib
import shutil

import jax
import numpy as np
import pytest
import tokenizers

from core.checkpoints import copying, published_files, writing
from core.checkpoints.steps import LeftOut
from core.checkpoints.store import Checkpoints
from core.errors import UnreachableError, UserError
from launch import loaded_model
from launch.check import preflight
from launch.config import loader
from launch.experiments import saved_run
from launch.hosts.cluster import Host
from launch.runs import continuation, prepared_run, train, warm_start

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


BASE = ("LENGTH = 16", "INIT_FROM = ''")


def load(folder, *bindings):
    base = (f"FOLDER = '{folder}'", f"DATA = '{folder}/*.txt'", *BASE)
    return loader.load("gin/finetune.gin", bindings=(*base, *bindings), slice_name="v4-16")


@functools.cache
def abstract_state(folder, *bindings):
    return load(folder, *bindings).build().bind(jax.devices()).abstract_state


def save(folder, run, step, *bindings, text=None, **more):
    """Saves a step of a run, whose numbers are all that of the step.

    `text`: its configuration, if not the bindings; `more`: further metadata.
    """
    text = text or load(folder, *bindings).text
    (run / "config.gin").write_text(text)
    checkpoints = Checkpoints(run / "checkpoints", keep=3)
    state = abstract_state(folder, *bindings)
    filled = jax.tree.map(lambda a: jax.numpy.asarray(np.full(a.shape, step, a.dtype)), state)
    checkpoints.save(step, state=filled, data={}, meta={"config": text, **more})
    checkpoints.close()


def prepare(folder, run_dir, *bindings):
    config = load(folder, *bindings)
    return prepared_run.prepare_run(
        config.build(), config=config, revision="", run_dir=str(run_dir), last_step=3, host=Host(0, 1, True)
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


def test_another_vocabulary_of_the_source_is_named(folder, tmp_path, capsys):
    """Each id of the same shapes may belong to another text."""
    source = tmp_path / "source"
    source.mkdir()
    save(folder, source, 3, data_order={"vocabulary": "ab" * 32})
    run = prepare(folder, tmp_path / "run", f"INIT_FROM = '{source}'")
    assert f"step 3 of {source}/checkpoints had another vocabulary (sha256 {'ab' * 6}, here" in capsys.readouterr().out
    save(folder, source, 5, data_order={"vocabulary": run.meta["data_order"]["vocabulary"]})
    prepare(folder, tmp_path / "run", f"INIT_FROM = '{source}'")
    assert "vocabulary" not in capsys.readouterr().out


@pytest.mark.parametrize("is_published", [True, False])
def test_the_disk_has_room_for_frozen_parameters_unless_checkpoints_leave_them_out(
    folder, tmp_path, monkeypatch, is_published
):
    source, frozen = folder, ("experiment.Experiment.frozen = ('layers/*',)",)
    if not is_published:
        source = tmp_path / "source"
        source.mkdir()
        save(folder, source, 3)
    run = prepare(folder, tmp_path / "run", f"INIT_FROM = '{source}'", *frozen)
    sizes = []
    monkeypatch.setattr(writing, "require_space", lambda run_dir, size_bytes: sizes.append(size_bytes))
    bindings = (*BASE, f"FOLDER = '{folder}'", f"DATA = '{folder}/*.txt'", *frozen, f"INIT_FROM = '{source}'")
    preflight.check("gin/finetune.gin", bindings=bindings, slice_name="v4-16", run_dir=run.run_dir, hosts="simulated")
    left_out = run.initial.left_out
    continuation.require_fit(run.run_dir, run.meta, run.span, run.program, left_out=left_out)
    state = run.program.abstract_state
    layers = sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(state.params["layers/block"]))
    saved = sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(state)) - (layers if is_published else 0)
    assert sizes == [saved, saved]


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
    assert loaded_model.load(str(source), averaged=False).where == f"step 3 of {source}"


def test_a_run_of_a_trainer_is_not_said_to_need_a_repair(folder, tmp_path, capsys):
    """Its configuration describes Python objects, which gin cannot build."""
    source = tmp_path / "source"
    source.mkdir()
    save(folder, source, 3, text=saved_run.described(load(folder).build()))
    prepare(folder, tmp_path / "run", f"INIT_FROM = '{source}'")
    said = (
        f"step 3 of {source}/checkpoints is of a run of renga.Trainer, so the settings of its model were not compared"
    )
    assert f"note: INIT_FROM:\n  {said}\n" in capsys.readouterr().out


@pytest.mark.parametrize("is_published", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_layers_of_another_depth_are_named_and_listed(folder, tmp_path, capsys, is_published):
    """The fixture has 3 layers. Frozen parameters whose layers are mapped are saved, because no folder has them so."""
    source = folder
    if not is_published:
        source = tmp_path / "source"
        source.mkdir()
        save(folder, source, 3)
    deeper = (f"INIT_FROM = '{source}'", "pretrained.model.num_layers = 4", "FROZEN = ('layers/*', 'embedding')")
    with pytest.raises(UserError, match=r"INIT_LAYERS gives a layer there for each layer here: \{'layers/\*'"):
        prepare(folder, tmp_path / "run", *deeper)
    for layers, said in {
        "(0, 1)": "2 entries, but layers/block/",
        "(0, 1, 2, 3)": "names layer 3, but layers/block/",
    }.items():
        with pytest.raises(UserError, match=r"INIT_LAYERS: 'layers/\*': ") as caught:
            prepare(folder, tmp_path / "run", *deeper, f"INIT_LAYERS = {{'layers/*': {layers}}}")
        assert said in str(caught.value)
    capsys.readouterr()
    run = prepare(folder, tmp_path / "run", *deeper, "INIT_LAYERS = {'layers/*': (0, 2, None, 0)}")
    line = "  layers/*: layers 0 from 0, 1 from 2, 3 from 0; initialized: 2; not taken from the source: 1\n"
    assert line in capsys.readouterr().out
    assert run.initial.left_out is None if not is_published else run.initial.left_out.arrays == ["params/~/embedding"]
    state = warm_start.first_state(run.experiment, run.program, run.initial, is_host_zero=True)
    query = jax.device_get(state.params["layers/block"]["query"])
    np.testing.assert_array_equal(query[0], query[3])
    assert query.shape[0] == 4
    assert not np.array_equal(query[0], query[2])


@pytest.fixture
def no_copies():
    yield
    published_files.use_copies(None)


def test_small_files_of_a_model_come_back_from_the_mirror_with_a_checkpoint(folder, tmp_path, no_copies):
    """And a first start, with nothing in the mirror, still keeps them."""
    first, fresh, mirror = (str(tmp_path / name) for name in ("first", "fresh", "mirror"))
    experiment = load(folder, f"settings.Checkpointing.checkpoint_mirror = '{mirror}'").build()
    published_files.use_copies(first)
    assert published_files.small_files(str(folder)) == folder
    train._fetch_copy(experiment, first, Host(0, 1, True))
    published_files.keep_copies(first)
    save(folder, tmp_path / "first", 3)
    with copying.Copying(first, mirror, keep=1, say=print):
        pass
    published_files.use_copies(fresh)
    assert published_files.small_files(str(folder)) == folder
    train._fetch_copy(experiment, fresh, Host(0, 1, True))
    assert published_files.small_files(str(folder)) == tmp_path / "fresh" / "published" / "0"


@pytest.mark.parametrize("kind", [UnreachableError, UserError])
def test_frozen_parameters_that_cannot_be_reached_now_say_that_another_start_can_help(monkeypatch, kind):
    def opened(model, place):
        raise kind("no route")

    monkeypatch.setattr(warm_start, "_pinned", str)
    monkeypatch.setattr(warm_start, "_opened", opened)
    left_out = LeftOut("gs://bucket/model", "gs://bucket/model", {}, ["w"])
    with pytest.raises(UserError, match=r"(?s)does not contain 1 frozen parameter, .*no route") as error:
        warm_start._source_of(left_out, None, "gs://bucket/model", "step 3")
    assert error.type is kind
