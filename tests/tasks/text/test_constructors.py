"""Text becomes the same rows on any number of hosts, and no text is lost."""

import collections
import gzip
import importlib.resources
import itertools
import json
import os
import pathlib
import sys
from fractions import Fraction

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from core.errors import UserError
from core.types import DataLayout
from tasks import text
from tasks.text import document_streams, documents, mixed_documents, text_files, vocabularies
from tasks.text.documents import StreamSpec

LENGTH = 32


def layout_of(rows):
    return DataLayout(rows, tuple(range(rows)), tuple(range(rows)))


def assert_equal(left, right):
    for key in left:
        np.testing.assert_array_equal(left[key], right[key], err_msg=key)


def segments(batch):
    """(targets, inputs, positions) of every segment, row by row."""
    for row in range(len(batch["targets"])):
        ids = batch["segment_ids"][row]
        for number in range(1, ids.max() + 1):
            where = ids == number
            yield tuple(batch[key][row][where] for key in ("targets", "inputs", "positions"))


@pytest.fixture(scope="module", autouse=True)
def small_windows():
    """64 rows: read soon."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(document_streams, "WINDOW_IDS", 64 * LENGTH)
        yield


@pytest.fixture(scope="module")
def python():
    return text.python_source(length=LENGTH, num_streams=2)


@pytest.fixture(scope="module")
def lines(json_folder):
    return text.files(train=f"{json_folder}/*.jsonl", field="body", length=LENGTH, num_streams=4)


def chunks_of(batches, count):
    """The targets of the first segments of one-row batches."""
    found = []
    while len(found) < count:
        found += [targets.tolist() for targets, *_ in segments(next(batches))]
    return found


# The same for all hosts


@pytest.mark.covers("D02", "D15")
@pytest.mark.parametrize("hosts", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_hosts_see_the_same_global_batches(python, hosts, host_layouts, global_batch):
    whole = python.train(layout_of(8), seed=1)
    layouts = host_layouts(8, hosts, strided=True)
    parts = [python.train(layout, seed=1) for layout in layouts]
    for _ in range(4):
        assert_equal(global_batch(layouts, [next(part) for part in parts]), next(whole))


@pytest.mark.covers("C06", "D15")
def test_a_run_continues_exactly_in_the_middle_of_the_shuffle_on_other_hosts(python, host_layouts, global_batch):
    layouts = host_layouts(8, 4, strided=True)
    parts = [python.train(layout, seed=1) for layout in layouts]
    for _ in range(40):  # 320 rows of 2 streams: more than two windows of each
        for part in parts:
            next(part)
    union = {name: value for part in parts for name, value in part.state().items()}
    expected = [global_batch(layouts, [next(part) for part in parts]) for _ in range(20)]
    fewer = host_layouts(8, 2)
    restored = [python.train(layout, seed=1) for layout in fewer]
    for batches in restored:
        batches.restore(union)
    for batch in expected:
        assert_equal(global_batch(fewer, [next(batches) for batches in restored]), batch)


def test_a_position_is_small_and_moves(python):
    batches = python.train(layout_of(8), seed=1)
    next(batches)
    first = batches.state()
    for _ in range(5):
        next(batches)
    assert max(map(len, first.values())) < 1000
    assert batches.state() != first


@pytest.mark.slow
def test_seeds_give_different_orders_and_the_same_seed_the_same(python):
    first, again, other = (next(python.train(layout_of(8), seed=seed)) for seed in (1, 1, 2))
    assert_equal(first, again)
    assert (first["targets"] != other["targets"]).any()


def test_evaluation_starts_over_at_every_call_on_any_hosts(python, host_layouts, global_batch):
    first = next(python.evaluation(layout_of(8)))
    layouts = host_layouts(8, 2, strided=True)
    assert_equal(global_batch(layouts, [next(python.evaluation(layout)) for layout in layouts]), first)
    train = next(python.train(layout_of(8), seed=1))["targets"]
    assert not {row.tobytes() for row in first["targets"]} & {row.tobytes() for row in train}


def test_a_damaged_position_is_refused(python):
    batches = python.train(layout_of(8), seed=1)
    cut = {name: value[: len(value) // 2] for name, value in batches.state().items()}
    with pytest.raises(ValueError, match="is not a data position: the checkpoint is damaged"):
        batches.restore(cut)


# What a batch holds


@pytest.mark.covers("D10", "X17")
@pytest.mark.parametrize(  # documents much longer than a row, and shorter
    "source", [pytest.param("python", marks=pytest.mark.slow), "lines"]
)
def test_packing(source, request):
    task = request.getfixturevalue(source)
    batches = task.train(layout_of(8), seed=1)
    ended, most = 0, 0
    for _ in range(30):
        batch = next(batches)
        real = batch["segment_ids"] > 0
        assert batch["weights"].dtype == np.float32
        assert (batch["weights"] == real).all()
        assert (batch["targets"][~real] == 0).all()
        assert (batch["positions"][~real] == 0).all()
        assert batch["targets"][real].min() > 0
        assert batch["targets"].max() < task.vocabulary.size
        most = max(most, batch["segment_ids"].max())
        assert real[:, 0].all()
        for targets, inputs, positions in segments(batch):
            assert positions.tolist() == list(range(len(targets)))
            assert inputs.tolist() == [0, *targets[:-1]]
            assert (targets[:-1] != 1).all()  # a document ends only where its segment does
            ended += targets[-1] == 1
    if source == "lines":
        assert most > 1
        assert ended > 0


def test_the_text_is_python(python):
    batch = next(python.evaluation(layout_of(2)))
    path = python.corpus.files("validation")[0].path
    assert python.vocabulary.decode(batch["targets"][0][batch["segment_ids"][0] == 1]) in pathlib.Path(path).read_text()
    description = python.describe()
    assert "files (train + validation)" in description
    assert "MiB" in description
    train, validation = (len(python.corpus.files(split)) for split in ("train", "validation"))
    assert 0.01 < validation / (train + validation) < 0.12
    assert train > 300
    assert not any("site-packages" in file.name for file in python.corpus.files("train"))


@pytest.mark.covers("D06")
def test_nothing_is_lost_in_an_epoch(text_folder):
    """A window has about 60 epochs of this text, in which all chunks of a stream's documents occur equally often."""
    task = text.files(train=f"{text_folder}/*.txt", validation=f"{text_folder}/*.txt", length=LENGTH, num_streams=2)
    documents = [path.read_text() for path in sorted(text_folder.iterdir())]
    for stream in range(2):
        mine = [d for epoch in range(2) for d in documents][stream::2]
        whole = [[*task.vocabulary.encode(document), 1] for document in mine]
        expected = [ids[at : at + LENGTH] for ids in whole for at in range(0, len(ids), LENGTH)]
        spec = StreamSpec("validation", stream, 2, 1, LENGTH, None, task.vocabulary)
        batches = task.corpus.open_stream(spec)
        source, window, taken = document_streams._Chunks(task.corpus, spec), [], 0
        while taken < 64 * LENGTH:
            window.append(source.take(LENGTH).tolist())
            taken += len(window[-1])
        assert window[: len(expected)] == expected
        assert sorted(chunks_of(batches, len(window))) == sorted(window)


