"""Hugging Face datasets, with a fake of the library that has its documented interface."""

import itertools
import sys
import types

import numpy as np
import pytest

from core import extras
from core.errors import UserError
from core.types import DataLayout
from tasks import text
from tasks.text import document_streams, hub_source, vocabularies
from tasks.text.documents import StreamSpec


class FakeIterable:
    """IterableDataset: shards of lists; a position that survives `iter`, as the library's does."""

    def __init__(self, shards):
        self._shards, self._done, self._start = shards, 0, 0  # _done: as the last example told
        self.num_shards = len(shards)

    def shard(self, num_shards, index):
        return FakeIterable(self._shards[index::num_shards])

    def state_dict(self):
        return {"examples": self._done}

    def load_state_dict(self, state):
        self._start = state["examples"]

    def __iter__(self):
        examples = [example for shard in self._shards for example in shard]
        for number, example in enumerate(examples[self._start :], start=self._start + 1):
            self._done = number
            yield example


TOKEN = "hf_secret_of_the_test"


@pytest.fixture
def fake(monkeypatch):
    """The package, with one dataset in 4 shards; what it was called with."""
    calls = []

    def load_dataset(name, config=None, **options):
        calls.append((name, config, options))
        first = {"train": 0, "validation": 100}[options["split"]]
        return FakeIterable([[{"text": f"{first + s * 10 + i:03d}" + "." * i} for i in range(10)] for s in range(4)])

    module = types.ModuleType("datasets")
    module.load_dataset = load_dataset
    module.__spec__ = types.SimpleNamespace(name="datasets")
    monkeypatch.setitem(sys.modules, "datasets", module)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr(document_streams, "WINDOW_IDS", 200)
    return calls


def make(num_streams):
    return text.huggingface(name="owner/some:en", length=16, num_streams=num_streams)


def layout_of(rows):
    return DataLayout(rows, tuple(range(rows)), tuple(range(rows)))


@pytest.mark.parametrize("num_streams", [2, 8])  # fewer and more than the shards of the dataset
def test_continues_exactly_and_on_other_hosts(fake, num_streams, host_layouts, global_batch):
    task = make(num_streams)
    batches = task.train(layout_of(16), seed=4)
    for _ in range(9):  # more than one epoch
        next(batches)
    state, expected = batches.state(), [next(batches) for _ in range(6)]
    layouts = host_layouts(16, 2, strided=True)
    restored = [task.train(layout, seed=4) for layout in layouts]
    for part in restored:
        part.restore(state)
    for batch in expected:
        got = global_batch(layouts, [next(part) for part in restored])
        for key in batch:
            np.testing.assert_array_equal(got[key], batch[key], err_msg=key)
    assert max(map(len, state.values())) < 1000


def test_a_position_that_is_saved_after_a_resume_is_exact_too(fake):
    task = make(2)
    batches = task.train(layout_of(2), seed=4)
    expected = [next(batches) for _ in range(40)]
    batches = task.train(layout_of(2), seed=4)
    for at in range(0, 40, 5):
        for batch in expected[at : at + 5]:
            np.testing.assert_array_equal(next(batches)["targets"], batch["targets"])
        state = batches.state()
        batches = task.train(layout_of(2), seed=4)
        batches.restore(state)


def test_the_share_of_an_evaluation_is_not_told_within_a_part_of_unknown_length(fake, monkeypatch):
    monkeypatch.setattr(document_streams, "WINDOW_IDS", 20)
    batches = make(1).evaluation(layout_of(1))
    assert batches.share() == 0.0
    next(batches)
    assert batches.share() is None
    assert len(list(batches)) > 20
    assert batches.share() == 1.0


def test_bytes_that_are_not_a_position_are_refused_and_change_nothing(fake):
    source = hub_source.HuggingFace("owner/some:en", "train", "validation", field="text", streaming=True)
    stream = source.open_stream(StreamSpec("train", 0, 1, rows=2, length=16, seed=4, vocabulary=vocabularies.Bytes()))
    before = stream.state()
    for state in (b"garbage", b"{}", b'{"sources": 1, "window": 3, "row": 4}'):
        with pytest.raises(UserError, match="is not a data position"):
            stream.restore(state)
    assert stream.state() == before


@pytest.mark.parametrize(("num_streams", "is_shared"), [(4, False), (5, True)])
def test_every_shard_is_a_part_which_more_streams_than_shards_have_in_common(fake, num_streams, is_shared):
    source = hub_source.HuggingFace("owner/some:en", "train", "validation", field="text", streaming=True)
    found = source.parts("validation", num_streams)
    assert [(part.split, part.index, part.count) for part in found.parts] == [("validation", n, 4) for n in range(4)]
    assert found.is_shared == is_shared


@pytest.mark.parametrize("num_streams", [2, 8])
def test_evaluation_reads_every_document(fake, num_streams):
    task = make(num_streams)
    batches = task.evaluation(layout_of(num_streams))
    seen = []
    for batch in batches:
        for row, ids in zip(batch["targets"], batch["segment_ids"], strict=True):
            texts = [task.vocabulary.decode(row[ids == n]) for n in range(1, ids.max() + 1)]
            seen += [t[:3] for t in texts if t[:3].isdigit()]
    assert sorted(seen) == [f"{100 + i:03d}" for i in range(40)]


