"""Conversations for fine-tuning: which tokens are learned, exact positions, and lines that are refused."""

import gzip
import json
import pathlib
import re
import shutil
import tracemalloc

import numpy as np
import pytest

from core.errors import UserError
from core.types import DataLayout
from tasks import text
from tasks.text import chat_files, packing, vocabularies

FOLDER = pathlib.Path(__file__).parent / "fixtures" / "tokenizers" / "bpe"
LENGTH = 48


def ask(number):
    return [
        {"role": "user", "content": f"What is {number} + 1?"},
        {"role": "assistant", "content": f"It is {number + 1}. 🐍"},
        {"role": "user", "content": "Sure?"},
        {"role": "assistant", "content": "Yes"},
    ]


@pytest.fixture
def tokenizer():
    return vocabularies.tokenizer(str(FOLDER))


@pytest.fixture
def chat_file(tmp_path):
    lines = [json.dumps({"messages": ask(number)}) for number in range(30)]
    lines += ["", *(json.dumps({"prompt": f"{number} and", "completion": " more"}) for number in range(10))]
    path = tmp_path / "chat_files.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


def make_task(pattern, tokenizer, **changes):
    return text.chats(**{"train": str(pattern), "length": LENGTH, "num_streams": 2, "vocabulary": tokenizer} | changes)


def test_data_that_move_between_the_splits_are_other_data(tmp_path, tokenizer):
    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_text("".join(f"{json.dumps({'messages': ask(n)})}\n" for n in range(30)))
    a, b = (str(tmp_path / f"{name}.jsonl") for name in "ab")
    splits = [([a, b], None), (a, b), (b, a)]
    found = {make_task("", tokenizer, train=train, validation=held).fingerprint() for train, held in splits}
    assert len(found) == 3


def test_a_pattern_that_is_no_text_is_named(tokenizer):
    with pytest.raises(UserError, match=r"text\.chats\.train is 3"):
        make_task("", tokenizer, train=[3])


def test_only_answers_and_their_end_markers_are_learned(tokenizer):
    chat = chat_files.read_chat("f", 1, json.dumps({"messages": ask(3)}).encode())
    segment = chat_files.segment(chat, tokenizer)
    whole = tokenizer.encode(tokenizer.chat(ask(3), add_generation_prompt=False))
    assert [*segment.inputs[:1], *segment.targets] == whole
    assert segment.inputs[1:].tolist() == segment.targets[:-1].tolist()
    learned = tokenizer._tokenizer.decode(segment.targets[segment.weights > 0].tolist(), skip_special_tokens=False)
    assert learned == "It is 4. 🐍<|im_end|>Yes<|im_end|>"


def test_compressed_files_have_the_conversations_of_plain_ones(chat_file, tokenizer):
    packed = chat_file.with_name("packed.jsonl.gz")
    packed.write_bytes(gzip.compress(chat_file.read_bytes()))
    found = make_task(packed, tokenizer)
    assert found.problems() == []
    plain, unpacked = (task.corpus.lines("train") for task in (make_task(chat_file, tokenizer), found))
    assert len(plain) > 30
    assert [line.chat()[1:] for line in unpacked] == [line.chat()[1:] for line in plain]


def test_conversations_are_held_as_the_bytes_of_their_lines(tmp_path, tokenizer):
    """As parsed messages they would need 1.7 times as much, and 4.8 times while they are read."""
    path = tmp_path / "a.jsonl"
    path.write_text(
        "".join(json.dumps({"prompt": f"{n} " + "x" * 500, "completion": "y" * 500}) + "\n" for n in range(2000))
    )
    corpus = make_task(path, tokenizer).corpus
    tracemalloc.start()
    try:
        assert len(corpus.lines("train")) + len(corpus.lines("validation")) == 2000
        held, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 1.3 * path.stat().st_size
    assert most < 2.6 * path.stat().st_size


