"""Questions about images of other datasets, with a fake of the hub's library that has its documented interface."""

import io
import json
import pathlib
import sys
import types

import numpy as np
import pytest
from PIL import Image

from core.errors import UserError
from core.types import DataLayout
from launch import __main__ as main
from tasks import vision
from tasks.text import vocabularies
from tasks.vision import images, question_sets


class FakeImage:
    """datasets.Image: the feature of a column of images."""

    def __init__(self, decode=True):
        self.decode = decode


class FakeDataset:
    """IterableDataset: images are decoded unless the column was cast."""

    def __init__(self, examples):
        self.examples, self.features, self.num_shards = examples, {"picture": FakeImage()}, 1

    def cast_column(self, name, feature):
        found = FakeDataset(self.examples)
        found.features = {**self.features, name: feature}
        return found

    def __iter__(self):
        assert not self.features["picture"].decode
        return iter(self.examples)


def encoded(color, kind="PNG"):
    stream = io.BytesIO()
    Image.new("RGB", (6, 4), color).save(stream, kind)
    return {"bytes": stream.getvalue(), "path": None}


RED, BLUE = encoded("red"), encoded("blue", "JPEG")
EXAMPLES = [
    {"picture": RED, "question": "what color?", "answers": ["", "pink", "red", " ", "red"], "type": "color"},
    {"picture": RED, "question": " what shape?\n", "answers": [{"answer": "a square"}], "type": "shape"},
    {"picture": BLUE, "question": "what color?", "answers": "blue", "type": "color"},
]
NAMES = ("--data", "hub:owner/some", "--image", "picture", "--answer", "answers", "--kind", "type")


@pytest.fixture
def examples(monkeypatch):
    """The examples of the split 'train', which a test may change; the split 'held' has the first of them."""
    found = list(EXAMPLES)
    module = types.ModuleType("datasets")
    module.Image = FakeImage
    module.load_dataset = lambda name, config=None, **options: FakeDataset(
        found if options["split"] == "train" else found[:1]
    )
    module.__spec__ = types.SimpleNamespace(name="datasets")
    monkeypatch.setitem(sys.modules, "datasets", module)
    return found


def build(*argv):
    return main.main(["build", "questions", *map(str, argv)])


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.covers("D04")
def test_questions_of_the_hub_are_written_and_read(examples, tmp_path, capsys):
    out = tmp_path / "out"
    assert build(*NAMES, "--validation", "held", "--out", out) == 0
    first, second, third = lines(out / "train.jsonl")
    assert (first["question"], first["answer"], first["kind"]) == ("what color?", "red", "color")
    assert (second["question"], second["answer"], second["kind"]) == ("what shape?", "a square", "shape")
    assert first["image"] == second["image"] != third["image"]
    assert third["image"].endswith(".jpeg")
    assert (out / first["image"]).read_bytes() == RED["bytes"]
    assert lines(out / "validation.jsonl") == [first]
    said = capsys.readouterr().out
    assert "train: 3 questions, 2 images" in said
    assert f"vision.questions.folder = '{out}'" in said
    assert "vision.questions.validation = 'validation.jsonl'" in said
    task = vision.questions(
        train="train.jsonl",
        validation="validation.jsonl",
        folder=str(out),
        image_size=4,
        image_tokens=2,
        length=32,
        num_streams=1,
        vocabulary=vocabularies.bytes(),
        kinds=("color", "shape"),
    )
    assert task.problems() == []
    batch = next(task.train(DataLayout(2, (0, 1), (0, 1)), seed=0))
    assert {tuple(image[0, 0]) for image in batch["images"]} <= {(255, 0, 0), (0, 0, 254)}


