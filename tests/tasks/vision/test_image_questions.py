"""Questions about images: rows by hand, exact positions, formats of images, and wrong input."""

import dataclasses
import hashlib
import json
import pathlib
import shutil

import numpy as np
import pytest
from PIL import Image

from core.errors import UserError
from core.files import paths
from core.types import DataLayout
from tasks import vision
from tasks.text import documents, vocabularies
from tasks.vision import images

SIZE, SLOTS, LENGTH = 8, 4, 24
WHOLE = DataLayout(4, (0, 1, 2, 3), (0, 1, 2, 3))


def saved(folder, number, mode="RGB"):
    pixels = np.random.default_rng(number).integers(0, 256, (SIZE, SIZE, len(mode)), dtype=np.uint8).squeeze()
    Image.fromarray(pixels, mode if mode != "L" else None).save(folder / f"{number}.png")
    return pixels


@pytest.fixture
def folder(tmp_path):
    lines = []
    for number in range(9):
        saved(tmp_path, number)
        line = {"image": f"{number}.png", "question": f"what {number}", "answer": "ab", "kind": "x" if number else "y"}
        lines.append({**line, "weight": float(number == 3)})
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    return tmp_path


def task(folder, **changes):
    sizes = {"image_size": SIZE, "image_tokens": SLOTS, "length": LENGTH, "num_streams": 2}
    files = {"train": "a.jsonl", "validation": "a.jsonl", "folder": str(folder)}
    return vision.questions(**{**files, **sizes, "vocabulary": vocabularies.bytes(), "kinds": ("x", "y"), **changes})


def test_a_row_by_hand(folder):
    made = task(folder)
    row = made.row(made.questions("train")[2])
    ids = [*([0] * SLOTS), *made.vocabulary.encode("what 2"), *made.vocabulary.encode(" ab"), made.vocabulary.eos_id]
    used, prefix = len(ids) - 1, SLOTS + 6
    assert row["inputs"].tolist() == ids[:-1] + [0] * (LENGTH - used)
    assert row["targets"][prefix - 1 : used].tolist() == ids[prefix:]
    assert row["weights"].tolist() == [0] * (prefix - 1) + [1] * (used - prefix + 1) + [0] * (LENGTH - used)
    assert row["until"].tolist() == [prefix - 1] * prefix + list(range(prefix, LENGTH))
    assert row["segment_ids"].tolist() == [1] * used + [0] * (LENGTH - used)
    assert row["slots"].tolist() == [0, 1, 2, 3]
    assert (row["images"] == saved(folder, 2)).all()
    assert row["kind"] == 0


def test_an_answer_without_an_end_token(folder):
    """The row is one position shorter, and the last token of the answer is its last target."""
    question = task(folder).questions("train")[2]
    with_end, without = (task(folder, ends=ends).row(question) for ends in (True, False))
    used = int(with_end["segment_ids"].sum())
    for name in ("inputs", "targets", "weights", "segment_ids", "positions"):
        want = with_end[name].copy()
        want[used - 1] = 0
        assert without[name].tolist() == want.tolist(), name
    assert without["weights"].sum() == with_end["weights"].sum() - 1 == len(" ab")
    assert task(folder, ends=False, length=used - 1).row(question)["segment_ids"].all()
    with pytest.raises(UserError, match=f"set LENGTH = {used}"):
        task(folder, length=used - 1).row(question)


@pytest.mark.parametrize("ends", [True, False])
def test_a_position_belongs_to_answers_with_or_without_an_end(folder, ends):
    layout = DataLayout(2, (0, 1), (0, 1))
    ours, others = (task(folder, ends=e).train(layout, seed=0) for e in (ends, not ends))
    next(ours)
    with pytest.raises(UserError, match="without_end"):
        others.restore(ours.state())


@pytest.mark.covers("D01")
def test_any_hosts_read_the_same_rows_and_continue_at_a_saved_position(folder):
    made = task(folder)
    whole = made.train(WHOLE, seed=3)
    batches = [next(whole) for _ in range(5)]
    hosts = [made.train(DataLayout(4, rows, rows), seed=3) for rows in ((0, 2), (1, 3))]
    for number, batch in enumerate(batches):
        if number == 2:
            saved_positions = {**hosts[0].state(), **hosts[1].state()}
            hosts = [made.train(DataLayout(4, rows, rows), seed=3) for rows in ((1,), (0, 2, 3))]
            for host in hosts:
                host.restore(saved_positions)
        for host in hosts:
            part = next(host)
            for name, values in part.items():
                np.testing.assert_array_equal(values, batch[name][list(host._layout.rows)])
    first = np.concatenate([b["inputs"][rows, SLOTS + 5] for b in batches for rows in (slice(0, 2),)])
    assert len(set(first[:4].tolist())) == 4  # of one stream with 5 questions, each once before any comes again
    assert set(spec := made.spec(4)) == set(batches[0])
    assert {n: (v.shape, v.dtype) for n, v in batches[0].items()} == {n: (f.shape, f.dtype) for n, f in spec.items()}


