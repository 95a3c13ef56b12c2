"""Benchmarks of language models: likelihoods and continuations as lm_eval asks for them."""

import dataclasses
import functools
import itertools
import json
import math
import pathlib
import shutil
import sys
import types
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import tokenizers

from core import slices
from core.checkpoints import published_files
from core.errors import UserError
from launch import __main__ as command
from launch import loaded_model
from launch.experiments import benchmarks, lm_eval_tasks, simulated_hosts, text_scores
from parallel.compiled import host_memory
from parallel.generation.sampling import GREEDY, Sampling

FAMILY = pathlib.Path(__file__).parents[2] / "models" / "fixtures" / "families" / "llama3"
WORDS = [f"w{i}" for i in range(83)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A published folder, whose texts are words w0 … w82."""
    found = tmp_path_factory.mktemp("published") / "tiny"
    shutil.copytree(FAMILY, found)
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(dict(zip(WORDS, itertools.count())), unk_token="w1"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    made.save(str(found / "tokenizer.json"))
    (found / "tokenizer_config.json").write_text('{"bos_token": "w80", "eos_token": "w82"}')
    yield found
    published_files.use_copies(None)


@pytest.fixture(scope="module")
def scores(folder):
    return text_scores.TextScores(loaded_model.load(str(folder)))


def words(*ids):
    return " ".join(WORDS[i] for i in ids)


@functools.cache
def logits_of(model):
    return jax.jit(model.logits)


def log_probabilities(scores, ids):
    """The log-probability of each id but the first, by the model's logits."""
    row = np.zeros((1, 12), np.int32)  # of one length, for one program; no position sees those after it
    row[0, : len(ids)] = ids
    batch = {name: np.ones_like(row) for name in ("segment_ids", "weights", "targets")}
    batch |= {"inputs": row, "positions": np.arange(row.size)[None]}
    logits = np.asarray(logits_of(scores.model.model)(scores.model.params, batch)[0], np.float64)
    log_p = logits - np.log(np.sum(np.exp(logits), axis=1, keepdims=True))
    return [float(log_p[i, token]) for i, token in enumerate(ids[1:])]


def test_a_model_that_this_machine_cannot_hold_is_an_error_before_its_parameters_are_read(folder, monkeypatch):
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 1000)
    arguments = types.SimpleNamespace(slice=None, simulate=False, run_dir=str(folder), step=None, gin=None, module=None)
    with pytest.raises(UserError, match=r"simulating v5e-1 needs .* has 1,000 B of free memory"):
        benchmarks.load(arguments)


@pytest.mark.covers("N13")
def test_texts_are_scored_in_windows_that_begin_with_the_text(scores, monkeypatch):
    ids = [5, 17, 3, 9, 2, 41, 7, 60, 11]
    want = sum(log_probabilities(scores, [80, *ids]))
    assert scores.rolling([words(*ids), ""]) == [pytest.approx(want, rel=1e-5), 0]
    beginning = text_scores.TextScores(dataclasses.replace(scores.model, begins_with_bos=True))
    assert beginning.rolling([words(*ids)]) == [pytest.approx(want, rel=1e-5)]  # that id itself has no score
    monkeypatch.setattr(scores.scorer, "max_length", 4)
    parts = [log_probabilities(scores, part) for part in ([80, *ids[:4]], ids[3:8], ids[4:9])]
    want = sum(parts[0]) + sum(parts[1]) + parts[2][-1]
    assert scores.rolling([words(*ids)]) == [pytest.approx(want, rel=1e-5)]


