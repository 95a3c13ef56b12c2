"""Published models from the command line: generate, train from one, export, and generate from the export."""

import dataclasses
import itertools
import json
import pathlib
import re
import shutil
import types

import jax
import numpy as np
import pytest
import tokenizers
from safetensors.numpy import load_file, save_file

from core import logical, parameters
from core.batches import batch_shapes
from core.checkpoints import published_files, steps
from core.checkpoints.store import Checkpoints
from core.errors import UserError
from launch import __main__ as command
from launch import loaded_model, session
from launch.check import preflight
from launch.cli import export, generate
from launch.config import loader
from launch.experiments import saved_run
from launch.hosts import tpu_host
from launch.hosts.cluster import Host
from launch.runs import prepared_run, warm_start
from launch.settings import Initialization, grouped
from models import pretrained
from parallel.generation.sampling import Sampling
from tasks import streams
from tasks.code import humaneval

TESTS = pathlib.Path(__file__).parents[1]
FAMILY = TESTS / "models" / "fixtures" / "families" / "llama3"
pytestmark = pytest.mark.usefixtures("no_cache_of_the_user")
WORDS = [f"w{i}" for i in range(83)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A published folder with weights and a tokenizer, which has one token more than the model."""
    found = tmp_path_factory.mktemp("published") / "tiny"
    shutil.copytree(FAMILY, found)
    write_tokenizer(found, WORDS)
    return found


def write_tokenizer(folder, words):
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(dict(zip(words, itertools.count())), unk_token="w1"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens(["<image>"])
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "w82"}')


@pytest.fixture(scope="module")
def run_dir(folder, tmp_path_factory):
    """A run of no step that continues to train the folder's model; the folder is gone."""
    run = tmp_path_factory.mktemp("run")
    for name in ("a", "b"):  # one is held out
        (run / f"{name}.txt").write_text("w5 w6")
    config = loader.load("gin/finetune.gin", bindings=bindings(folder, run), slice_name="v4-16")
    (run / "config.gin").write_text(config.text)
    experiment = config.build()
    ready = prepared_run.prepare_run(
        experiment, config=config, revision="", run_dir=str(run), last_step=3, host=Host(0, 1, True)
    )
    assert ready.meta["init_from"] == f"the published folder {folder}"
    assert ready.initial.left_out is None  # nothing is frozen
    state = warm_start.first_state(experiment, ready.program, ready.initial, is_host_zero=True)
    checkpoints = Checkpoints(run / "checkpoints", keep=1)
    checkpoints.save(3, state=state, data={}, meta=ready.meta)
    checkpoints.close()
    folder.rename(folder.with_name("moved"))
    yield run
    folder.with_name("moved").rename(folder)


def bindings(folder, run):
    return (
        f"FOLDER = '{folder}'",
        f"DATA = '{run}/*.txt'",
        "pretrained.model.dtype = 'float32'",
        "LENGTH = 16",
    )


@pytest.fixture(autouse=True)
def no_copies(monkeypatch):
    monkeypatch.setenv("COLUMNS", "1000")  # an error is one line
    yield
    published_files.use_copies(None)


def run_command(*words):
    return command.main(list(map(str, words)))


@pytest.mark.covers("C16", "C17", "N13")
def test_a_run_from_a_folder_generates_and_exports_the_same_model(run_dir, tmp_path, capsys):
    want = np.load(FAMILY / "reference.npz")["greedy"].tolist()
    prompt = ",".join(map(str, want[:6]))
    assert run_command("export", run_dir, "--out", tmp_path / "out", "--dtype", "float32") == 0
    exported, original = (load_file(f / "model.safetensors") for f in (tmp_path / "out", FAMILY))
    assert exported.keys() == original.keys()
    assert all(np.array_equal(exported[name], original[name]) for name in original)
    config, published = (json.loads((f / "config.json").read_text()) for f in (tmp_path / "out", FAMILY))
    assert {key: config[key] for key in ("vocab_size", "rope_scaling", "head_dim")} == {
        key: published[key] for key in ("vocab_size", "rope_scaling", "head_dim")
    }
    capsys.readouterr()
    words = ("--prompt-ids", prompt, "--max-tokens", 8, "--greedy", "--json")
    assert run_command("generate", run_dir, *words) == 0
    assert json.loads(capsys.readouterr().out)["ids"] == want[6:14]
    laid_out = loaded_model.load(str(run_dir), slice_name="v4-8")
    again = pretrained.model(str(tmp_path / "out"), dtype="float32")
    assert dataclasses.replace(again, head_dim=None) == dataclasses.replace(laid_out.model, head_dim=None)


def test_a_run_that_is_laid_out_on_a_slice_generates_the_same(run_dir):
    want = np.load(FAMILY / "reference.npz")["greedy"].tolist()
    laid_out = loaded_model.load(str(run_dir), slice_name="v4-8")
    assert laid_out.continued([want[:6]], max_tokens=8)[0].ids == want[6:14]


def test_an_export_has_the_tokenizer_and_the_ids_of_the_last_phase(run_dir, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    write_tokenizer(other, WORDS[::-1])  # w82, which ends a text, is 0
    told = (
        "from launch import experiment",
        "from tasks.text import vocabularies",
        "PHASES = (@last/experiment.Phase(),)",
        "last/experiment.Phase.after = 1",
        "last/experiment.Phase.task = @last/text.files()",
        "last/text.files.vocabulary = @last/vocabularies.tokenizer()",
        f"last/vocabularies.tokenizer.folder = '{other}'",
    )
    words = (word for line in told for word in ("--gin", line))
    assert run_command("export", run_dir, "--out", tmp_path / "out", *words) == 0
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (other / name).read_bytes()
    for name in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / "out" / name).read_text())["eos_token_id"] == 0


