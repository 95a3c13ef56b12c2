"""Source code in chunks: splits by package, exact rows, orders that resume, and cached hidden states."""

import dataclasses
import hashlib
import json

import numpy as np
import pytest

from core.errors import UserError
from core.types import DataLayout
from tasks.code import cached, chunks, files

LAYOUT = DataLayout(4, (0, 1, 2, 3), (0, 1, 2, 3))


@pytest.fixture
def folder(tmp_path):
    for package in range(30):
        for name in ("a.py", "b.py", "c.js"):
            file = tmp_path / f"package{package}" / name
            file.parent.mkdir(exist_ok=True)
            file.write_text(f"# {package} {name}\n" + "x = 1\n" * (package % 7 + 3))
    return tmp_path


def task(folder, **changes):
    settings = {"length": 16, "num_streams": 2, "least_tokens": 4, "held_out_percent": 20}
    return files.code_files(files=str(folder / "**" / "*"), **{**settings, **changes})


def rows_of(batches, count):
    found = [next(batches) for _ in range(count)]
    return {name: np.concatenate([batch[name] for batch in found]) for name in found[0]}


def test_packages_belong_to_one_split_as_a_whole(folder):
    of = {split: task(folder).rows(split).names for split in chunks.SPLITS}
    packages = {split: {name.partition("/")[0] for name in names} for split, names in of.items()}
    assert sum(map(len, packages.values())) == 30 == len(set().union(*packages.values()))
    assert all(packages.values())
    assert {name.rpartition(".")[2] for names in of.values() for name in names} == {"py"}
    assert task(folder, languages="javascript").rows("train").names[0].endswith(".js")


