"""`launch/run evaluate --task`: the metrics that a registered task of seqio has, of predictions and of scores."""

import json
import os
import subprocess

import numpy as np
import pytest

from core.errors import UserError
from core.types import DataLayout
from launch import __main__ as command
from launch import environment
from tasks import text
from tasks.text import seqio_tasks, tfds_source

MODULE = """
import seqio, tensorflow as tf

PAIRS = {"inputs": [f"{n} + 1 =" for n in range(40)], "targets": [str(n + 1) for n in range(40)]}

def same(targets, predictions):
    return {"equal": sum(map(str.__eq__, targets, predictions)) / len(targets), "all": seqio.metrics.Text("no number")}

def mean(targets, scores):
    return {"likelihood": sum(scores) / len(scores)}

def best(targets, predictions, aux_values):
    sure = max(range(len(targets)), key=aux_values["scores"].__getitem__)
    return {"surest": float(targets[sure] == predictions[sure]), "aux": sum(aux_values["scores"])}

vocabulary = seqio.ByteVocabulary()

def add(name, features, **options):
    seqio.TaskRegistry.add(
        name,
        source=seqio.FunctionDataSource(
            lambda split, shuffle_files, seed=None: tf.data.Dataset.from_tensor_slices({f: PAIRS[f] for f in features}),
            splits=["train", "validation"],
        ),
        preprocessors=[seqio.preprocessors.tokenize, seqio.preprocessors.append_eos],
        output_features={f: seqio.Feature(vocabulary, add_eos=f == "targets") for f in features},
        **options,
    )

add("sums", ("inputs", "targets"), metric_fns=[same, mean])
add("surely", ("inputs", "targets"), metric_fns=[best])
add("numbers", ("targets",), metric_fns=[mean])
add("bare", ("targets",))
"""


@pytest.fixture(scope="module")
def registered(tmp_path_factory):
    """A module of the user that registers tasks."""
    folder = tmp_path_factory.mktemp("modules")
    (folder / "own_sums.py").write_text(MODULE)
    tfds_source.tensorflow()
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        import own_sums

        yield own_sums


@pytest.mark.slow
def test_targets_follow_inputs_and_only_they_are_learned(registered):
    task = text.seqio(name="sums", inputs_length=12, length=32, num_streams=1, live=True)
    assert task.problems() == []
    batch = next(task.evaluation(DataLayout(4, (0, 1, 2, 3), (0, 1, 2, 3))))
    row, segments, weights = (batch[name][0] for name in ("targets", "segment_ids", "weights"))
    known = dict(zip(registered.PAIRS["inputs"], registered.PAIRS["targets"], strict=True))
    for number in range(1, segments.max() + 1):
        inputs, targets = row[(segments == number) & (weights == 0)], row[(segments == number) & (weights > 0)]
        assert targets[-1] == task.vocabulary.eos_id
        assert known[task.vocabulary.decode(inputs)] == task.vocabulary.decode(targets)
        assert batch["inputs"][0][segments == number].tolist() == [0, *row[segments == number][:-1]]
    assert segments.max() >= 2
    for name, length in (("sums", None), ("numbers", 5)):
        (problem,) = text.seqio(name=name, inputs_length=length, length=32, num_streams=1, live=True).problems()
        assert "give it for a task with inputs, and for no other" in problem
    with pytest.raises(UserError, match="expected less than the length 8"):
        text.seqio(name="sums", inputs_length=8, length=8, num_streams=1)


