"""Runs that tune a published model of images and text: what they export, and how they continue prompts."""

import dataclasses
import json
import pathlib
import re
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from core.checkpoints import published_files, steps
from core.checkpoints.store import Checkpoints
from launch import __main__ as command
from launch import loaded_model
from launch.config import loader
from launch.experiments import saved_run
from launch.hosts.cluster import Host
from launch.runs import prepared_run, progress, warm_start
from parallel.generation import sampling, text_part
from parallel.generation.generating import Generator
from tasks.text import ids
from tests.models.vision.folders import FIXTURES, PHOTO, copied

SELECTOR = (
    "from models.vision import selector",
    "pretrained.model.selector = @selector.Selector()",
    "selector.Selector.num_chosen = 4",
    "vision.questions.image_tokens = 4",
)
ADAPTERS = (
    "from models import lora",
    "pretrained.model.lora = @lora.Lora()",
    "lora.Lora.rank = 2",
    "lora.Lora.alpha = 4.0",
    "lora.Lora.targets = ('query',)",
    "lora.Lora.base_dtype = 'float32'",
    "FREEZE = ()",
)
NO_IMAGE = {"prompts": ["A: no image"], "max_tokens": 8}


@pytest.fixture(autouse=True, scope="module")
def compiled_once(kept_programs):
    """Programs of several tests are compiled once."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("JAX_COMPILATION_CACHE_DIR", kept_programs)
        yield


@pytest.fixture(autouse=True)
def no_copies(monkeypatch):
    monkeypatch.setenv("COLUMNS", "1000")  # an error is one line
    yield
    published_files.use_copies(None)


class Begun(NamedTuple):
    """A run of no step that tunes a folder, as it was prepared, and its first state."""

    folder: pathlib.Path
    ready: prepared_run.Run
    state: Any


def begun(name, to, *more, slice_name="v4-8", params=None):
    """Begins a run; `params`: its first parameters, to which random ones are added; None: those of the folder."""
    folder = copied(name, to)
    lines = [json.dumps({"image": f"{to}/{number}.png", "question": "what?", "answer": "ab"}) for number in range(40)]
    (to / "lines.jsonl").write_text("\n".join(lines) + "\n")
    for number in range(40):
        (to / f"{number}.png").write_bytes(PHOTO.read_bytes())
    told = (f"FOLDER = '{folder}'", f"DATA = '{to}/lines.jsonl'", "LENGTH = 64", "COMPUTE_DTYPE = 'float32'", *more)
    config = loader.load("gin/finetune_images.gin", bindings=told, slice_name=slice_name)
    experiment = config.build()
    (to / "run").mkdir()
    ready = prepared_run.prepare_run(
        experiment, config=config, revision="", run_dir=str(to / "run"), last_step=3, host=Host(0, 1, True)
    )
    if params is None:
        state = warm_start.first_state(experiment, ready.program, ready.initial, is_host_zero=True)
    else:
        state = ready.program.init_from(completed(params, ready.program.abstract_state.params))
    return Begun(pathlib.Path(folder), ready, state)


def completed(params, shapes):
    random = np.random.default_rng(3)

    def placed(leaf, values):
        values = random.normal(scale=0.1, size=leaf.shape) if values is None else np.asarray(values)
        return jax.device_put(values.astype(leaf.dtype), leaf.sharding)

    return {
        module: {name: placed(leaf, params.get(module, {}).get(name)) for name, leaf in leaves.items()}
        for module, leaves in shapes.items()
    }


def saved(begun, run=None):
    """Saves the state as step 3 of the run, or of another run directory; returns the directory."""
    run = pathlib.Path(run or begun.ready.run_dir)
    run.mkdir(exist_ok=True)
    (run / "config.gin").write_text(begun.ready.config.text)
    checkpoints = Checkpoints(run / "checkpoints", keep=1)
    checkpoints.left_out = begun.ready.initial.left_out
    checkpoints.save(3, state=begun.state, data={}, meta=begun.ready.meta)
    checkpoints.close()
    return run


def started(name, to, *more, **options):
    """Returns a run of no step that tunes a folder, and the folder."""
    found = begun(name, to, *more, **options)
    return saved(found), found.folder


def changed(begun):
    """The same with all trained parameters changed."""
    random = np.random.default_rng(7)

    def moved(a, spec):
        if not spec.trainable:
            return a
        return jax.device_put(np.asarray(a) + (0.1 * random.standard_normal(a.shape)).astype(a.dtype), a.sharding)

    params = jax.tree.map(moved, begun.state.params, begun.ready.program.param_specs)
    return begun._replace(state=begun.state._replace(params=params))


@pytest.fixture(scope="module")
def begun_llava(tmp_path_factory):
    """A run that tunes the folder `llava`."""
    return begun("llava", tmp_path_factory.mktemp("llava"))


@pytest.fixture(scope="module")
def llava(begun_llava):
    """The same, saved, and the folder."""
    return saved(begun_llava), begun_llava.folder


@pytest.fixture(scope="module")
def selecting(begun_llava, tmp_path_factory):
    """A run that tunes the folder `llava` with a selector, and the folder."""
    return started("llava", tmp_path_factory.mktemp("selecting"), *SELECTOR, params=begun_llava.state.params)


@pytest.fixture(scope="module")
def adapting(tmp_path_factory):
    """A run that tunes adapters of the folder `llava`, which is not saved."""
    return begun("llava", tmp_path_factory.mktemp("adapting"), *ADAPTERS)


@pytest.fixture(scope="module")
def base(llava):
    """The model of the folder `llava`."""
    return loaded_model.load(str(llava[1]))


@pytest.fixture(scope="module")
def without_image(base):
    """The folder's continuation of the prompt of `NO_IMAGE`."""
    [found] = base.continued(**NO_IMAGE)
    return found


