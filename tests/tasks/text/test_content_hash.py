"""A fingerprint of files changes with their content, also if no size changes, and costs the same for any amount."""

import json

import pytest

from core.batches import fingerprint_of, is_same_data
from tasks import text
from tasks.text import content_hash, vocabularies
from tasks.text.documents import list_files

LINES = "".join(json.dumps({"text": f"myself and itself, {n}"}) + "\n" for n in range(40))
TASKS = {
    "text": ("text.txt", text.files),
    "lines": ("lines.jsonl", text.files),
}


@pytest.mark.parametrize("what", TASKS)
def test_text_that_changes_without_a_change_of_size_is_other_data(tmp_path, what):
    name, make = TASKS[what]
    for number in range(3):
        (tmp_path / f"{number}_{name}").write_text(LINES)

    def fingerprint():
        task = make(train=[str(tmp_path / f"*{name}")], length=32, num_streams=1, vocabulary=vocabularies.bytes())
        return task.fingerprint()

    before = fingerprint()
    assert fingerprint() == before
    for file in tmp_path.glob(f"*{name}"):
        file.write_text(LINES.replace("self", "SELF"))
    assert before.partition(" content=")[0] == fingerprint().partition(" content=")[0]
    assert not is_same_data(before, fingerprint())


def test_a_fingerprint_of_an_earlier_revision_has_no_content():
    listing, content = "1234", "files:5678"
    assert is_same_data(listing, fingerprint_of(listing, content))
    assert is_same_data(fingerprint_of(listing, content), listing)
    assert not is_same_data("1235", fingerprint_of(listing, content))
    assert not is_same_data(fingerprint_of(listing, "files:5679"), fingerprint_of(listing, content))
    assert is_same_data(fingerprint_of(listing, "objects:5679"), fingerprint_of(listing, content))  # no common hash
    assert not is_same_data("mnist", "mnist noisy")  # a task of the user


def test_of_many_bytes_blocks_are_read_from_everywhere(tmp_path, monkeypatch):
    monkeypatch.setattr(content_hash, "WHOLE_BYTES", 3000)
    monkeypatch.setattr(content_hash, "_MOST_BLOCKS", 30)
    monkeypatch.setattr(content_hash, "_BLOCK_BYTES", 20)
    sizes = [2500, 10, 1490]
    for number, size in enumerate(sizes):
        (tmp_path / f"{number}.txt").write_bytes(bytes(size))
    files = list_files((str(tmp_path / "*.txt"),))
    blocks = list(content_hash._blocks(files))
    assert len(blocks) == 30
    starts = [start + sum(sizes[: int(file.name[0])]) for file, start, _ in blocks]
    assert starts == [4000 * n // 30 for n in range(30)]
    before = content_hash.of_files(files)
    seen, expected = [], [at for at in range(0, 2500, 25) if any(start <= at < start + 20 for start in starts)]
    assert 10 < len(expected) < 30
    for at in range(0, 2500, 25):
        content = bytearray(2500)
        content[at] = 1
        (tmp_path / "0.txt").write_bytes(content)
        seen += [at] * (content_hash.of_files(files) != before)
    assert seen == expected


def test_an_object_in_a_bucket_is_known_by_its_checksum(bucket, monkeypatch):
    for key, value in bucket.environment.items():
        monkeypatch.setenv(key, value)
    bucket.write("gs://hashed/a.jsonl", LINES.encode())
    before = content_hash.of_files(list_files(("gs://hashed/*.jsonl",)))
    bucket.write("gs://hashed/b.jsonl", LINES.encode())
    both = content_hash.of_files(list_files(("gs://hashed/*.jsonl",)))
    assert both != before
    bucket.write("gs://hashed/b.jsonl", LINES.replace("self", "SELF").encode())
    import fsspec

    fsspec.filesystem("gcs").invalidate_cache()
    assert content_hash.of_files(list_files(("gs://hashed/*.jsonl",))) != both
