"""An adapter trained on cached hidden states is that trained with its base, within rounding."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from core.checkpoints import reading
from core.hosts import exit_codes
from launch import __main__ as main
from launch import loaded_model
from tasks.code import cached

DECODER = (
    "transformer.Transformer.num_layers = 1",
    "transformer.Transformer.embed_dim = 16",
    "transformer.Transformer.mlp_dim = 16",
    "transformer.Transformer.num_heads = 2",
    "LENGTH = 32",
    "BATCH_SIZE = 4",
    "TOTAL_STEPS = 6",
    "WARMUP_STEPS = 1",
    "EVAL_BATCHES = 2",
    "EVAL_INTERVAL = 6",
    "CHECKPOINT_INTERVAL = 6",
)
ADAPTER = ("HEAD_DIM = 8", "CHUNK = 16")
CACHED = ("include 'gin/ponder/cached.gin'", "LOSS_POSITIONS = None")
BASE, EXPERIMENT = "gin/ponder/base.gin", "gin/ponder/quick.gin"


def gin(*bindings):
    return [word for text in bindings for word in ("--gin", text)]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("code")
    for package in range(30):
        file = folder / f"package{package}" / "a.py"
        file.parent.mkdir()
        file.write_text("".join(f"x{i} = {i * package}\n" for i in range(9)))
    return gin(*DECODER, f"DATA = '{folder}/**/*.py'")


@pytest.fixture(scope="module")
def trained(launch, data, tmp_path_factory):
    """Trains an experiment; gives the directory of the run."""

    def run(name, experiment, *bindings, code=0):
        place = str(tmp_path_factory.mktemp("runs") / name)
        own = ("train", experiment, "--slice", "v5e-1", "--run-dir", place, *data, *gin(*bindings))
        return place, launch(*own, slice_name="v5e-1", code=code)

    return run


@pytest.fixture(scope="module")
def base(trained):
    return trained("base", BASE)[0]


@pytest.fixture(scope="module")
def hidden(launch, data, base, tmp_path_factory):
    out = str(tmp_path_factory.mktemp("hidden") / "states")
    own = gin(*ADAPTER, f"INIT_FROM = '{base}'")
    assert "is complete" in launch("cache-hidden-states", EXPERIMENT, "--out", out, *data, *own)
    assert "is complete" in launch(
        "cache-hidden-states", EXPERIMENT, "--out", out, *data, *own
    )  # and again, all of it kept
    return out


def adapter_of(place):
    """The parameters of the adapter of a run or of one of its steps, [N]."""
    params = loaded_model.load(place).params
    modules = sorted(module for module in params if module.startswith("adapter"))
    leaves = [leaf for module in modules for _, leaf in sorted(params[module].items())]
    return np.concatenate([np.asarray(leaf, np.float64).ravel() for leaf in leaves])


def losses_of(place):
    rows = map(json.loads, (Path(place) / "metrics.jsonl").read_text().splitlines())
    return [row[name] for row in rows for name in ("loss", "validation/loss") if name in row]


@pytest.mark.slow
@pytest.mark.covers("N05")
@pytest.mark.parametrize("carry", ["none", "document"])
def test_training_on_cached_hidden_states_is_training_with_the_base(trained, base, hidden, carry):
    own = (*ADAPTER, f"INIT_FROM = '{base}'", f"CARRY = '{carry}'", "CHECKPOINT_INTERVAL = 1", "KEEP_CHECKPOINTS = 9")
    with_base, first = trained("with_base", EXPERIMENT, *own)
    with_states, second = trained("with_states", EXPERIMENT, *own, *CACHED, f"HIDDEN = '{hidden}'")
    checksums = {re.search("frozen +checksum ([0-9a-f]{8}),", said)[1] for said in (first, second)}
    assert checksums == {f"{json.loads((Path(hidden) / 'about.json').read_text())['model']['checksum']:08x}"}
    ours, theirs = losses_of(with_base), losses_of(with_states)
    assert len(ours) >= 3
    np.testing.assert_allclose(ours, theirs, rtol=1e-4)
    start, ours, theirs = map(adapter_of, (f"{with_base}@1", with_base, with_states))
    # States are stored in float16, and Adam divides small gradients by their size: the difference was 2.7 %.
    assert np.linalg.norm(ours - theirs) < 0.05 * np.linalg.norm(ours - start)


@pytest.mark.slow
@pytest.mark.covers("N05")
def test_hidden_states_of_another_base_or_rows_of_another_length_are_refused(trained, base, hidden):
    own = (*ADAPTER, *CACHED, f"HIDDEN = '{hidden}'", f"INIT_FROM = '{base}'")
    another, _ = trained("another_base", BASE, "SEED = 1")
    refused = {
        (f"INIT_FROM = '{another}'",): "the cached hidden states were computed with another base: cached_hidden: ",
        ("LENGTH = 16",): "cached_hidden.length = 16: the rows of ",
        ("CHUNK = 32",): "the chunk of the model is 32, and the hidden states of the data were computed with 16",
        ("transformer.Transformer.embed_dim = 32",): "has width 32, and the hidden states of the batch have 16: ",
        (
            "HIDDEN = 'no/such'",
        ): "cached_hidden.folder = 'no/such': no complete folder of launch/run cache-hidden-states",
    }
    for bindings, words in refused.items():
        _, said = trained("refused", EXPERIMENT, *own, *bindings, code=exit_codes.USER_ERROR)
        assert words in said, said


@pytest.mark.slow
@pytest.mark.covers("N05")
def test_an_evaluation_on_hidden_states_of_another_base_is_refused(launch, trained, base, hidden, data, tmp_path):
    run, _ = trained("own", EXPERIMENT, *ADAPTER, *CACHED, f"HIDDEN = '{hidden}'", f"INIT_FROM = '{base}'")
    another, _ = trained("another_base", BASE, "SEED = 1")
    states = str(tmp_path / "states")
    launch("cache-hidden-states", EXPERIMENT, "--out", states, *data, *gin(*ADAPTER, f"INIT_FROM = '{another}'"))
    for options in ((), ("--gates", "skip,update")):
        said = launch("evaluate", run, *options, *gin(f"HIDDEN = '{states}'"), code=exit_codes.USER_ERROR)
        assert "the cached hidden states were computed with another base: " in said
        launch("evaluate", run, *options)


@pytest.mark.parametrize(
    ("bindings", "words"),
    [
        (("INIT_FROM = ''",), "INIT_FROM is not set: name the run or the folder of the base"),
        (("INIT_FROM = 'no/such/run'",), "no/such/run"),
        (("CHUNK = 48",), "chunk = 48 does not divide the 32 positions of a row"),
        (("INIT_FROM = 'x'", "INIT_RENAMES = {'a': 'b'}"), "INIT_RENAMES = {'a': 'b'}: the base is read as it is"),
        (("INIT_FROM = 'x'", "VOCAB_SIZE = 8"), "VOCAB_SIZE"),
    ],
)
def test_a_base_that_is_missing_and_chunks_that_do_not_divide_rows_are_refused(data, tmp_path, capsys, bindings, words):
    own = gin(*ADAPTER, *bindings)
    assert (
        main.main(["cache-hidden-states", EXPERIMENT, "--out", str(tmp_path / "states"), *data, *own])
        == exit_codes.USER_ERROR
    )
    assert words in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "states").exists()


@pytest.mark.parametrize("stored", ["bfloat16", pytest.param("float32", marks=pytest.mark.slow)])
def test_a_published_base_has_the_numbers_that_training_reads(data, tmp_path, monkeypatch, stored):
    folder = str(Path(__file__).parents[1] / "models/fixtures/families/gpt2")  # in float32
    about = {}
    monkeypatch.setattr(cached, "write", lambda *_, model, **__: about.update(model) or iter(()))
    own = gin(*ADAPTER, f"INIT_FROM = '{folder}'", "COMPUTE_DTYPE = 'bfloat16'", f"FROZEN_DTYPE = '{stored}'")
    assert main.main(["cache-hidden-states", EXPERIMENT, "--out", str(tmp_path / "out"), *data, *own]) == 0
    base = loaded_model.load(folder, dtype="float32")
    specs = reading.by_name(base.program.param_specs)
    whole = {name: a for name, a in reading.by_name(base.params).items() if specs[name].kind != "constant"}
    assert about["checksum"] == reading.checksum({name: a.astype(stored) for name, a in whole.items()})


def test_a_bucket_is_refused_before_a_model_is_read(data, capsys):
    command = ["cache-hidden-states", EXPERIMENT, "--out", "gs://bucket/states", *data]
    assert main.main(command) == exit_codes.USER_ERROR
    assert "--out gs://bucket/states: expected a local folder" in " ".join(capsys.readouterr().err.split())


def test_a_folder_in_the_home_directory_is_one_place(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "states").mkdir()
    assert cached._local("~/states") == cached._local("states") == tmp_path / "states"
