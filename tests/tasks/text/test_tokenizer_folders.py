"""Tokenizers of published folders against transformers, which `fixtures/tokenizers/make.py` ran."""

import datetime
import json
import pathlib
import re
import shutil

import pytest

from core.errors import UserError
from tasks.text import template_process, vocabularies
from tasks.text.document_streams import with_end
from tasks.text.ids import decode_continuation

HERE = pathlib.Path(__file__).parent / "fixtures" / "tokenizers"


@pytest.fixture(params=["bpe", "unigram"])
def folder(request):
    return HERE / request.param


def read(folder):
    return json.loads((folder / "expected.json").read_text())


@pytest.mark.covers("D09")
def test_ids_texts_and_chats_equal_those_of_transformers(folder):
    tokenizer, expected = vocabularies.tokenizer(str(folder)), read(folder)
    assert [tokenizer.encode(text) for text in expected["texts"]] == expected["ids"]
    until_end = [ids[: ids.index(tokenizer.eos_id)] if tokenizer.eos_id in ids else ids for ids in expected["ids"]]
    assert [ids == cut for ids, cut in zip(expected["ids"], until_end, strict=True)].count(False) == 1
    for ids, cut, text in zip(expected["ids"], until_end, expected["decoded"], strict=True):
        assert text.startswith(tokenizer.decode(ids))
        assert tokenizer.decode(ids) == text or ids != cut
    assert (tokenizer.size, tokenizer.eos_id, tokenizer.bos_id) == tuple(
        expected[key] for key in ("size", "eos_id", "bos_id")
    )
    assert [tokenizer.chat(chat) for chat in expected["chats"]] == expected["formatted"]


def test_id_zero_is_an_ordinary_token_and_the_template_says_where_a_text_begins():
    bpe, unigram = (vocabularies.tokenizer(str(HERE / name)) for name in ("bpe", "unigram"))
    assert bpe.encode("<|endoftext|>") == [0]
    assert bpe.pad_id is None
    assert (bpe.begins_with_bos, unigram.begins_with_bos) == (False, True)
    assert bpe.stop_ids == (2,)


@pytest.mark.parametrize(
    ("settings", "begins"),
    [
        ({"tokenizer_class": "LlamaTokenizerFast", "add_bos_token": True}, True),
        ({"tokenizer_class": "LlamaTokenizerFast", "add_bos_token": False}, False),
        ({"tokenizer_class": "GPT2TokenizerFast", "add_bos_token": True}, False),
    ],
)
def test_a_setting_of_llama_s_tokenizers_says_whether_a_text_begins_with_its_id(tmp_path, settings, begins):
    """As in DeepSeek-R1-Distill-Qwen, whose tokenizer.json has no template."""
    shutil.copytree(HERE / "bpe", tmp_path / "copy")
    file = tmp_path / "copy" / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"bos_token": "<|endoftext|>"} | settings))
    assert vocabularies.tokenizer(str(tmp_path / "copy")).begins_with_bos == begins


def test_llama_s_setting_counts_more_than_the_template(tmp_path):
    shutil.copytree(HERE / "unigram", tmp_path / "copy")
    file = tmp_path / "copy" / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    for kind, begins in (("LlamaTokenizerFast", False), ("PreTrainedTokenizerFast", True)):
        file.write_text(json.dumps(settings | {"tokenizer_class": kind, "add_bos_token": False}))
        assert vocabularies.tokenizer(str(tmp_path / "copy")).begins_with_bos == begins


@pytest.mark.parametrize("name", ["bpe", "unigram", "strips a space", "bytes"])
def test_a_continuation_is_decoded_as_part_of_its_text(tmp_path, name):
    """Decoders such as those of Llama 2 strip a space at the beginning of what they decode."""
    vocabulary = vocabularies.bytes() if name == "bytes" else None
    if name == "strips a space":
        shutil.copytree(HERE / "unigram", tmp_path / "copy")
        content = json.loads((tmp_path / "copy" / "tokenizer.json").read_text())
        content["normalizer"]["normalizers"].insert(0, {"type": "Prepend", "prepend": "▁"})
        content["decoder"]["decoders"].append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
        (tmp_path / "copy" / "tokenizer.json").write_text(json.dumps(content))
        vocabulary = vocabularies.tokenizer(str(tmp_path / "copy"))
    vocabulary = vocabulary or vocabularies.tokenizer(str(HERE / name))
    text = "def f(x):\n    return 1 ☃  # größer"
    found = vocabulary.encode(text)
    assert vocabulary.decode(found) == text
    for at in range(len(found) + 1):
        before = vocabulary.decode(found[:at]).rstrip("\ufffd")
        assert before + decode_continuation(vocabulary, found[:at], found[at:]) == text
    for skipped in (vocabulary.eos_id, vocabulary.size):  # an id of the model alone has no text
        assert decode_continuation(vocabulary, [*found, skipped], found) == text


