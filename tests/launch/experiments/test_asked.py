"""A run that was trained on questions about images answers them."""

import json

import numpy as np
import pytest
from PIL import Image

from core.checkpoints import published_files
from core.checkpoints.store import Checkpoints
from launch import __main__ as command
from launch.config import loader
from launch.hosts.cluster import Host
from launch.runs import prepared_run

SMALL = (
    "PHASES = ()",
    "BATCH_SIZE = 4",
    "VOCAB_SIZE = 16",
    "EVAL_BATCHES = 1",
    "KINDS = ()",
    "vision.questions.train = 'train.jsonl'",
    "vision.questions.image_size = 33",
    "transformer.Transformer.embed_dim = 16",
    "transformer.Transformer.mlp_dim = 16",
    "tower.VisionTower.image_size = 33",  # 4 x 4 patches of 8 pixels, which leave out a pixel at the edge
    "tower.VisionTower.cut = True",
    "tower.VisionTower.embed_dim = 16",
    "vision.questions.image_tokens = 16",
    "vision.questions.length = 28",
    "vision.questions.broken = 'skip'",
    "selector.Selector.num_chosen = 4",
)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of no step that reads mosaics of four gray squares, of which one cannot be read."""
    folder = tmp_path_factory.mktemp("asked")
    lines = []
    for number in range(6):
        pixels = np.repeat(np.random.default_rng(number).integers(0, 255, (33, 33, 1), np.uint8), 3, axis=2)
        Image.fromarray(pixels).save(folder / f"{number}.png")
        about = {"image": f"{number}.png", "answer": "dark", "grid": 3}
        lines += [{**about, "question": f"what is at {cell} ?", "cells": [cell]} for cell in (0, 4)]
    for split in ("train", "validation"):
        own = lines[:6] if split == "train" else lines[6:]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in own))
    (folder / "5.png").write_bytes(b"no image")
    words = ["[UNK]", "[EOS]", "what", "is", "at", "0", "4", "?", "dark"]
    tokenizer = {
        "version": "1.0",
        "model": {"type": "WordLevel", "vocab": {w: n for n, w in enumerate(words)}, "unk_token": "[UNK]"},
        "pre_tokenizer": {"type": "Whitespace"},
        "added_tokens": [
            {"id": n, "content": words[n], "special": True, "single_word": False, "lstrip": False, "rstrip": False}
            | {"normalized": False}
            for n in (0, 1)
        ],
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "[EOS]"}))
    config = loader.load("gin/arrcoc/easy_vqa.gin", bindings=(f"DATA = '{folder}'", *SMALL), slice_name="v5e-1")
    made = folder / "run"
    made.mkdir()
    (made / "config.gin").write_text(config.text)
    ready = prepared_run.prepare_run(
        config.build(), config=config, revision="", run_dir=str(made), last_step=3, host=Host(0, 1, True)
    )
    checkpoints = Checkpoints(made / "checkpoints", keep=1)
    checkpoints.save(3, state=ready.program.init(), data={}, meta=ready.meta)
    checkpoints.close()
    yield made
    published_files.use_copies(None)


def test_chosen_patches_are_measured_and_drawn_without_the_images_that_cannot_be_read(run, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "1000")
    assert command.main(["evaluate", str(run), "--relevance"]) == 0
    said = capsys.readouterr()
    assert "left out: 2 questions; the last: " in said.err
    assert "5.png cannot be read as an image" in said.err
    assert "step 3 of" in said.out
    assert "4 questions" in said.out
    assert "2 pairs of questions about other cells of the same image share" in said.out
    assert command.main(["evaluate", str(run), "--pictures"]) == 0
    with Image.open(run / "evaluation" / "pictures.png") as page:
        assert page.size == (12 + 2 * (192 + 12), 12 + 2 * (192 + 64))
