"""`launch/run evaluate --task`: the metrics that a registered task of seqio has, of predictions and of scores."""

import json
import os
import re
import subprocess

import numpy as np
import pytest

from core.errors import UserError
from core.types import DataLayout
from launch import __main__ as command
from launch import environment
from launch.cli import export
from launch.config import loader
from tasks import text
from tasks.text import seqio_metrics, seqio_tasks

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

def add(name, features, vocabulary=vocabulary, **options):
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
add("likely", ("inputs", "targets"), metric_fns=[mean])
add("silent", ("inputs", "targets"))
add("endless", ("targets",), seqio.PassThroughVocabulary(9), metric_fns=[same])
add("endless_scored", ("targets",), seqio.PassThroughVocabulary(9), metric_fns=[mean])
seqio.MixtureRegistry.add("together", [("sums", 1.0), ("likely", 1.0), ("silent", 1.0)])
"""


@pytest.fixture(scope="module")
def registered(tmp_path_factory):
    """A module of the user that registers tasks."""
    folder = tmp_path_factory.mktemp("modules")
    (folder / "own_sums.py").write_text(MODULE)
    seqio_tasks.library()
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


def evaluated(name, *, most, score, predict):
    """Returns what host 0 computes from the answers of all hosts; questions and metrics are sent as JSON."""
    measured = seqio_metrics.Measured(name, most=most)
    questions = json.loads(json.dumps(measured.questions()))
    return measured.computed(seqio_metrics.answered(questions, score=score, predict=predict))


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

    assert evaluated("sums", most=12, score=score, predict=predict) == {
        "sums": {"equal": 0.75, "likelihood": pytest.approx(-np.mean([2] * 9 + [3] * 3))}
    }
    assert asked["prompts"][3] == [0, *vocabulary.encode("3 + 1 =")]
    assert asked["pairs"][3] == (asked["prompts"][3], [*vocabulary.encode("4"), 1])
    assert asked["most"] == 3
    found = evaluated("surely", most=12, score=score, predict=predict)
    assert found == {"surely": {"surest": 0.0, "aux": -sum(len(targets) for _, targets in asked["pairs"])}}
    assert [vocabulary.decode(targets) for _, targets in asked["pairs"][:3]] == ["x", "2", "3"]
    assert {targets[-1] for _, targets in asked["pairs"]} == {1}
    evaluated("numbers", most=None, score=score, predict=predict)
    assert asked["pairs"][9] == ([0], [*vocabulary.encode("10"), 1])
    assert len(asked["pairs"]) == 40
    with pytest.raises(UserError, match="bare has no metrics: expected metrics of predictions or scores"):
        evaluated("bare", most=None, score=score, predict=predict)
    with pytest.raises(UserError, match="no seqio task or mixture 'sum'; did you mean 'sums'"):
        evaluated("sum", most=None, score=score, predict=predict)


@pytest.mark.slow
def test_only_scores_of_a_vocabulary_without_an_end_of_document_id(registered):
    assert seqio_metrics.require_metrics("endless_scored")
    with pytest.raises(UserError, match="its PassThroughVocabulary has no end-of-document id"):
        seqio_metrics.require_metrics("endless")


@pytest.mark.slow
def test_an_export_of_a_run_without_an_end_of_document_id_names_none(registered):
    task = ["TASK = @text.seqio()", "text.seqio.live = True", "text.seqio.inputs_length = None"]
    for name, end in (("endless", None), ("numbers", 1)):
        bindings = [*task, f"text.seqio.name = '{name}'", "text.seqio.length = 32", "text.seqio.num_streams = 1"]
        ids, settings = export._generation(loader.load("gin/quickstart.gin", bindings=bindings).build())
        assert (ids["eos_token_id"], settings) == (end, {})


@pytest.mark.slow
def test_a_run_is_scored_by_the_metrics_of_its_task(tmp_path):
    """During a run on two hosts, afterwards in one process, and on two hosts with another strategy.

    Each command is a process: the module is on PYTHONPATH, and the run's gin file names it.
    """
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "own_sums.py").write_text(MODULE)
    gin = tmp_path / "sums.gin"
    gin.write_text(
        f"""from __gin__ import dynamic_registration