@pytest.mark.covers("C17")
def test_a_run_needs_its_folder_no_longer(folder, run_dir, tmp_path, capsys):
    assert not folder.exists()
    assert run_command("export", run_dir, "--out", tmp_path / "out") == 0
    kept = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert {file.name for file in (tmp_path / "out").iterdir()} == kept
    assert (tmp_path / "out" / "tokenizer.json").read_text() == (
        folder.with_name("moved") / "tokenizer.json"
    ).read_text()
    capsys.readouterr()
    assert run_command("generate", run_dir, "--prompt", "w5 w6", "--max-tokens", 2, "--greedy", "--json") == 0
    assert len(json.loads(capsys.readouterr().out)["ids"]) == 2
    checked = preflight.check(
        "gin/finetune.gin",
        bindings=bindings(folder, run_dir),
        slice_name="v4-16",
        run_dir=str(run_dir),
        hosts="simulated",
    )
    assert [f.detail for f in checked.findings if not f.ok] == []
    assert "not read: the run resumes from step 3" in [f.detail for f in checked.findings]


def test_rows_of_more_positions_than_the_model_has_are_refused(folder, run_dir):
    there = bindings(folder.with_name("moved"), run_dir)
    for length, expected in ((64, []), (65, ["LENGTH = 65: the model has 64 positions; set LENGTH = 64 or less"])):
        config = loader.load("gin/finetune.gin", bindings=(*there, f"LENGTH = {length}"), slice_name="v4-16")
        found = config.build().data_problems(prepared=False)
        assert [problem.partition(" (")[0] for problem in found] == expected


def test_a_check_lists_all_parameters_that_do_not_fit(tmp_path):
    shutil.copytree(FAMILY, tmp_path / "tiny")
    write_tokenizer(tmp_path / "tiny", WORDS)
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text("w5 w6")
    renames = "INIT_RENAMES = {'model.layers.0.*': 'decoder.0.*'}"
    checked = preflight.check(
        "gin/finetune.gin",
        bindings=(*bindings(tmp_path / "tiny", tmp_path), renames),
        slice_name="v4-16",
        run_dir=str(tmp_path / "run"),
        hosts="simulated",
    )
    (found,) = [finding for finding in checked.findings if finding.name == "initial parameters"]
    assert not found.ok
    lines = found.detail.splitlines()
    assert lines[0] == f"INIT_FROM: the published folder {tmp_path}/tiny does not fit the model:"
    missing = [line for line in lines if line.startswith("  missing: model.layers.0.")]
    assert len(missing) == len([line for line in lines if line.startswith("  left over: decoder.0.")]) == 9