def test_an_evaluation_scores_each_question_once_and_then_ends(folder):
    for rows, want in ((None, 9), (3, 3)):
        batches = list(task(folder).evaluating(rows).evaluation(WHOLE))
        scored = np.concatenate([b["weights"].any(-1) for b in batches])
        kinds = np.concatenate([b["kind"] for b in batches])
        asked = np.concatenate([b["inputs"][:, SLOTS + 5] for b in batches])[scored]
        assert (scored.sum(), len(set(asked.tolist()))) == (want, want)
        assert (kinds[~scored] == vision.NO_KIND).all()
    assert task(folder).evaluating(3).evaluated_on() == "3 of 9 held-out questions"


def test_weights_say_how_often_a_question_is_drawn(folder):
    made = dataclasses.replace(task(folder, num_streams=1), weighted=True)
    batches = made.train(WHOLE, seed=0)
    asked = {int(i) for _ in range(3) for i in next(batches)["inputs"][:, SLOTS + 5]}
    assert asked == set(made.vocabulary.encode("3"))


def test_weights_are_relative_to_all_lines_however_they_are_dealt_to_streams(folder):
    lines = [json.loads(line) | {"weight": 9.0 if n % 2 else 1.0} for n, line in enumerate(lines_of(folder))][:8]
    (folder / "a.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    made = dataclasses.replace(task(folder), weighted=True)
    digits = dict(zip((made.vocabulary.encode(str(n))[0] for n in range(8)), range(8), strict=True))
    batches = made.train(WHOLE, seed=0)
    drawn = [digits[int(i)] for _ in range(100) for i in next(batches)["inputs"][:, SLOTS + 5]]
    odd = sum(n % 2 for n in drawn) / len(drawn)
    assert 0.85 < odd < 0.95  # 36 of 40; dealt by turns, the streams would give half each


def lines_of(folder):
    return (folder / "a.jsonl").read_text().splitlines()


def test_images_are_moved_and_mirrored_in_training_alone(folder):
    made = task(folder, max_shift=2, mirror=True)
    question = made.questions("train")[1]
    image = saved(folder, 1)
    assert (made.row(question)["images"] == image).all()
    moved = made.row(question, np.random.default_rng(1))["images"]
    padded = [np.pad(a, ((2, 2), (2, 2), (0, 0)), mode="edge") for a in (image, image[:, ::-1])]
    places = [(a, y, x) for a in range(2) for y in range(5) for x in range(5)]
    assert [p for p in places if (padded[p[0]][p[1] : p[1] + SIZE, p[2] : p[2] + SIZE] == moved).all()]


@pytest.mark.parametrize("dtype", [np.int32, np.float32])
def test_gray_values_of_32_bits_are_refused(tmp_path, dtype):
    Image.fromarray(np.full((8, 8), 70_000, dtype)).save(tmp_path / "a.tiff")
    with pytest.raises(images.UnreadableImage, match="its gray values are not whole numbers of at most 16 bits"):
        images.decode((tmp_path / "a.tiff").read_bytes(), size=8)


@pytest.mark.parametrize(("value", "shown"), [(30_000, 30_000 >> 8), (200, 200)])
def test_gray_values_of_8_and_16_bits_may_be_in_a_file_of_32(tmp_path, value, shown):
    Image.fromarray(np.full((8, 8), value, np.int32)).save(tmp_path / "a.tiff")
    assert set(images.decode((tmp_path / "a.tiff").read_bytes(), size=8).ravel().tolist()) == {shown}


@pytest.mark.parametrize("mode", ["L", "RGBA", "I;16"])
def test_gray_and_transparent_images_become_colors(tmp_path, mode):
    file = tmp_path / "a.png"
    if mode == "I;16":
        deep = np.arange(64, dtype=np.uint16).reshape(8, 8) * 1000
        Image.fromarray(deep).save(file)
        want = np.repeat((deep >> 8).astype(np.uint8)[..., None], 3, axis=-1)
    elif mode == "L":
        pixels = np.random.default_rng(0).integers(0, 256, (8, 8), dtype=np.uint8)
        Image.fromarray(pixels).save(file)
        want = np.repeat(pixels[..., None], 3, axis=-1)
    else:
        pixels = np.random.default_rng(0).integers(0, 256, (8, 8, 4), dtype=np.uint8)
        Image.fromarray(pixels).save(file)
        share = pixels[..., 3:] / 255
        want = pixels[..., :3] * share + 255 * (1 - share)
    found = images.decode(file.read_bytes(), size=8)
    assert found.dtype == np.uint8
    np.testing.assert_allclose(found, want, atol=1)
    assert images.decode(file.read_bytes(), size=5).shape == (5, 5, 3)


def test_a_broken_image_is_refused_or_skipped_and_counted(folder, capsys):
    whole = (folder / "4.png").read_bytes()
    (folder / "4.png").write_bytes(whole[: len(whole) // 2])
    refusing = task(folder, num_streams=1)
    with pytest.raises(UserError, match=r"a\.jsonl:5: .*4\.png cannot be read as an image.*broken = 'skip'"):
        list(refusing.evaluation(WHOLE))
    skipping = task(folder, num_streams=1, broken="skip")
    batches = list(skipping.evaluation(WHOLE))
    assert sum(b["weights"].any(-1).sum() for b in batches) == 8
    train = skipping.train(WHOLE, seed=0)
    assert all(next(train)["weights"].any(-1).all() for _ in range(5))
    said = capsys.readouterr().err
    assert said.count("4.png cannot be read") == 1
    assert "broken = 'skip'" not in said
    assert "skipped because their images cannot be read: 1 of" in said
    weighted = dataclasses.replace(skipping, weighted=True).train(WHOLE, seed=0)
    assert all(next(weighted)["weights"].any(-1).all() for _ in range(20))
    for number in range(9):
        (folder / f"{number}.png").write_bytes(b"no image")
    with pytest.raises(UserError, match=r"no image of a stream can be read; the last: .*cannot be read as an image"):
        next(task(folder, broken="skip").train(WHOLE, seed=1))


def test_an_image_that_could_not_be_read_once_is_not_left_out(folder, monkeypatch):
    """A network may fail for a moment, and on one host only: the rows must not depend on it."""
    skipping, kind, failing = task(folder, num_streams=1, broken="skip"), type(paths.resolve(folder)), [2]
    read = kind.read_bytes

    def unsteady(path):
        failing[0] -= path.suffix == ".png"
        if path.suffix == ".png" and not failing[0]:
            raise ConnectionResetError(104, "Connection reset by peer")
        return read(path)

    monkeypatch.setattr(kind, "read_bytes", unsteady)
    with pytest.raises(OSError, match=r"a\.jsonl:\d: .*\.png cannot be read: .*Connection reset by peer"):
        list(skipping.evaluation(WHOLE))
    batches = list(skipping.evaluation(WHOLE))
    assert sum(b["weights"].any(-1).sum() for b in batches) == 9


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ({"question": "q", "answer": "a"}, "image is 'None', expected text"),
        ({"image": "0.png", "question": " ", "answer": "a"}, "question is ' ', expected text"),
        ({"image": "0.png", "question": "q", "answer": "a", "kind": "z"}, "kind is 'z', expected one of x, y"),
        ({"image": "0.png", "question": "q", "answer": "a", "kind": "x", "weight": -1}, "weight is -1"),
        ([1], "expected an object with image, question and answer"),
    ],
)
def test_malformed_lines_name_file_and_line(folder, line, said):
    (folder / "a.jsonl").write_text("\n" + json.dumps(line))
    with pytest.raises(UserError, match=r"a\.jsonl:2: ") as caught:
        task(folder).questions("train")
    assert said in str(caught.value)
    assert said in "\n".join(task(folder).problems())


def test_a_question_that_is_longer_than_the_row_and_empty_folders_are_refused(folder, tmp_path):
    (folder / "a.jsonl").write_text(json.dumps({"image": "0.png", "question": "q" * 20, "answer": "a", "kind": "x"}))
    made = task(folder)
    with pytest.raises(UserError, match="20 tokens of the question and 3 of the answer beside 4 positions") as caught:
        made.row(made.questions("train")[0])
    assert "set LENGTH = 26" in str(caught.value)
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "no file matches" in task(empty, train="*.jsonl").problems()[0]
    assert "DATA is not set" in dataclasses.replace(made, train_files=()).problems()[0]
    with pytest.raises(UserError, match=r"broken = 'ignore': expected one of refuse, skip"):
        task(folder, broken="ignore")


def held_out(folder, patterns="**/*.jsonl"):
    """The images that a task without files for validation holds out, below that folder."""
    made = task(folder, train=patterns, validation=None, kinds=())
    found = {split: {question.image for question in made.questions(split)} for split in ("train", "validation")}
    assert not found["train"] & found["validation"]
    return {image.removeprefix(f"{folder}/") for image in found["validation"]}


def ask_about(file, images):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps({"image": str(i), "question": "q", "answer": "a"}) + "\n" for i in images))