def test_a_row_is_a_piece_of_one_file(folder):
    given = task(folder)
    rows = given.rows("train")
    text = (folder / rows.names[0]).read_text()
    ids = [*given.vocabulary.encode(text), given.vocabulary.eos_id]
    first, second = rows.row(0), rows.row(1)
    assert first["targets"].tolist() == ids[:16]
    assert first["inputs"].tolist() == [given.vocabulary.bos_id, *ids[:15]]
    assert second["inputs"].tolist()[0] == ids[15]
    assert first["documents"] == second["documents"] == 0
    last = rows.row(-(-len(ids) // 16) - 1)
    size = len(ids) % 16 or 16
    assert last["weights"].tolist() == last["segment_ids"].tolist() == [1] * size + [0] * (16 - size)


def test_epochs_visit_every_row_once_and_resume_exactly(folder):
    given = task(folder)
    count = len(given.rows("train"))
    batches = given.train(LAYOUT, seed=3)
    whole = rows_of(batches, -(-2 * count // 4))
    seen = [tuple(row) for row in np.c_[whole["documents"], whole["targets"]]]
    assert sorted(seen[:count]) == sorted(seen[count : 2 * count])
    assert seen[:count] != seen[count : 2 * count]
    first = given.train(LAYOUT, seed=3)
    rows_of(first, 5)
    second = given.train(LAYOUT, seed=3)
    second.restore(first.state())
    np.testing.assert_array_equal(next(first)["targets"], next(second)["targets"])


def test_an_evaluation_visits_held_out_rows_once_on_any_hosts(folder):
    given = task(folder, held_out="test")
    count = len(given.rows("test"))
    batches = list(given.evaluation(LAYOUT))
    documents = np.concatenate([batch["documents"] for batch in batches])
    assert (documents >= 0).sum() == count
    assert len(documents) == -(-count // 4) * 4
    half = list(given.evaluation(DataLayout(4, (1, 3), (1, 3))))
    for whole, part in zip(batches, half, strict=True):
        np.testing.assert_array_equal(whole["targets"][[1, 3]], part["targets"])
    assert sum((batch["documents"] >= 0).sum() for batch in given.evaluating(5).evaluation(LAYOUT)) == 5


@pytest.mark.covers("D13")
def test_files_with_text_of_an_evaluation_set_are_not_trained_on(folder):
    plain = task(folder)
    copied = plain.rows("train").names[0]
    solution = "def add(first, second):\n    return first + second  # the sum of both numbers\n"
    (folder / copied).write_text("import os\n" + solution)
    problems = folder / "problems.jsonl"
    problems.write_text('{"canonical_solution": ' + repr(solution).replace("'", '"') + "}\n")
    given = task(folder, exclude=str(problems))
    assert copied not in given.rows("train").names
    assert len(given.rows("train").names) == len(plain.rows("train").names) - 1
    assert "1 left out" in given.describe()
    assert given.fingerprint() != task(folder).fingerprint()


def test_hidden_states_are_computed_once_and_a_broken_call_continues(folder, tmp_path):
    given, out, calls = task(folder), str(tmp_path / "hidden"), []

    def hidden(batch):
        calls.append(len(batch["inputs"]))
        return np.repeat(batch["inputs"][..., None] / 8, 3, axis=-1)

    limits = {"train": 10, "validation": 4, "test": 3}
    model = {"base": "a base", "checksum": 5, "chunk": 16}
    steps = cached.write(out, given, hidden, limits=limits, rows=4, model=model)
    for split, _, _ in steps:  # stops in the second split
        if split == "validation":
            break
    with pytest.raises(UserError, match="no complete folder of launch/run cache-hidden-states"):
        cached.cached_hidden(folder=out, length=16, num_streams=2).spec(4)
    before = len(calls)
    other = {**model, "base": "another", "checksum": 6}
    with pytest.raises(UserError, match=r"was begun with different model: .*'a base'.*'another'"):
        next(cached.write(out, given, hidden, limits=limits, rows=4, model=other))
    with pytest.raises(UserError, match="was begun with different limits"):
        next(cached.write(out, given, hidden, limits={**limits, "train": 11}, rows=4, model=model))
    moved = {**model, "base": "the same elsewhere"}
    assert list(cached.write(out, given, hidden, limits=limits, rows=4, model=moved))
    assert len(calls) == before + 2
    read = cached.cached_hidden(folder=out, length=16, num_streams=2, held_out="test")
    assert not read.problems()
    batch = next(read.train(LAYOUT, seed=0))
    np.testing.assert_array_equal(batch["hidden"][..., 1] * 8, batch["inputs"])
    assert set(batch) == set(read.spec(4))
    assert len(read.rows("train")) == 10
    source, kept = given.rows("test"), read.rows("test")
    first = sorted(map(int, chunks.evaluation_order(len(source))[:3]))  # a sample of all, in the order of the task
    assert len(kept) == len(first) < len(source)
    for ours, number in zip(map(kept.row, range(len(kept))), first, strict=True):
        for name, values in source.row(number).items():
            np.testing.assert_array_equal(ours[name], values)
    assert (read.chunk, read.base_checksum) == (16, 5)
    assert read.fingerprint() != given.fingerprint()
    assert dataclasses.replace(read, length=8).problems()
    assert list(cached.write(f"{out}_again", given, hidden, limits=limits, rows=4, model=model))
    again = cached.cached_hidden(folder=f"{out}_again", length=16, num_streams=2)
    assert again.describe() != read.describe()
    assert again.fingerprint() == read.fingerprint()
    about = {name: value for name, value in read._about.items() if name != "format"}  # as earlier versions wrote it
    (tmp_path / "hidden" / "about.json").write_text(json.dumps(about))
    former = cached.cached_hidden(folder=out, length=16, num_streams=2)
    assert former.fingerprint() == hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"languages": "cobol"}, "languages = 'cobol': expected some of python"),
        ({"languages": ()}, r"languages = \(\): expected some of python"),
        ({"held_out_percent": 50}, "held_out_percent = 50: expected from 1 to 49"),
        ({"held_out": "train"}, "expected 'validation' or 'test'"),
        ({"least_tokens": 17}, "least_tokens = 17: expected from 1 to the length, 16"),
    ],
)
def test_settings_out_of_range_are_refused(folder, change, words):
    with pytest.raises(UserError, match=words):
        task(folder, **change)


def test_missing_files_are_a_problem(tmp_path):
    given = task(tmp_path)
    assert "matches" in given.problems()[0]
    assert given.named_files() == given.files
