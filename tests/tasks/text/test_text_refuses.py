"""Invalid text tasks are refused, and problems are reported before data is opened."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from core.errors import UserError
from core.types import DataLayout
from tasks import text
from tasks.text import hub_source, vocabularies

ONE_ROW = DataLayout(1, (0,), (0,))
TOKENIZER = pathlib.Path(__file__).parent / "fixtures" / "tokenizers" / "bpe"
MESSAGES = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


def test_problems_are_reported_with_their_fix(tmp_path, monkeypatch):
    options = {"length": 8, "num_streams": 1}
    assert "DATA is not set" in text.files(train=None, **options).problems()[0]
    assert "no file matches" in text.files(train=f"{tmp_path}/*.txt", **options).problems()[0]
    (tmp_path / "a.csv").write_text("x")
    (csv,) = text.files(train=f"{tmp_path}/*", **options).problems()
    assert "ending in .csv, expected .txt, .jsonl, .parquet" in csv
    (tmp_path / "LICENSE").write_text("x")
    (problem,) = text.files(train=f"{tmp_path}/LICENSE", **options).problems()
    assert "LICENSE' matches files without an ending, expected" in problem
    (both,) = text.files(train=f"{tmp_path}/*", **options).problems()
    assert "matches files ending in .csv and without an ending, expected" in both
    (tmp_path / "LICENSE").unlink()
    (tmp_path / "a.txt").write_text("x")
    assert "leaves none for validation" in text.files(train=f"{tmp_path}/*.txt", **options).problems()[0]
    (tmp_path / "b.txt").write_text("y")
    assert text.files(train=f"{tmp_path}/*.txt", **options).problems() == []
    missing = text.files(train=f"{tmp_path}/x.txt", validation=f"{tmp_path}/y.txt", **options)
    assert len(missing.problems()) == 2
    assert "DATA is not set" in text.files(train="", **options).describe()
    with pytest.raises(ValueError, match="no file matches"):
        missing.train(ONE_ROW, seed=0)
    both = text.files(train=None, vocabulary=vocabularies.sentencepiece(None), **options).problems()
    assert [problem.split()[0] for problem in both] == ["DATA", "VOCABULARY"]


def _overlapping(kind, folder):
    """A task of that kind whose validation data are part of its training data."""
    for name in ("part", "val"):
        lines = [{"text": "a b c", "messages": MESSAGES, "n": number} for number in range(40)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = {"length": 8, "num_streams": 1}
    named = {"train": f"{folder}/*.jsonl", "validation": f"{folder}/val.jsonl"}
    match kind:
        case "files":
            return text.files(**named, **options)
        case "chats":
            return text.chats(**named, **options, vocabulary=vocabularies.tokenizer(str(TOKENIZER)))
        case "mixture":
            held_out = text.files(train=f"{folder}/part.jsonl", validation=named["validation"], **options)
            return text.mixture(tasks=[text.files(train=named["train"], **options), held_out], weights=[1, 1])
        case "mixture of one":
            return text.mixture(tasks=[text.files(**named, **options)], weights=[1])
        case "tfds":
            return text.tfds(name="c4/en", validation_split="train[:1%]", **options)
        case _:
            return text.huggingface(name="a/b", validation_split="train", **options)


@pytest.mark.parametrize(
    ("kind", "setting"),
    [
        ("files", "text.files.validation"),
        ("chats", "text.chats.validation"),
        ("mixture", "text.mixture"),
        ("mixture of one", "text.files.validation"),
        ("tfds", "text.tfds.validation_split"),
        ("huggingface", "text.huggingface.validation_split"),
    ],
)
def test_data_for_training_and_validation_is_refused_by_every_source_before_a_run(kind, setting, tmp_path, monkeypatch):
    monkeypatch.setattr(hub_source.extras, "missing", lambda *_, **__: None)
    task = _overlapping(kind, tmp_path)
    [problem] = task.problems()
    assert problem.startswith(f"{setting}: '")
    assert "of the training" in problem
    with pytest.raises(UserError, match=setting):
        task.prepare(str(tmp_path), is_host_zero=True)


def test_sources_with_apart_files_have_no_problem(tmp_path):
    (tmp_path / "val.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "part.jsonl").write_text('{"text": "a"}\n')
    named = {"train": f"{tmp_path}/p*.jsonl", "validation": f"{tmp_path}/val.jsonl"}
    task = text.files(**named, length=8, num_streams=1)
    other = text.files(**named, field="text2", length=8, num_streams=1)
    assert task.problems() == []
    assert text.mixture(tasks=[task, other], weights=[1, 1]).corpus.overlaps(remote=True) == []
    task.prepare(str(tmp_path), is_host_zero=True)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (
            lambda: text.python_source(length=0, num_streams=1),
            "text.python_source.length = 0: expected an integer of at least 2",
        ),
        (lambda: text.python_source(length=8, num_streams=True), "num_streams = True: expected an integer"),
        (lambda: text.python_source(length=8, num_streams=1, vocabulary="bytes"), "@vocabularies.bytes"),
        (lambda: text.files(train=[3], length=8, num_streams=1), "text.files.train is 3"),
        (lambda: text.tfds(name="", length=8, num_streams=1), "text.tfds.name"),
        (lambda: text.huggingface(name="a/b", streaming=1, length=8, num_streams=1), "streaming is 1"),
        (lambda: text.mixture(tasks=[], weights=[]), "0 tasks and 0 weights"),
        (lambda: text.seqio(name="renga.python_source", epochs=2, length=8, num_streams=1), "needs no cache"),
        (lambda: text.seqio(name="own", vocabulary=vocabularies.bytes(), length=8, num_streams=1), "output features"),
    ],
)
def test_wrong_arguments_are_named(make, reason):
    with pytest.raises(ValueError, match=reason):
        make()


def test_a_task_of_this_workspace_is_that_of_its_constructor():
    options = {"length": 8, "num_streams": 1}
    for vocabulary in (vocabularies.bytes(), vocabularies.sentencepiece("own.model")):
        made = text.seqio(name="renga.python_source", vocabulary=vocabulary, **options)
        assert made == text.python_source(vocabulary=vocabulary, **options)


def test_a_mixture_refuses_what_does_not_mix():
    one = text.files(train="a*.txt", length=8, num_streams=1)
    with pytest.raises(ValueError, match="length is 9 in a task of TextFiles and 8"):
        text.mixture(tasks=[one, text.files(train="b*.txt", length=9, num_streams=1)], weights=[1, 1])
    with pytest.raises(ValueError, match=r"expected positive numbers"):
        text.mixture(tasks=[one], weights=[0])
    with pytest.raises(ValueError, match="twice"):
        text.mixture(tasks=[one, one], weights=[1, 1])
    with pytest.raises(ValueError, match=r"cannot mix text\.seqio: own"):
        text.mixture(tasks=[text.seqio(name="own", length=8, num_streams=1, live=True)], weights=[1])
    other = text.files(train="b*.txt", length=8, num_streams=1, vocabulary=vocabularies.trained_sentencepiece(300))
    unset = [text.files(train=f"{n}*", length=8, num_streams=1, vocabulary=vocabularies.sentencepiece()) for n in "ab"]
    assert any("VOCABULARY is not set" in problem for problem in text.mixture(tasks=unset, weights=[1, 1]).problems())
    larger = text.files(train="c*.txt", length=8, num_streams=1, vocabulary=vocabularies.trained_sentencepiece(800))
    for first, second in ((one, other), (other, larger)):
        with pytest.raises(ValueError, match="different vocabularies"):
            text.mixture(tasks=[first, second], weights=[1, 1])


def test_constructing_every_task_imports_no_tensorflow():
    code = """
import sys
from tasks import synthetic, text; from tasks.text import vocabularies
o = dict(length=8, num_streams=2)
a, b = text.python_source(**o), text.files(train="/nowhere/*.txt", **o)
made = [a, b, text.tfds(name="c4/en", **o), text.huggingface(name="a/b", **o),
        text.mixture(tasks=[a, b], weights=[1, 2]),
        synthetic.random_tokens(vocab_size=9, **o),
        text.files(train="x", vocabulary=vocabularies.trained_sentencepiece(300), **o)]
for task in made:
    task.problems(), task.describe()
assert [t.named_files() for t in made[:5]] == [(), ("/nowhere/*.txt",), (), (), ("/nowhere/*.txt",)]
made[0].vocabulary.decode(made[0].vocabulary.encode("abc"))
heavy = sorted({"tensorflow", "seqio", "datasets", "tensorflow_text", "sentencepiece"} & set(sys.modules))
assert not heavy, heavy
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env={**os.environ})
    assert done.returncode == 0, done.stderr