def test_special_tokens_that_are_written_in_a_document_are_not_repeated():
    for name, bos, eos in (("unigram", "<s>", "</s>"), ("bpe", "<|im_start|>", "<|im_end|>")):
        tokenizer = vocabularies.tokenizer(str(HERE / name))
        texts = ["Hi", f"{bos}Hi", f"Hi{eos}", f"{bos}Hi{eos}"]
        found = [with_end(tokenizer.encode(text), tokenizer, where=str).tolist() for text in texts]
        assert found == [[*tokenizer.encode("Hi"), tokenizer.eos_id]] * 4
        assert with_end(tokenizer.encode(bos), tokenizer, where=str).tolist() == [tokenizer.eos_id]


def test_several_stop_tokens_come_from_the_generation_config(tmp_path):
    shutil.copytree(HERE / "bpe", tmp_path / "bpe")
    (tmp_path / "bpe" / "generation_config.json").write_text('{"eos_token_id": [0, 2]}')
    assert vocabularies.tokenizer(str(tmp_path / "bpe")).stop_ids == (2, 0)


def test_added_tokens_beyond_the_embedding_are_refused_only_where_they_occur(tmp_path):
    """As in Gemma 3 1B: 262,145 ids for 262,144 embeddings."""
    shutil.copytree(HERE / "bpe", tmp_path / "bpe")
    content = json.loads((tmp_path / "bpe" / "tokenizer.json").read_text())
    size = vocabularies.tokenizer(str(tmp_path / "bpe")).size
    plain = {key: False for key in ("single_word", "lstrip", "rstrip", "normalized")}
    content["added_tokens"].append({"id": size, "content": "<image>", "special": True, **plain})
    (tmp_path / "bpe" / "tokenizer.json").write_text(json.dumps(content))
    assert vocabularies.tokenizer(str(tmp_path / "bpe")).size == size + 1  # of no model
    for config in ({"vocab_size": size}, {"text_config": {"vocab_size": size}}):
        (tmp_path / "bpe" / "config.json").write_text(json.dumps(config))
        tokenizer = vocabularies.tokenizer(str(tmp_path / "bpe"))
        vocabularies.check_fits(tokenizer, vocab_size=size)
        assert "without 1 token that the model lacks" in tokenizer.describe()
        assert tokenizer.decode(tokenizer.encode("plain text")) == "plain text"
        with pytest.raises(
            UserError, match=rf"contains '<image>' \(id {size}\), for which the model of .* has no embed"
        ):
            tokenizer.encode("an <image> here")
    (tmp_path / "bpe" / "config.json").write_text(json.dumps({"vocab_size": size - 100}))
    with pytest.raises(UserError, match=f"has vocab_size {size - 100}, but .* has {size + 1} ids"):
        vocabularies.check_fits(vocabularies.tokenizer(str(tmp_path / "bpe")), vocab_size=size - 100)


def test_a_folder_without_a_tokenizer_or_template_is_refused(tmp_path):
    absent = vocabularies.tokenizer(str(tmp_path))
    assert "no tokenizer.json" in absent.problems()[0]
    with pytest.raises(UserError, match=r"no tokenizer\.json in .*save_pretrained"):
        absent.encode("a")
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match="is malformed"):
        vocabularies.tokenizer(str(tmp_path)).encode("a")
    with pytest.raises(UserError, match="has no chat template"):
        vocabularies.tokenizer(str(HERE / "unigram")).chat([{"role": "user", "content": "a"}])
    with pytest.raises(UserError, match="refuses this conversation: unknown role teacher"):
        vocabularies.tokenizer(str(HERE / "bpe")).chat([{"role": "teacher", "content": "a"}])