def test_rows_do_not_depend_on_the_date(tmp_path):
    """Templates of Llama 3 begin with the date of today."""
    shutil.copytree(FOLDER, tmp_path / "bpe")
    template = (FOLDER / "tokenizer_config.json", tmp_path / "bpe" / "tokenizer_config.json")
    settings = json.loads(template[0].read_text())
    settings["chat_template"] = "Today Date: {{ strftime_now('%d %b %Y') }} " + settings["chat_template"]
    template[1].write_text(json.dumps(settings))
    tokenizer = vocabularies.tokenizer(str(tmp_path / "bpe"))
    chat = chat_files.read_chat("f", 1, json.dumps({"messages": ask(3)}).encode())
    segment = chat_files.segment(chat, tokenizer)
    whole = tokenizer.decode([*segment.inputs[:1].tolist(), *segment.targets.tolist()])
    assert whole.startswith("Today Date: 26 Jul 2024 ")


def test_a_completion_follows_its_prompt_and_ends_the_document(tokenizer):
    chat = chat_files.read_chat("f", 1, b'{"prompt": "Two and", "completion": " three"}')
    segment = chat_files.segment(chat, tokenizer)
    assert segment.targets.tolist() == [*tokenizer.encode("Two and three")[1:], tokenizer.eos_id]
    assert tokenizer.decode(segment.targets[segment.weights > 0].tolist()) == " three"
    assert segment.weights[-1] == 1


def test_rows_do_not_depend_on_hosts_and_positions_are_exact(chat_file, tokenizer, host_layouts, global_batch):
    batch_size, task = 4, make_task(chat_file, tokenizer)
    whole = task.train(DataLayout(batch_size, tuple(range(4)), tuple(range(4))), seed=3)
    batches = [next(whole) for _ in range(3)]
    saved = whole.state()
    batches += [next(whole) for _ in range(30)]  # into the second epoch
    layouts = host_layouts(batch_size, 2, strided=True)
    hosts = [task.train(layout, seed=3) for layout in layouts]
    for host in hosts:
        host.restore(saved)
    for expected in batches[3:]:
        found = global_batch(layouts, [next(host) for host in hosts])
        for key, values in expected.items():
            np.testing.assert_array_equal(found[key], values, err_msg=key)


def test_an_epoch_has_every_conversation_once(chat_file, tokenizer):
    task = make_task(chat_file, tokenizer)
    corpus = task.corpus
    train, validation = corpus.lines("train"), corpus.lines("validation")
    assert len(train) + len(validation) == 40
    assert not {line.number for line in train} & {line.number for line in validation}
    streams = [chat_files.ChatStream(corpus, _spec(task, index)) for index in range(2)]
    seen = [stream._lines[place].number for stream in streams for place in stream._order(0)]
    assert sorted(seen) == sorted(line.number for line in train)


def _spec(task, index):
    return chat_files.StreamSpec("train", index, 2, 1, LENGTH, 0, task.vocabulary)