def read(task, index, num_streams, *, split="train", seed=5):
    """The documents that one stream reads, endlessly."""
    spec = StreamSpec(split, index, num_streams, 1, 2**20, seed, task.vocabulary)  # a chunk is a document
    chunks = document_streams._Chunks(task.corpus, spec)
    while True:
        yield task.vocabulary.decode(chunks.take(2**20))


def dealt(task, index, num_streams, *, split="train", seed=5):
    """The documents that one stream reads, endlessly, each with the number that it has in the order of all streams."""
    spec = StreamSpec(split, index, num_streams, 1, 2**20, seed, task.vocabulary)  # a chunk is a document
    chunks = document_streams._Chunks(task.corpus, spec)
    while True:
        text = task.vocabulary.decode(chunks.take(2**20))
        place = chunks.position()
        yield place["seen"] + place["taken"] - 1 if chunks._is_shared else place["part"] * num_streams + index, text


def in_order(task, num_streams, count, **options):
    """The first documents of all streams, in the order before they were dealt."""
    most = count // num_streams + 1
    found = [
        pair for i in range(num_streams) for pair in itertools.islice(dealt(task, i, num_streams, **options), most)
    ]
    return [text for _, text in sorted(found, key=lambda pair: pair[0])][:count]


@pytest.mark.covers("D06")
@pytest.mark.parametrize("num_streams", [1, 4, 23, 30])  # with 30, every stream reads all 23 files
def test_every_document_once_an_epoch_in_a_new_order(text_folder, num_streams):
    task = text.files(train=f"{text_folder}/*.txt", validation=f"{text_folder}/0*.txt", length=LENGTH, num_streams=4)
    names = sorted(path.read_text() for path in text_folder.iterdir())
    order = in_order(task, num_streams, 2 * len(names))
    assert sorted(order[: len(names)]) == sorted(order[len(names) :]) == names
    assert order[: len(names)] != order[len(names) :]


