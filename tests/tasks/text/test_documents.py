"""Invalid documents are reported with file and line, by the checks before a run and by the pipeline."""

import fnmatch
import hashlib
import itertools
import json

import pytest

from core.errors import UserError
from core.types import DataLayout
from tasks import text
from tasks.text import documents

GOOD = [json.dumps({"text": f"a line of words, number {i}"}) for i in range(40)]
ROWS = DataLayout(2, (0, 1), (0, 1))
BAD_LINES = {
    "broken": ('{"text": oh', "not JSON (Expecting value"),
    "missing": (
        '{"body": "x"}',
        "no text in field 'text', found ['body']; name the field that has it (text.files.field, --field)",
    ),
    "number": ('{"text": 3}', "no text in field 'text', found 3"),
    "null text": ('{"text": null}', "no text in field 'text', found null"),
    "null": ("null", "no text in field 'text', found null"),
    "surrogate": ('{"text": "ab\\ud800"}', "half a surrogate pair ('\\ud800') at character 3, which is not text"),
    "NUL": ('{"text": "a\\u0000b"}', "a NUL character at byte 1"),
}


def task(pattern, **options):
    return text.files(train=str(pattern), length=16, num_streams=1, **options)


def lines(folder, number, line):
    file = folder / "part.jsonl"
    file.write_text("\n".join([*GOOD[: number - 1], line, *GOOD[number - 1 :]]) + "\n")
    return file


@pytest.mark.parametrize("bad", BAD_LINES)
def test_a_line_that_is_no_text_is_found_before_the_run(tmp_path, bad):
    line, says = BAD_LINES[bad]
    file = lines(tmp_path, 7, line)
    (problem,) = task(file).problems()
    assert problem.startswith(f"text.files.train: {file}:7: {says}")


def test_the_pipeline_reports_an_invalid_later_line_alike(tmp_path, capfd):
    file = lines(tmp_path, 7, BAD_LINES["surrogate"][0])
    batches = task(file).train(ROWS, seed=0)
    with pytest.raises(ValueError, match=r"part\.jsonl:7: half a surrogate pair") as error:
        list(itertools.islice(batches, 50))
    assert "\n" not in str(error.value)
    assert "part.jsonl" not in "".join(capfd.readouterr())


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("na\xefve caf\xe9".encode("latin-1"), "not UTF-8 text (byte 0xef at 2); convert it"),
        (b"one\ntwo\xff\n", "not UTF-8 text (byte 0xff at 7, in line 2)"),
        (b"a\0b", "a NUL character at byte 1: the file is not text, or is damaged"),
    ],
)
def test_a_file_that_is_no_text_is_named(tmp_path, content, says):
    (tmp_path / "a.txt").write_bytes(content)
    (tmp_path / "b.txt").write_text("words")
    (problem,) = task(tmp_path / "*.txt").problems()
    assert problem.startswith(f"text.files.train: {tmp_path / 'a.txt'}: {says}")


def test_a_file_that_is_cut_inside_of_a_character_is_text(tmp_path):
    (tmp_path / "a.txt").write_text("x" + "é" * 2**20)
    (tmp_path / "b.txt").write_text("words")
    assert task(tmp_path / "*.txt").problems() == []


