"""Compressed text and .parquet files give the documents of plain files, and damaged ones are named."""

import itertools
import json

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from core.errors import UserError
from core.types import DataLayout
from tasks import text
from tasks.text import document_streams, text_files, text_formats

TEXTS = [f"{i:03d} é" + "x" * (i * 7 % 50) for i in range(300)]
LINES = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()
ROWS = DataLayout(4, (0, 1, 2, 3), (0, 1, 2, 3))
ENDINGS = [*text_formats.COMPRESSIONS]


def compressed(content, ending):
    sink = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(sink, text_formats.COMPRESSIONS[ending]) as stream:
        stream.write(content)
    return sink.getvalue().to_pybytes()


def write_rows(path, texts, rows=64, **columns):
    parquet.write_table(
        pyarrow.table({"text": texts, "n": list(range(len(texts))), **columns}), path, row_group_size=rows
    )


def write(folder, name, texts=TEXTS):
    """The texts as a file of that name's format."""
    file = folder / name
    if name.endswith(".parquet"):
        write_rows(file, texts)
    else:
        content = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
        file.write_bytes(compressed(content, file.suffix) if file.suffix in ENDINGS else content)
    return file


def task(file, **options):
    return text.files(**{"train": str(file), "length": 32, "num_streams": 1, **options})


def texts_of(found, split, num_streams=1):
    """The documents of a split; every one is read by a reader that was opened at its offset."""
    for part in found.corpus.parts(split, num_streams).parts:
        reader = part.open(None)
        while (document := next(reader, None)) is not None:
            yield document.decode()
            reader = part.open(reader.offset())


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.jsonl.bz2", "a.parquet"])
def test_every_format_gives_the_documents_of_plain_lines_from_any_offset(tmp_path, name):
    own = write(tmp_path, name, TEXTS[:80])
    assert task(own).problems() == []
    assert list(texts_of(task(own, validation=str(own)), "train")) == TEXTS[:80]
    split = [list(texts_of(task(own), split)) for split in ("train", "validation")]
    assert sorted(itertools.chain(*split)) == sorted(TEXTS[:80])
    assert all(split)
    plain = task(write(tmp_path, "b.jsonl", TEXTS[:80]), num_streams=2, validation=str(own))
    other = task(own, num_streams=2, validation=str(own))
    assert next(other.evaluation(ROWS))["targets"].tolist() == next(plain.evaluation(ROWS))["targets"].tolist()


def test_texts_in_compressed_files_and_several_formats_at_once(tmp_path):
    (tmp_path / "a.txt.zst").write_bytes(compressed(b"one", ".zst") + compressed(b" two", ".zst"))
    (tmp_path / "b.txt").write_text("three")
    write(tmp_path, "c.jsonl.gz", ["four"])
    write(tmp_path, "d.parquet", ["five"])
    (tmp_path / "held_out").mkdir()
    found = task(tmp_path / "*.*", validation=str(write(tmp_path / "held_out", "e.jsonl", ["six"])))
    assert found.problems() == []
    assert list(texts_of(found, "train")) == ["one two", "three", "four", "five"]


def test_a_table_is_divided_into_row_groups_among_streams(tmp_path):
    found = task(write(tmp_path, "a.parquet"), num_streams=4, validation=str(tmp_path / "a.parquet"))
    parts = found.corpus.parts("train", 4)
    assert (len(parts.parts), parts.is_shared) == (5, False)
    assert sorted(texts_of(found, "train", 4)) == TEXTS


@pytest.mark.slow
def test_a_table_is_read_from_a_bucket_and_continues_exactly(bucket, tmp_path, monkeypatch):
    for key, value in bucket.environment.items():
        monkeypatch.setenv(key, value)
    monkeypatch.setattr(document_streams, "WINDOW_IDS", 64 * 32)
    for name in ("a.parquet", "b.jsonl.zst"):
        bucket.write(f"gs://tables/{name}", write(tmp_path, name).read_bytes())
    here, there = (task(f"{at}/*", num_streams=4).train(ROWS, seed=1) for at in (tmp_path, "gs://tables"))
    for _ in range(3):
        np.testing.assert_array_equal(next(here)["targets"], next(there)["targets"])
    restored = task("gs://tables/*", num_streams=4).train(ROWS, seed=1)
    restored.restore(there.state())
    np.testing.assert_array_equal(next(restored)["targets"], next(here)["targets"])


def problem_of(file, **options):
    """Returns the error of reading a file to its end, after checking that the check before a run reports the same."""
    found = task(file, validation=str(file), **options)
    with pytest.raises(UserError) as error:
        list(texts_of(found, "train"))
    assert found.problems() == [f"text.files.{split}: {error.value}" for split in ("train", "validation")]
    return str(error.value)


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_damaged_compressed_file_is_named(tmp_path, ending, monkeypatch):
    monkeypatch.setattr(text_formats, "_BUFFER_BYTES", 100)
    whole, file = compressed(LINES, ending), tmp_path / f"a.jsonl{ending}"
    file.write_bytes(whole[:-9])
    with pytest.raises(
        UserError, match=rf"{file}( after line [1-9]\d*)?: Truncated compressed stream; write or copy it again"
    ):
        list(texts_of(task(file, validation=str(file)), "train"))
    file.write_bytes(LINES)
    assert problem_of(file).startswith(f"cannot read {file}: ")
    (tmp_path / "b.jsonl").write_bytes(LINES)
    file.write_bytes(b"")
    assert problem_of(tmp_path / "*") == f"cannot read {file}: it is empty, and not compressed text"


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b'{"text": "ab\\ud800"}', "half a surrogate pair ('\\ud800') at character 3"),
        ('{"text": "é"}'.encode("latin-1"), "not UTF-8 text (byte 0xe9 at 10); convert it"),
        ('{"text": "a"}'.encode("utf-16"), "not UTF-8 text (byte 0xff at 0); convert it, such as iconv -f utf-16"),
        (b'{"text": null}', "no text in field 'text', found null"),
        (b'{"text": "a', "not JSON (Unterminated"),
    ],
)
def test_a_malformed_line_of_a_compressed_file_is_named(tmp_path, line, says):
    file = tmp_path / "a.jsonl.gz"
    file.write_bytes(compressed(LINES + line + b"\n" + LINES, ".gz"))
    assert problem_of(file).startswith(f"{file}:{len(TEXTS) + 1}: {says}")