def test_a_folder_is_laid_out_and_computed_as_told(tmp_path, capsys):
    shutil.copytree(FAMILY, tmp_path / "tiny")
    write_tokenizer(tmp_path / "tiny", WORDS)
    model = loaded_model.load(str(tmp_path / "tiny"), slice_name="v4-8", dtype="bfloat16")
    assert model.program.partitioner.strategy.name == "fsdp"
    query = model.params["layers/block"]["query"]
    assert (query.dtype, query.addressable_shards[0].data.size) == (jax.numpy.bfloat16, query.size // 4)
    assert model.params["layers/block"]["attention_norm"].dtype == jax.numpy.float32
    told = ["STRATEGY = @strategies.fsdp_tensor()", "strategies.fsdp_tensor.tensor = 2", "COMPUTE_DTYPE = 'bfloat16'"]
    model = loaded_model.load(str(tmp_path / "tiny"), slice_name="v4-8", bindings=told)
    assert model.program.partitioner.shape["tensor"] == 2
    assert model.model.dtype == "bfloat16"
    for binding, says in {
        "TOTAL_STEPS = 3": "TOTAL_STEPS is not one of the macros that gin/generation/folder.gin declares",
        "strategies.fsdp_tensor.tensor = 2": "fsdp_tensor",
    }.items():
        assert run_command("generate", tmp_path / "tiny", "--prompt", "w1", "--gin", binding) == 2
        assert says in capsys.readouterr().err


def test_a_token_without_embedding_is_refused_where_it_occurs(tmp_path, capsys):
    shutil.copytree(FAMILY, tmp_path / "tiny")
    write_tokenizer(tmp_path / "tiny", WORDS)
    words = ("generate", tmp_path / "tiny", "--max-tokens", 1, "--greedy", "--prompt")
    assert run_command(*words, "w3 <image>") == 2
    assert "the text contains '<image>' (id 83), for which the model of" in capsys.readouterr().err
    write_tokenizer(tmp_path / "tiny", [*WORDS, "more", "words"])
    assert run_command(*words, "w3 w4") == 2
    assert "the model has vocab_size 83, but" in capsys.readouterr().err


def test_a_file_of_prompts_is_answered_in_batches_and_continued_where_it_was_interrupted(
    run_dir, tmp_path, capsys, monkeypatch
):
    prompts = [[3, 9], [4, 8, 15], [16], [23, 42]]
    (tmp_path / "prompts.jsonl").write_text("\n\n".join(json.dumps({"ids": ids}) for ids in prompts))
    out = tmp_path / "answers.jsonl"
    words = (
        "generate",
        run_dir,
        "--file",
        tmp_path / "prompts.jsonl",
        "--max-tokens",
        4,
        "--batch-size",
        2,
        "--out",
        out,
    )
    with monkeypatch.context() as patch:
        patch.setattr(generate._Answers, "finish", lambda self: None)
        assert run_command(*words) == 0
    [partial] = tmp_path.glob("answers.jsonl.*.partial")
    whole = partial.read_text()
    assert [json.loads(line)["prompt"] for line in whole.splitlines()] == prompts
    first = json.loads(whole.splitlines()[0])
    assert len(first["ids"]) == len(first["tokens"]) == len(first["log_probabilities"]) == 4
    assert "".join(first["tokens"]) == first["text"]
    partial.write_text("".join(whole.splitlines(keepends=True)[:2]) + whole.splitlines()[2][:9])
    capsys.readouterr()
    assert run_command(*words) == 0
    assert "continues after 2 of 4 prompts" in capsys.readouterr().err
    assert out.read_text() == whole
    assert not partial.exists()


def test_answers_are_continued_only_with_equal_parameters_fields_and_options(tmp_path):
    """They may be computed in another layout, which changes nothing but rounding."""
    shutil.copytree(FAMILY, tmp_path / "tiny")
    write_tokenizer(tmp_path / "tiny", WORDS)
    tensor = ["STRATEGY = @strategies.fsdp_tensor()", "strategies.fsdp_tensor.tensor = 2"]
    model, elsewhere, narrow = (
        loaded_model.load(str(tmp_path / "tiny"), bindings=told, slice_name=slice_name)
        for told, slice_name in (([], None), (tensor, "v4-8"), (["COMPUTE_DTYPE = 'bfloat16'"], None))
    )
    options = {"max_tokens": 4, "sampling": Sampling(), "seed": 0}

    def digest(model, ids=((3, 9),), **others):
        return generate._Answers(tmp_path / "out", 1, generate._inputs(model, ids, {**options, **others}))._partial

    def changed(**fields):
        names = ("model", "params", "vocabulary", "stop_ids", "sight")
        return types.SimpleNamespace(**{**{name: getattr(model, name) for name in names}, **fields})

    assert digest(elsewhere) == digest(model)
    found = [
        digest(model),
        digest(narrow),
        digest(changed(model=dataclasses.replace(model.model, rope_theta=5.0))),
        digest(changed(params=jax.tree.map(lambda a: 2 * a, model.params))),
        digest(changed(sight=types.SimpleNamespace(params=model.params))),
        digest(model, ids=((3, 8),)),
        digest(model, max_tokens=5),
        digest(model, sampling=Sampling(top_k=3)),
        digest(model, seed=1),
    ]
    assert len(set(found)) == len(found)


def test_each_of_several_answers_is_shown_below_its_prompt(capsys):
    answers = [loaded_model.Text(text, [], [], False) for text in ("w7\x1b", "w8\nw9")]
    generate._print(["w1", "w5\nw6", [7] * 60], 1, answers)
    ids = "7," * 49 + "7…"
    assert capsys.readouterr().out == f"prompt 2 of 3: w5 w6\nw7\\x1b\n\nprompt 3 of 3: {ids}\nw8\nw9\n\n"


@pytest.mark.covers("C12")
def test_a_damaged_checkpoint_is_refused_by_every_command(run_dir, tmp_path, capsys):
    """Its description, one of its arrays, and one that is not there."""
    arrays = max((run_dir / "checkpoints/3/state/d").iterdir(), key=lambda file: file.stat().st_size)
    harms = {
        "meta/metadata": lambda file: file.write_text(file.read_text().replace("SEED", "SEND")),
        str(arrays.relative_to(run_dir / "checkpoints/3")): lambda file: file.write_bytes(flipped(file.read_bytes())),
        "state/manifest.ocdbt": lambda file: file.unlink(),
    }
    for name, harm in harms.items():
        run, out = tmp_path / name.replace("/", "-"), tmp_path / "out"
        shutil.copytree(run_dir, run)
        harm(run / "checkpoints/3" / name)
        for words in (("generate", run, "--prompt-ids", "1", "--max-tokens", 1), ("export", run, "--out", out)):
            assert run_command(*words) == 2, (name, words)
            assert f"error: damaged checkpoint, step 3 in {run}/checkpoints: " in capsys.readouterr().err
        assert not out.exists()


def flipped(content):
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 4]) + content[middle + 1 :]