@pytest.mark.slow
def test_predictions_and_scores_are_of_the_targets_after_their_inputs(registered):
    vocabulary, asked = registered.vocabulary, {}

    def score(pairs):
        asked["pairs"] = pairs
        return [-float(len(targets)) for _, targets in pairs]

    def predict(prompts, most):
        asked["prompts"], asked["most"] = prompts, most
        answers = [str(int(vocabulary.decode(ids[1:]).split()[0]) + 1) for ids in prompts]
        return [vocabulary.encode(answer if n % 4 else "x") for n, answer in enumerate(answers)]

    assert seqio_tasks.evaluate("sums", most=12, score=score, predict=predict) == {
        "sums": {"equal": 0.75, "likelihood": pytest.approx(-np.mean([2] * 9 + [3] * 3))}
    }
    assert asked["prompts"][3] == [0, *vocabulary.encode("3 + 1 =")]
    assert asked["pairs"][3] == (asked["prompts"][3], [*vocabulary.encode("4"), 1])
    assert asked["most"] == 3
    found = seqio_tasks.evaluate("surely", most=12, score=score, predict=predict)
    assert found == {"surely": {"surest": 0.0, "aux": -sum(len(targets) for _, targets in asked["pairs"])}}
    assert [vocabulary.decode(targets) for _, targets in asked["pairs"][:3]] == ["x", "2", "3"]
    assert {targets[-1] for _, targets in asked["pairs"]} == {1}
    seqio_tasks.evaluate("numbers", most=None, score=score, predict=predict)
    assert asked["pairs"][9] == ([0], [*vocabulary.encode("10"), 1])
    assert len(asked["pairs"]) == 40
    with pytest.raises(UserError, match="bare has no metrics: expected metrics of predictions or scores"):
        seqio_tasks.evaluate("bare", most=None, score=score, predict=predict)
    with pytest.raises(UserError, match="no seqio task or mixture 'sum'; did you mean 'sums'"):
        seqio_tasks.evaluate("sum", most=None, score=score, predict=predict)


@pytest.mark.slow
def test_a_run_is_scored_by_the_metrics_of_its_task(tmp_path):
    """Each command is a process: the module is on PYTHONPATH, and the run's gin file names it."""
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "own_sums.py").write_text(MODULE)
    gin = tmp_path / "sums.gin"
    gin.write_text(
        f"""from __gin__ import dynamic_registration
from tasks import text
include '{environment.WORKSPACE}/gin/quickstart.gin'
TASK = @text.seqio()
text.seqio.name = 'sums'
text.seqio.module = 'own_sums'
text.seqio.cache = '{tmp_path}/cache'
text.seqio.inputs_length = 12
text.seqio.length = %LENGTH
text.seqio.num_streams = %NUM_STREAMS
LENGTH = 32
NUM_STREAMS = 1
VOCAB_SIZE = 384
TOTAL_STEPS = 2
WARMUP_STEPS = 1
EVAL_BATCHES = 0
PROMPT = ''
"""
    )

    def launch(*arguments):
        path = os.pathsep.join([str(tmp_path / "modules"), str(environment.WORKSPACE)])
        command = [*environment.COMMAND, *map(str, arguments)]
        return subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)

    run_dir, out, trusted = tmp_path / "run", tmp_path / "scores.json", ("--module", "own_sums")
    trained = launch("pod", "v5e-1", gin, "--simulate", "--run-dir", run_dir)
    assert trained.returncode == 0, trained.stderr
    scored = launch("evaluate", run_dir, "--task", "sums", "--rows", "8", "--json", out, *trusted)
    assert scored.returncode == 0, scored.stderr
    found = json.loads(out.read_text())["tasks"]["sums"]
    assert 0 <= found["equal"] <= 1
    assert -50 < found["likelihood"] < 0
    assert "likelihood" in scored.stdout
    assert launch("evaluate", run_dir, "--task", "nosuch", *trusted).returncode == 2

    without = launch("generate", run_dir, "--prompt", "1 + 1 =", "--max-tokens", "2")  # the cache has the vocabulary
    assert without.returncode == 0, without.stderr


def test_samples_belong_to_other_benchmarks(capsys):
    assert command.main(["evaluate", "anything", "--task", "sums", "--samples", "2"]) == 2
    assert "--samples belongs to --humaneval, not to --task" in " ".join(capsys.readouterr().err.split())
