"""Questions about images in a run: two phases of selection, evaluations by kind, and pictures."""

import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from core.types import DataLayout
from launch import __main__ as command
from launch import environment
from launch.config import loader
from launch.runs import smoke
from tests.lab import golden

sys.path.insert(0, str(environment.WORKSPACE / "examples"))
import easy_vqa

SMALL = ("BATCH_SIZE = 8", "SOFT_STEPS = 2", "TOTAL_STEPS = 4", "WARMUP_STEPS = 1", "EVAL_INTERVAL = 2")
SMALL += ("HARD_BATCH_SIZE = 8", "EVAL_BATCHES = 2", "CHECKPOINT_INTERVAL = 2")
SMALL += (
    "transformer.Transformer.embed_dim = 16",
    "transformer.Transformer.mlp_dim = 16",
    "tower.VisionTower.embed_dim = 16",
)


def package(folder):
    """Pictures of squares in the schema of the package easy-vqa."""
    rng = np.random.default_rng(0)
    for split in ("train", "test"):
        (folder / split / "images").mkdir(parents=True)
        questions = []
        for number in range(20):
            pixels = np.full((64, 64, 3), 240, np.uint8)
            top, left = rng.integers(0, 48, 2)
            pixels[top : top + 16, left : left + 16] = (255, 0, 0) if number % 2 else (0, 0, 255)
            Image.fromarray(pixels).save(folder / split / "images" / f"{number}.png")
            shade, other = ("red", "blue") if number % 2 else ("blue", "red")
            questions.append(["what color is the shape?", shade, number])
            questions.append([f"is there a {shade} shape?", "yes", number])
            questions.append([f"is there not a {other} shape?", "yes", number])
            questions.append(["what shape is in the image?", "rectangle", number])
        (folder / split / "questions.json").write_text(json.dumps(questions))
    return folder


def test_the_converter_splits_by_image_and_weighs_answers(tmp_path):
    easy_vqa.main(package(tmp_path / "data"), tmp_path / "out")
    lines = {
        name: [json.loads(line) for line in (tmp_path / "out" / f"{name}.jsonl").read_text().splitlines()]
        for name in ("train", "curriculum", "validation", "test")
    }
    assert [len(found) for found in lines.values()] == [72, 72, 8, 80]
    assert not {line["image"] for line in lines["train"]} & {line["image"] for line in lines["validation"]}
    negated = [line["weight"] for line in lines["curriculum"] if "not" in line["question"]]
    positive = [line["weight"] for line in lines["train"] if "not" in line["question"]]
    np.testing.assert_allclose(np.array(negated) / positive, easy_vqa.NEGATED, rtol=1e-3)
    config = loader.load("gin/arrcoc/easy_vqa.gin", bindings=[f"DATA = '{tmp_path / 'out'}'"])
    soft, hard = (span.experiment for span in config.build().spans())
    assert (soft.task.image_tokens, hard.task.image_tokens, hard.model.selector.num_chosen) == (64, 8, 8)
    words = soft.task.vocabulary
    question = "what color is the shape ?"
    assert words.decode(words.encode(question)).split() == question.split()


def test_a_smoke_run_keeps_the_rows_that_an_image_fills():
    for file in ("v5p_128", "easy_vqa"):
        small = smoke.shrink(loader.load(f"gin/arrcoc/{file}.gin").build())
        assert small.model.decoder.embed_dim < 64
        layout = DataLayout(small.batch_size, tuple(range(small.batch_size)), tuple(range(small.batch_size)))
        batch = next(small.task.train(layout, seed=0))
        assert batch["slots"].shape[1] == {"v5p_128": 200, "easy_vqa": 64}[file]


@pytest.mark.slow  # compiles two phases
@pytest.mark.covers("N11")
def test_a_run_of_two_phases_is_evaluated_by_kind_and_drawn(tmp_path):
    easy_vqa.main(package(tmp_path / "data"), tmp_path / "out")
    bindings = [f"DATA = '{tmp_path / 'out'}'", "VOCAB_SIZE = 16", *SMALL]
    run_dir = tmp_path / "run"
    words = ["train", "gin/arrcoc/easy_vqa.gin", "--slice", "v5e-1", "--run-dir", str(run_dir)]
    ended = subprocess.run(
        [sys.executable, "-m", "launch", *words, *(word for binding in bindings for word in ("--gin", binding))],
        cwd=environment.WORKSPACE,
        env={**os.environ, "RENGA_SIMULATE": "v5e-1", "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    metrics = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    by_kind = [{k for k in line if k.startswith("validation/exact")} for line in metrics]
    assert {f"validation/exact_{kind}" for kind in easy_vqa.KINDS} <= set().union(*by_kind)
    assert command.main(["evaluate", str(run_dir), "--pictures"]) == 0
    with Image.open(run_dir / "evaluation" / "pictures.png") as page:
        assert page.width > 192 * 3


def test_figures_of_the_page_are_those_of_the_records():
    page = (environment.WORKSPACE / "docs/results/images-compiled.md").read_text()
    row = r"^\| `(v5p_\w+)`[^|]*\|.*?\| ([\d.]+) \(([\d.]+)\) \| ([\d.]+) \| (\d+) \|$"
    rows = re.findall(row, page, re.MULTILINE)
    files = (environment.WORKSPACE / "gin/arrcoc").glob("v5p_*.gin")
    assert {name for name, *_ in rows} == {path.stem for path in files}
    for name, memory, state, seconds, mfu in rows:
        record = golden.read(f"arrcoc-{name}")
        times, shares = record["predicted"]["step_seconds"], record["predicted"]["mfu"]
        assert memory == f"{record['memory']['peak_bytes'] / 2**30:.2f}", name
        batch = record["memory"]["argument_bytes"] / 2**30 - float(state)  # the other argument of a step
        assert -0.005 <= batch < 0.02, name  # the page rounds the state
        assert seconds == f"{times['scheduled']:.3g}", name
        assert mfu == f"{100 * shares['scheduled']:.0f}", name
    small, large = (golden.read(f"arrcoc-{name}") for name in ("v5p_8", "v5p_128"))
    assert small["cycles"] == large["cycles"]  # the same work for each chip


@pytest.mark.covers("N11")
@pytest.mark.parametrize(
    ("name", "method", "slots"),
    [
        ("learned", "soft", [64, 8]),
        ("mixed", "soft", [64, 8]),
        ("all", "all", [64, 64]),
        ("random", "random", [8, 8]),
        ("center", "center", [8, 8]),
        ("blind", "blind", [8, 8]),
    ],
)
def test_controls_train_on_the_same_questions(name, method, slots):
    spans = loader.load(f"gin/arrcoc/controls/{name}.gin", slice_name="v5e-1").build().spans()
    assert [span.experiment.task.image_tokens for span in spans] == slots
    assert [span.experiment.task.length for span in spans] == [12 + number for number in slots]
    files = [span.experiment.task.train_files for span in spans]
    assert files == [("easy_vqa/curriculum.jsonl",), ("easy_vqa/train.jsonl",)]
    assert {span.experiment.model.selector.method for span in spans} == {method}