def test_held_out_images_do_not_depend_on_where_the_folder_is(tmp_path):
    for place in ("here", "some/where/else", "here_again"):
        ask_about(tmp_path / place / "a.jsonl", [f"images/{n}.png" for n in range(200)])
    here, *others = (held_out(tmp_path / place) for place in ("here", "some/where/else", "here_again"))
    assert 2 < len(here) < 30
    assert others == [here, here]
    for place in ("here", "some/where/else"):
        for part in range(40):  # an image has the same path in all of these folders
            ask_about(tmp_path / place / f"{part}" / "q.jsonl", ["image.png"])
    here, there = (held_out(tmp_path / place, "*/*.jsonl") for place in ("here", "some/where/else"))
    assert 0 < len(here) < 10
    assert here == there


def test_images_on_absolute_paths_are_held_out_by_these(tmp_path):
    for place in "ab":
        ask_about(tmp_path / place / "q.jsonl", [f"/images/{n}.png" for n in range(99)] + ["gs://bucket/a.png"] * 2)
    assert held_out(tmp_path / "a") == held_out(tmp_path / "b") == vision_names([f"/images/{n}.png" for n in range(99)])


def vision_names(names):
    return documents.validation_names([*names, "gs://bucket/a.png"])


def test_all_questions_about_an_image_are_in_one_split_however_it_is_named(tmp_path):
    images = range(200)
    ask_about(tmp_path / "a.jsonl", [f"images/{n}.png" for n in images])
    ask_about(tmp_path / "b.jsonl", [f"{tmp_path}/images/{n}.png" for n in images])
    ask_about(tmp_path / "more" / "c.jsonl", [f"../images/./{n}.png" for n in images])
    made = task(tmp_path, train="**/*.jsonl", validation=None, kinds=())
    found = [{pathlib.Path(q.image).resolve() for q in made.questions(split)} for split in ("train", "validation")]
    assert found[1]
    assert not found[0] & found[1]
    assert sum(len(made.questions(split)) for split in ("train", "validation")) == 600