def test_long_conversations_are_cut_and_counted(tmp_path, tokenizer, capfd):
    long = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "word " * 100}]
    hopeless = [{"role": "user", "content": "word " * 100}, {"role": "assistant", "content": "b"}]
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(json.dumps({"messages": chat}) for chat in (long, hopeless, ask(1))))
    task = make_task(path, tokenizer, num_streams=1, validation=str(path))
    batch = next(task.train(DataLayout(1, (0,), (0,)), seed=0))
    assert batch["weights"].any()
    told = capfd.readouterr().err
    assert f"cut to {LENGTH} tokens: 1 of" in told
    assert f"skipped because no answer begins within {LENGTH} tokens: 1 of" in told
    two = "\n".join(json.dumps({"messages": chat}) for chat in (hopeless, ask(1)))
    path.write_text(two)  # two in a row, where an epoch ends with the one and the next begins with it
    for seed in range(4):
        next(
            make_task(path, tokenizer, num_streams=1, validation=str(path)).train(DataLayout(1, (0,), (0,)), seed=seed)
        )
    path.write_text(json.dumps({"messages": hopeless}))
    with pytest.raises(UserError, match=r"none of 1 conversation has an answer .* set LENGTH higher"):
        next(make_task(path, tokenizer, num_streams=1, validation=str(path)).train(DataLayout(1, (0,), (0,)), seed=0))
    with pytest.raises(UserError, match=r"none of 1 conversation for validation has an answer .* set LENGTH higher"):
        next(
            iter(make_task(path, tokenizer, num_streams=1, validation=str(path)).evaluation(DataLayout(1, (0,), (0,))))
        )


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ('{"messages": [{"role": "teacher", "content": "a"}]}', "message 1 has the role 'teacher', expected one of"),
        ('{"messages": [{"role": "user", "content": null}]}', "message 1 has the content 'None', expected text"),
        ('{"messages": [{"role": "user", "content": "a"}]}', "1 message without an answer"),
        (
            '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "weight": 0}]}',
            r"message 2 has \['weight'\], which would be dropped",
        ),
        ('{"messages": "a"}', "0 messages without an answer"),
        (
            '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": " "}]}',
            "message 2 is an empty answer",
        ),
        ('{"messages": [{"role": "assistant", "content": "a"}]}', "message 1 is an answer without a question"),
        ('{"prompt": "a", "completion": ""}', "completion is '', expected text"),
        ('{"text": "a"}', r"found \['text'\], expected messages, or prompt and completion"),
        ("[]", "found list, expected messages"),
        ("{", "not JSON"),
        ('{"prompt": "a", "completion": "\\ud800"}', "half a surrogate pair"),
    ],
)
def test_a_malformed_line_is_named_before_a_run_and_when_read(tmp_path, tokenizer, line, told):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"messages": ask(1)}) + "\n" + line)
    (problem,) = make_task(path, tokenizer).problems()
    assert f"text.chats.train: {path}:2: " in problem
    with pytest.raises(UserError, match=f":2: {told}"):
        make_task(path, tokenizer).corpus.lines("train")


def test_a_malformed_line_behind_those_that_are_tried_first_is_a_problem_like_others(tmp_path, tokenizer):
    good = json.dumps({"prompt": "a" * 700, "completion": "b"})
    (tmp_path / "long.jsonl").write_text("\n".join([good] * 1600 + [json.dumps({"prompt": "a", "completion": ""})]))
    (found,) = make_task(tmp_path / "long.jsonl", tokenizer).problems()
    assert "long.jsonl:1601: completion is ''" in str(found)


def test_all_of_a_completion_without_a_prompt_is_learned(tokenizer):
    """Its first id follows the begin-of-text id, also with a tokenizer that begins no text with it."""
    assert not tokenizer.begins_with_bos
    chat = chat_files.read_chat("f", 1, json.dumps({"prompt": "", "completion": "some words"}).encode())
    segment = chat_files.segment(chat, tokenizer)
    assert segment.targets.tolist() == [*tokenizer.encode("some words"), tokenizer.eos_id]
    assert segment.weights.all()
    assert segment.inputs[0] == tokenizer.bos_id


def test_settings_that_cannot_work_are_refused(tmp_path, chat_file, tokenizer):
    assert "DATA is not set" in make_task("", tokenizer).problems()[0]
    (tmp_path / "a.txt").write_text("a")
    assert "expected .jsonl (" in make_task(tmp_path / "a.txt", tokenizer).problems()[0]
    with pytest.raises(UserError, match=r"which has no chat template: use @vocabularies\.tokenizer"):
        make_task(chat_file, vocabularies.bytes())
    with pytest.raises(UserError, match=r"and 64 streams; set NUM_STREAMS lower"):
        make_task(chat_file, tokenizer, num_streams=64).train(DataLayout(64, (63,), (63,)), seed=0)


