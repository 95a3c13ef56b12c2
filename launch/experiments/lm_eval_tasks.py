"""`launch/run evaluate --lm-eval`: scores a model on tasks of lm_eval, EleutherAI's evaluation harness.

lm_eval builds the requests of its tasks and computes the scores; this module answers the requests.
"""

import contextlib
import dataclasses
import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from core import extras
from core.errors import UserError
from launch.experiments.text_scores import TextScores
from parallel.generation.sampling import GREEDY, Sampling

USUAL_TOKENS = 256  # new tokens if a task does not say how many
_SHOWN = 400  # characters of lm_eval's errors that are shown
_MOST_TOKENS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")


@dataclasses.dataclass(frozen=True)
class Tasks:
    """Tasks that lm_eval has found: names of tasks, groups or tags, and its task manager."""

    names: Sequence[str]
    manager: Any


def find(names: str, *, folder: str | None) -> Tasks:
    """Finds tasks by their names, separated by commas.

    `folder`: a folder of further tasks, as YAML files; None: only those of the library.

    Raises:
      UserError: lm_eval is not installed, or a task does not exist or cannot be used.
    """
    extras.require("lm_eval", extra="lm-eval", what="--lm-eval")
    from lm_eval.tasks import TaskManager

    if folder is not None and not Path(folder).is_dir():
        raise UserError(f"--lm-eval-path {folder}: expected a folder of tasks (YAML files)")
    asked = [name.strip() for name in names.split(",") if name.strip()]
    with _refusing(f"--lm-eval-path {folder}: lm_eval cannot read the folder"):
        manager = TaskManager(include_path=folder)
    absent = [name for name in asked if name not in manager.all_tasks]
    if absent or not asked:
        near = difflib.get_close_matches(absent[0] if absent else "", manager.all_tasks, n=3)
        hint = f"; did you mean {', '.join(near)}?" if near else ""
        where = f", with {folder}, whose malformed files it skips," if folder else ""
        raise UserError(
            f"--lm-eval {names}: lm_eval{where} has no task {', '.join(map(repr, absent)) or repr(names)}{hint}"
        )
    with _refusing(f"--lm-eval {names}: lm_eval cannot load the tasks"):
        loaded = manager.load(asked)["tasks"]  # with their data, which may have to be downloaded
    for name, task in loaded.items():
        if task.config.unsafe_code:
            raise UserError(
                f"--lm-eval {names}: task {name} runs programs that the model writes, without confining them. For "
                "HumanEval, give --humaneval, which confines them"
            )
        if task.OUTPUT_TYPE == "generate_until":
            try:
                generation_options(task.config.generation_kwargs or {})
            except UserError as error:
                raise UserError(f"--lm-eval {names}: task {name}: {error}") from error
    return Tasks(asked, manager)


@contextlib.contextmanager
def _refusing(what: str) -> Iterator[None]:
    """Converts exceptions to UserErrors, because those of lm_eval have many types."""
    try:
        yield
    except Exception as error:
        said = " ".join(str(error).split()) or "no reason given"
        hint = "It reads files that a task names relative to the current directory"
        raise UserError(f"{what} ({type(error).__name__}: {said[:_SHOWN]}). {hint}") from error


def evaluate(tasks: Tasks, scores: TextScores, *, limit: int | None) -> dict[str, dict[str, float]]:
    """Returns the metrics of each task and group, by name.

    `limit`: the number of documents of each task, from the first; None: all.
    """
    import lm_eval

    found = lm_eval.simple_evaluate(
        model=adapter(scores), tasks=list(tasks.names), task_manager=tasks.manager, limit=limit, log_samples=False
    )
    assert found is not None  # lm_eval asks for the processes; this is the only one
    return {task: numbers(metrics) for task, metrics in {**found["results"], **found.get("groups", {})}.items()}


def numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Returns the metrics that are numbers, by name, such as `acc` for lm_eval's `acc,none`."""
    return {
        name.removesuffix(",none"): float(value)
        for name, value in metrics.items()
        if isinstance(value, (int, float)) and "," in name
    }


def adapter(scores: TextScores) -> Any:
    """Returns an `lm_eval.api.model.LM` that answers with the model."""
    from lm_eval.api.model import TemplateLM

    vocabulary = scores.model.vocabulary

    class Adapter(TemplateLM):
        eot_token_id = vocabulary.eos_id
        prefix_token_id = vocabulary.bos_id

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
            return scores.encoded(string, with_bos=add_special_tokens)

        def _loglikelihood_tokens(self, requests: Sequence[Any], **_: Any) -> list[tuple[float, bool]]:
            found = scores.likelihoods([(context, text) for _, context, text in requests])
            return [(one.log_likelihood, one.is_greedy) for one in found]

        def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
            del disable_tqdm
            return scores.rolling([request.args[0] for request in requests])

        def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
            del disable_tqdm
            groups: dict[str, list[int]] = {}  # requests with the same options run together
            for i, request in enumerate(requests):
                groups.setdefault(json.dumps(request.args[1], sort_keys=True), []).append(i)
            texts: dict[int, str] = {}
            for options, members in groups.items():
                prompts = [requests[i].args[0] for i in members]
                found = scores.continued(prompts, **generation_options(json.loads(options)))
                texts |= dict(zip(members, found, strict=True))
            return [texts[i] for i in range(len(requests))]

    return Adapter()


def generation_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Converts a task's generation options to arguments of `TextScores.continued`.

    Raises UserError if one is unknown or malformed.
    """
    options = dict(given)
    until = options.pop("until", None) or []
    until = [until] if isinstance(until, str) else until
    counts = [options.pop(name) for name in _MOST_TOKENS if name in options]
    try:
        temperature, top_k, top_p = (options.pop(name, None) for name in ("temperature", "top_k", "top_p"))
        is_drawn = options.pop("do_sample", temperature is not None)
        usual = Sampling()  # for what is not given; a temperature of 0 is given
        sampling = Sampling(
            usual.temperature if temperature is None else float(temperature),
            usual.top_k if top_k is None else max(int(top_k), 0),  # -1 is another way to say: all
            usual.top_p if top_p is None else float(top_p),
        )
        max_tokens = int(counts[0]) if counts else USUAL_TOKENS
    except (TypeError, ValueError) as error:
        raise UserError(f"malformed generation options {dict(given)}: {error}") from error
    if options:
        known = ", ".join(["until", *_MOST_TOKENS, "do_sample", "temperature", "top_k", "top_p"])
        raise UserError(f"the generation options {', '.join(options)} are not known here; expected any of {known}")
    if max_tokens < 1 or not isinstance(until, list) or not all(isinstance(stop, str) for stop in until):
        raise UserError(f"malformed generation options {dict(given)}: expected stop texts, and at least 1 token")
    sampling = sampling if is_drawn and sampling.temperature > 0 else GREEDY
    return {"until": until, "max_tokens": max_tokens, "sampling": sampling}
