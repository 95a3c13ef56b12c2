"""An evaluation of text is one pass: each token once, in rows that depend on neither streams, batches nor hosts."""

import json
import pathlib

import numpy as np
import pytest

from core.errors import UserError
from core.training.evaluation import FirstBatches, Scored
from core.types import DataLayout
from tasks import text
from tasks.text import chat_files, document_streams, vocabularies

LENGTH = 32
TOKENIZER = pathlib.Path(__file__).parent / "fixtures" / "tokenizers" / "bpe"
TEXTS = [f"{i:03d}." + "abcdefghij"[i % 10] * (i * 7 % 57 + 90 * (i % 11 == 0)) for i in range(60)]


@pytest.fixture(autouse=True)
def small_windows(monkeypatch):
    """A split has several windows: 16 rows each, and 2 of conversations."""
    monkeypatch.setattr(document_streams, "WINDOW_IDS", 16 * LENGTH)
    monkeypatch.setattr(chat_files, "WINDOW_ROWS", 2)


def txt(folder, num_streams):
    for number, content in enumerate(TEXTS):
        (folder / f"{number:03d}.txt").write_text(content)
    return text.files(train=f"{folder}/0*.txt", validation=f"{folder}/*.txt", length=LENGTH, num_streams=num_streams)


def lines(folder, num_streams):
    write(folder / "a.jsonl", [{"text": content} for content in TEXTS])
    names = {"train": f"{folder}/a.jsonl", "validation": f"{folder}/a.jsonl"}
    return text.files(**names, length=LENGTH, num_streams=num_streams)


def conversations(folder, num_streams):
    write(folder / "chat_files.jsonl", [{"prompt": f"{n} and", "completion": " more" * (n % 5 + 1)} for n in range(40)])
    names = {"train": f"{folder}/chat_files.jsonl", "validation": f"{folder}/chat_files.jsonl"}
    vocabulary = vocabularies.tokenizer(str(TOKENIZER))
    return text.chats(**names, length=LENGTH, num_streams=num_streams, vocabulary=vocabulary)


def mixed(folder, num_streams):
    write(folder / "b.jsonl", [{"text": f"b{n}"} for n in range(7)])
    names = {"train": f"{folder}/b.jsonl", "validation": f"{folder}/b.jsonl"}
    other = text.files(**names, length=LENGTH, num_streams=num_streams)
    return text.mixture(tasks=[lines(folder, num_streams), other], weights=[1.0, 2.0])


def write(file, records):
    file.write_text("".join(json.dumps(record) + "\n" for record in records))


SOURCES = {"txt": txt, "lines": lines, "conversations": conversations, "mixed": mixed}
WAYS = [(1, 4, 1, False), (2, 4, 2, True), (4, 4, 4, False), (6, 6, 3, True), (8, 16, 4, False)]


def expected(kind):
    """The number of tokens with a weight."""
    vocabulary = vocabularies.bytes()
    count = sum(len(vocabulary.encode(content)) + 1 for content in TEXTS)
    return count + sum(len(f"b{n}") + 1 for n in range(7)) * (kind == "mixed")


@pytest.mark.parametrize("kind", SOURCES)
def test_rows_depend_on_neither_streams_batches_nor_hosts(tmp_path, kind, host_layouts, global_batch):
    passes = []
    for num_streams, batch_size, hosts, strided in WAYS:
        task = SOURCES[kind](tmp_path, num_streams)
        layouts = host_layouts(batch_size, hosts, strided=strided)
        parts = [list(task.evaluation(layout)) for layout in layouts]
        assert len({len(part) for part in parts}) == 1  # all hosts run the same steps
        batches = [global_batch(layouts, of_hosts) for of_hosts in zip(*parts, strict=True)]
        rows = {key: np.concatenate([batch[key] for batch in batches]) for key in batches[0]}
        real = np.flatnonzero(rows["segment_ids"].any(1))
        assert real.tolist() == list(range(len(real)))
        assert len(real) > len(rows["weights"]) - batch_size  # only the last batch is filled up
        assert not any(values[len(real) :].any() for values in rows.values())
        passes.append({key: values[: len(real)] for key, values in rows.items()})
    for found in passes[1:]:
        for key, values in passes[0].items():
            np.testing.assert_array_equal(found[key], values)
    if kind != "conversations":
        assert passes[0]["weights"].sum() == expected(kind)


def test_the_share_of_a_bounded_pass_is_known(tmp_path):
    layout = DataLayout(4, (0, 1, 2, 3), (0, 1, 2, 3))
    shares = {}
    for kind, make in SOURCES.items():
        (folder := tmp_path / kind).mkdir()
        task = make(folder, 4)
        whole, part = FirstBatches(task.evaluation(layout), None), FirstBatches(task.evaluation(layout), 2)
        rows = [sum(len(batch["weights"]) for batch in batches) for batches in (whole, part)]
        assert whole.share == 1.0
        exactly = FirstBatches(task.evaluation(layout), rows[0] // 4)
        assert (len(list(exactly)), exactly.share) == (rows[0] // 4, 1.0)
        shares[kind] = (part.share, rows[1] / rows[0])
    assert shares.pop("mixed")[0] is None
    for share, of_rows in shares.values():
        assert share == pytest.approx(of_rows, abs=0.2)
    assert Scored(301.0, 1.0).describe("token") == "301 tokens, all of the validation data"
    assert Scored(1.0, 0.294).describe("token") == "1 token, about 29 % of the validation data"
    assert Scored(2.0, 1e-5).describe("token") == "2 tokens, less than 1 % of the validation data"


def test_three_lines_are_enough_for_any_number_of_streams(tmp_path):
    write(tmp_path / "train.jsonl", [{"text": content} for content in TEXTS])
    write(tmp_path / "held_out.jsonl", [{"text": content} for content in TEXTS[:3]])
    names = {"train": f"{tmp_path}/train.jsonl", "validation": f"{tmp_path}/held_out.jsonl"}
    for num_streams in (1, 16):
        task = text.files(**names, length=LENGTH, num_streams=num_streams)
        (batch,) = task.evaluation(DataLayout(16, tuple(range(16)), tuple(range(16))))
        assert batch["weights"].sum() == sum(len(content) + 1 for content in TEXTS[:3])


def test_a_split_without_text_is_refused(tmp_path):
    write(tmp_path / "train.jsonl", [{"text": content} for content in TEXTS])
    write(tmp_path / "held_out.jsonl", [{"text": " "}] * 3)
    names = {"train": f"{tmp_path}/train.jsonl", "validation": f"{tmp_path}/held_out.jsonl"}
    task = text.files(**names, length=LENGTH, num_streams=2)
    with pytest.raises(UserError, match="the validation split has no document"):
        next(task.evaluation(DataLayout(2, (0, 1), (0, 1))))
