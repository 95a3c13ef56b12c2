"""A base model that is tuned on chats stops where an answer ends, here and in its export."""

import itertools
import json
import pathlib
import shutil

import pytest
import tokenizers

from core.checkpoints import published_files
from launch.cli import export
from launch.config import loader

FAMILY = pathlib.Path(__file__).parents[1] / "models" / "fixtures" / "families" / "llama3"
SPECIAL = ["<unk>", "<s>", "</s>", "<|end|>"]
WORDS = [*SPECIAL, "Hi", "Hello", "there", ".", *(f"w{i}" for i in range(75))]
TEMPLATE = (
    "{% for m in messages %} {{ m.role }} {{ m.content }} <|end|> {% endfor %}"
    "{% if add_generation_prompt %} assistant {% endif %}"
)
MESSAGES = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello there ."}]


@pytest.fixture
def folder(tmp_path):
    """A base model whose chat template ends turns with a token that is not the end of a document."""
    base = tmp_path / "base"
    shutil.copytree(FAMILY, base)
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(dict(zip(WORDS, itertools.count())), unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens(SPECIAL)
    made.save(str(base / "tokenizer.json"))
    described = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE}
    (base / "tokenizer_config.json").write_text(json.dumps(described))
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, "eos_token_id": [2, 9], "pad_token_id": 0}))
    for place in (tmp_path, tmp_path / "held_out"):
        place.mkdir(exist_ok=True)
        (place / "chats.jsonl").write_text((json.dumps({"messages": MESSAGES}) + "\n") * 40)
        (place / "a.txt").write_text("Hello there .")
    yield base
    published_files.use_copies(None)


def bindings(folder, data):
    named = {"FOLDER": str(folder), "DATA": str(data), "VALIDATION_DATA": f"{data.parent}/held_out/{data.name}"}
    named |= {
        "LENGTH": 16,
        "BATCH_SIZE": 4,
        "LEARNING_RATE": 3e-3,
        "EVAL_INTERVAL": 150,
        "PROMPT": "user Hi <|end|> assistant",
    }
    return [f"{name} = {value!r}" for name, value in named.items()]


def test_an_export_names_what_ends_the_texts_that_the_run_was_trained_on(folder, tmp_path):
    for file, data, ends in (("finetune_chats", "chats.jsonl", [2, 9, 3]), ("finetune", "a.txt", [2, 9])):
        experiment = loader.load(f"gin/{file}.gin", bindings=bindings(folder, tmp_path / data)).build()
        ids, settings = export._generation(experiment)
        assert ids == settings == {"bos_token_id": 1, "eos_token_id": ends, "pad_token_id": 0}


@pytest.mark.slow
def test_a_tuned_base_model_stops_at_the_end_of_its_answer(launch, folder, tmp_path):
    run, out = str(tmp_path / "run"), str(tmp_path / "out")
    told = itertools.chain.from_iterable(("--gin", one) for one in bindings(folder, tmp_path / "chats.jsonl"))
    options = ("--slice", "v4-8", "--run-dir", run, "--steps", "150")
    trained = launch("train", "gin/finetune_chats.gin", *options, *told, slice_name="v4-8")
    assert trained.partition("The model continues")[2].split("\n")[2] == " Hello there ."
    launch("export", run, "--out", out)
    for model in (run, out):
        asked = ("--prompt", "Hi", "--chat", "--greedy", "--max-tokens", "40", "--json")
        found = json.loads(launch("generate", model, *asked))
        assert (found["text"], len(found["ids"]), found["ended"]) == (" Hello there .", 3, True)