def test_wrong_words_are_refused(run_dir, tmp_path, capsys):
    incomplete = tmp_path / "incomplete"
    incomplete.mkdir()
    shutil.copy(FAMILY / "model.safetensors", incomplete)
    (tmp_path / "lines.jsonl").write_text('{"prompt": "a"}\n\n{"text": "a"}\n')
    (tmp_path / "cut.jsonl").write_text('{"ids": [1]}\n{"ids": [1')
    (tmp_path / "ids.jsonl").write_text('{"ids": [1]}\n{"ids": [1, 83]}\n')
    (tmp_path / "none.jsonl").write_text("\n")
    for words, message in {
        ("generate", run_dir, "--prompt-ids", "1,x"): "expected whole numbers separated by commas",
        ("generate", run_dir, "--prompt-ids", "1", "--top-p", "1.5"): "--top-p 1.5: expected from 0 to 1",
        ("generate", FAMILY, "--prompt", "a"): "no tokenizer.json",
        ("generate", incomplete, "--prompt", "a"): "has no config.json (it has model.safetensors)",
        ("generate", run_dir, "--file", tmp_path / "lines.jsonl"): 'line 3: {"text": "a"}: expected lines such as',
        ("generate", run_dir, "--file", tmp_path / "cut.jsonl"): "line 2: Expecting ',' delimiter",
        ("generate", run_dir, "--max-tokens", 4, "--file", tmp_path / "ids.jsonl"): "prompt 2 of 2 has the id 83",
        ("generate", run_dir, "--file", tmp_path / "none.jsonl"): "has no prompts",
        ("generate", run_dir, "--file", tmp_path / "ids.jsonl", "--out", tmp_path / "a"): "new ones need 101 positions",
        ("generate", run_dir, "--prompt-ids", "1", "--json", "--out", tmp_path / "a"): "--json prints the lines that",
        ("generate", run_dir, "--prompt-ids", "1", "--chat"): "--chat formats text, and --prompt-ids gives ids",
        ("generate", run_dir, "--prompt-ids", "1", "--min-p", "nan"): "--min-p nan: expected from 0 to 1",
        ("generate", tmp_path, "--prompt", "a"): f"{tmp_path} has neither checkpoints nor config.json. Give a run",
        ("generate", tmp_path / "gone", "--prompt", "a"): "does not exist. Give a run (runs/first), a step of it",
        (
            "generate",
            "gone@7",
            "--prompt",
            "a",
        ): "the folder of a published model (config.json, *.safetensors) or hf://",
        ("export", run_dir, "--out", FAMILY): "is not empty",
        ("export", run_dir, "--out", tmp_path / "out", "--push", "name"): "'name' is not the name of a repository",
    }.items():
        assert run_command(*words) not in (0, 13)
        assert message in capsys.readouterr().err
    assert not list(tmp_path.glob("a*"))


