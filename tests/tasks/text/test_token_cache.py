"""A token cache holds every document once, and is read alike on any hosts and from any position."""

import collections
import concurrent.futures
import contextlib
import importlib.machinery
import itertools
import json
import shutil
import sys
import types

import numpy as np
import pytest

from core.errors import UserError
from core.files import paths
from core.types import DataLayout
from tasks import text
from tasks.text import document_streams, documents, token_cache, token_writer, tokenizing, vocabularies
from tasks.text.documents import StreamSpec
from tasks.text.filters import Filters

LENGTH = 32
TEXTS = [f"{i:03d} é" + "x" * (i * 7 % 50 + 300 * (i % 97 == 0)) for i in range(300)]


class Inline:
    """Converts in this process, because starting others takes seconds."""

    def __init__(self, vocabulary, excluded, signs, processes):
        tokenizing._vocabulary = vocabularies.named(vocabulary)
        tokenizing._excluded, tokenizing._signs = excluded, signs

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def map(self, call, *items):
        return map(call, *items)

    def submit(self, call, *arguments):
        done = concurrent.futures.Future()
        done.set_result(call(*arguments))
        return done


@pytest.fixture(autouse=True, scope="module")
def small():
    """Everything happens several times: batches of few documents, shards of few blocks, windows of few rows."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizing, "_pool", Inline)
        patch.setattr(tokenizing, "_BATCH_BYTES", 400)
        patch.setattr(token_writer, "_COMMIT_TOKENS", 2000)
        patch.setattr(token_cache, "SHARD_TOKENS", 1024)
        patch.setattr(token_cache, "BLOCK_TOKENS", 64)
        patch.setattr(token_cache, "_REQUEST_TOKENS", 256)
        patch.setattr(token_cache, "AHEAD_TOKENS", 1024)
        patch.setattr(token_cache, "_BOUNDS", 16)
        patch.setattr(document_streams, "WINDOW_IDS", 16 * LENGTH)
        yield


def write_lines(file, texts):
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(file)


def tokenize(
    out,
    data,
    *,
    validation=(),
    skip_bad=False,
    vocabulary="bytes",
    report=lambda counts: None,
    check=lambda: None,
    **filters,
):
    sources = (str(data),), tuple(map(str, validation))
    job = tokenizing.Job(*sources, "text", vocabulary, str(out), skip_bad, Filters(**filters))
    said = []
    return tokenizing.run(job, processes=1, say=said.append, report=report, check=check), said


@pytest.fixture(scope="module")
def cache(tmp_path_factory, small):
    """TEXTS for training, and 20 of them for validation."""
    folder = tmp_path_factory.mktemp("tokens")
    held_out = write_lines(folder / "held_out.jsonl", TEXTS[:20])
    tokenize(folder / "cache", write_lines(folder / "train.jsonl", TEXTS), validation=[held_out])
    return folder / "cache"


def make_task(cache, *, num_streams=4, **options):
    return text.tokens(cache=str(cache), length=LENGTH, num_streams=num_streams, **options)


def documents_of(task, index, num_streams, *, split="train", seed=5, start=0):
    """The documents of one stream from one of them on, endlessly."""
    spec = StreamSpec(split, index, num_streams, 1, 2**20, seed, task.vocabulary)
    reader = token_cache._Documents(task.corpus, spec)
    reader.move({"document": start, "id": 0})
    while True:
        yield task.vocabulary.decode(reader.take(2**20))


def decoded(task, split):
    """All documents of a split, in order."""
    spec = StreamSpec(split, 0, 1, 1, 2**20, None, task.vocabulary)
    reader = token_cache._Documents(task.corpus, spec)
    return [task.vocabulary.decode(reader.take(2**20)) for _ in range(task.corpus.split(split).documents)]


# Reading


@pytest.mark.covers("D06")
@pytest.mark.parametrize("num_streams", [1, 4, 7])
def test_every_document_comes_exactly_once_an_epoch(cache, num_streams):
    """Counted over all streams: document k of stream s is number k * S + s."""
    task = make_task(cache)
    streams = [documents_of(task, index, num_streams) for index in range(num_streams)]
    order = [next(streams[number % num_streams]) for number in range(3 * len(TEXTS))]
    epochs = [order[at : at + len(TEXTS)] for at in range(0, len(order), len(TEXTS))]
    for epoch in epochs:
        assert collections.Counter(epoch) == collections.Counter(TEXTS)
    assert epochs[0] != epochs[1] != epochs[2] != TEXTS
    assert decoded(task, "validation") == TEXTS[:20]


@pytest.mark.covers("C06", "D07", "D15")
@pytest.mark.parametrize("concatenate", [False, True])
def test_any_hosts_read_the_same_and_continue_exactly(cache, host_layouts, global_batch, concatenate):
    task = make_task(cache, num_streams=16, concatenate=concatenate)

    def batches_of(hosts):
        layouts = host_layouts(16, hosts)
        return layouts, [task.train(layout, seed=1) for layout in layouts]

    _, (whole,) = batches_of(1)
    state = {}
    for step in range(30):
        state[step] = whole.state()
        whole_batch = next(whole)
        if step == 17:
            expected = whole_batch
    for hosts in (1, 2, 4, 16):
        layouts, restored = batches_of(hosts)
        for part in restored:
            part.restore(state[17])
        found = global_batch(layouts, [next(part) for part in restored])
        for key, values in expected.items():
            np.testing.assert_array_equal(found[key], values, err_msg=f"{key} on {hosts} hosts")
        merged = {name: value for part in restored for name, value in part.state().items()}
        assert merged == state[18]
    position = json.loads(state[17]["stream_00000"].partition(b"\n")[2])
    assert sorted(position) == ["row", "source", "window"]
    assert sorted(position["source"]) == ["document", "id"]


def test_a_position_far_ahead_is_reached_at_once(cache):
    task = make_task(cache)
    far = 300 * 10**9 + 7  # in epoch 4 * 10^9: nothing before it is read
    order = list(itertools.islice(documents_of(task, 1, 4, start=far), 70))
    assert list(itertools.islice(documents_of(task, 1, 4, start=far + 50), 20)) == order[50:]


def test_concatenated_rows_are_full_and_continue_documents(cache):
    task = make_task(cache, num_streams=1, concatenate=True)
    batches = task.evaluation(DataLayout(16, tuple(range(16)), tuple(range(16))))
    batch = next(batches)
    assert batch["weights"].all()
    ends = (batch["targets"] == 1).sum()
    assert batch["segment_ids"].max(1).sum() <= ends + 16  # a document is one segment of a row
    spec = StreamSpec("validation", 0, 1, 1, 2**20, None, task.vocabulary)
    reader = token_cache._Documents(task.corpus, spec)
    stream = np.concatenate([reader.take(2**20) for _ in range(40)])[: 16 * LENGTH].reshape(16, LENGTH)
    assert sorted(map(tuple, batch["targets"])) == sorted(map(tuple, stream))


@pytest.mark.covers("D10")
def test_packed_rows_hold_whole_documents(cache):
    task = make_task(cache, num_streams=1)
    batches = task.train(DataLayout(16, tuple(range(16)), tuple(range(16))), seed=0)
    whole = [[*task.vocabulary.encode(text), 1] for text in TEXTS]
    chunks = {tuple(ids[at : at + LENGTH]) for ids in whole for at in range(0, len(ids), LENGTH)}
    found = []
    for _ in range(4):
        batch = next(batches)
        for row, ids in zip(batch["targets"], batch["segment_ids"], strict=True):
            found += [tuple(row[ids == n].tolist()) for n in range(1, ids.max() + 1)]
    assert set(found) <= chunks
    assert len(set(found)) > 60


@pytest.mark.covers("D12")
def test_caches_are_mixed_exactly(cache, tmp_path):
    other = tmp_path / "other"
    tokenize(
        other, write_lines(tmp_path / "b.jsonl", ["b" * 31] * 50), validation=[write_lines(tmp_path / "v.jsonl", ["b"])]
    )
    tasks = [make_task(cache), make_task(other)]
    batches = text.mixture(tasks=tasks, weights=[7, 3]).train(DataLayout(8, tuple(range(8)), tuple(range(8))), seed=0)
    rows = np.concatenate([(next(batches)["targets"][:, 0] == ord("b") + 3) for _ in range(250)])
    counts = np.convolve(rows, np.ones(1000), "valid")
    assert set(counts) <= {298, 299, 300, 301, 302}  # streams rotate within a batch


# Refusals


@pytest.mark.covers("D09")
def test_what_is_not_a_complete_cache_of_this_tokenizer_is_refused(cache, tmp_path):
    assert make_task(cache).problems() == []
    (wrong,) = make_task(cache, vocabulary=vocabularies.Numbers(9)).problems()
    assert "was written with another tokenizer: bytes (259 ids); this run has numbers (9 ids)" in wrong
    assert "Set VOCABULARY = 'bytes'" in wrong
    (absent,) = make_task(tmp_path).problems()
    assert "no token cache at" in absent
    assert "launch/run tokenize --out" in absent
    (unset,) = text.tokens(cache=None, length=8, num_streams=1).problems()
    assert unset.startswith("DATA is not set")

    def stop(counts):
        if counts.total("documents") > 100:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tokenize(tmp_path / "half", write_lines(tmp_path / "a.jsonl", TEXTS), report=stop)
    (half,) = make_task(tmp_path / "half").problems()
    assert "is not complete: wait for the command" in half
    with pytest.raises(UserError, match="is not complete"):
        make_task(tmp_path / "half").train(DataLayout(4, (0, 1, 2, 3), (0, 1, 2, 3)), seed=0)
    shutil.copytree(cache, tmp_path / "all")
    about = json.loads((cache / "cache.json").read_text())
    about["splits"]["validation"]["documents"] = 0  # as earlier revisions wrote
    (tmp_path / "all" / "cache.json").write_text(json.dumps(about))
    (empty,) = make_task(tmp_path / "all").problems()
    assert "has no document for validation" in empty


def test_what_was_changed_or_removed_later_is_named(cache, tmp_path):
    copy = shutil.copytree(cache, tmp_path / "copy")
    array = token_cache.array(paths.resolve(copy) / "train", "tokens", "uint16", writes=True)
    array[5000] = 99
    with pytest.raises(UserError, match=r"document \d+ differs\. train/tokens/c/4 was changed or is damaged"):
        decoded(make_task(copy), "train")
    shutil.rmtree(copy / "train" / "tokens" / "c")
    with pytest.raises(UserError, match=r"copy' cannot be read, was it changed or removed\?.*tokens/"):
        decoded(make_task(copy), "train")


@pytest.mark.parametrize("changed", [3, 99, 100, 250])
def test_a_change_anywhere_in_the_document_of_a_position_is_named(cache, tmp_path, changed):
    copy = shutil.copytree(cache, tmp_path / "copy")
    array = token_cache.array(paths.resolve(copy) / "train", "tokens", "uint16", writes=True)
    task = make_task(copy)
    reader = token_cache._Documents(task.corpus, StreamSpec("train", 0, 1, 1, LENGTH, None, task.vocabulary))
    reader.move({"document": 0, "id": 100})  # of 306
    assert task.vocabulary.decode(reader.take(300)) == TEXTS[0][99:]
    array[changed] = 99
    reader = token_cache._Documents(make_task(copy).corpus, StreamSpec("train", 0, 1, 1, LENGTH, None, task.vocabulary))
    reader.move({"document": 0, "id": 100})
    with pytest.raises(UserError, match="document 0 differs"):
        reader.take(300)


def test_a_position_beyond_its_document_is_an_error(cache):
    task = make_task(cache)
    reader = token_cache._Documents(task.corpus, StreamSpec("train", 0, 1, 1, LENGTH, None, task.vocabulary))
    reader.move({"document": 0, "id": 5000})
    with pytest.raises(UserError, match="after id 5000 of document 0, which has fewer"):
        reader.take(1)


def test_another_cache_at_the_same_place_is_refused_by_a_position(cache, tmp_path):
    rows = DataLayout(4, (0, 1, 2, 3), (0, 1, 2, 3))
    state = make_task(cache).train(rows, seed=0).state()
    held_out = write_lines(tmp_path / "held_out.jsonl", TEXTS[:20])
    tokenize(tmp_path / "cache", write_lines(tmp_path / "a.jsonl", TEXTS[::-1]), validation=[held_out])
    with pytest.raises(UserError, match="the saved data position belongs to other data"):
        make_task(tmp_path / "cache").train(rows, seed=0).restore(state)


# Writing


def contents(cache):
    """Every array of a cache, and its `cache.json`."""
    about = json.loads((cache / "cache.json").read_text())
    kinds = {"tokens": about["dtype"], "ends": "int64", "checks": "uint32"}
    arrays = {
        (split, name): token_cache.array(paths.resolve(cache) / split, name, kind)[:].read().result().tolist()
        for split in token_cache.SPLITS
        for name, kind in kinds.items()
    }
    return about, arrays


@pytest.mark.covers("D06")
def test_an_interrupted_command_continues_without_duplicates_or_losses(tmp_path):
    """Interrupted every few batches, and once where it would have written."""
    data = write_lines(tmp_path / "a.jsonl", TEXTS)
    tokenize(tmp_path / "whole", data)
    expected = contents(tmp_path / "whole")
    assert collections.Counter(
        [*decoded(make_task(tmp_path / "whole"), "train"), *decoded(make_task(tmp_path / "whole"), "validation")]
    ) == collections.Counter(TEXTS)
    starts = 0
    for _ in range(100):
        starts += 1
        reports, checks = itertools.count(), itertools.count()

        def stop(counts, reports=reports):
            if next(reports) == 7:
                raise KeyboardInterrupt

        def fail(starts=starts, checks=checks):
            if starts == 3 and next(checks) == 1:
                raise KeyboardInterrupt

        try:
            _, said = tokenize(tmp_path / "parts", data, report=stop, check=fail)
            break
        except KeyboardInterrupt:
            assert not (tmp_path / "parts" / "cache.json").exists()
    assert starts > 4
    assert said[0].startswith("continuing after ")
    assert contents(tmp_path / "parts") == expected
    assert tokenize(tmp_path / "parts", data)[1] == [f"{tmp_path}/parts is complete"]
    assert not (tmp_path / "parts" / "tokenizing.json").exists()


def test_changed_sources_and_settings_are_named(tmp_path):
    for name in "ab":
        write_lines(tmp_path / f"{name}.jsonl", TEXTS)
    out, data = tmp_path / "out", f"{tmp_path}/*.jsonl"

    def stop(counts):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tokenize(out, data, report=stop)
    (tmp_path / "b.jsonl").write_text((tmp_path / "a.jsonl").read_text())  # the same again
    with pytest.raises(KeyboardInterrupt):
        tokenize(out, data, report=stop)
    write_lines(tmp_path / "b.jsonl", [*TEXTS[1:], TEXTS[0]])
    with pytest.raises(UserError, match=rf"changed since it was begun: {tmp_path}/b.jsonl has other content\. Restore"):
        tokenize(out, data)
    write_lines(tmp_path / "b.jsonl", TEXTS[1:])
    write_lines(tmp_path / "c.jsonl", TEXTS)
    with pytest.raises(UserError, match=r"b.jsonl has [\d,]+ bytes, before [\d,]+; .*c.jsonl was added\."):
        tokenize(out, data)
    (tmp_path / "held_out").mkdir()
    held_out = write_lines(tmp_path / "held_out" / "a.jsonl", TEXTS)
    with pytest.raises(UserError, match="was begun with the split by hash"):
        tokenize(out, data, validation=[held_out])
    with pytest.raises(UserError, match=r"no tokenizer\.json in"):
        tokenize(out, data, vocabulary=str(tmp_path))


def test_files_that_move_to_the_other_split_are_named(tmp_path):
    a, b, c = (write_lines(tmp_path / f"{name}.jsonl", TEXTS[n:]) for n, name in enumerate("abc"))
    both = f"{tmp_path}/[ab].jsonl"
    tokenize(tmp_path / "out", both, validation=[c])
    with pytest.raises(UserError, match=r"b\.jsonl is in validation now, before in train"):
        tokenize(tmp_path / "out", a, validation=[b, c])
    tokenize(tmp_path / "out", both, validation=[c])


def test_a_command_continues_after_its_sources_moved(tmp_path):
    """Files of other folders are compared by content; what is complete is the same whether they moved or not."""
    for folder in ("old", "new", "other"):
        for number, name in enumerate(("a/1.jsonl", "b/2.jsonl")):
            (tmp_path / folder / name).parent.mkdir(parents=True, exist_ok=True)
            texts = TEXTS[number::2] if folder != "other" else TEXTS[number::2][::-1]
            write_lines(tmp_path / folder / name, texts)
    patterns = {folder: f"{tmp_path}/{folder}/*/*.jsonl" for folder in ("old", "new", "other")}

    def stop(counts):
        raise KeyboardInterrupt

    tokenize(tmp_path / "straight", patterns["old"])
    with pytest.raises(KeyboardInterrupt):
        tokenize(tmp_path / "out", patterns["old"], report=stop)
    with pytest.raises(UserError, match=rf"{tmp_path}/other/a/1.jsonl has other content"):
        tokenize(tmp_path / "out", patterns["other"])
    for file in tmp_path.glob("old/*/*.jsonl"):
        file.unlink()
    about, _ = tokenize(tmp_path / "out", patterns["new"])
    assert [entry["path"] for entry in about["sources"]] == sorted(map(str, tmp_path.glob("new/*/*")))
    kept = [json.loads((tmp_path / out / "cache.json").read_text()) for out in ("straight", "out")]
    assert kept[0]["splits"] == kept[1]["splits"]
    assert [entry["sha256"] for entry in kept[0]["sources"]] == [entry["sha256"] for entry in kept[1]["sources"]]
    assert tokenize(tmp_path / "straight", patterns["new"])[1] == [f"{tmp_path}/straight is complete"]
    (tmp_path / "new" / "c").mkdir()
    write_lines(tmp_path / "new" / "c" / "3.jsonl", TEXTS)
    with pytest.raises(UserError, match=rf"{tmp_path}/new/a/1.jsonl was added; .*new/b/2.jsonl was added; .*new/c/3"):
        tokenize(tmp_path / "straight", patterns["new"])


def test_files_for_training_and_validation_are_refused(tmp_path, monkeypatch):
    for name in ("part", "val"):
        write_lines(tmp_path / f"{name}.jsonl", TEXTS)
    monkeypatch.chdir(tmp_path)
    for skip_bad in (False, True):
        with pytest.raises(UserError, match=r"^--validation: 'val.jsonl' matches 1 file of the training data \(/"):
            tokenize(tmp_path / "out", f"{tmp_path}/*.jsonl", validation=["val.jsonl"], skip_bad=skip_bad)
    assert not (tmp_path / "out").exists()
    with pytest.raises(UserError, match=r"^--validation: 'train' has examples of the training split 'train'"):
        tokenize(tmp_path / "out", "tfds:c4/en", validation=["train"])


def test_a_source_that_changes_while_it_is_read_is_named_and_nothing_of_it_is_kept(tmp_path):
    file = tmp_path / "a.jsonl"
    write_lines(file, TEXTS)

    def change(counts):
        if not file.read_text().endswith(" \n"):
            file.write_text(file.read_text() + " \n")

    with pytest.raises(UserError, match=r"a\.jsonl was changed while it was read: restore it"):
        tokenize(tmp_path / "out", file, report=change)
    write_lines(file, TEXTS)
    tokenize(tmp_path / "out", file)
    tokenize(tmp_path / "whole", file)
    assert contents(tmp_path / "out")[1] == contents(tmp_path / "whole")[1]


def test_malformed_documents_are_refused_or_counted(tmp_path, monkeypatch):
    """The first bytes are checked before, the rest while it is converted."""
    good = [json.dumps({"text": text}) for text in TEXTS[:60]]
    bad = ['{"text": "ab\\ud800"}', '{"text": nul', '{"text": null}']
    lines = [*good[:40], *bad, '{"text": " "}', *good[40:]]
    (tmp_path / "a.jsonl").write_text("\n".join(good))
    (tmp_path / "b.jsonl").write_text("\n".join(lines))
    number = 41
    with pytest.raises(UserError, match=rf"^--data: .*b.jsonl:{number}: half a surrogate"):
        tokenize(tmp_path / "out", f"{tmp_path}/*.jsonl")
    monkeypatch.setattr(documents, "_MOST_BYTES", 200)
    with pytest.raises(UserError, match=rf"b.jsonl:{number}: half a surrogate.*skip such documents with --skip-bad"):
        tokenize(tmp_path / "out", f"{tmp_path}/*.jsonl")
    assert not (tmp_path / "out" / "cache.json").exists()
    about, said = tokenize(tmp_path / "out", f"{tmp_path}/*.jsonl", skip_bad=True)
    assert (
        about["left_out"]["malformed"]["documents"],
        sum(split["documents"] for split in about["splits"].values()),
    ) == (3, 120)
    assert [line.split(": ")[:2] for line in said if line.startswith("skipped")] == [
        ["skipped", f"{tmp_path}/b.jsonl:{number + i}"] for i in range(3)
    ]


@pytest.mark.parametrize(("lines", "says"), [("", ""), (" \n\n", ""), ('{"text": " "}\n{}\n', "1 malformed, 1 blank")])
@pytest.mark.parametrize("lacking", ["training", "validation"])
def test_sources_without_text_are_refused_and_leave_nothing(tmp_path, lines, says, lacking):
    """They are compressed, so the check of the first bytes cannot know that nothing follows."""
    import gzip

    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    data, held = tmp_path / "a.jsonl.gz", write_lines(tmp_path / "b.jsonl", TEXTS[:3])
    data, held = (data, held) if lacking == "training" else (held, data)
    with pytest.raises(UserError, match=rf"no document for {lacking}.*{says}"):
        tokenize(tmp_path / "out", data, validation=[held], skip_bad=True)
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize("skip_bad", [False, True])
def test_one_text_file_alone_is_refused_and_leaves_nothing(tmp_path, skip_bad):
    (tmp_path / "a.txt").write_text("one document")
    with pytest.raises(UserError, match=r"^--data: .*--validation"):
        tokenize(tmp_path / "out", tmp_path / "a.txt", skip_bad=skip_bad)
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize("lacking", ["training", "validation"])
def test_documents_that_are_all_of_one_split_leave_nothing(tmp_path, lacking):
    """Also if a part of them is written already; with files for validation the same folder can then be used."""
    chosen = [text for text in TEXTS if documents.is_validation(text) == (lacking == "training")]
    data = write_lines(tmp_path / "a.jsonl", chosen * (10 if lacking == "training" else 2))
    with pytest.raises(UserError, match=rf"no document for {lacking} among .* documents.*give --validation"):
        tokenize(tmp_path / "out", data, near_duplicates=0.8 if lacking == "validation" else None)
    assert not list((tmp_path / "out").iterdir())
    held = write_lines(tmp_path / "b.jsonl", TEXTS[:3])
    assert tokenize(tmp_path / "out", data, validation=[held])[0]["splits"]["validation"]["documents"] == 3


def test_a_corrected_file_is_read_if_nothing_was_written(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "_MOST_BYTES", 10)
    data = write_lines(tmp_path / "a.jsonl", TEXTS[:60])
    (tmp_path / "a.jsonl").write_text((tmp_path / "a.jsonl").read_text() + "broken")
    with pytest.raises(UserError, match="not JSON"):
        tokenize(tmp_path / "out", data)
    write_lines(tmp_path / "a.jsonl", TEXTS[:60])
    assert sum(split["documents"] for split in tokenize(tmp_path / "out", data)[0]["splits"].values()) == 60


def test_a_damaged_file_is_refused_even_if_malformed_documents_are_skipped(tmp_path):
    import gzip

    content = gzip.compress("".join(json.dumps({"text": text}) + "\n" for text in TEXTS * 50).encode())
    (tmp_path / "a.jsonl.gz").write_bytes(content[:-20])
    with pytest.raises(UserError, match=r"cannot read .*a.jsonl.gz( after line \d+)?: Truncated compressed stream"):
        tokenize(tmp_path / "out", tmp_path / "a.jsonl.gz", skip_bad=True)


def test_ids_are_stored_in_two_bytes_if_they_fit(tmp_path):
    data = write_lines(tmp_path / "a.jsonl", ["1 2 3", "65536"] * 30)
    with_end = type("Ended", (vocabularies.Numbers,), {"eos_id": 1})
    for size, dtype in [(2**16, "uint16"), (2**16 + 1, "uint32")]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(vocabularies, "named", lambda name, size=size: with_end(size))
            if dtype == "uint16":
                with pytest.raises(UserError, match="id 65536 is outside numbers"):
                    tokenize(tmp_path / dtype, data)
            else:
                assert tokenize(tmp_path / dtype, data)[0]["dtype"] == dtype


@pytest.mark.covers("D07")
@pytest.mark.parametrize("refused", [0.0, pytest.param(0.05, marks=pytest.mark.slow)])
def test_a_bucket_is_written_and_read(bucket, tmp_path, monkeypatch, refused):
    """With `refused`, requests are also answered late."""
    for key, value in bucket.environment.items():
        monkeypatch.setenv(key, value)
    data = write_lines(tmp_path / "a.jsonl", TEXTS[:100])
    bucket.write(f"gs://texts/{refused}/a.jsonl", (tmp_path / "a.jsonl").read_bytes())
    tokenize(tmp_path / "out", data)
    before = bucket.errors(refused)["refused"]
    tokenize(f"gs://caches/{refused}", f"gs://texts/{refused}/*.jsonl")
    rows = DataLayout(4, (0, 1, 2, 3), (0, 1, 2, 3))
    bucket.errors(refused, seconds=refused)
    here, there = (make_task(at).train(rows, seed=2) for at in (tmp_path / "out", f"gs://caches/{refused}"))
    for _ in range(4):
        ours, theirs = next(here), next(there)
        for key, values in ours.items():
            np.testing.assert_array_equal(theirs[key], values)
    assert (bucket.errors(0.0)["refused"] > before) == (refused > 0)
    changed = token_cache.array(paths.resolve(f"gs://caches/{refused}") / "train", "tokens", "uint16", writes=True)
    changed[1500] = 98
    with pytest.raises(
        UserError, match=rf"'gs://caches/{refused}' is not what was written: .* train/tokens/c/1 was changed"
    ):
        decoded(make_task(f"gs://caches/{refused}"), "train")


def test_a_dataset_of_the_hub_is_converted(tmp_path, monkeypatch):
    """A stand-in for the library `datasets`; its position is a count."""

    class Examples:
        num_shards, at = 1, 0

        def shard(self, num_shards, index):
            return Examples()

        def state_dict(self):
            return {"at": self.at}

        def load_state_dict(self, state):
            self.at = state["at"]

        def __iter__(self):
            while self.at < len(TEXTS):
                self.at += 1
                yield {"text": TEXTS[self.at - 1]}

    module = types.ModuleType("datasets")
    module.__spec__ = importlib.machinery.ModuleSpec("datasets", None)
    module.load_dataset = lambda *_, **__: Examples()
    monkeypatch.setitem(sys.modules, "datasets", module)
    while True:
        reports = itertools.count()

        def stop(counts, reports=reports):
            if next(reports) == 9:
                raise KeyboardInterrupt

        try:
            tokenize(tmp_path / "out", "hub:owner/some", report=stop)
            break
        except KeyboardInterrupt:
            continue
    task = make_task(tmp_path / "out")
    assert sorted([*decoded(task, "train"), *decoded(task, "validation")]) == TEXTS
    with pytest.raises(UserError, match="names a dataset and something else"):
        tokenizing.Job(("tfds:a", "b"), (), "text", "bytes", "out", False, Filters()).source()


@pytest.mark.covers("D13")
def test_near_duplicates_are_left_out_also_by_a_command_that_continues(tmp_path):
    """Every third text comes again, with a word changed at its end; of each pair the first is kept, in either split."""
    texts = [" ".join(f"w{i * j % 997}" for j in range(1, 60)) for i in range(1, 41)]
    data = write_lines(tmp_path / "a.jsonl", [*texts, *(f"{text} again" for text in texts[::3])])
    about, _ = tokenize(tmp_path / "whole", data, near_duplicates=0.8)
    left_out = about["left_out"]["near_duplicate"]
    sizes = [len(f"{text} again") for text in texts[::3]]
    assert left_out == {"documents": 14, "tokens": sum(sizes) + 14, "bytes": sum(sizes)}
    task = make_task(tmp_path / "whole")
    assert sorted([*decoded(task, "train"), *decoded(task, "validation")]) == sorted(texts)
    assert sum(split["bytes"] for split in about["splits"].values()) == sum(map(len, texts))
    for _ in range(30):
        reports = itertools.count()

        def stop(counts, reports=reports):
            if next(reports) == 9:
                raise KeyboardInterrupt

        with contextlib.suppress(KeyboardInterrupt):
            _, said = tokenize(tmp_path / "parts", data, near_duplicates=0.8, report=stop)
            break
    assert said[0].startswith("continuing after ")
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")
    assert sorted(path.name for path in (tmp_path / "parts").iterdir()) == ["cache.json", "train", "validation"]
    with pytest.raises(UserError, match=r"was begun with --deduplicate 0\.8, now --deduplicate 0\.9: give"):
        tokenize(tmp_path / "parts", data, near_duplicates=0.9)
    held = write_lines(tmp_path / "b.jsonl", texts[:5])
    about, _ = tokenize(tmp_path / "apart", data, near_duplicates=0.8, validation=[held])
    assert [split["documents"] for split in about["splits"].values()] == [40, 5]


def test_a_command_that_was_ended_twice_counts_documents_that_were_left_out_once(tmp_path):
    """None of the documents before its position was kept, and it ends again before it writes one."""
    counts = token_writer.Counts()
    counts.left_out["shares_text"]["documents"] = 30
    folder, how = paths.resolve(tmp_path), {"seen": None, "check": lambda read: None}
    token_writer.Writer(folder, {"dtype": "uint16"}, counts, position={"file": 3}, **how)
    state = json.loads((tmp_path / token_writer.STARTED).read_text())
    assert (state["position"], state["counts"]["left_out"]["shares_text"]["documents"]) == ({"file": 3}, 30)


@pytest.mark.covers("D13")
def test_documents_that_share_text_with_an_evaluation_set_are_left_out(tmp_path):
    shared = "the answer to this question is that nobody went to sea in a bowl"
    texts = [f"{text} {shared.upper() if i % 10 == 0 else ''}" for i, text in enumerate(TEXTS)]
    train, held = write_lines(tmp_path / "a.jsonl", texts), write_lines(tmp_path / "b.jsonl", [shared])
    (tmp_path / "set.jsonl").write_text(json.dumps({"task": 1, "parts": [{"text": f"? {shared}!"}]}) + "\n")
    how = {"validation": (held,), "exclude": (str(tmp_path / "set.jsonl"),), "words": 13}
    about, _ = tokenize(tmp_path / "out", train, **how)
    assert about["left_out"]["shares_text"]["documents"] == 30
    assert about["splits"]["train"]["documents"] == 270
    assert about["splits"]["validation"]["documents"] == 1
    with pytest.raises(UserError, match="was begun with another --exclude"):
        tokenize(tmp_path / "out", train, **{**how, "words": 12})


@pytest.mark.parametrize("concatenate", [False, True])
def test_an_evaluation_reads_every_token_once(cache, concatenate, host_layouts, global_batch):
    held_out = {text: 0 for text in TEXTS[:20]}
    passes = []
    for num_streams, batch_size, hosts in ((1, 1, 1), (4, 8, 4), (8, 8, 2)):
        task = make_task(cache, num_streams=num_streams, concatenate=concatenate)
        layouts = host_layouts(batch_size, hosts, strided=True)
        parts = [list(task.evaluation(layout)) for layout in layouts]
        batches = [global_batch(layouts, of_hosts) for of_hosts in zip(*parts, strict=True)]
        targets, weights = (np.concatenate([batch[key] for batch in batches]) for key in ("targets", "weights"))
        passes.append(targets[weights.any(1)].tolist())
        assert weights.sum() == sum(len(text.encode()) + 1 for text in held_out)
    assert passes[0] == passes[1] == passes[2]