def test_a_document_of_white_space_is_empty(tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(" \n\t ")
    (problem,) = task(tmp_path / "*.txt").problems()
    assert problem == "text.files.train: 2 files with only white space and no text"


def test_a_folder_is_called_one(tmp_path):
    (problem,) = task(tmp_path).problems()
    assert problem == f"text.files.train: '{tmp_path}' is a folder; name its files, such as {tmp_path}/*.txt"


def test_the_description_has_number_and_size_of_the_files(tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text("two words")
    assert f"train {tmp_path}/*.txt (1 file, 9 bytes); validation 1" in task(tmp_path / "*.txt").describe()
    (tmp_path / "part.jsonl").write_text("\n".join(GOOD))
    assert "validation 5 % of it" in task(tmp_path / "*.jsonl").describe()


def test_the_description_names_few_files_that_are_held_out(tmp_path):
    def said(pattern, **options):
        described = task(tmp_path / pattern, **options)
        return described.describe().rpartition("; validation ")[2].partition(";")[0], described

    for name in "ab":
        (tmp_path / f"{name}.txt").write_text("two words")
    whole, two = said("*.txt")
    (held,) = two.corpus.files("validation")
    assert whole == f"1 of 2 .txt files ({held.name}), by hash (or set VALIDATION_DATA)"
    (tmp_path / "part.jsonl").write_text("\n".join(GOOD))
    assert said("*")[0].startswith(f"1 of 2 .txt files ({held.name}) and 5 % of the lines and rows, by hash")
    assert said("a.txt", validation=f"{tmp_path}/b.txt")[0] == f"{tmp_path}/b.txt"
    for number in range(98):
        (tmp_path / f"{number}.txt").write_text("two words")
    whole, many = said("*.txt")
    assert len(many.corpus.files("validation")) > 3
    assert whole == f"{len(many.corpus.files('validation'))} of 100 .txt files, by hash (or set VALIDATION_DATA)"


def test_of_two_or_more_names_some_train_and_some_validate():
    """Also of names that all would validate by their hashes, or none would."""
    names = [f"{number}.txt" for number in range(400)]
    held = [name for name in names if documents.is_validation(name)]
    others = [name for name in names if not documents.is_validation(name)]
    assert len(held) > 3
    assert len(documents.validation_names(others)) == 1
    for some in (held, held[:2], held[1:3]):
        assert documents.validation_names(some) < set(some)
        assert len(documents.validation_names(some)) == len(some) - 1
    assert documents.validation_names([*others, *held]) == set(held)
    assert documents.validation_names(held[:1]) == documents.validation_names(others[:1]) == set()


def test_a_bucket_is_not_asked():
    assert task("gs://no-such-bucket/*.jsonl").problems() == []
    assert task("gs://no-such-bucket/*.txt").describe().startswith("text.files: train gs://no-such-bucket/*.txt; valid")


@pytest.mark.parametrize(
    ("patterns", "paths_there", "names"),
    [
        (["gs://b/data/**"], ["gs://b/data/p0/m.py", "gs://b/data/p1/m.py"], ["p0/m.py", "p1/m.py"]),
        (["gs://b/data/*"], ["gs://b/data/one.txt"], ["one.txt"]),
        (["/d/**"], ["/d/data/p0/m.py", "/d/data/p1/m.py"], ["p0/m.py", "p1/m.py"]),
        (["/d/*"], ["/d/ab/x.txt", "/d/abc/y.txt"], ["ab/x.txt", "abc/y.txt"]),
        (["/d/*", "gs://b/*"], ["/d/x.txt", "gs://b/y.txt"], ["d/x.txt", "gs://b/y.txt"]),
    ],
)
def test_names_of_files_begin_below_their_common_folder(monkeypatch, patterns, paths_there, names):
    """So they are the same on a disk and in a bucket: packages and held-out files are chosen by them."""

    def listed(pattern):
        begins = pattern.rstrip("*")
        return {path: (3, "") for path in paths_there if path.startswith(begins)}

    monkeypatch.setattr(documents.paths, "listed", listed)
    assert [file.name for file in documents.list_files(tuple(patterns))] == names


def test_a_file_that_several_patterns_name_is_listed_once(tmp_path, monkeypatch):
    (tmp_path / "a.jsonl").write_text("\n".join(GOOD))
    monkeypatch.chdir(tmp_path)
    patterns = ("*.jsonl", f"{tmp_path}/a.jsonl", "./a.*", f"{tmp_path}/../{tmp_path.name}/a.jsonl", "a.jsonl")
    assert [file.path for file in documents.list_files(patterns)] == [f"{tmp_path}/a.jsonl"]


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    """Two files and a link to one of them, in the working directory."""
    (tmp_path / "corpus").mkdir()
    for name in ("part.jsonl", "val.jsonl"):
        (tmp_path / "corpus" / name).write_text("\n".join(GOOD))
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "corpus" / "val.jsonl")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "corpus"


@pytest.mark.parametrize("name", ["corpus/val.jsonl", "{corpus}/val.jsonl", "./corpus/../corpus/v*", "link.jsonl"])
def test_a_file_for_training_and_validation_is_found_however_it_is_named(corpus, name):
    name = name.format(corpus=corpus)
    for train in ("corpus/*.jsonl", f"{corpus}/**", "corpus/val.jsonl"):
        [problem] = documents.overlaps([train], [name], where="text.files.validation", remote=False)
        assert (problem.setting, problem.file) == ("text.files.validation", name)
        path = corpus.parent / "link.jsonl" if name == "link.jsonl" else corpus / "val.jsonl"
        assert problem.found == f"{name!r} matches 1 file of the training data ({path})"
        assert "move them where no pattern for training finds them" in problem
        assert documents.overlaps(["corpus/part*", "other/*"], [name], where="", remote=False) == []
        assert documents.overlaps([train], [], where="", remote=False) == []


def test_objects_are_compared_only_where_buckets_may_be_listed(monkeypatch):
    objects = {"gs://bucket/a.txt": (1, ""), "gs://bucket/b.txt": (1, "")}
    asked = []

    def listed(pattern):
        asked.append(pattern)
        return {name: about for name, about in objects.items() if fnmatch.fnmatch(name, pattern)}

    monkeypatch.setattr(documents.paths, "listed", listed)
    made = task("gs://bucket/*.txt", validation="gs://bucket/b*")
    assert made.problems() == asked == []
    with pytest.raises(UserError, match=r"'gs://bucket/b\*' matches 1 file of the training data \(gs://bucket/b.txt\)"):
        made.prepare("", is_host_zero=True)
    task("gs://bucket/a*", validation="gs://bucket/b*").prepare("", is_host_zero=True)


@pytest.mark.parametrize(
    ("train", "validation", "shares"),
    [
        ("train", "validation", False),
        ("train", "train", True),
        ("train", "train[:5%]", True),
        ("train[5%:]", "train[:5%]", False),
        ("train[:5%]", "train[:5%]", True),
        ("train+test[:9]", "test", True),
        ("train + test", "validation+ test", True),
        ("training", "train", False),
    ],
)
def test_splits_of_a_dataset_that_share_examples_are_found(train, validation, shares):
    found = documents.split_overlaps(train, validation, where="text.tfds.validation_split")
    assert len(found) == shares
    said = f"text.tfds.validation_split: {validation!r} has examples of the training split {train!r}, expected a split"
    assert all(one.startswith(said) for one in found)


def test_another_field_is_another_text(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "two words", "body": "three"}))
    usual, other = (task(tmp_path / "*.jsonl", **options).corpus.fingerprint() for options in ({}, {"field": "body"}))
    listing = [("train", "a.jsonl", 38), ("validation", "a.jsonl", 38)]
    assert usual == hashlib.sha256(repr(listing).encode()).hexdigest() != other  # as before fields were counted


def test_the_fingerprint_of_source_code_has_no_field():
    corpus = text.python_source(length=16, num_streams=1).corpus
    listing = [(split, f.name, f.size_bytes) for split in ("train", "validation") for f in corpus.files(split)]
    assert corpus.fingerprint() == hashlib.sha256(repr(listing).encode()).hexdigest()


def test_documents_of_white_space_are_counted_and_reported_at_powers_of_ten(capsys):
    given = ["words", *[" "] * 12]
    intake = documents.Intake("a source")
    texts = [intake.take(documents.file_text, "a.txt", content.encode()) for content in given]
    assert texts == [b"words", *[b""] * 12]
    said = capsys.readouterr().err.splitlines()
    assert [line.rpartition(": ")[2] for line in said] == [
        "1 of 2 documents read so far on this host",
        "10 of 11 documents read so far on this host",
    ]


def test_a_python_file_has_the_size_of_its_bytes_whatever_ends_its_lines(tmp_path):
    (tmp_path / "a.py").write_bytes(b"x = 1\r\n")
    (found,) = documents.python_files(str(tmp_path))
    assert found.size_bytes == (tmp_path / "a.py").stat().st_size