@pytest.fixture(scope="module")
def adapted(tmp_path_factory):
    """The folder of a published model, a run with adapters of it, and the run's state."""
    folder = tmp_path_factory.mktemp("adapted")
    base, run = folder / "base", folder / "run"
    shutil.copytree(FAMILY, base)
    write_tokenizer(base, WORDS)
    run.mkdir()
    for name in ("a", "b"):
        (run / f"{name}.txt").write_text("w5 w6")
    told = [*bindings(base, run), "include 'gin/models/lora.gin'", "lora.adapted.targets = ('query', 'output')"]
    config = loader.load("gin/finetune.gin", bindings=told, slice_name="v4-16")
    (run / "config.gin").write_text(config.text)
    ready = prepared(config, run)
    checkpoints = Checkpoints(ready.checkpoint_dir, keep=1, origin=ready.origin)
    state = session.restore_or_init(ready, checkpoints).state
    block = dict(state.params["layers/block"])
    block["query_lora_b"] = jax.numpy.full_like(block["query_lora_b"], 0.25)
    state = state._replace(params={**state.params, "layers/block": block})
    checkpoints.save(3, state=state, data={}, meta=ready.meta)
    checkpoints.close()
    yield base, run, state
    published_files.use_copies(None)


def prepared(config, run):
    return prepared_run.prepare_run(
        config.build(), config=config, revision="", run_dir=str(run), last_step=3, host=Host(0, 1, True)
    )


def resumed(run, **changes):
    """The state of a run that is started again; other fields of the experiment may be changed."""
    ready = prepared(saved_run.read(str(run)).config, run)
    ready = dataclasses.replace(
        ready, experiment=dataclasses.replace(ready.experiment, **grouped(changes, ready.experiment))
    )
    return session.restore_or_init(ready, Checkpoints(ready.checkpoint_dir, keep=1, origin=ready.origin)).state