def run_command(*words):
    return command.main(list(map(str, words)))


@pytest.mark.parametrize("name", ["llava", pytest.param("llava_siglip", marks=pytest.mark.slow), "smolvlm"])
def test_an_export_has_every_tensor_of_its_folder(name, llava, tmp_path, capsys):
    run, folder = llava if name == "llava" else started(name, tmp_path, slice_name="v5e-1")
    assert run_command("export", run, "--out", tmp_path / "out", "--dtype", "float32") == 0
    config = json.loads((folder / "config.json").read_text())
    assert f"{tmp_path / 'out'}: {config['model_type']}, " in capsys.readouterr().out
    exported, original = (load_file(f / "model.safetensors") for f in (tmp_path / "out", folder))
    assert exported.keys() == original.keys()
    for key, tensor in original.items():  # the run stores the tower, which it does not train, in bfloat16
        assert np.array_equal(exported[key], tensor), key
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {**config, "torch_dtype": "float32"}
    for file in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "out" / file).read_bytes() == (folder / file).read_bytes()
    processors = [json.loads((f / "preprocessor_config.json").read_text()) for f in (tmp_path / "out", folder)]
    splits = {"do_image_splitting": False} if name == "smolvlm" else {}  # rows of training have one frame
    assert processors[0] == {**processors[1], **splits}


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("llava", ADAPTERS),
        pytest.param("llava", ("FREEZE = ()",), marks=pytest.mark.slow),
        pytest.param("smolvlm", ("FREEZE = ()",), marks=pytest.mark.slow),
    ],
)
def test_an_export_of_changed_parameters_continues_as_its_run(name, more, adapting, base, tmp_path):
    first = adapting if more == ADAPTERS else begun(name, tmp_path, *more)
    run, merge = saved(changed(first), tmp_path / "changed"), ["--merge"] * (more == ADAPTERS)
    assert run_command("export", run, "--out", tmp_path / "out", "--dtype", "float32", *merge) == 0
    found = []
    for place in (run, tmp_path / "out", first.folder):
        published_files.use_copies(None)
        model = base if place == first.folder and name == "llava" else loaded_model.load(str(place))
        ids = model.checked(["what?"], max_tokens=8, is_chat=True, images=[[str(PHOTO)]])
        [text] = model.continued(["what?"], max_tokens=8, is_chat=True, images=[[str(PHOTO)]])
        found.append((ids, text))
    (ids, ours), (exported_ids, exported), (_, original) = found
    assert exported_ids == ids
    assert exported.ids == ours.ids
    np.testing.assert_allclose(exported.log_probabilities, ours.log_probabilities, atol=1e-4)
    assert np.abs(np.subtract(original.log_probabilities[:1], ours.log_probabilities[:1])).max() > 1e-3