def test_continuations_end_before_the_first_stop_string(scores, monkeypatch):
    prompts = [words(5, 17, 3), words(9), words(4, 4, 4, 4)]
    whole = scores.continued(prompts, until=[], max_tokens=40)
    free = [text.split() for text in whole]
    assert len(free[0]) > 20
    stop = free[0][3]
    found = scores.continued(prompts, until=[stop, "", free[1][2]], max_tokens=40)
    assert found == [text_scores.cut(text, [stop, free[1][2]]) for text in whole]
    generator, calls = scores.model.generator, []
    decode = generator._decoder.decode
    monkeypatch.setattr(generator, "_steps", 4)
    monkeypatch.setattr(generator._decoder, "decode", lambda *a, **k: calls.append(1) or decode(*a, **k))
    same = prompts[:1] * len(prompts)  # as many rows as above, for one program
    assert scores.continued(same, until=[free[0][0]], max_tokens=40) == [" "] * len(same)  # after a word
    assert len(calls) == 3  # of 10: two are under way when the first one's tokens are seen
    with pytest.raises(UserError, match="64 new tokens need more than the 64 positions"):
        scores.continued(prompts, until=[], max_tokens=64)
    assert text_scores.cut("abcabd", ["bd", "ca"]) == "ab"


def test_stop_strings_that_are_special_tokens_end_a_continuation(folder, tmp_path):
    """Text leaves them out, so that they are looked for among the ids."""
    shutil.copytree(folder, tmp_path / "special")
    made = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    made.add_special_tokens(["w7"])
    made.save(str(tmp_path / "special" / "tokenizer.json"))
    special = text_scores.TextScores(loaded_model.load(str(tmp_path / "special")))
    assert special._special(["w7", "w8", "w8 w9"]) == [7]
    [[found]] = special.model.batches(["w5"], rows=1, max_tokens=30)
    [[ended]] = special.model.batches(["w5"], rows=1, max_tokens=30, stop_ids=[found.ids[2]])
    assert list(ended.ids) == list(found.ids[: [*found.ids].index(found.ids[2])])


def test_a_row_that_ends_at_once_does_not_keep_the_others_running(scores):
    rows = text_scores._StopsEveryRow(scores.model, ["w3"], [[5], [6]], waits=False)
    assert not rows.add([None, 7])
    assert rows.add([None, 3])


class Request:
    def __init__(self, *args):
        self.args = args