@pytest.mark.slow  # tests/core/checkpoints/test_warm_start.py is quick
@pytest.mark.covers("N07")
def test_only_adapters_are_saved_and_the_base_is_read_again(adapted, tmp_path, capsys):
    base, run, state = adapted
    described = steps.read(steps.find(str(run)))
    params = {name for name in described.saved if name.startswith("params/")}
    assert params == {f"params/layers/block/{name}_lora_{part}" for name in ("query", "output") for part in "ab"}
    assert described.left_out is not None
    assert (described.left_out.source, len(described.left_out.arrays)) == (str(base), 12)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(resumed(run)), jax.device_get(state))
    loaded = loaded_model.load(str(run))
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(loaded.params), jax.device_get(state.params))

    moved, other = tmp_path / "moved", tmp_path / "other"
    shutil.copytree(base, other)
    tensors = load_file(other / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"] += 1
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    base.rename(moved)
    try:
        at_moved = resumed(run, init_from=str(moved))
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(at_moved), jax.device_get(state))
        assert loaded_model.load(str(run), bindings=[f"INIT_FROM = '{moved}'"]).where == loaded.where
        gone = f"does not contain 12 frozen parameters, which the run read from {base}. "
        wrong = "is not the source of the checkpoint's frozen parameters: 1 of 12 differ (layers/block/up). The hash"
        with pytest.raises(UserError, match=gone):
            resumed(run)
        options = {"bindings": (), "slice_name": "v4-16", "run_dir": str(run), "hosts": "simulated"}
        checked = preflight.check(str(run / "config.gin"), **options)
        [found] = [finding for finding in checked.findings if not finding.ok]
        assert (found.name, gone in found.detail) == ("initial parameters", True)
        with pytest.raises(UserError, match=re.escape(wrong)):
            resumed(run, init_from=str(other))
        words = ("generate", run, "--prompt-ids", "5,6", "--max-tokens", 1)
        for command, message in {
            words: gone,
            (*words, "--gin", f"INIT_FROM = '{other}'"): wrong,
            ("export", run, "--out", tmp_path / "adapter"): gone,
            ("export", run, "--out", tmp_path / "merged", "--merge"): gone,
        }.items():
            capsys.readouterr()
            assert run_command(*command) == 2
            assert message in capsys.readouterr().err
        assert not any((tmp_path / "adapter").iterdir())
        told = ("--gin", f"INIT_FROM = '{moved}'")
        assert run_command("export", run, "--out", tmp_path / "adapter", *told) == 0
        settings = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
        assert settings["base_model_name_or_path"] == str(moved)
        other.rename(base)
        assert run_command("export", run, "--out", tmp_path / "wrong") == 2
        assert wrong in capsys.readouterr().err
    finally:
        shutil.rmtree(base, ignore_errors=True)
        moved.rename(base)


def initial_parameters(run, run_dir, *told):
    """The finding of a check of the run's experiment in a run directory."""
    config, where = str(run / "config.gin"), {"slice_name": "v4-16", "run_dir": str(run_dir)}
    checked = preflight.check(config, bindings=told, **where, hosts="simulated")
    [found] = [finding for finding in checked.findings if finding.name == "initial parameters"]
    return found


@pytest.mark.covers("N07")
@pytest.mark.usefixtures("laid_out_once")
def test_a_check_reads_the_headers_of_the_base_that_a_start_needs(adapted, tmp_path):
    """The start resumes a run with adapters, or is a new run that starts from them."""
    base, run, _ = adapted
    moved = tmp_path / "moved"
    shutil.copytree(base, tmp_path / "copy")
    tuned = (tmp_path / "tuned", f"INIT_FROM = '{run}'", f"FOLDER = '{tmp_path}/copy'")
    resumed_from = f"the run resumes from step 3 and reads 12 frozen parameters from the published folder {base}"
    assert initial_parameters(run, run)[1:3] == (True, resumed_from)
    assert initial_parameters(run, run, "INIT_FROM = ''")[1:3] == (True, resumed_from)
    assert initial_parameters(run, *tuned).ok
    base.rename(moved)
    try:
        gone = f"does not contain 12 frozen parameters, which the run read from {base}. "
        for started in ((run,), (run, "INIT_FROM = ''"), tuned):
            found = initial_parameters(run, *started)
            assert not found.ok
            assert gone in found.detail
        found = initial_parameters(run, run, f"INIT_FROM = '{moved}'")
        assert (found.ok, found.detail) == (True, resumed_from.replace(str(base), str(moved)))
        tensors = load_file(moved / "model.safetensors")
        del tensors["model.layers.1.mlp.up_proj.weight"]
        shutil.copytree(moved, base)
        save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
        for started in ((run,), tuned):
            found = initial_parameters(run, *started)
            assert not found.ok
            assert "does not have the parameters that the checkpoint leaves out:\n  missing: model.l" in found.detail
    finally:
        shutil.rmtree(base, ignore_errors=True)
        moved.rename(base)