@pytest.mark.covers("D06")
def test_fewer_documents_than_streams_are_dealt_by_chunk(tmp_path):
    (tmp_path / "only.txt").write_text("x" * 200)
    task = text.files(train=f"{tmp_path}/*.txt", validation=f"{tmp_path}/*.txt", length=16, num_streams=4)
    batch = next(task.train(layout_of(16), seed=0))
    assert (batch["targets"][:, :8] > 0).all()
    assert (batch["weights"].reshape(4, 4, 16).sum((1, 2)) >= 3 * 16).all()


def test_an_id_outside_the_vocabulary_is_an_error(text_folder):
    class Narrow(vocabularies.Bytes):
        size = 100  # "a" is 97 + 3

    task = text.files(train=f"{text_folder}/*.txt", length=LENGTH, num_streams=1, vocabulary=Narrow())
    with pytest.raises(ValueError, match=r"ids 1 to 1\d\d in a document, expected 1 to 99 \(id 0 is reserved"):
        next(task.train(layout_of(1), seed=0))


# Sources


def test_lines_of_json_with_fewer_files_than_streams(lines, host_layouts, global_batch):
    layouts = host_layouts(8, 4)
    parts = [next(lines.train(layout, seed=1)) for layout in layouts]
    assert_equal(global_batch(layouts, parts), next(lines.train(layout_of(8), seed=1)))


@pytest.mark.parametrize("num_streams", [1, 4, 7])
@pytest.mark.parametrize("ending", ["\n", "\r\n"])
@pytest.mark.parametrize("smallest", [2**20, 200])  # the files are shared, or divided into ranges of lines
def test_lines_of_json_are_divided_and_none_is_lost(tmp_path, smallest, ending, num_streams, monkeypatch):
    """Two files, with blank lines, a long line, and no end of the last line; about 5 % are kept for validation."""
    monkeypatch.setattr(text_files, "_SMALLEST_RANGE_BYTES", smallest)
    texts = [f"{i:03d} é" + "x" * (i * 7 % 50 + 1000 * (i == 40)) for i in range(120)]
    lines = [json.dumps({"text": text}, ensure_ascii=False) for text in texts]
    (tmp_path / "a.jsonl").write_bytes(ending.join([*lines[:50], "", "", *lines[50:70], ""]).encode())
    (tmp_path / "b.jsonl").write_bytes(ending.join(["", *lines[70:]]).encode())
    task = text.files(train=f"{tmp_path}/*.jsonl", length=LENGTH, num_streams=num_streams)
    seen = {}
    for split in ("train", "validation"):
        parts = task.corpus.parts(split, num_streams)
        seen[split] = [text.decode() for part in parts.parts for text in documents_of(part) if text]
    assert sorted(seen["train"] + seen["validation"]) == texts
    assert 1 <= len(seen["validation"]) <= 20
    parts = task.corpus.parts("train", num_streams)
    assert parts.is_shared == (smallest == 2**20 and num_streams > 2)
    assert len(parts.parts) >= (2 if smallest == 2**20 else 3 * num_streams) or num_streams == 1
    if parts.is_shared:
        order = in_order(task, num_streams, 2 * len(seen["train"]))
        for epoch in (order[: len(seen["train"])], order[len(seen["train"]) :]):
            assert sorted(epoch) == sorted(seen["train"])


def documents_of(part):
    """The documents of a part, opened anew at the offset of each."""
    reader = part.open(None)
    while (text := next(reader, None)) is not None:
        yield text
        reader = part.open(reader.offset())