def test_too_few_conversations_are_refused_before_a_run(tmp_path, chat_file, tokenizer):
    assert make_task(chat_file, tokenizer, num_streams=8).problems() == []
    (problem,) = make_task(chat_file, tokenizer, num_streams=512).problems()
    assert "for train and 512 streams; set NUM_STREAMS lower" in problem
    one = tmp_path / "one.jsonl"
    one.write_text(json.dumps({"messages": ask(1)}))
    (problem,) = make_task(one, tokenizer, num_streams=1).problems()
    assert "no conversation for validation" in problem
    assert make_task(chat_file, tokenizer, num_streams=8, validation=str(one)).problems() == []


def with_template(folder, template):
    shutil.copytree(FOLDER, folder)
    settings = json.loads((FOLDER / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": template}))
    return vocabularies.tokenizer(str(folder))


MARKED = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' and loop.last %}"
    "{% generation %}{{ m.content }}!\n{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
)


def test_a_template_with_marks_decides_what_is_learned(tmp_path):
    tokenizer = with_template(tmp_path / "a", MARKED)
    segment = chat_files.segment(chat_files.Chat("f:1", tuple(ask(3))), tokenizer)
    learned = tokenizer.decode(segment.targets[segment.weights > 0].tolist())
    assert learned == "Yes!\n"  # the last answer alone, with what follows it
    nothing = with_template(tmp_path / "b", MARKED.replace("loop.last", "false"))
    with pytest.raises(UserError, match=r"f:1: .*they mark nothing of this conversation"):
        chat_files.segment(chat_files.Chat("f:1", tuple(ask(3))), nothing)


def test_a_template_gets_the_tools_and_documents_of_its_line(tmp_path):
    template = "{% if tools %}{{ tools[0].name }}{% endif %}{{ documents | length if documents is not none }}"
    tokenizer = with_template(tmp_path / "a", f"{template}{MARKED}")

    def text(**given):
        chat = chat_files.read_chat("f", 1, json.dumps({"messages": ask(1)[:2], **given}).encode())
        return "".join(map(tokenizer.token_of, chat_files.segment(chat, tokenizer).inputs[:9]))

    plain = text()
    assert plain.startswith("<user")
    assert text(tools=[{"name": "now"}], documents=[{}, {}]).startswith("now2<")
    assert text(tools='[{"name": "now"}]').startswith("now<")
    assert text(tools=None, documents=None) == plain
    for wrong in ("now", {}, [3], "[3]"):
        with pytest.raises(UserError, match=r"f:1: tools is .*, expected a list of objects"):
            text(tools=wrong)


def test_the_chat_template_is_tried_before_a_run(tmp_path, chat_file, tokenizer):
    assert make_task(chat_file, tokenizer).example_problems() == []
    assert make_task(chat_file, tokenizer).describe().endswith("; answers end with <|im_end|>")
    broken = {
        "{{ raise_exception('no thanks') }}": "a.jsonl:2: .*refuses this conversation: no thanks",
        "{% if %}": "a.jsonl:2: .*malformed",
        "{{ messages | length }}: {{ messages[0].content }}": "a.jsonl:2: .*formats message 2 differently",
    }
    (tmp_path / "a.jsonl").write_text('{"prompt": "a", "completion": "b"}\n' + json.dumps({"messages": ask(1)}))
    given = {"num_streams": 1, "validation": str(chat_file)}
    for number, (template, told) in enumerate(broken.items()):
        task = make_task(tmp_path / "a.jsonl", with_template(tmp_path / str(number), template), **given)
        (problem,) = task.example_problems()
        assert re.search(told, problem)
    endless = make_task(tmp_path / "a.jsonl", with_template(tmp_path / "c", MARKED.replace("!", "")), **given)
    assert endless.example_problems() == []
    assert "answers end with no token" in endless.describe()


def test_the_description_counts_conversations_that_are_held_out(chat_file, tokenizer):
    task = make_task(chat_file, tokenizer)
    held, learned = (len(task.corpus.lines(split)) for split in ("validation", "train"))
    assert f"validation {held} of {held + learned} conversations, by hash" in task.describe()
    assert "validation 5 % of it" in make_task("gs://no-such-bucket/a.jsonl", tokenizer).corpus.describe()
    assert f"validation {chat_file}" in make_task(chat_file, tokenizer, validation=str(chat_file)).describe()
    chat_file.write_text("broken")
    assert "validation 5 % of it" in make_task(chat_file, tokenizer).corpus.describe()


def test_without_a_chat_template_prompts_and_completions_are_read(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"prompt": "a", "completion": "b"}\n' * 2)
    task = make_task(tmp_path / "a.jsonl", with_template(tmp_path / "b", None), num_streams=1, validation="")
    assert task.stop_ids() == (2,)
    assert "answers end" not in task.describe()


def test_a_template_that_rewrites_earlier_answers_is_refused(tokenizer, monkeypatch):
    plain = tokenizer.chat
    monkeypatch.setattr(
        tokenizer, "chat", lambda messages, **options: f"{len(messages)} messages:" + plain(messages, **options)
    )
    chat = chat_files.read_chat("f", 7, json.dumps({"messages": ask(1)}).encode())
    with pytest.raises(UserError, match=r"f:7: the chat template formats message 2 differently .* one line per answer"):
        chat_files.segment(chat, tokenizer)


def test_a_template_without_roles_is_refused(tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat", lambda messages, **_: "\n".join(m["content"] for m in messages))
    chat = chat_files.read_chat("f", 7, json.dumps({"messages": ask(1)}).encode())
    with pytest.raises(UserError, match="f:7: the chat template shows the contents of messages without their roles"):
        chat_files.segment(chat, tokenizer)


def test_segments_are_packed_with_their_weights():
    segment = packing.Segment(np.array([4, 5]), np.array([5, 6]), np.array([0.0, 1.0]))
    packed = packing.batch(packing.first_fit([segment, segment], length=5), length=5)
    assert packed["weights"].tolist() == [[0, 1, 0, 1, 0]]
    assert packed["inputs"].tolist() == [[4, 5, 4, 5, 0]]


@pytest.mark.parametrize("name", ["unigram", "bpe"])
@pytest.mark.parametrize("begun", ["", "<s>", "<|im_start|>"])
@pytest.mark.parametrize("ended", ["", "</s>", "<|im_end|>"])
def test_special_tokens_that_are_written_in_a_prompt_or_completion_are_not_repeated(name, begun, ended):
    tokenizer = vocabularies.tokenizer(str(FOLDER.parent / name))
    plain, written = (
        chat_files.segment(chat_files.Chat("f:1", prompt=first + "Hi", completion=f" Hello.{last}"), tokenizer)
        for first, last in (("", ""), (begun, ended))
    )
    bos, eos = {"unigram": ("<s>", "</s>"), "bpe": ("", "<|im_end|>")}[name]
    is_equal = begun in ("", bos) and ended in ("", eos)
    assert (written.inputs.tolist() == plain.inputs.tolist()) == is_equal
    assert (written.targets.tolist() == plain.targets.tolist()) == is_equal
    if is_equal:
        assert written.weights.tolist() == plain.weights.tolist()
    assert written.weights[-1] == 1


def test_a_conversation_is_converted_once_for_a_window_of_many_epochs(chat_file, tokenizer, monkeypatch):
    layout, converted = DataLayout(2, (0, 1), (0, 1)), []
    plain = chat_files.segment
    monkeypatch.setattr(
        chat_files, "segment", lambda chat, vocabulary: converted.append(chat) or plain(chat, vocabulary)
    )
    batches = make_task(chat_file, tokenizer).train(layout, seed=1)
    first = next(batches)
    assert len(converted) == len(set(chat.where for chat in converted)) < 40
    monkeypatch.setattr(chat_files.ChatStream, "_converted", lambda self, n: plain(self._lines[n].chat(), tokenizer))
    again = next(make_task(chat_file, tokenizer).train(layout, seed=1))
    assert all((first[key] == again[key]).all() for key in first)