@pytest.mark.covers("N07")
def test_a_run_that_starts_from_another_run_saves_all_of_its_parameters(adapted, tmp_path):
    """Steps of other runs are removed while they train, and by `launch/run checkpoints prune`."""
    base, run, state = adapted
    moved, tuned = tmp_path / "moved", tmp_path / "tuned"
    tuned.mkdir()
    config = loader.load(str(run / "config.gin"), bindings=[f"INIT_FROM = '{run}'"], slice_name="v4-16")
    (tuned / "config.gin").write_text(config.text)
    ready = prepared(config, tuned)
    assert ready.initial.left_out is None
    checkpoints = Checkpoints(ready.checkpoint_dir, keep=1, origin=ready.origin)
    checkpoints.save(1, state=session.restore_or_init(ready, checkpoints).state, data={}, meta=ready.meta)
    checkpoints.close()
    base.rename(moved)
    try:
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(resumed(tuned).params), jax.device_get(state.params))
    finally:
        moved.rename(base)


@pytest.mark.covers("N07")
def test_bindings_of_an_export_that_make_another_model_are_refused(adapted, tmp_path, capsys):
    _, run, _ = adapted
    told = "lora.adapted.rank = 4"
    assert run_command("export", run, "--out", tmp_path / "out", "--merge", "--gin", told) == 2
    said = capsys.readouterr().err
    assert "the parameters of step 3 are not those of its model:" in said
    assert "block/query_lora_b: float32[3, 8, 4, 8] in the checkpoint, expected float32[3, 4, 4, 8]" in said
    assert not (tmp_path / "out").exists()


@pytest.mark.covers("N07")
def test_adapters_start_from_a_folder_and_are_exported_alone_or_merged(adapted, tmp_path, capsys):
    base, run, _ = adapted
    for words, out in (((), "adapter"), (("--merge", "--dtype", "float32"), "merged"), (("--merge",), "smaller")):
        assert run_command("export", run, "--out", tmp_path / out, *words) == 0
    assert {a.dtype.name for a in load_file(tmp_path / "smaller/model.safetensors").values()} == {"bfloat16"}
    assert {a.dtype.name for a in load_file(tmp_path / "adapter/adapter_model.safetensors").values()} == {"float32"}
    adapter, merged, original = (
        load_file(f)
        for f in (
            tmp_path / "adapter/adapter_model.safetensors",
            tmp_path / "merged/model.safetensors",
            base / "model.safetensors",
        )
    )
    name = "model.layers.0.self_attn.q_proj"
    a, b = (adapter[f"base_model.model.{name}.lora_{part}.weight"] for part in "AB")
    # The run stored its base in bfloat16; the folder has it in float32, as PEFT reads it.
    np.testing.assert_allclose(merged[f"{name}.weight"], original[f"{name}.weight"] + 2.0 * b @ a, atol=1e-7)
    same = [key for key in original if np.array_equal(merged[key], original[key])]
    assert sorted(set(original) - set(same)) == sorted(key for key in original if key.endswith("q_proj.weight"))
    settings = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert (settings["r"], settings["target_modules"]) == (8, ["o_proj", "q_proj"])
    assert settings["base_model_name_or_path"] == str(base)
    capsys.readouterr()
    assert run_command("export", run, "--out", tmp_path / "none", "--gin", "INIT_FROM = ''") == 2
    assert "which PEFT cannot load: give --merge" in capsys.readouterr().err
    others = "INIT_LAYERS = {'layers/*': (0, 2, 1)}"
    assert run_command("export", run, "--out", tmp_path / "none", "--gin", others) == 2
    assert "its base has other layers than" in capsys.readouterr().err


@pytest.mark.covers("N07")
@pytest.mark.parametrize(
    ("told", "says"),
    [
        ("pretrained.model.rope_theta = 5.0", "rope_theta = 500000.0 in "),
        ("pretrained.model.norm_eps = 0.5", "norm_eps = 1e-05 in "),
        ("pretrained.model.attention = 'none'", "attention = 'auto' in "),
        ("INIT_RENAMES = {'other/*': 'layers/*'}", "its base has other names than"),
        ("INIT_PATTERNS = ('*layers/*', 'embedding')", "2 parameters of its base began from the seed, not from "),
    ],
)
def test_adapters_are_not_exported_for_a_base_that_the_run_did_not_have(adapted, told, says, tmp_path, capsys):
    base, run, _ = adapted
    assert run_command("export", run, "--out", tmp_path / "out", "--gin", told) == 2
    said = capsys.readouterr().err
    assert says in said
    assert f"{base}" in said
    assert "give --merge" in said
    assert not (tmp_path / "out").exists()