def test_a_compressed_file_that_does_not_fit_the_position_to_continue_from_is_named(tmp_path):
    file = write(tmp_path, "a.jsonl.gz", TEXTS[:9])
    [part] = task(file, validation=str(file)).corpus.parts("train", 1).parts
    reader = part.open(None)
    *_, last = iter(lambda: next(reader, None), None)
    assert last.decode() == TEXTS[8]
    end = reader.offset()
    assert next(part.open(end), None) is None
    for offset, found in {end + 5: f"has {end} bytes", end - 5: "has no line that begins there"}.items():
        with pytest.raises(UserError) as error:
            part.open(offset)
        assert str(error.value) == (
            f"{file}: reading continues at byte {offset} of the decompressed text, which {found}; it was replaced "
            "after the position was saved: restore it"
        )


def test_long_lines_are_read_and_endless_ones_refused(tmp_path, monkeypatch):
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps({"text": "y" * 10_000_000}) + "\n" + json.dumps({"text": "next"}))
    found = task(file, validation=str(write(tmp_path, "held_out.jsonl", ["short"])))
    assert found.problems() == []
    assert [len(text) for text in texts_of(found, "train")] == [10_000_000, 4]
    monkeypatch.setattr(text_formats, "LARGEST_DOCUMENT_BYTES", 10_000)
    with pytest.raises(UserError, match=r"a\.jsonl: over 9\.77 KiB without the end of a line"):
        list(texts_of(found, "train"))
    file = tmp_path / "b.txt.gz"
    file.write_bytes(compressed(b"z" * 10_001, ".gz"))
    with pytest.raises(UserError, match=r"b\.txt\.gz: one document of over 9\.77 KiB; split it"):
        list(texts_of(task(file, validation=str(file)), "train"))


def test_damaged_pages_of_a_table_are_named_and_their_checksums_verified(tmp_path):
    """Every byte of the pages is changed once: with checksums nothing else than the written texts is ever read."""
    table, file, whole = pyarrow.table({"text": TEXTS[:6]}), tmp_path / "a.parquet", tmp_path / "whole.parquet"
    said = set()
    for has_checksums in (False, True):
        parquet.write_table(table, whole, write_page_checksum=has_checksums, use_dictionary=has_checksums)
        content = whole.read_bytes()
        end = len(content) - 8 - int.from_bytes(content[-8:-4], "little")
        for at in range(4, end):
            file.write_bytes(content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :])
            try:
                found = list(text_formats.Rows(str(file), "text").read(0, 6))
            except text_formats.UnreadableFile as error:
                said.add(str(error))
            else:
                assert not has_checksums or [value.decode() for value in found] == TEXTS[:6]
    assert all(text.startswith(f"cannot read {file}") for text in said)
    for problem in ("its footer says 6 rows, and its pages end here", "could not verify page integrity"):
        assert any(f"{file} after row 0: {problem}" in text for text in said)


def test_a_damaged_or_unsuitable_table_is_named(tmp_path):
    file = tmp_path / "a.parquet"
    write_rows(file, ["a", None, "c"])
    assert problem_of(file) == f"{file}, row 2: null in column 'text', expected text"
    assert problem_of(file, field="body") == f"{file}: no column 'body', only ['n', 'text']; set the field of the text"
    assert problem_of(file, field="n") == f"{file}: column 'n' is int64, expected text; set the field of the text"
    invalid = pyarrow.array([b"ok", b"\xff\xfe"], pyarrow.binary())
    parquet.write_table(
        pyarrow.table({"text": pyarrow.Array.from_buffers(pyarrow.string(), 2, invalid.buffers())}), file
    )
    assert problem_of(file).startswith(f"{file}, row 2: not UTF-8 text (byte 0xff at 0); convert it")
    write(tmp_path, "a.parquet")
    content = file.read_bytes()
    write(tmp_path, "b.parquet")
    for wrong in (content[:-50], b"", b"text"):
        file.write_bytes(wrong)
        assert problem_of(tmp_path / "*").startswith(f"cannot read {file}: Parquet ")
    for name, says in {"a.csv.gz": ".csv.gz", "b.parquet.zst": ".parquet.zst"}.items():
        (tmp_path / name).write_bytes(b"x")
        (problem,) = task(tmp_path / name).problems()
        assert f"matches files ending in {says}, expected .txt, .jsonl, .parquet (text also compressed: .gz" in problem


def test_ranges_are_only_of_plain_lines(tmp_path, monkeypatch):
    monkeypatch.setattr(text_files, "_SMALLEST_RANGE_BYTES", 200)
    write(tmp_path, "a.jsonl.gz")
    write(tmp_path, "b.jsonl")
    found = task(tmp_path / "*", num_streams=4, validation=f"{tmp_path}/*")
    assert len(found.corpus.parts("train", 4).parts) == 1 + 16
    assert sorted(texts_of(found, "train", 4)) == sorted(TEXTS * 2)
