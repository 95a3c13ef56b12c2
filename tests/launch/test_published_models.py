"""Published models from the command line: generate, train from one, export, and generate from the export."""

import dataclasses
import json
import pathlib
import shutil

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from core.checkpoints.store import Checkpoints
from launch import __main__ as command
from launch import configuration, loaded_model
from launch.runs import warm_start
from models import pretrained

TESTS = pathlib.Path(__file__).parents[1]
FAMILY = TESTS / "models" / "fixtures" / "families" / "llama3"
TOKENIZER = TESTS / "tasks" / "fixtures" / "tokenizers" / "bpe"
GIN = """
from __gin__ import dynamic_registration
from launch import experiment
from models import pretrained
from tasks import synthetic

include 'gin/defaults.gin'
SLICE = 'v4-8'
MODEL = @pretrained.model()
pretrained.model.folder = '{folder}'
pretrained.model.dtype = %COMPUTE_DTYPE
COMPUTE_DTYPE = 'float32'
INIT_FROM = '{folder}'
VOCAB_SIZE = 83
LENGTH = 16
NUM_STREAMS = 4
BATCH_SIZE = 4
TOTAL_STEPS = 200
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A published folder with weights and a tokenizer, whose ids above the model's are not used."""
    found = tmp_path_factory.mktemp("published") / "tiny"
    shutil.copytree(FAMILY, found)
    return found


@pytest.fixture(scope="module")
def run_dir(folder, tmp_path_factory):
    """The run of no step that starts from the folder."""
    run = tmp_path_factory.mktemp("run")
    (run / "first.gin").write_text(GIN.format(folder=folder))
    config = configuration.load(str(run / "first.gin"))
    (run / "config.gin").write_text(config.text)
    experiment = config.build()
    program = experiment.bind(jax.devices()[:4])
    assert warm_start.require_fit(experiment, program) == f"the published folder {folder}"
    state = warm_start.first_state(experiment, program, is_host_zero=True)
    checkpoints = Checkpoints(run / "checkpoints", keep=1)
    checkpoints.save(3, state=state, data={}, meta={"config": config.text})
    checkpoints.close()
    return run


def run_command(*words):
    return command.main(list(map(str, words)))


@pytest.mark.covers("C16", "C17", "N13")
def test_a_run_from_a_folder_generates_and_exports_the_same_model(folder, run_dir, tmp_path, capsys):
    want = np.load(FAMILY / "reference.npz")["greedy"].tolist()
    prompt = ",".join(map(str, want[:6]))
    assert run_command("export", run_dir, "--out", tmp_path / "out", "--dtype", "float32") == 0
    exported, original = (load_file(f / "model.safetensors") for f in (tmp_path / "out", folder))
    assert exported.keys() == original.keys()
    assert all(np.array_equal(exported[name], original[name]) for name in original)
    config, published = (json.loads((f / "config.json").read_text()) for f in (tmp_path / "out", folder))
    assert {key: config[key] for key in ("vocab_size", "rope_scaling", "head_dim")} == {
        key: published[key] for key in ("vocab_size", "rope_scaling", "head_dim")
    }
    capsys.readouterr()
    words = ("--prompt-ids", prompt, "--max-tokens", 8, "--greedy", "--json")
    assert run_command("generate", run_dir, *words) == 0
    assert json.loads(capsys.readouterr().out)["ids"] == want[6:14]
    laid_out = loaded_model.load(str(run_dir), slice_name="v4-8")
    assert laid_out.continued([want[:6]], max_tokens=8)[0].ids == want[6:14]
    again = pretrained.model(str(tmp_path / "out"), dtype="float32")
    assert dataclasses.replace(again, head_dim=None) == dataclasses.replace(laid_out.model, head_dim=None)


def test_wrong_words_are_refused(folder, run_dir, tmp_path, capsys):
    (tmp_path / "lines.jsonl").write_text('{"text": "a"}\n')
    for words, message in {
        ("generate", run_dir, "--prompt-ids", "1,x"): "expected whole numbers separated by commas",
        ("generate", run_dir, "--prompt-ids", "1", "--top-p", "1.5"): "--top-p 1.5: expected from 0 to 1",
        ("generate", folder, "--prompt", "a"): "no tokenizer.json",
        ("generate", run_dir, "--file", tmp_path / "lines.jsonl"): "KeyError: 'prompt'; expected lines such as",
        ("generate", tmp_path, "--prompt", "a"): "has no checkpoints",
        ("export", run_dir, "--out", folder): "is not empty",
    }.items():
        assert run_command(*words) not in (0, 13)
        assert message in capsys.readouterr().err