@pytest.mark.covers("N07")
@pytest.mark.parametrize("told", ["pretrained.model.max_positions = 200", "pretrained.model.quantization = 'int8'"])
def test_adapters_are_exported_whatever_does_not_change_their_base(adapted, told, tmp_path):
    base, run, _ = adapted
    assert run_command("export", run, "--out", tmp_path / "out", "--gin", told) == 0
    settings = json.loads((tmp_path / "out/adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == str(base)


@pytest.mark.parametrize("quantization", ["int8", pytest.param("fp8", marks=pytest.mark.slow)])  # rounded likewise
def test_a_run_with_rounded_products_is_exported_as_others(run_dir, quantization, tmp_path):
    told = f"pretrained.model.quantization = '{quantization}'"
    assert run_command("export", run_dir, "--out", tmp_path / "out", "--dtype", "float32", "--gin", told) == 0
    exported, original = (load_file(f / "model.safetensors") for f in (tmp_path / "out", FAMILY))
    assert exported.keys() == original.keys()
    assert all(np.array_equal(exported[name], original[name]) for name in original)


@pytest.mark.covers("N07")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_base_of_adapters_is_stored_in_the_dtype_of_frozen_parameters(dtype, tmp_path):
    shutil.copy(FAMILY / "config.json", tmp_path)
    (tmp_path / "a.txt").write_text("w5 w6")
    told = [*bindings(tmp_path, tmp_path), "include 'gin/models/lora.gin'", f"FROZEN_DTYPE = '{dtype}'"]
    write_tokenizer(tmp_path, WORDS)
    model = loader.load("gin/finetune.gin", bindings=told, slice_name="v4-16").build().model
    shapes, _ = logical.abstract_init(model.init, jax.random.key(0), batch_shapes(streams.batch_spec(1, length=8)))
    found = {parameters.path_name(path): leaf.dtype.name for path, leaf in jax.tree_util.tree_leaves_with_path(shapes)}
    assert {kind for path, kind in found.items() if "_lora_" not in path} == {dtype}
    assert {kind for path, kind in found.items() if "_lora_" in path} == {"float32"}


def test_a_run_without_adapters_has_nothing_to_merge(run_dir, tmp_path, capsys):
    assert run_command("export", run_dir, "--out", tmp_path / "out", "--merge") == 2
    assert "has no adapters: leave --merge out" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "platforms", "chips", "expected"),
    [
        ((), None, [], "cpu"),  # libtpu would print errors
        ((), None, ["accel0"], None),
        ((), "tpu", [], "tpu"),
        (("--simulate",), "tpu", ["accel0"], "cpu"),
    ],
)
@pytest.mark.parametrize("command", [("generate", "--prompt", "a"), ("evaluate", "--humaneval", "P", "--allow-code")])
def test_a_machine_without_chips_uses_its_cpu(command, words, platforms, chips, expected, tmp_path, monkeypatch):
    given = {"jax_platforms": platforms}
    config = types.SimpleNamespace(update=given.__setitem__, values=given)
    monkeypatch.setattr(loaded_model.jax, "config", config)
    monkeypatch.setattr(tpu_host, "chips", lambda: chips)
    monkeypatch.setattr(humaneval, "read", lambda file, most: [])
    name, *rest = command
    assert run_command(name, tmp_path, *rest, *words) == 2
    assert given["jax_platforms"] == expected


def test_adapters_name_the_revision_of_the_hub_that_they_were_trained_on(monkeypatch):
    experiment = types.SimpleNamespace(initialization=Initialization(init_from="hf://owner/name"))
    for source, expected in (("hf://owner/name@abc", "hf://owner/name@abc"), ("/models/tiny", "hf://owner/name")):
        left_out = steps.LeftOut("hf://owner/name", source, {}, [])
        monkeypatch.setattr(export.steps, "read", lambda step, found=left_out: types.SimpleNamespace(left_out=found))
        assert export._base("3", experiment) == expected


def test_exported_files_can_be_read_by_others(run_dir, tmp_path):
    assert run_command("export", run_dir, "--out", tmp_path / "out") == 0
    modes = {file.name: file.stat().st_mode & 0o777 for file in (tmp_path / "out").iterdir()}
    assert modes["model.safetensors"] == modes["config.json"]