@pytest.mark.parametrize(
    ("changes", "given", "message"),
    [
        ({"picture": {"bytes": b"no image"}}, (), "example 2 of train: picture cannot be read as an image"),
        ({"picture": None}, (), "example 2 of train: picture cannot be read as an image"),
        ({"answers": []}, (), r"example 2 of train: answers is '\[\]', expected text"),
        ({"question": 7}, (), "example 2 of train: question is '7', expected text"),
        ({"answers": [b"\xff"]}, (), "example 2 of train: answers is .*, which is not UTF-8"),
        ({}, ("--validation", "train"), "--split 'train' and --validation 'train': expected two different splits"),
        ({}, ("--split", ""), "--split '' and --validation ''"),
        ({}, ("--data-dir", "x"), "--data-dir is for tfds: datasets"),
        ({}, ("--question", "asked"), r"has no field 'asked', only \['answers', .*name it with --question"),
        ({}, ("--data", "owner/some"), "--data owner/some: expected hub:OWNER/NAME or tfds:NAME"),
    ],
)
def test_wrong_input_is_named_and_nothing_is_written(examples, tmp_path, capsys, changes, given, message):
    examples[1] = {**examples[1], **changes}
    assert build(*NAMES, *given, "--out", tmp_path / "out") == 2
    capsys.readouterr()
    assert list(tmp_path.iterdir()) == []
    source = {**dict(zip(NAMES[::2], NAMES[1::2], strict=True)), **dict(zip(given[::2], given[1::2], strict=True))}
    options = {name.removeprefix("--").replace("-", "_"): value for name, value in source.items()}
    with pytest.raises(UserError, match=message):
        question_sets.QuestionSet(**options).write(str(tmp_path / "out"), report=lambda done: None)


def test_bad_examples_can_be_skipped_and_are_counted(examples, tmp_path, capsys):
    examples[0] = {**examples[0], "picture": {"bytes": b""}}
    assert build(*NAMES, "--skip-bad", "--out", tmp_path / "out") == 0
    assert "train: 2 questions, 2 images; 1 example skipped" in capsys.readouterr().out
    examples[:] = examples[:1]
    assert build(*NAMES, "--skip-bad", "--out", tmp_path / "none") == 2
    assert "1 example skipped, and none left" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.covers("D04")
def test_questions_of_a_prepared_dataset(tmp_path, capsys):
    import tensorflow_datasets as tfds

    class Pictures(tfds.core.GeneratorBasedBuilder):
        VERSION = tfds.core.Version("1.0.0")

        def _info(self):
            image = tfds.features.Image(shape=(None, None, None))
            texts = {"question": tfds.features.Text(), "answer": tfds.features.Text()}
            return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict({"image": image, **texts}))

        def _split_generators(self, dl_manager):
            return {"train": self._generate_examples()}

        def _generate_examples(self):
            yield 0, {"image": np.full((4, 4, 3), 200, np.uint8), "question": "how bright?", "answer": "bright"}
            yield 1, {"image": np.zeros((4, 4, 1), np.uint8), "question": "how bright?", "answer": "dark"}

    Pictures(data_dir=tmp_path / "tfds").download_and_prepare()
    where = ("--data", "tfds:pictures", "--data-dir", tmp_path / "tfds")
    assert build(*where, "--out", tmp_path / "out") == 0
    found = {line["answer"]: line["image"] for line in lines(tmp_path / "out/train.jsonl")}
    values = {answer: images.decode((tmp_path / "out" / name).read_bytes(), size=2) for answer, name in found.items()}
    assert {answer: np.unique(image).tolist() for answer, image in values.items()} == {"bright": [200], "dark": [0]}
    assert all(pathlib.Path(name).suffix == ".png" for name in found.values())
    for name, split, message in (
        ("pictures", "test", "tfds: pictures has no split 'test'"),
        ("no_such", "train", "tfds: there is no dataset 'no_such'"),
        ("../x", "train", "tfds: there is no dataset '../x'"),
        ("mnist", "train", "tfds: mnist is not prepared in"),
    ):
        given = ("--data", f"tfds:{name}", "--data-dir", tmp_path / "tfds", "--split", split)
        assert build(*given, "--out", tmp_path / "wrong") == 2
        assert message in capsys.readouterr().err