def test_requests_are_answered_in_their_order(scores, monkeypatch):
    """The base class is a stand-in: the real one adds tokenization of pairs, which needs the library."""
    for name in ("lm_eval", "lm_eval.api", "lm_eval.api.model"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules["lm_eval.api.model"].TemplateLM = type("TemplateLM", (), {})
    model = lm_eval_tasks.adapter(scores)
    assert (model.eot_token_id, model.prefix_token_id) == (82, 80)
    assert model.tok_encode(words(5, 6)) == [5, 6]
    assert model.tok_encode(words(5, 6), add_special_tokens=True) == [80, 5, 6]
    assert model.tok_encode(words(80, 5)) == [80, 5]
    assert model.tok_encode(words(80, 5), add_special_tokens=True) == [80, 5]
    assert model.tok_encode(words(80, 5), add_special_tokens=False) == [80, 5]
    found = model._loglikelihood_tokens([(None, [5, 17], [3]), (None, [9], [2, 41])], disable_tqdm=True)
    wanted = [log_probabilities(scores, [5, 17, 3])[-1:], log_probabilities(scores, [9, 2, 41])]
    np.testing.assert_allclose([total for total, _ in found], [sum(want) for want in wanted], rtol=1e-5)
    assert model.loglikelihood_rolling([Request(words(5)), Request(words(6))]) == scores.rolling([words(5), words(6)])
    short, long = {"until": ["no such word"], "max_gen_toks": 2}, {"max_gen_toks": 5, "do_sample": False}
    texts = model.generate_until([Request(words(5), short), Request(words(9), long), Request(words(7), short)])
    assert [len(text.split()) for text in texts] == [2, 5, 2]
    assert texts[1] == scores.continued([words(9)], until=[], max_tokens=5)[0]


def test_options_of_generation():
    options = lm_eval_tasks.generation_options
    assert options({"until": "\n"}) == {"until": ["\n"], "max_tokens": 256, "sampling": GREEDY}
    assert options({"temperature": 0.0, "do_sample": False})["sampling"] == GREEDY
    assert options({"temperature": 0.0, "do_sample": True})["sampling"] == GREEDY
    assert options({"temperature": 0.0})["sampling"] == options({"top_p": 0.5})["sampling"] == GREEDY
    assert options({"temperature": 0.7, "top_p": 0})["sampling"] == Sampling(0.7, 0, 0.0)
    assert options({"temperature": None, "do_sample": True, "top_k": None})["sampling"] == Sampling(1.0)
    drawn = options({"temperature": 0.5, "top_p": 0.9, "max_new_tokens": 7})
    assert drawn == {"until": [], "max_tokens": 7, "sampling": Sampling(0.5, 0, 0.9)}
    with pytest.raises(UserError, match="num_beams, penalty are not known here"):
        options({"num_beams": 4, "penalty": 1})
    assert options({"temperature": 0.7, "top_k": -1})["sampling"] == Sampling(0.7)  # all, as others write it
    several = [{"until": 3}, {"until": [3]}, {"max_gen_toks": "many"}, {"max_gen_toks": 0}, {"temperature": "hot"}]
    for wrong in (*several, {"temperature": -1.0}, {"temperature": 0.5, "top_p": 1.5}):
        with pytest.raises(UserError, match=r"malformed generation options \{"):
            options(wrong)


@pytest.mark.part("code")
def test_wrong_arguments_are_refused_before_the_model_is_loaded(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "1000")
    monkeypatch.setattr(loaded_model, "load", None)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "lm_eval", None)
        assert command.main(["evaluate", str(folder), "--lm-eval", "arc_easy"]) == 2
        assert "--lm-eval: needs the package lm_eval; launch/setup.sh --extra lm-eval" in capsys.readouterr().err
    library, tasks = types.ModuleType("lm_eval"), types.ModuleType("lm_eval.tasks")
    library.__spec__ = types.SimpleNamespace(name="lm_eval")
    kinds = {"code": (True, {}), "beams": (False, {"beams": 2}), "arc_easy": (False, None), "hellaswag": (False, None)}

    def task(unsafe_code, generation_kwargs):
        config = types.SimpleNamespace(unsafe_code=unsafe_code, generation_kwargs=generation_kwargs)
        return types.SimpleNamespace(OUTPUT_TYPE="generate_until", config=config)

    def load(names):
        if names == ["no_data"]:
            (tmp_path / "data.jsonl").read_text()
        return {"tasks": {name: task(*kinds[name]) for name in names}}

    def manager(include_path):
        if include_path:
            raise ValueError("Expected YAML dict\n  from tasks.yaml")
        return types.SimpleNamespace(all_tasks=["no_data", *kinds], load=load)

    tasks.TaskManager = manager
    monkeypatch.setitem(sys.modules, "lm_eval", library)
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", tasks)
    none = str(tmp_path / "none")
    for arguments, message in {
        ("arc_esy",): "lm_eval has no task 'arc_esy'; did you mean arc_easy?",
        (",",): "has no task ','",
        ("no_data",): "lm_eval cannot load the tasks (FileNotFoundError: [Errno 2] No such file or directory",
        ("code",): "--lm-eval code: task code runs programs that the model writes, without confining them",
        ("beams",): "--lm-eval beams: task beams: the generation options beams are not known here",
        ("arc_easy", "--lm-eval-path", none): "expected a folder of tasks (YAML files)",
        ("arc_easy", "--lm-eval-path", str(tmp_path)): "(ValueError: Expected YAML dict from tasks.yaml)",
        ("arc_easy", "--all-steps"): "are for the run's own held-out data",
        (
            "arc_easy",
            "--samples",
            "2",
            "--allow-code",
        ): "--allow-code, --samples belong to --humaneval, not to --lm-eval",
    }.items():
        assert command.main(["evaluate", str(folder), "--lm-eval", *arguments]) == 2
        assert message in capsys.readouterr().err
    assert command.main(["evaluate", str(folder), "--json", str(tmp_path / "out.json")]) == 2
    assert "--json belongs to --lm-eval or --task" in capsys.readouterr().err
    assert not any(tmp_path.iterdir())


