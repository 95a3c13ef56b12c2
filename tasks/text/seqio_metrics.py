"""Computes a registered seqio task's own metrics on its validation split, with `seqio.Evaluator`."""

import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from core.errors import UserError
from tasks.text import seqio_tasks

Pair = tuple[Sequence[int], Sequence[int]]  # ids of the context, which begins with id 0, and ids of the targets
_SPLIT = "validation"
_PREDICTION, _WITH_SCORES, _SCORE = "PREDICTION", "PREDICTION_WITH_AUX", "SCORE"  # seqio.metrics.ModelOutputType


class Measured(NamedTuple):
    """The metrics of a registered task, or of each task of a mixture.

    Attributes:
      name: name of the task or mixture.
      module: the module that registers it; None: already imported.
      most: maximum number of examples per task; None: all.
      lengths: maximum number of ids by feature, as pairs; (): examples are not cut.
    """

    name: str
    module: str | None = None
    most: int | None = None
    lengths: tuple[tuple[str, int], ...] = ()

    def questions(self) -> dict[str, Any]:
        """Returns what to ask the model, as JSON values for `answered`."""
        found, evaluator = require_metrics(self.name, self.module), _evaluator(self)
        asked = {}
        for task in evaluator.eval_tasks:
            pairs = _pairs(evaluator.cached_task_datasets[task.name], has_inputs="inputs" in task.output_features)
            asked[task.name] = {"kinds": kinds(task), "pairs": pairs}
        return {"eos_id": seqio_tasks.eos_id(found.output_features["targets"].vocabulary), "tasks": asked}

    def computed(self, outputs: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, float]]:
        """Returns the metrics that are numbers, by task and metric, from `answered`'s outputs.

        Raises UserError if a metric fails.
        """
        evaluator, types = _evaluator(self), seqio_tasks.library().metrics.ModelOutputType
        of = {id(dataset): outputs[name] for name, dataset in evaluator.cached_model_datasets.items()}

        def scores(dataset: Any) -> list[tuple[int, float]]:
            return list(enumerate(of[id(dataset)]["scores"]))

        def predictions(dataset: Any) -> list[tuple[int, list[int]]]:
            return list(enumerate(of[id(dataset)]["answers"]))

        def with_scores(dataset: Any) -> tuple[list[tuple[int, list[int]]], dict[str, list[float]]]:
            return predictions(dataset), {"scores": of[id(dataset)]["answer_scores"]}

        functions = {types.SCORE: scores, types.PREDICTION: predictions, types.PREDICTION_WITH_AUX: with_scores}
        try:
            values = evaluator.evaluate(compute_metrics=True, model_fns=functions)[0].result()
        except Exception as error:  # a metric is a user's function
            raise UserError(f"the metrics of {self.name} fail: {type(error).__name__}: {error}") from error
        return {task: dict(_scalars(each)) for task, each in values.items()}


def require_metrics(name: str, module: str | None = None) -> Any:
    """Returns a registered task or mixture. Raises UserError if its metrics cannot be computed."""
    seqio, found = seqio_tasks.library(), seqio_tasks.registered(name, "--task", module=module)
    needed = [kind for task in seqio.get_subtasks(found) if _SPLIT in task.splits for kind in kinds(task)]
    require_kinds(name, needed)
    vocabulary = found.output_features["targets"].vocabulary
    if {_PREDICTION, _WITH_SCORES} & set(needed) and seqio_tasks.eos_id(vocabulary) < 0:
        raise UserError(
            f"{name} has metrics of predictions, but its {type(vocabulary).__name__} has no end-of-document id, which "
            "ends a prediction: give the vocabulary an eos_id, or use metrics of scores"
        )
    return found


def kinds(task: Any) -> list[str]:
    """Returns the model outputs that metrics need, as names of `seqio.metrics.ModelOutputType`."""
    return sorted({metric.model_output_type.name for metric in task.metric_objs})


def require_kinds(name: str, found: Collection[str]) -> None:
    """Raises UserError unless there are metrics, all of predictions or scores."""
    if not found or set(found) - {_PREDICTION, _WITH_SCORES, _SCORE}:
        has = ", ".join(sorted(set(found))) or "no metrics"
        raise UserError(
            f"{name} has {has}: expected metrics of predictions or scores (metric_fns or metric_objs), of tasks with a "
            f"{_SPLIT} split"
        )


def answered(
    questions: Mapping[str, Any],
    *,
    score: Callable[[Sequence[Pair]], Sequence[float]],
    predict: Callable[[Sequence[Sequence[int]], int], Sequence[Sequence[int]]],
) -> dict[str, dict[str, Any]]:
    """Returns a model's outputs for `Measured.computed`.

    Args:
      questions: the result of `Measured.questions`.
      score: returns log-likelihoods, given pairs of ids (context, continuation).
      predict: returns continuations, given prompts and the largest number of ids.
    """
    eos_id, outputs = questions["eos_id"], {}
    for name, asked in questions["tasks"].items():
        pairs = [(context, targets) for context, targets in asked["pairs"]]
        found: dict[str, Any] = {}
        if _SCORE in asked["kinds"]:
            found["scores"] = list(score(pairs))
        if {_PREDICTION, _WITH_SCORES} & set(asked["kinds"]):
            contexts = [context for context, _ in pairs]
            answers = predict(contexts, max(len(targets) for _, targets in pairs))
            found["answers"] = _padded(answers, eos_id)
        if _WITH_SCORES in asked["kinds"]:
            given = [(context, [*ids, eos_id]) for context, ids in zip(contexts, answers, strict=True)]
            found["answer_scores"] = list(score(given))
        outputs[name] = found
    return outputs


@functools.lru_cache(maxsize=1)
def _evaluator(measured: Measured) -> Any:
    seqio, found = seqio_tasks.library(), seqio_tasks.registered(measured.name, "--task", module=measured.module)
    try:
        return seqio.Evaluator(
            measured.name,
            seqio.DecoderFeatureConverter(pack=False),
            eval_split=_SPLIT,
            use_cached=any(task.requires_caching for task in seqio.get_subtasks(found)),
            num_examples=measured.most,
            sequence_length=dict(measured.lengths) or None,
            async_compute_metrics=False,
        )
    except Exception as error:  # sources and preprocessors are the user's code
        raise UserError(f"the examples of {measured.name} fail: {type(error).__name__}: {error}") from error


def _pairs(dataset: Any, *, has_inputs: bool) -> list[tuple[list[int], list[int]]]:
    """Returns the ids before the targets, beginning with id 0, and the targets of each example."""
    examples = list(dataset.as_numpy_iterator())
    if not examples:
        raise UserError("the validation split of the task has no examples")
    before = [each["inputs"].tolist() if has_inputs else [] for each in examples]
    return [([0, *ids], each["targets"].tolist()) for ids, each in zip(before, examples, strict=True)]


def _padded(answers: Sequence[Sequence[int]], eos_id: int) -> list[list[int]]:
    longest = max(map(len, answers))
    return [[*ids, eos_id, *[0] * (longest - len(ids))] for ids in answers]


def _scalars(metrics: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for name, metric in metrics.items():
        value = getattr(metric, "value", metric)
        if isinstance(value, int | float | np.number) or getattr(value, "shape", None) == ():
            yield name, float(value)
