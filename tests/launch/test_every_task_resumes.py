"""With every task, an interrupted and resumed run equals an uninterrupted one, bit for bit."""

import dataclasses
import json

import pytest

from core.checkpoints import steps
from core.files import paths
from launch.config import loader
from launch.hosts.cluster import Host
from launch.runs import prepared_run
from launch.session import Session

COMMON = ("TOTAL_STEPS = 8", "CHECKPOINT_INTERVAL = 4", "EVAL_BATCHES = 0", "WARMUP_STEPS = 6", "BATCH_SIZE = 8")
TOKENS = (
    *COMMON,
    "NUM_STREAMS = 4",
    "LENGTH = 16",
    "PROMPT = ''",
    "transformer.Transformer.num_layers = 1",
    "transformer.Transformer.embed_dim = 32",
    "transformer.Transformer.mlp_dim = 64",
)
GRIDS = (*COMMON, "trm.TRM.embed_dim = 32", "trm.TRM.num_layers = 1", "trm.TRM.h_cycles = 2", "trm.TRM.l_cycles = 2")
MAZES = ("puzzles.maze.size = 7", "puzzles.maze.num_train = 20", "puzzles.maze.num_test = 8")
MAZES += ("TASK = @puzzles.maze()",)
STORED = ("DATA = '{data}'", "puzzles.dataset.directory = %DATA", "TASK = @puzzles.dataset()", "LENGTH = 16")
STORED += ("puzzles.dataset.length = %LENGTH", "puzzles.dataset.vocab_size = %VOCAB_SIZE")
LINES = ("TASK = @text.files()", "DATA = '{lines}'", "VALIDATION_DATA = '{held_out}'", "text.files.train = %DATA")
LINES += ("text.files.validation = %VALIDATION_DATA", "text.files.length = %LENGTH")
LINES += ("text.files.num_streams = %NUM_STREAMS",)
CHUNKS = ("from tasks import chunked", "TASK = @chunked.rows()", "chunked.rows.task = @text.python_source()")
CHUNKS += ("chunked.rows.length = 16", "LENGTH = 48", "transformer.Transformer.keeps_states = True")
CHUNKS += ("from models.mixers import s5", "transformer.Transformer.feed_forward = @s5.S5()", "s5.S5.states = 8")
TASKS = {
    "random_tokens": ("gin/quickstart.gin", (*TOKENS, "TASK = @synthetic.random_tokens()")),
    "python_source": ("gin/quickstart.gin", TOKENS),
    "files": ("gin/quickstart.gin", (*TOKENS, *LINES)),
    "chunks": ("gin/quickstart.gin", (*(b for b in TOKENS if not b.startswith("LENGTH")), *CHUNKS)),  # saved in a row
    "maze": ("gin/trm/sudoku4.gin", (*GRIDS, *MAZES)),
    "dataset": ("gin/trm/sudoku4.gin", (*GRIDS, *STORED)),
}


def ready(name, folder):
    """That task in a tiny run of 8 steps."""
    for file in ("text", "held_out"):
        (folder / f"{file}.jsonl").write_text("".join(json.dumps({"text": f"line {i} " * 9}) + "\n" for i in range(64)))
    file, bindings = TASKS[name]
    places = {"data": "data", "lines": "text.jsonl", "held_out": "held_out.jsonl"}
    places = {name: str(folder / place) for name, place in places.items()}
    bindings = [b.format_map(places) if b.startswith(("DATA", "VALIDATION")) else b for b in bindings]
    config = loader.load(file, bindings=bindings, slice_name="v5e-4")
    straight = str(folder / "straight")
    return prepared_run.prepare_run(
        config.build(), config=config, revision="", run_dir=straight, last_step=8, host=Host(0, 1, True)
    )


def left_behind(run):
    """What is in every array, and which positions there are: an iterator's own state says when it was written."""
    found = steps.read(paths.resolve(run.checkpoint_dir) / "8")
    return found.content, found.streams


@pytest.mark.slow  # test_session.py is quick: a run that is stopped and started again has the same losses, bit for bit
@pytest.mark.covers("C06")
@pytest.mark.parametrize("name", TASKS)
def test_a_run_resumes_bit_for_bit(name, tmp_path):
    if name == "dataset":
        from launch import __main__ as main

        words = ["sudoku", "--size", "4", "--train", "40", "--test", "8", "--out", str(tmp_path / "data")]
        assert main.main(["make-dataset", *words]) == 0
    run = ready(name, tmp_path)
    Session(run).run()
    resumed = dataclasses.replace(run, run_dir=str(tmp_path / "resumed"))
    Session(dataclasses.replace(resumed, last_step=4)).run()
    Session(resumed).run()
    (content, streams), (want, want_streams) = left_behind(resumed), left_behind(run)
    assert content == want  # of every array, optimizer and carry included
    assert streams == want_streams
    assert len(content) > 10
    assert streams