def test_an_export_stops_where_answers_end(llava, tmp_path):
    run, folder = llava[0], pathlib.Path(copied("llava", tmp_path, end="<global-img>"))
    (folder / "config.json").write_text(
        json.dumps({**json.loads((folder / "config.json").read_text()), "dtype": "float16"})
    )
    there = f"FOLDER = '{folder}'"
    assert run_command("export", run, "--out", tmp_path / "out", "--gin", there) == 0
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    own = saved_run.read(str(run), step=steps.find(str(run)), bindings=[there]).experiment()
    stops = ids.stop_ids(own.task.vocabulary)
    assert set(stops) == set(loaded_model.load(str(run), bindings=[there]).stop_ids)
    assert len(stops) == 2
    assert set(stops) <= set(generation["eos_token_id"])
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["torch_dtype"], "dtype" in config) == ("bfloat16", False)


@pytest.mark.slow
def test_a_run_of_two_steps_trains_and_resumes(launch, tmp_path):
    folder = copied("llava", tmp_path)
    lines = [json.dumps({"image": f"{tmp_path}/{n}.png", "question": "what?", "answer": "ab"}) for n in range(40)]
    (tmp_path / "lines.jsonl").write_text("\n".join(lines) + "\n")
    for number in range(40):
        (tmp_path / f"{number}.png").write_bytes(PHOTO.read_bytes())
    told = (f"FOLDER = '{folder}'", f"DATA = '{tmp_path}/lines.jsonl'", "LENGTH = 64", "WARMUP_STEPS = 0")
    told += ("CHECKPOINT_INTERVAL = 1", "LOG_INTERVAL = 1", "LEARNING_RATE = 1e-2", "NUM_STREAMS = 1", "BATCH_SIZE = 4")
    where = ["train", "gin/finetune_images.gin", "--slice", "v5e-1", "--run-dir", tmp_path / "run"]
    words = [*map(str, where), *(word for text in told for word in ("--gin", text))]
    launch(*words, "--steps", "1", slice_name="v5e-1")
    said = launch(*words, "--steps", "6", slice_name="v5e-1")
    assert "resumed from 1" in said
    losses = [float(loss) for loss in re.findall(r"step +\d+/6  loss ([\d.]+)", said)]
    assert losses[-1] < losses[0]
    assert "validation: accuracy" in said


@pytest.mark.slow  # that an export continues as its run is quick, and so is that a folder continues as transformers
@pytest.mark.parametrize("name", ["llava", "llava_siglip"])
def test_a_run_continues_a_prompt_with_an_image_as_transformers(name, tmp_path):
    run, _ = started(name, tmp_path, "FREEZE = ()")
    reference = np.load(FIXTURES / name / "reference.npz")
    prompt = "USER: <image> what? A:"
    for slice_name in (None, "v4-8"):
        model = loaded_model.load(str(run), slice_name=slice_name)
        assert model.checked([prompt], max_tokens=8, is_chat=False, images=[[str(PHOTO)]]) == [
            reference["ids"].tolist()
        ]
        [found] = model.continued([prompt], max_tokens=8, images=[[str(PHOTO)]])
        assert reference["ids"].tolist() + found.ids == reference["greedy"].tolist()


def test_a_run_with_rounded_products_is_exported_as_others(llava, tmp_path):
    run, folder = llava
    rounded = ("--gin", "pretrained.model.quantization = 'int8'")
    assert run_command("export", run, "--out", tmp_path / "out", "--dtype", "float32", *rounded) == 0
    exported, original = (load_file(f / "model.safetensors") for f in (tmp_path / "out", folder))
    assert all(np.array_equal(exported[key], original[key]) for key in original)


def test_tensors_that_the_run_does_not_read_are_in_the_range_of_the_export(llava, tmp_path, capsys):
    run, folder = llava[0], pathlib.Path(copied("llava", tmp_path))
    tensors = load_file(folder / "model.safetensors")
    name = next(key for key in tensors if "post_layernorm.weight" in key)
    tensors[name] = tensors[name] * 0 + 1e6
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    there = ("--gin", f"INIT_FROM = '{folder}'")
    assert run_command("export", run, "--out", tmp_path / "narrow", "--dtype", "float16", *there) == 2
    assert f"{name} has 1e+06, beyond the range of float16" in capsys.readouterr().err
    assert not (tmp_path / "narrow" / "config.json").exists()
    assert run_command("export", run, "--out", tmp_path / "wide", "--dtype", "bfloat16", *there) == 0
    assert np.isfinite(load_file(tmp_path / "wide" / "model.safetensors")[name].astype(np.float32)).all()