def test_a_chat_template_is_read_and_compiled_once(tmp_path, monkeypatch):
    shutil.copytree(HERE / "bpe", tmp_path / "bpe")
    template = tmp_path / "bpe" / "chat_template.jinja"
    template.write_text("{{ messages[0].content }} on {{ strftime_now('%d %b %Y') }}")
    started, start = [], template_process.TemplateProcess._start
    monkeypatch.setattr(template_process.TemplateProcess, "_start", lambda self: started.append(1) or start(self))
    tokenizer = vocabularies.tokenizer(str(tmp_path / "bpe"))
    ask = [{"role": "user", "content": "Hi"}]
    assert tokenizer.chat(ask, date=datetime.date(2024, 2, 29)) == "Hi on 29 Feb 2024"
    template.unlink()
    assert tokenizer.chat(ask) == f"Hi on {datetime.datetime.now().astimezone():%d %b %Y}"
    assert started == [1]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% if %}", "the chat template is malformed: line 1: Expected an expression"),
        ("{{ messages + 1 }}", "the chat template refuses this conversation: TypeError: can only concatenate list"),
        ("{{ raise_exception('no') }}", "the chat template refuses this conversation: no"),
    ],
)
def test_an_error_in_a_chat_template_is_told(tmp_path, template, message):
    shutil.copytree(HERE / "bpe", tmp_path / "bpe")
    (tmp_path / "bpe" / "chat_template.jinja").write_text(template)
    with pytest.raises(UserError, match=re.escape(f"{tmp_path}/bpe: {message}")):
        vocabularies.tokenizer(str(tmp_path / "bpe")).chat([{"role": "user", "content": "a"}])


def whole(tokenizer):
    """Asks for all that is read of a folder."""
    tokenizer.prepare("", is_host_zero=True, sample=lambda: ())
    return tokenizer.size, tokenizer.bos_id, tokenizer.stop_ids, tokenizer.chat([{"role": "user", "content": "a"}])


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("tokenizer.json", b"\xff", "/tokenizer.json is malformed: .*download it again"),
        ("tokenizer_config.json", b"{", "/tokenizer_config.json: malformed JSON .*download it again"),
        ("generation_config.json", b"[1]", "/generation_config.json: malformed JSON .expected an object"),
        ("config.json", b"\xff", "/config.json: malformed JSON"),
        (
            "tokenizer_config.json",
            b'{"eos_token": 3}',
            "/tokenizer_config.json: eos_token = 3: expected text, or an ob",
        ),
        ("tokenizer_config.json", b'{"eos_token": {"id": 3}}', "eos_token = .*: expected text, or an object with"),
        ("tokenizer_config.json", b'{"eos_token": "</end>"}', "eos_token is '</end>', which tokenizer.json does not"),
        (
            "generation_config.json",
            b'{"eos_token_id": 1.5}',
            "/generation_config.json: eos_token_id = 1.5: expected an",
        ),
        ("tokenizer_config.json", b'{"eos_token_id": 2, "chat_template": 3}', "chat_template = 3: expected text, or a"),
        ("chat_template.jinja", b"\xff", "/chat_template.jinja is malformed"),
    ],
)
def test_malformed_files_are_refused_with_file_and_key(tmp_path, file, content, message):
    shutil.copytree(HERE / "bpe", tmp_path / "bpe")
    (tmp_path / "bpe" / file).write_bytes(content)
    with pytest.raises(UserError, match=f"{tmp_path}/bpe.*{message}"):
        whole(vocabularies.tokenizer(str(tmp_path / "bpe")))


def test_batches_are_converted_as_single_texts_whatever_settings_the_file_keeps(tmp_path):
    import tokenizers

    shutil.copytree(HERE / "bpe", tmp_path, dirs_exist_ok=True)
    kept = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    texts = ["a", "several words of text", "", "é 1 2 3"]
    expected = [kept.encode(text, add_special_tokens=False).ids for text in texts]
    kept.enable_padding(length=7)
    kept.enable_truncation(2)
    kept.save(str(tmp_path / "tokenizer.json"))
    vocabulary = vocabularies.tokenizer(str(tmp_path))
    assert vocabulary.encode_batch(texts) == [vocabulary.encode(text) for text in texts] == expected
