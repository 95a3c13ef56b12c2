"""Chat templates against transformers, which `fixtures/chat_templates/make.py` ran."""

import datetime
import json
import pathlib

import pytest

from core.checkpoints import published_files
from core.errors import UserError
from core.files import paths
from tasks.text import vocabularies

HERE = pathlib.Path(__file__).parent / "fixtures"
EXPECTED = json.loads((HERE / "chat_templates" / "expected.json").read_text())
NOW = datetime.datetime.fromisoformat(EXPECTED["now"])


PLAIN = {key: False for key in ("single_word", "lstrip", "rstrip", "normalized")}


def tokenizer_with(folder, template, settings, *, added=()):
    """A tokenizer with a chat template; ids of the added tokens follow those of the others."""
    folder.mkdir(exist_ok=True)
    content = json.loads((HERE / "tokenizers" / "bpe" / "tokenizer.json").read_text())
    size = len(content["model"]["vocab"])
    content["added_tokens"] += [{"id": size + i, "content": c, "special": False, **PLAIN} for i, c in enumerate(added)]
    (folder / "tokenizer.json").write_text(json.dumps(content))
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": template}))
    return vocabularies.tokenizer(str(folder))


def learned(tokenizer, text, answers):
    ids, offsets = tokenizer.encode_with_offsets(text)
    return ids, "".join(str(int(any(s < last and first < e for first, last in answers))) for s, e in offsets)


@pytest.mark.covers("D09")
@pytest.mark.parametrize("name", EXPECTED["templates"])
def test_texts_ids_and_masks_equal_those_of_transformers(tmp_path, name):
    template = EXPECTED["templates"][name]
    tokenizers = {
        key: tokenizer_with(tmp_path / key, template, settings) for key, settings in EXPECTED["settings"].items()
    }
    cases = [case for case in EXPECTED["cases"] if case["template"] == name]
    assert len(cases) == len(EXPECTED["inputs"])
    for case in cases:
        given = dict(EXPECTED["inputs"][case["input"]])
        tokenizer, messages = tokenizers[given.pop("settings")], given.pop("messages")
        if "error" in case:
            with pytest.raises(UserError, match="the chat template refuses this conversation"):
                tokenizer.chat(messages, date=NOW, **given)
            continue
        text = tokenizer.chat(messages, date=NOW, **given)
        assert (text, tokenizer.encode(text)) == (case["text"], case["ids"]), case["input"]
        marked = None if given.pop("add_generation_prompt") else tokenizer.marked_chat(messages, date=NOW, **given)
        if marked:
            assert (marked[0], *learned(tokenizer, *marked)) == (text, case["ids"], case["mask"]), case["input"]
        assert (marked is None) == ("mask" not in case or EXPECTED["inputs"][case["input"]]["add_generation_prompt"])


SAYS = "{% for m in messages %}<|im_start|>{{ m.role }}: {{ m.content }}"
GENERATED = "{% for m in messages %}{{ m.role }}: {% if m.role == 'assistant' %}"
ADDED = ("<|eot_id|>", "<end_of_turn>", "<|end|>", "<|return|>", "<turn|>", "<|end_of_text|>", "<｜end▁of▁sentence｜>")


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (EXPECTED["templates"]["chatml"], ["<|im_end|>"]),
        (EXPECTED["templates"]["chatml_marked"], ["<|im_end|>"]),
        (EXPECTED["templates"]["llama3"], ["<|eot_id|>"]),
        (EXPECTED["templates"]["qwen"], ["<|im_end|>"]),
        (EXPECTED["templates"]["mistral"], ["<|endoftext|>"]),
        (EXPECTED["templates"]["gemma"], ["<end_of_turn>"]),
        (EXPECTED["templates"]["gemma4"], ["<turn|>"]),
        (EXPECTED["templates"]["deepseek"], ["<｜end▁of▁sentence｜>"]),
        (EXPECTED["templates"]["granite4"], ["<|end_of_text|>"]),
        (SAYS + "\n#\n{% endfor %}", ["#"]),  # an ordinary token, the only one after the content
        (SAYS + " and so on\n{% endfor %}", []),
        (SAYS + "\n{% endfor %}", []),
        (SAYS + "{{ '<|return|>' if loop.last and m.role == 'assistant' else '<|end|>' }}{% endfor %}", ["<|return|>"]),
        (
            GENERATED + "{% generation %}{{ m.content }}{{ '<|return|>' if loop.last else '<|end|>' }}"
            "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}",
            ["<|end|>", "<|return|>"],
        ),
        (
            GENERATED + "{% generation %}{{ m.content }}{% endgeneration %}{{ eos_token }}"
            "{% else %}{{ m.content }}{% endif %}{% endfor %}",
            [],
        ),
        ("{{ raise_exception('no') }}", []),
        ("{% if %}", []),
        (None, []),
    ],
)
def test_the_tokens_that_end_an_answer_end_generation(tmp_path, template, expected):
    tokenizer = tokenizer_with(tmp_path / "a", template, {"eos_token": "<|endoftext|>"}, added=ADDED)
    assert [tokenizer.token_of(i) for i in tokenizer.turn_ends] == expected
    assert tokenizer.stop_ids == tuple(dict.fromkeys([tokenizer.eos_id, *tokenizer.turn_ends]))


def test_one_of_several_templates_is_for_tools(tmp_path):
    templates = [{"name": name, "template": name} for name in ("default", "tool_use")]
    tokenizer = tokenizer_with(tmp_path / "a", templates, {"eos_token": "<|im_end|>"})
    assert tokenizer.chat([]) == "default"
    assert tokenizer.chat([], tools=[]) == "tool_use"
    assert tokenizer_with(tmp_path / "b", templates[:1], {}).chat([], tools=[]) == "default"


def test_templates_in_files_of_their_own_are_for_tools_too(tmp_path):
    tokenizer = tokenizer_with(tmp_path / "a", "unused", {"eos_token": "<|im_end|>"})
    (tmp_path / "a" / "chat_template.jinja").write_text("default")
    (tmp_path / "a" / "additional_chat_templates").mkdir()
    (tmp_path / "a" / "additional_chat_templates" / "tool_use.jinja").write_text("tool_use")
    assert tokenizer.chat([]) == "default"
    assert tokenizer.chat([], tools=[]) == "tool_use"
    for to in ("b", "b"):  # a second copy changes nothing
        (tmp_path / to).mkdir(exist_ok=True)
        published_files.copy_templates(paths.Path(tmp_path / "a"), paths.Path(tmp_path / to))
    assert (tmp_path / "b" / "additional_chat_templates" / "tool_use.jinja").read_text() == "tool_use"
    published_files.copy_templates(paths.Path(tmp_path), paths.Path(tmp_path / "b"))
    assert not list((tmp_path / "b").rglob("*.jinja"))


def test_a_mark_whose_place_in_the_text_is_not_known_is_an_error_where_marks_are_needed(tmp_path):
    template = "{% set said %}{% generation %}b{% endgeneration %}{% endset %}a{{ said }}"
    tokenizer = tokenizer_with(tmp_path / "a", template, {"eos_token": "<|im_end|>"})
    assert tokenizer.chat([]) == "ab"
    with pytest.raises(UserError, match="its place in the text is not known"):
        tokenizer.marked_chat([])
