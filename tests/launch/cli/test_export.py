"""A run whose vocabulary was trained on its own text is exported."""

import json

from launch import __main__ as cli
from launch.config import loader
from launch.hosts.cluster import Host
from launch.runs import prepared_run
from launch.session import Session

SMALL = (
    "from tasks import text",
    "from tasks.text import vocabularies",
    "TASK = @text.files()",
    "text.files.vocabulary = @vocabularies.trained_sentencepiece()",
    "vocabularies.trained_sentencepiece.size = 300",
    "text.files.length = 16",
    "text.files.num_streams = 2",
    "VOCAB_SIZE = 300",
    "NUM_STREAMS = 2",
    "BATCH_SIZE = 2",
    "TOTAL_STEPS = 2",
    "WARMUP_STEPS = 1",
    "EVAL_BATCHES = 0",
    "PROMPT = ''",
    "transformer.Transformer.num_layers = 1",
    "transformer.Transformer.embed_dim = 16",
    "transformer.Transformer.mlp_dim = 16",
)


def test_a_run_with_a_vocabulary_of_its_own_has_its_ids_in_the_export(tmp_path):
    for name in ("words", "held_out"):
        (tmp_path / f"{name}.txt").write_text("some words of a text, again and again\n" * 50)
    files = (f"text.files.train = '{tmp_path}/words.txt'", f"text.files.validation = '{tmp_path}/held_out.txt'")
    bindings = (*SMALL, *files)
    config = loader.load("gin/quickstart.gin", bindings=bindings, slice_name="v5e-1")
    told = {
        "config": config,
        "revision": "",
        "run_dir": str(tmp_path / "run"),
        "last_step": 1,
        "host": Host(0, 1, True),
    }
    run = prepared_run.prepare_run(config.build(), **told)
    Session(run).run()
    vocabulary = run.experiment.task.vocabulary
    assert cli.main(["export", str(tmp_path / "run"), "--out", str(tmp_path / "out")]) == 0
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (written["bos_token_id"], written["eos_token_id"]) == (vocabulary.bos_id, vocabulary.eos_id)