def test_a_selector_is_not_exported(selecting, tmp_path, capsys):
    run, folder = selecting
    assert run_command("export", run, "--out", tmp_path / "out", "--dtype", "float32") == 0
    assert "without the selector: the folder's model reads all patches" in capsys.readouterr().out
    exported, original = (load_file(f / "model.safetensors") for f in (tmp_path / "out", folder))
    assert all(np.array_equal(exported[key], original[key]) for key in original)


@pytest.mark.parametrize("tuned", ["llava", "selecting"])
def test_text_without_an_image_is_that_of_the_decoder(tuned, without_image, request):
    run, _ = request.getfixturevalue(tuned)
    [found] = loaded_model.load(str(run)).continued(**NO_IMAGE)
    assert found.ids == without_image.ids
    np.testing.assert_allclose(found.log_probabilities, without_image.log_probabilities, atol=1e-4)


def test_the_sample_at_the_end_of_a_run_is_text_of_its_decoder(begun_llava, monkeypatch):
    monkeypatch.setattr(progress, "SAMPLE_IDS", 20)
    _, ready, state = begun_llava
    program, asked = ready.program, dataclasses.replace(ready.experiment.evaluation, prompt="A: no image")
    experiment = dataclasses.replace(ready.experiment, evaluation=asked)
    sharper = jax.tree.map(lambda a: jax.device_put(np.asarray(a) * np.asarray(8, a.dtype), a.sharding), state.params)
    state = state._replace(params=sharper)  # not almost uniform
    text, params = text_part.of(program, state.params)
    assert text.model is experiment.model.decoder
    vocabulary = experiment.task.vocabulary
    prompt = vocabulary.encode("A: no image")
    how = {"max_tokens": progress.SAMPLE_IDS, "sampling": sampling.Sampling(temperature=progress.TEMPERATURE)}
    how |= {"num_ids": vocabulary.size, "stop_ids": ids.stop_ids(vocabulary)}
    [want] = Generator(text, params).generate([ids.with_bos(prompt, vocabulary)], **how)
    assert progress._sample(experiment, program, state) == ids.decode_continuation(vocabulary, prompt, want.ids)


@pytest.mark.slow  # test_folders.py has a quick test that such a run reads no images
def test_a_run_with_a_selector_does_not_generate(selecting, capsys):
    run, _ = selecting
    assert run_command("generate", run, "--image", PHOTO, "--prompt", "USER: <image>", "--greedy") == 2
    assert "reads no images: only runs of gin/finetune_images" in capsys.readouterr().err


def test_adapters_are_exported_merged(adapting, tmp_path, capsys):
    run, folder = saved(adapting), adapting.folder
    assert run_command("export", run, "--out", tmp_path / "alone") == 2
    assert "exported merged only: give --merge" in capsys.readouterr().err
    assert run_command("export", run, "--out", tmp_path / "out", "--merge", "--dtype", "float32") == 0
    exported, original = (load_file(f / "model.safetensors") for f in (tmp_path / "out", folder))
    assert all(np.array_equal(exported[key], original[key]) for key in original)  # adapters begin at 0


def test_what_cannot_be_exported_is_refused_before_anything_is_written(llava, tmp_path, capsys):
    run, folder = llava
    text = FIXTURES.parent / "families" / "llama2"
    refused = {
        ("--merge",): "has no adapters: leave --merge out",
        ("--gin", "INIT_FROM = ''"): "did not begin with a published model of images and text (INIT_FROM = '')",
        ("--gin", f"INIT_FROM = '{text}'"): "expected a folder of llava, idefics3, smolvlm",
    }
    for words, says in refused.items():
        assert run_command("export", run, "--out", tmp_path / "out", *words) == 2
        assert says in capsys.readouterr().err
    config = json.loads((folder / "config.json").read_text())
    other = copied("llava", tmp_path / "other")
    (pathlib.Path(other) / "config.json").write_text(json.dumps({**config, "projector_hidden_act": "silu"}))
    assert run_command("export", run, "--out", tmp_path / "out", "--gin", f"INIT_FROM = '{other}'") == 2
    said = capsys.readouterr().err
    assert f"the model is no longer that of {other}" in said
    assert "connector_activation = 'silu' in" in said
    assert not (tmp_path / "out").exists()