def test_runs_that_held_out_other_images_are_told_apart_by_their_data(folder):
    """Earlier versions chose images by absolute paths, and did not tell the splits of files apart."""
    apart, by_hash = (task(folder, validation=validation) for validation in ("a.jsonl", None))
    size = (folder / "a.jsonl").stat().st_size
    for made, count in ((apart, 2), (by_hash, 1)):
        before = hashlib.sha256(repr([("a.jsonl", size)] * count).encode()).hexdigest()[:16]
        assert not made.fingerprint().startswith(before)
    assert "by their paths" in by_hash.describe()


def test_a_file_for_training_and_validation_is_refused_before_a_run(folder):
    made = task(folder, train="*.jsonl", validation="a.jsonl")
    [problem] = made.problems()
    assert problem.startswith(f"vision.questions.validation: '{folder}/a.jsonl' matches 1 file of the training data")
    with pytest.raises(UserError, match="matches 1 file of the training data"):
        made.prepare(str(folder), is_host_zero=True)
    shutil.copy(folder / "a.jsonl", folder / "b.jsonl")
    apart = task(folder, train="a.jsonl", validation="b.jsonl")
    assert apart.problems() == []
    apart.prepare(str(folder), is_host_zero=True)


def test_random_questions_have_the_same_fields_without_kinds(folder):
    made = task(folder, kinds=())
    random = made.rehearsal()
    assert random.spec(4) == made.spec(4)
    batch = next(random.train(WHOLE, seed=0))
    assert batch["weights"].sum(-1).min() >= 1
    assert not (batch["weights"] * (batch["segment_ids"] == 0)).any()