from models.decoder import transformer
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
BATCH_SIZE = 8
TOTAL_STEPS = 2
WARMUP_STEPS = 1
EVAL_INTERVAL = 1
EVAL_BATCHES = 1
METRIC_EXAMPLES = 11
PROMPT = ''
transformer.Transformer.num_layers = 1
transformer.Transformer.dtype = 'float32'
"""
    )

    def launch(*arguments):
        path = os.pathsep.join([str(tmp_path / "modules"), str(environment.WORKSPACE)])
        command = [*environment.COMMAND, *map(str, arguments)]
        return subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)

    run_dir, out, trusted = tmp_path / "run", tmp_path / "scores.json", ("--module", "own_sums")
    trained = launch("pod", "v4-16", gin, "--simulate", "--run-dir", run_dir)
    assert trained.returncode == 0, trained.stderr
    said = re.findall(r"validation: .*sums/equal (\S+) .*sums/likelihood (\S+)", trained.stdout)
    assert len(said) == 2  # one for each step
    for how in ((), ("--slice", "v4-16", "--simulate", "--gin", "STRATEGY = @strategies.data_parallel()")):
        scored = launch("evaluate", run_dir, "--task", "sums", "--num-examples", "11", "--json", out, *trusted, *how)
        assert scored.returncode == 0, scored.stderr + scored.stdout
        found = json.loads(out.read_text())["tasks"]["sums"]
        assert 0 <= found["equal"] <= 1
        assert [found["equal"], found["likelihood"]] == pytest.approx(list(map(float, said[-1])), abs=1e-3)
        assert scored.stdout.count("likelihood") == 1  # of host 0
        out.unlink()
    assert launch("evaluate", run_dir, "--task", "nosuch", *trusted).returncode == 2

    without = launch("generate", run_dir, "--prompt", "1 + 1 =", "--max-tokens", "2")  # the cache has the vocabulary
    assert without.returncode == 0, without.stderr


@pytest.mark.slow
def test_the_metrics_of_a_mixture_are_those_of_seqio(registered):
    import seqio

    def answer(context):
        number = int(registered.vocabulary.decode(context[1:]).split()[0])
        return registered.vocabulary.encode(str(number + 1) if number % 3 else "x")

    def pairs(dataset):
        """From the features that seqio converts for a decoder; no id of these tasks is 0."""
        for _, each in dataset.as_numpy_iterator():
            ids, is_target = each["decoder_target_tokens"], each["decoder_loss_weights"] > 0
            yield [0, *ids[: is_target.argmax()].tolist()], ids[is_target].tolist()

    def predicted(dataset):
        answers = [[*answer(context), 1] for context, _ in pairs(dataset)]
        return [(n, ids + [0] * (4 - len(ids))) for n, ids in enumerate(answers)]

    def scored(dataset):
        return [(n, -float(len(targets))) for n, (_, targets) in enumerate(pairs(dataset))]

    evaluator = seqio.Evaluator("together", seqio.DecoderFeatureConverter(pack=False), num_examples=12)
    values, _ = evaluator.evaluate(compute_metrics=True, predict_fn=predicted, score_fn=scored)
    wanted = {task: {name: found[name] for name in found if name != "all"} for task, found in values.result().items()}
    assert wanted.keys() == {"sums", "likely"}
    found = evaluated(
        "together",
        most=12,
        score=lambda pairs: [-float(len(targets)) for _, targets in pairs],
        predict=lambda prompts, most: list(map(answer, prompts)),
    )
    assert found == wanted


@pytest.mark.part("code")
def test_samples_belong_to_other_benchmarks(capsys):
    assert command.main(["evaluate", "anything", "--task", "sums", "--samples", "2"]) == 2
    assert "--samples belongs to --humaneval, not to --task" in " ".join(capsys.readouterr().err.split())
