"""Published models of images and text continue prompts with images as transformers; wrong input is an error."""

import json
import pathlib
import shutil

import numpy as np
import pytest

from core.checkpoints import published_files
from core.errors import UserError
from launch import loaded_model
from launch.__main__ import main
from launch.images import folders
from models import pretrained
from models.decoder.published import families
from models.vision import published
from parallel.generation import generating
from tasks.vision import image_questions
from tests.models.vision import subjects

HERE = pathlib.Path(__file__).parents[2] / "models" / "fixtures" / "images"
TEXT = HERE.parent / "families" / "llama2"
PHOTO = str(HERE / "photo.png")
FOLDERS, QUICK = ("llava", "llava_siglip", "smolvlm", "idefics3"), ("llava", "smolvlm")
PROMPT = "USER: <image> what? A:"


def test_every_family_is_loaded():
    assert set(folders.FOLDERS) == set(published.FAMILIES) == set(families.WITH_IMAGES)


@pytest.fixture(scope="module")
def llava():
    """The model of the folder `llava`."""
    return loaded_model.load(str(HERE / "llava"))


@pytest.mark.parametrize("name", [pytest.param(f, marks=[pytest.mark.slow] * (f not in QUICK)) for f in FOLDERS])
def test_ids_of_the_prompt_and_greedy_ids_equal_transformers(name, llava):
    reference = np.load(HERE / name / "reference.npz")
    model = llava if name == "llava" else loaded_model.load(str(HERE / name))
    ids = model.checked([PROMPT], max_tokens=8, is_chat=False, images=[[PHOTO]])
    assert ids == [reference["ids"].tolist()]
    found = model.continued([PROMPT], max_tokens=8, images=[[PHOTO]])
    assert ids[0] + found[0].ids == reference["greedy"].tolist()
    # A prompt without an image in the same batch changes nothing, and needs none.
    both = model.continued(["A: no image", PROMPT], max_tokens=8, images=[[], [PHOTO]])
    assert [each.ids for each in both] == [model.continued(["A: no image"], max_tokens=8)[0].ids, found[0].ids]


def test_a_message_has_its_images_before_its_text(llava):
    reference = np.load(HERE / "llava" / "reference.npz")["ids"].tolist()
    assert llava.encoded("what?", is_chat=True, images=[PHOTO]) == reference  # the template has no begin-of-text
    assert llava.vocabulary.decode(llava.encoded("what?", is_chat=True)) == "USER: what? A:"


def test_an_image_may_be_longer_than_a_chunk_of_the_prompt(llava, monkeypatch):
    monkeypatch.setattr(generating, "CHUNK", 8)
    reference = np.load(HERE / "llava" / "reference.npz")
    [found] = llava.continued([PROMPT], max_tokens=8, images=[[PHOTO]])
    assert reference["ids"].tolist() + found.ids == reference["greedy"].tolist()


def test_several_devices_make_vectors_of_an_image():
    reference = np.load(HERE / "llava" / "reference.npz")
    model = loaded_model.load(str(HERE / "llava"), slice_name="v5e-4")
    assert len(model.sight.params["~"]["connector_down"].sharding.device_set) == 4
    assert not model.sight.params["~"]["connector_down"].is_fully_replicated
    [found] = model.continued([PROMPT], max_tokens=8, images=[[PHOTO]])
    assert reference["ids"].tolist() + found.ids == reference["greedy"].tolist()


def refused(capsys, *args):
    assert main(["generate", *map(str, args), "--greedy"]) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "says"),
    [
        pytest.param(
            ["--prompt", "USER: what?", "--image", PHOTO],
            "the prompt has 0 image tokens <image>, and 1 image is given",
            marks=pytest.mark.slow,  # the next case compares the same numbers
        ),
        (["--prompt", PROMPT, "--image", PHOTO, "--image", PHOTO], "1 image token <image>, and 2 images are given"),
        (["--prompt", PROMPT], "1 image token <image>, and no image is given: leave <image> out, or give --image FILE"),
        pytest.param(
            ["--prompt", "an <image>", "--chat"],
            "beside --prompt; conversations take no images",
            marks=pytest.mark.slow,  # the case before is refused by the same comparison
        ),
        (["--prompt-ids", "5,258,7", "--image", PHOTO], "has the id 258 of an image token 1 times"),
        (
            ["--prompt", PROMPT, "--image", str(HERE / "make.py")],
            "make.py is not an image that can be read (Pillow knows no such format)",
        ),
        (["--prompt", PROMPT, "--image", "absent.png"], "absent.png cannot be read"),
        (["--chat", "--image", PHOTO], "--image belongs to one prompt"),
    ],
)
def test_wrong_images_are_refused_before_weights_are_read(args, says, capsys, monkeypatch):
    monkeypatch.setattr(published_files, "weights", lambda text: pytest.fail("weights were read"))
    assert says in refused(capsys, HERE / "llava", *args)