@pytest.mark.covers("D08")
def test_the_token_is_neither_shown_nor_passed(fake, monkeypatch, capfd):
    task = make(2)
    batches = task.train(layout_of(2), seed=0)
    next(batches)
    shown = [repr(task), task.describe(), str(task.problems()), task.fingerprint(), *capfd.readouterr(), *sys.argv]
    shown += [value.decode() for value in batches.state().values()] + [repr(call) for call in fake]
    assert not any(TOKEN in text for text in shown)
    assert fake[0] == ("owner/some", "en", {"split": "train", "streaming": True})


def test_a_dataset_that_the_library_refuses_is_named(fake, monkeypatch):
    def load_dataset(name, *_, **__):
        raise ValueError("Unknown split 'train'. Should be one of ['test'].")

    monkeypatch.setattr(sys.modules["datasets"], "load_dataset", load_dataset)
    with pytest.raises(UserError, match=r"owner/some:en, split train, cannot be loaded: Unknown split .* HF_TOKEN"):
        next(make(1).train(layout_of(1), seed=0))


def test_a_missing_validation_split_is_found_before_the_run(fake, monkeypatch, tmp_path):
    def load_dataset(name, *_, split, **__):
        if split != "train":
            raise ValueError(f"Unknown split {split!r}. Should be one of ['train'].")
        return FakeIterable([[{"text": "a"}]])

    monkeypatch.setattr(sys.modules["datasets"], "load_dataset", load_dataset)
    with pytest.raises(UserError, match=r"split validation, cannot be loaded: Unknown split 'validation'"):
        make(1).prepare(str(tmp_path), is_host_zero=True)


def test_a_wrong_field_is_named(fake):
    task = text.huggingface(name="owner/some", field="body", length=16, num_streams=1)
    with pytest.raises(ValueError, match=r"no text 'body', only \['text'\]"):
        next(task.train(layout_of(1), seed=0))


def test_a_missing_package_is_reported(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    (problem,) = make(1).problems()
    assert (problem.setting, problem.fix) == ("text.huggingface", extras.install("huggingface"))
    with pytest.raises(UserError, match="needs the package datasets"):
        next(make(1).train(layout_of(1), seed=0))


def plant(monkeypatch, texts):
    module = types.ModuleType("datasets")
    module.__spec__ = types.SimpleNamespace(name="datasets")
    module.load_dataset = lambda *_, **__: FakeIterable([[{"text": text} for text in texts]])
    monkeypatch.setitem(sys.modules, "datasets", module)
    monkeypatch.setattr(document_streams, "WINDOW_IDS", 40)


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ("a\0b", "document 3 of train: a NUL character at byte 1: the file is not text, or is damaged"),
        (None, "document 3 of train: expected a text, got NoneType"),  # as `tokenize --skip-bad` may skip
        ("ab\ud800", r"document 3 of train: half a surrogate pair \('\\ud800'\) at character 3, which is not text"),
    ],
)
def test_a_document_that_is_not_text_is_named(monkeypatch, bad, says):
    plant(monkeypatch, ["words", " \n", bad])
    task = text.huggingface(name="owner/bad", length=16, num_streams=2)
    with pytest.raises(ValueError, match=says):
        list(itertools.islice(task.train(layout_of(2), seed=0), 9))
    with pytest.raises(ValueError, match=says):
        list(task.corpus.sample_texts())


def test_documents_of_white_space_are_left_out_counted_and_reported(monkeypatch, capsys):
    plant(monkeypatch, ["words", " \n", "more words", "\t"])
    task = text.huggingface(name="owner/blank", length=16, num_streams=1)
    assert list(task.corpus.sample_texts()) == ["words", "more words"]
    said = capsys.readouterr().err
    assert (
        "owner/blank (train; validation validation), streamed: skipped because they contain only white space: 1 of 2"
        in said
    )
    batch = next(task.train(layout_of(1), seed=None))
    ids = batch["segment_ids"][0]
    texts = [task.vocabulary.decode(batch["targets"][0][ids == number]) for number in range(1, ids.max() + 1)]
    assert texts
    assert set(texts) <= {"words", "more words"}


def test_documents_of_other_languages_are_left_out(fake, monkeypatch):
    """A dataset with the columns of The Stack: text in `content`, its language in `lang`."""
    rows = [{"content": f"{lang} {i}", "lang": lang} for i in range(6) for lang in ("Python", "Go", "C")]
    monkeypatch.setattr(sys.modules["datasets"], "load_dataset", lambda *_, **__: FakeIterable([rows]))
    options = {"name": "owner/stack", "field": "content", "length": 16, "num_streams": 1}
    task = text.huggingface(**options, where={"lang": ("Python", "C")})
    assert list(task.corpus.sample_texts()) == [r["content"] for r in rows if r["lang"] != "Go"]
    assert "lang Python or C" in task.describe()
    assert task.fingerprint() != text.huggingface(**options).fingerprint()
    wrong = text.huggingface(**options, where={"language": "Python"})
    with pytest.raises(UserError, match=r"no column 'language', only \['content', 'lang'\]"):
        next(wrong.corpus.sample_texts())