@pytest.mark.parametrize("refused", [0.0, pytest.param(0.2, marks=pytest.mark.slow)])
def test_a_bucket_gives_the_rows_of_a_folder_and_an_exact_position(bucket, json_folder, refused, monkeypatch):
    """Ranges of lines, with a share of the requests refused."""
    for key, value in bucket.environment.items():
        monkeypatch.setenv(key, value)
    monkeypatch.setattr(text_files, "_SMALLEST_RANGE_BYTES", 2000)
    for file in json_folder.iterdir():
        bucket.write(f"gs://texts/{file.name}", file.read_bytes())
    options = {"field": "body", "length": LENGTH, "num_streams": 4}
    here = text.files(train=f"{json_folder}/*.jsonl", **options).train(layout_of(4), seed=2)
    there = text.files(train="gs://texts/*.jsonl", **options)
    bucket.errors(refused)
    batches = there.train(layout_of(4), seed=2)
    for _ in range(5):
        assert_equal(next(batches), next(here))
    (name, *_) = [file.name for file in json_folder.iterdir()]
    before = there.fingerprint()
    bucket.write(f"gs://texts/{name}", (json_folder / name).read_bytes() + b"\n")
    assert text.files(train="gs://texts/*.jsonl", **options).fingerprint() != before  # of another size
    bucket.write(f"gs://texts/{name}", (json_folder / name).read_bytes())
    restored = there.train(layout_of(4), seed=2)
    restored.restore(batches.state())
    assert_equal(next(restored), next(here))
    assert (bucket.errors(0.0)["refused"] > 0) == (refused > 0)


def test_lines_of_json_continue_exactly(lines):
    batches = lines.train(layout_of(8), seed=1)
    for _ in range(40):
        next(batches)
    state = batches.state()
    expected = [next(batches) for _ in range(10)]
    restored = lines.train(layout_of(8), seed=1)
    restored.restore(state)
    for batch in expected:
        assert_equal(next(restored), batch)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"content": "a"}', r"bad.jsonl:1: no text in field 'text', found \[.content.\]; name the field that has it"),
        ('{"text": ', r"bad.jsonl:1: not JSON"),
        ("[1]", r"bad.jsonl:1: no text in field 'text', found list"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, reason):
    (tmp_path / "bad.jsonl").write_text(line + "\n")
    task = text.files(train=f"{tmp_path}/bad.jsonl", validation=f"{tmp_path}/bad.jsonl", length=8, num_streams=1)
    with pytest.raises(UserError, match=reason):
        next(task.train(layout_of(1), seed=0))


def test_blank_files_among_others_end_no_run(tmp_path):
    for number in range(10):
        (tmp_path / f"{number}.txt").write_text("words" if number % 3 == 0 else " ")
    task = text.files(train=f"{tmp_path}/*.txt", validation=f"{tmp_path}/*.txt", length=LENGTH, num_streams=8)
    for index in range(8):
        assert {text for _, text in itertools.islice(dealt(task, index, 8), 50)} == {"words"}


def test_a_split_without_documents_is_refused_and_does_not_wait(tmp_path):
    (tmp_path / "one.jsonl").write_text(json.dumps({"text": "alone"}) + "\n")
    task = text.files(train=f"{tmp_path}/one.jsonl", length=8, num_streams=1)
    with pytest.raises(UserError, match="split has no document"):
        next(task.train(layout_of(1), seed=0)), next(task.evaluation(layout_of(1)))


@pytest.mark.covers("D12")
def test_a_mixture_keeps_its_weights_and_its_place_on_any_hosts(tmp_path, host_layouts, global_batch):
    for letter in "ab":
        for number in range(8):
            (tmp_path / f"{letter}{number}.txt").write_text(letter * (LENGTH - 1))
    parts = [text.files(train=f"{tmp_path}/{letter}*.txt", length=LENGTH, num_streams=2) for letter in "ab"]
    task = text.mixture(tasks=parts, weights=[3, 1])
    batches = task.train(layout_of(8), seed=0)
    first = np.concatenate([next(batches)["targets"][:, 0] for _ in range(150)])  # 1,200 rows, each of one document
    counts = np.convolve(first == ord("a") + 3, np.ones(1000), "valid")  # of any 1,000 consecutive rows
    assert set(counts) <= {749, 750, 751}
    state, expected = batches.state(), [next(batches) for _ in range(5)]
    layouts = host_layouts(8, 2)
    restored = [task.train(layout, seed=0) for layout in layouts]
    for part in restored:
        part.restore(state)
    for batch in expected:
        assert_equal(global_batch(layouts, [next(part) for part in restored]), batch)
    assert "75% text.files" in task.describe()