def test_an_image_for_a_model_of_text_is_refused(capsys):
    assert "reads no images" in refused(capsys, TEXT, "--prompt-ids", "5", "--image", PHOTO)


def test_an_empty_conversation_and_images_for_other_prompts_are_errors(llava):
    with pytest.raises(UserError, match="a conversation has no messages"):
        llava.chat_ids([])
    with pytest.raises(UserError, match="images has 1 entries for 2 prompts: expected one for each"):
        llava.checked([PROMPT] * 2, max_tokens=1, is_chat=False, images=[[PHOTO]])


def test_an_image_for_a_run_is_refused():
    model = subjects.model("center")
    spec = image_questions.batch_spec(1, length=32, image_size=16, image_tokens=subjects.CHOSEN, has_kinds=False)
    program = loaded_model.bound(model, None, None, spec)
    run = loaded_model.LoadedModel(program, None, None, "step 3 of runs/seeing")
    with pytest.raises(UserError, match="only runs of gin/finetune_images"):
        run.checked([[5]], max_tokens=1, is_chat=False, images=[[PHOTO]])


@pytest.mark.parametrize(
    ("token", "says"),
    [
        (280, "config.json: the image token has the id 280, and the decoder has 280 ids"),
        (279, "no token with the id 279"),
    ],
)
def test_an_image_token_that_a_model_does_not_have_is_refused(token, says, tmp_path, capsys, monkeypatch):
    folder = shutil.copytree(HERE / "llava", tmp_path / "llava")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "image_token_index": token}))
    monkeypatch.setattr(published_files, "weights", lambda text: pytest.fail("weights were read"))
    assert says in refused(capsys, folder, "--prompt", PROMPT, "--image", PHOTO)


def test_a_folder_without_its_image_processor_is_refused(tmp_path, capsys):
    folder = shutil.copytree(HERE / "llava", tmp_path / "llava")
    (folder / "preprocessor_config.json").unlink()
    said = refused(capsys, folder, "--prompt", PROMPT, "--image", PHOTO)
    assert "has no preprocessor_config.json, nor processor_config.json" in said


def test_a_family_that_is_not_supported_is_named(tmp_path, capsys):
    config = {"model_type": "qwen2_vl", "text_config": {"model_type": "qwen2"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "model_type = 'qwen2_vl' is not known" in refused(capsys, tmp_path, "--prompt", "hi")


def says_what_reads_it(text):
    said = " ".join(text.split())
    assert "is a vision-language model, which launch/run generate FOLDER --image FILE reads" in said
    assert "and gin/finetune_images.gin for fine-tuning" in said
    assert "describe needs a language model. Its text_config is a llama" in said
    assert "not known" not in said
    return said


@pytest.mark.parametrize("name", QUICK)
def test_a_decoder_is_not_read_from_a_vision_language_model(name):
    with pytest.raises(UserError) as caught:
        pretrained.model(str(HERE / name))
    assert f"{name}/config.json: model_type = '{name}' is" in says_what_reads_it(str(caught.value))


@pytest.mark.parametrize("name", QUICK)
def test_describe_says_what_reads_a_vision_language_model(name, capsys):
    assert main(["describe", str(HERE / name)]) == 2
    says_what_reads_it(capsys.readouterr().err)


@pytest.mark.parametrize("name", QUICK)
def test_export_refuses_a_vision_language_model_as_no_run(name, tmp_path, capsys):
    assert main(["export", str(HERE / name), "--out", str(tmp_path / "out")]) == 2
    assert "is a published model, not a run" in says_what_reads_it(capsys.readouterr().err)
    assert not (tmp_path / "out").exists()


def test_export_refuses_a_published_model_of_text(tmp_path, capsys):
    assert main(["export", str(TEXT), "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert "is a published model, not a run" in said
    assert "vision" not in said