def test_scores_are_printed_and_written(folder, tmp_path, capsys, monkeypatch):
    library, tasks = types.ModuleType("lm_eval"), types.ModuleType("lm_eval.tasks")
    library.__spec__ = types.SimpleNamespace(name="lm_eval")
    asked = {}

    def simple_evaluate(model, **options):
        asked.update(options)
        return {"results": {"capitals": {"alias": "capitals", "acc,none": 0.25, "acc_stderr,none": 0.125}}}

    library.simple_evaluate = simple_evaluate
    tasks.TaskManager = lambda include_path: types.SimpleNamespace(
        all_tasks=["capitals"], load=lambda names: {"tasks": {}}
    )
    monkeypatch.setitem(sys.modules, "lm_eval", library)
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", tasks)
    monkeypatch.setattr(lm_eval_tasks, "adapter", lambda scores: "the adapter")
    out = tmp_path / "scores.json"
    arguments = ["--lm-eval", "capitals", "--rows", "12", "--json", str(out)]
    assert command.main(["evaluate", str(folder), *arguments]) == 0
    assert (asked["tasks"], asked["limit"]) == (["capitals"], 12)
    assert ["capitals", "acc", "0.2500", "0.1250"] in [line.split() for line in capsys.readouterr().out.splitlines()]
    written = {"model": str(folder), "tasks": {"capitals": {"acc": 0.25, "acc_stderr": 0.125}}}
    assert json.loads(out.read_text()) == written


def test_figures_that_are_not_finite_are_text(tmp_path):
    args = SimpleNamespace(json=str(tmp_path / "found.json"))
    benchmarks.write(
        args, SimpleNamespace(model=SimpleNamespace(where="here")), {"sums": {"f1": math.nan, "loss": 1.5}}
    )
    found = json.loads((tmp_path / "found.json").read_text(), parse_constant=lambda name: pytest.fail(name))
    assert found == {"model": "here", "sums": {"f1": "nan", "loss": 1.5}}


@pytest.mark.parametrize(("name", "logs"), [("sums@100", "sums/logs"), ("absent@100", None)])
def test_simulated_hosts_make_no_folder_that_looks_like_a_step(tmp_path, monkeypatch, name, logs):
    (tmp_path / "sums" / "checkpoints").mkdir(parents=True)
    found = []

    def run(slice_, *, command, log_directory):
        found.append(log_directory)

    monkeypatch.setattr(simulated_hosts.simulate, "run", run)
    monkeypatch.setattr(simulated_hosts.flags, "passed_on", lambda args, *names: [])
    args = SimpleNamespace(run_dir=str(tmp_path / name))
    if logs is None:
        with pytest.raises(UserError, match="absent@100"):
            simulated_hosts.evaluate(args, slices.get("v4-16"))
    else:
        simulated_hosts.evaluate(args, slices.get("v4-16"))
        assert found == [tmp_path / logs]
    assert [path.name for path in tmp_path.iterdir()] == ["sums"]


def test_a_batch_stops_when_every_row_has_stopped_and_not_before_a_row_has_begun():
    """Rows of a batch may run one after another: then None is the new id of a row that has not begun."""
    model = types.SimpleNamespace(decoded=lambda ids, after: "".join(map(chr, ids)))
    stops = text_scores._StopsEveryRow(model, ["."], [[1], [2]], waits=True)
    for first, second, ends in (("a", None, False), (".", None, False), (None, "b", False), (None, ".", True)):
        assert stops.add([first and ord(first), second and ord(second)]) is ends
    ended = text_scores._StopsEveryRow(model, ["."], [[1], [2]], waits=True)
    assert not ended.add([ord("a"), ord("b")])
    assert ended.add([None, ord(".")])  # the first row has ended by its stop id