@pytest.mark.covers("D12")
@pytest.mark.parametrize("weights", [(1, 1), (3, 1), (7, 1)])
@pytest.mark.parametrize("rows_per_stream", [1, 2])
def test_a_mixture_reads_every_document_of_every_source(tmp_path, weights, rows_per_stream):
    """Also where the period of the weights divides the rows of a batch."""
    for letter in "ab":
        texts = (letter + "xyzw"[number // 4] + "xyzw"[number % 4] + "." * (LENGTH - 5) for number in range(16))
        (tmp_path / f"{letter}.jsonl").write_text("".join(json.dumps({"text": each}) + "\n" for each in texts))
        (tmp_path / f"{letter}_held.jsonl").write_text(json.dumps({"text": "held"}) + "\n")
    parts = [
        text.files(
            train=f"{tmp_path}/{letter}.jsonl",
            validation=f"{tmp_path}/{letter}_held.jsonl",
            length=LENGTH,
            num_streams=4,
        )
        for letter in "ab"
    ]
    task = text.mixture(tasks=parts, weights=weights)
    batches = task.train(layout_of(4 * rows_per_stream), seed=0)
    total = 16 * sum(weights) * 8  # rows for eight epochs of the source with the smaller weight
    rows = np.concatenate([next(batches)["targets"][:, :3] for _ in range(-(-total // (4 * rows_per_stream)))])
    counts = collections.Counter(bytes(row - 3).decode() for row in rows)
    assert len(counts) == 32
    for letter, weight in zip("ab", weights, strict=True):
        own = [count for name, count in counts.items() if name[0] == letter]
        assert min(own) >= sum(own) / 16 - 4  # a window of rows may be of several epochs, and is shuffled
        assert abs(sum(own) - len(rows) * weight / sum(weights)) <= 1


@pytest.mark.parametrize(
    ("weights", "num_streams", "rows_per_stream"),
    [((63, 1), 32, 1), ((1, 1), 2, 1), ((3, 1), 2, 1), ((0.95, 0.05), 16, 2), ((0.75, 0.125, 0.125), 16, 1)],
)
def test_every_1000_rows_and_every_stream_have_the_shares_of_the_weights(weights, num_streams, rows_per_stream):
    turns, exact = 32768 // (num_streams * rows_per_stream), [Fraction(weight) for weight in weights]
    drawn = np.zeros((turns, num_streams, rows_per_stream), int)
    for turn in range(turns):
        slots = [mixed_documents.slot_of(stream, num_streams, turn=turn) for stream in range(num_streams)]
        assert sorted(slots) == list(range(num_streams))
        for stream, slot in enumerate(slots):
            first = (turn * num_streams + slot) * rows_per_stream
            for row in range(rows_per_stream):
                drawn[turn, stream, row] = mixed_documents.source_of(first + row, exact)
    for source, weight in enumerate(weights):
        share = weight / sum(weights)
        counts = np.convolve((drawn == source).ravel(), np.ones(1000), "valid")
        assert abs(counts - 1000 * share).max() <= 2
        of_streams = (drawn == source).mean(axis=(0, 2))
        assert abs(of_streams - share).max() <= 0.3 * share


@pytest.mark.slow
def test_a_prepared_dataset_of_the_catalog(tmp_path, monkeypatch, capfd):
    monkeypatch.setitem(sys.modules, "importlib_resources", importlib.resources)  # a backport that some installs lack
    import tensorflow_datasets as tfds

    class Tiny(tfds.core.GeneratorBasedBuilder):
        VERSION = tfds.core.Version("1.0.0")

        def _info(self):
            return tfds.core.DatasetInfo(
                builder=self, features=tfds.features.FeaturesDict({"text": tfds.features.Text(), "number": np.int64})
            )

        def _split_generators(self, dl_manager):
            return {"train": self._generate_examples(0, 40), "validation": self._generate_examples(40, 50)}

        def _generate_examples(self, start, stop):
            for number in range(start, stop):
                yield number, {"text": f"{number:03d}" + "." * number, "number": number}
            yield "blank", {"text": " \n", "number": 0}

    Tiny(data_dir=tmp_path).download_and_prepare()
    task = text.tfds(name="tiny", data_dir=str(tmp_path), length=LENGTH, num_streams=2)
    batches = task.train(layout_of(4), seed=1)
    for _ in range(7):
        next(batches)
    state, expected = batches.state(), [next(batches) for _ in range(10)]
    restored = task.train(layout_of(4), seed=1)
    restored.restore(state)
    for batch in expected:
        assert_equal(next(restored), batch)
    decoded = [task.vocabulary.decode(t)[:3] for t, _, _ in segments(next(task.evaluation(layout_of(4))))]
    assert len({text for text in decoded if text.isdigit()} & {f"{i:03d}" for i in range(40, 50)}) >= 2
    assert "skipped because they contain only white space: 1 of" in capfd.readouterr().err
    numbers = text.tfds(name="tiny", field="number", data_dir=str(tmp_path), length=8, num_streams=1)
    with pytest.raises(UserError, match=r"text.tfds.field: 'number' is int64, expected text"):
        next(numbers.train(layout_of(1), seed=0))
    with pytest.raises(UserError, match="has no 'body', only"):
        text.tfds(name="tiny", field="body", data_dir=str(tmp_path), length=8, num_streams=1).train(
            layout_of(1), seed=0
        )


def test_a_trained_vocabulary_end_to_end(tmp_path, text_folder):
    vocabulary = vocabularies.trained_sentencepiece(300)
    task = text.files(train=f"{text_folder}/*.txt", length=LENGTH, num_streams=1, vocabulary=vocabulary)
    task.prepare(str(tmp_path), is_host_zero=True)
    batch = next(task.evaluation(layout_of(1)))
    decoded = [vocabulary.decode(targets) for targets, _, _ in segments(batch)]
    assert decoded[0] in {path.read_text() for path in text_folder.iterdir()}
    assert batch["targets"].max() < vocabulary.size


# Small sources


def train_of(folder, num_streams, **options):
    task = text.files(train=f"{folder}/*.jsonl", field="body", length=LENGTH, num_streams=num_streams, **options)
    return task.train(layout_of(2 * num_streams), seed=3)


def seen_by(batches, count):
    """Rows and positions, batch by batch."""
    return [({key: values.tolist() for key, values in next(batches).items()}, batches.state()) for _ in range(count)]


@pytest.mark.parametrize("num_streams", [1, 5])
def test_a_source_in_memory_gives_the_same_rows_and_positions(json_folder, monkeypatch, num_streams):
    """Windows of several epochs, and resumes from every position, also inside of a part."""
    kept = seen_by(train_of(json_folder, num_streams), 70)
    monkeypatch.setattr(document_streams, "_MOST_REMEMBERED", 0)
    assert seen_by(train_of(json_folder, num_streams), 70) == kept
    monkeypatch.undo()
    for at in (0, 31, 60):
        resumed = train_of(json_folder, num_streams)
        resumed.restore(kept[at][1])
        assert seen_by(resumed, 3) == kept[at + 1 : at + 4]


def test_a_small_file_is_parsed_and_converted_once_for_all_streams(json_folder, monkeypatch):
    monkeypatch.setattr(document_streams, "WINDOW_IDS", 2**14)
    read, encoded = [], []

    class Counting(vocabularies.Bytes):
        def encode(self, text):
            encoded.append(text)
            return super().encode(text)

    monkeypatch.setattr(documents.Intake, "count", lambda self, note: read.append(note))
    next(train_of(json_folder, 16, vocabulary=Counting()))
    assert len(encoded) == len(set(encoded)) > 250
    assert 0 <= len(read) - len(encoded) <= 3  # blank lines


def _write(folder, ending):
    """Three files of many documents, as text of one document each, or with one on each line or row."""
    folder.mkdir()
    for number in range(3):
        texts = [f"document {number} {row} " + "word " * 9 for row in range(40)]
        lines = "".join(json.dumps({"text": one}) + "\n" for one in texts).encode()
        file = folder / f"{number}{ending}"
        if ending == ".parquet":
            parquet.write_table(pyarrow.table({"text": texts}), file)
        else:
            content = "\n".join(texts).encode() if ending == ".txt" else lines
            file.write_bytes(gzip.compress(content) if ending.endswith(".gz") else content)


HARMS = {
    "cut in half": lambda file: os.truncate(file, file.stat().st_size // 2),
    "cut to nothing": lambda file: os.truncate(file, 0),
    "cut a little": lambda file: os.truncate(file, file.stat().st_size - 9),
    "longer": lambda file: file.write_bytes(file.read_bytes() * 2),
    "deleted": lambda file: file.unlink(),
}


@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.parametrize("ending", [".txt", ".jsonl", ".jsonl.gz", ".parquet"])
def test_files_that_change_while_they_are_read_are_errors(tmp_path, ending, harm):
    """All files change after the first batch; those that were opened before are read to their ends."""
    _write(tmp_path / "data", ending)
    batches = text.files(train=f"{tmp_path}/data/*{ending}", field="text", length=LENGTH, num_streams=1).train(
        layout_of(1), seed=0
    )
    next(batches)
    for file in (tmp_path / "data").iterdir():
        HARMS[harm](file)
    with pytest.raises(UserError, match=r"data/\d\."):
        list(itertools.islice(batches, 2000))
