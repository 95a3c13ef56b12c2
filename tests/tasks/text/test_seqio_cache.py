"""A registered seqio task becomes a token cache with the examples that seqio gives, and is read without seqio."""

import collections
import concurrent.futures
import dataclasses
import importlib
import importlib.util
import itertools
import json
import os
import pathlib
import subprocess
import sys
import types

import numpy as np
import pytest

from core.errors import UserError
from core.files import paths
from core.types import DataLayout
from launch import environment
from tasks import text
from tasks.text import (
    beam_parts,
    chat_files,
    mixed_documents,
    near_duplicates,
    sentencepieces,
    seqio_cache,
    seqio_metrics,
    seqio_pipeline,
    seqio_tasks,
    token_cache,
    token_writer,
    tokenizing,
    vocabularies,
)
from tasks.text.documents import StreamSpec
from tasks.text.filters import Filters

pytestmark = pytest.mark.slow  # TensorFlow
MODULE = "equal_tasks"
INPUTS, LENGTH = 24, 72


class Inline:
    """Runs pipelines in this process, because each other one imports TensorFlow."""

    def submit(self, number, call, *arguments):
        done = concurrent.futures.Future()
        try:
            done.set_result(call(*arguments))
        except UserError as error:
            done.set_exception(error)
        return done

    def close(self):
        seqio_pipeline._open.clear()


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Text files and a SentencePiece model; tasks that read them are registered."""
    folder = tmp_path_factory.mktemp("files")
    words = ["some", "lines", "of", "text", "that", "differ", "from", "one", "another"]
    lines = [" ".join(words[i * k % 9] for k in range(1 + i % 12)) + f" {i}" for i in range(120)]
    for part in range(3):
        (folder / f"part-{part}.txt").write_text("\n".join(lines[40 * part : 40 * part + 40]) + "\n")
        texts = [{"text": line * (1 + 9 * (at % 7 == 0))} for at, line in enumerate(lines[40 * part : 40 * part + 40])]
        (folder / f"part-{part}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in texts))
    ask = [{"role": role, "content": role[0] * 3} for role in ("user", "assistant")]
    chats = [{"messages": ask * (1 + n % 3)} for n in range(1, 40)]
    chats += [{"prompt": "x" * n, "completion": " more"} for n in range(40)]
    (folder / "chats.jsonl").write_text("".join(json.dumps(one) + "\n" for one in chats))
    (folder / "own.model").write_bytes(sentencepieces._train(lines, 300))
    seqio_tasks.library()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OWN_FILES", str(folder))
        patch.syspath_prepend(str(pathlib.Path(__file__).parent))
        patch.setattr(seqio_pipeline, "PROCESSES", Inline())
        patch.setattr(seqio_cache, "_EXAMPLES", 7)
        importlib.import_module(MODULE)
        yield folder


def make(name, cache, *, inputs=False, **options):
    options = {"length": LENGTH if inputs else LENGTH - INPUTS, "num_streams": 2} | options
    return text.seqio(name=name, module=MODULE, cache=str(cache), inputs_length=INPUTS if inputs else None, **options)


def filled(name, cache, **options):
    task = make(name, cache, **options)
    assert [*task.problems(), *task.example_problems()] == []
    task.prepare("unused", is_host_zero=True)
    return task


def segments(rows):
    """The segments of packed rows, as tuples of values."""
    found = collections.Counter()
    for row in rows:
        for number in range(1, int(row["segment_ids"].max()) + 1):
            here = row["segment_ids"] == number
            keys = ("inputs", "targets", "weights", "positions")
            found[tuple(tuple(row[key][here].tolist()) for key in keys)] += 1
    return found


def passes(stream):
    while True:
        try:
            yield {key: values[0] for key, values in next(stream).items()}
        except StopIteration:
            return


def read(task, split="train"):
    spec = StreamSpec(split, 0, 1, 1, task.length, None, task.vocabulary, once=True)
    return segments(passes(task.corpus.open_stream(spec)))


def theirs(name, lengths, converter, split="train", **options):
    import seqio

    examples = seqio.get_mixture_or_task(name).get_dataset(
        lengths, split=split, shuffle=False, **{"num_epochs": 1, "seed": 0} | options
    )
    names = {
        "inputs": "decoder_input_tokens",
        "targets": "decoder_target_tokens",
        "weights": "decoder_loss_weights",
        "segment_ids": "decoder_segment_ids",
        "positions": "decoder_positions",
    }
    rows = converter(pack=True)(examples, lengths).as_numpy_iterator()
    return segments({key: row[name] for key, name in names.items()} for row in rows)


def converter_of(name):
    import seqio

    return getattr(seqio, name)


@pytest.mark.parametrize("split", ["train", "validation"])
@pytest.mark.parametrize(
    ("name", "converter"),
    [
        ("prefix", "PrefixLMFeatureConverter"),
        ("lines", "LMFeatureConverter"),
        ("several", "DecoderFeatureConverter"),
        ("truncated", "PrefixLMFeatureConverter"),
        ("trimmed", "DecoderFeatureConverter"),
        ("empty", "LMFeatureConverter"),
        ("long", "DecoderFeatureConverter"),
        ("hugging_face", "PrefixLMFeatureConverter"),
    ],
)
def test_segments_equal_those_of_seqio(files, tmp_path, name, converter, split):
    inputs = name in ("prefix", "several", "truncated", "trimmed", "hugging_face")
    task = filled(name, tmp_path / "cache", inputs=inputs)
    wanted = theirs(name, task.corpus.asked.lengths, converter_of(converter), split)
    assert len(wanted) > 2
    assert read(task, split) == wanted


def test_trimmed_and_padded_rows_are_the_segments(files, tmp_path):
    """seqio's rows of one example each, without their padding."""
    import seqio

    task = filled("trimmed", tmp_path / "cache", inputs=True)
    lengths = task.corpus.asked.lengths
    examples = seqio.TaskRegistry.get("trimmed").get_dataset(lengths, split="train", shuffle=False, num_epochs=1)
    rows = list(seqio.PrefixLMFeatureConverter(pack=False)(examples, lengths).as_numpy_iterator())
    names = [f"decoder_{name}" for name in ("input_tokens", "target_tokens", "loss_weights")]
    wanted = [[row[name][: np.count_nonzero(row["decoder_target_tokens"])].tolist() for name in names] for row in rows]
    assert {len(row["decoder_target_tokens"]) for row in rows} == {LENGTH}
    found = read(task)
    assert collections.Counter(tuple(map(tuple, each)) for each in wanted) == collections.Counter(
        {each[:3]: sum(n for other, n in found.items() if other[:3] == each[:3]) for each in found}
    )


def test_a_mixture_has_the_rates_of_seqio_in_every_window(files, tmp_path):
    import seqio

    task = filled("mixed", tmp_path / "cache", num_streams=4)
    lengths, mixture = task.corpus.asked.lengths, seqio.MixtureRegistry.get("mixed")
    each = {name: theirs(name, lengths, seqio.LMFeatureConverter) for name in ("empty", "long")}
    assert read(task) == each["empty"] + each["long"]  # an evaluation reads every example once
    share = mixture.get_rate(seqio.TaskRegistry.get("empty")) / mixture.total_rate
    chunks = [task.corpus.chunks(spec(task, index)) for index in range(4)]
    drawn = []
    for turn in range(300):  # in which streams have other slots than in the one before
        slots = [mixed_documents.slot_of(index, 4, turn=turn) for index in range(4)]
        drawn += [tuple(chunks[slots.index(slot)].next_segment(LENGTH).targets.tolist()) for slot in range(4)]
    known = {targets for _, targets, *_ in each["empty"]}
    is_first = np.array([targets in known for targets in drawn])
    for start in range(0, 1100, 37):
        for size in (20, 100):
            assert abs(is_first[start : start + size].sum() - share * size) <= 1


def spec(task, index, split="train", seed=3):
    return StreamSpec(split, index, task.num_streams, 2, task.length, seed, task.vocabulary)


@pytest.mark.parametrize("name", ["random", "random_inside"])
def test_epochs_of_a_random_task_are_those_of_seqio(files, tmp_path, name):
    import seqio

    (problem,) = make(name, tmp_path / "cache").problems()
    assert all(words in problem for words in ("text.seqio.epochs", "live = True"))
    task = filled(name, tmp_path / "cache", epochs=3)
    lengths = task.corpus.asked.lengths
    epochs = [theirs(name, lengths, seqio.LMFeatureConverter, seed=seed) for seed in range(3)]
    assert epochs[0] != epochs[1]
    assert read(task) == sum(epochs, collections.Counter())
    # A cache that was begun by a revision that took the task for one that draws nothing is not continued.
    (begun,) = (cache.about for cache in task.corpus._opened)
    with pytest.raises(UserError, match="was begun with draws None, now True"):
        tokenizing._require_same("out", begun | {"seqio": task.corpus._identity()}, begun, [])
    chunks = task.corpus.chunks(spec(task, 0)._replace(num_streams=1))
    count = epochs[0].total()
    for wanted in (*epochs, epochs[0]):  # and then from the start, in another order
        got = [tuple(chunks.next_segment(LENGTH).targets.tolist()) for _ in range(count)]
        assert collections.Counter(got) == collections.Counter({seg[1]: n for seg, n in wanted.items()})


def test_random_numbers_without_a_seed_are_the_same_in_every_cache(files, tmp_path):
    first, second = (filled("without_seed", tmp_path / name) for name in "ab")
    assert 0 < sum(read(first).values()) < len(importlib.import_module(MODULE).TEXTS)
    assert first.fingerprint() == second.fingerprint()


def test_a_position_of_rows_that_were_mixed_in_another_order_is_refused(files, tmp_path):
    """A window of such rows can have another number of them."""
    layout = DataLayout(8, tuple(range(8)), tuple(range(8)))
    batches = filled("mixed", tmp_path / "cache", num_streams=4).train(layout, seed=5)
    next(batches)
    state = batches.state()
    batches.restore(state)
    before = {key: value.replace(b'"packing": 3', b'"packing": 2') for key, value in state.items()}
    assert before != state
    with pytest.raises(UserError, match="packed in another way, by an earlier version"):
        batches.restore(before)


@pytest.mark.parametrize("hosts", [1, 2, 4])
def test_any_hosts_read_the_same_rows_and_continue_exactly(files, tmp_path_factory, hosts):
    folder = tmp_path_factory.getbasetemp() / "shared_mixed"
    task = filled("mixed", folder, num_streams=4)
    rows = np.arange(8).reshape(hosts, -1) if hosts < 4 else np.arange(8).reshape(4, 2)
    layouts = [DataLayout(8, tuple(map(int, own)), tuple(map(int, own))) for own in rows]
    whole = task.train(DataLayout(8, tuple(range(8)), tuple(range(8))), seed=5)
    parts = [task.train(layout, seed=5) for layout in layouts]
    for _ in range(9):
        wanted, found = next(whole), [next(part) for part in parts]
        for key, values in wanted.items():
            assert np.array_equal(values, np.concatenate([each[key] for each in found])), key
    saved = {key: value for part in parts for key, value in part.state().items()}
    again = make("mixed", folder, num_streams=4).train(DataLayout(8, tuple(range(8)), tuple(range(8))), seed=5)
    again.restore(saved)
    for _ in range(30):
        wanted, found = next(whole), next(again)
        assert all(np.array_equal(values, found[key]) for key, values in wanted.items())


class Stopped(RuntimeError):
    """Interrupts a command."""


def stopped():
    raise Stopped


def test_an_interrupted_cache_continues_to_the_same_bytes(files, tmp_path, monkeypatch):
    monkeypatch.setattr(token_writer, "_COMMIT_TOKENS", 500)
    whole, broken = (make("lines", tmp_path / name) for name in ("whole", "broken"))
    whole.corpus.fill(processes=2)
    reports = 0

    def stop(counts):
        nonlocal reports
        reports += 1
        if reports in (4, 11):
            raise Stopped

    for _ in range(2):
        with pytest.raises(Stopped):
            broken.corpus.fill(processes=3, report=stop)
        with pytest.raises(UserError, match="no token cache"):
            broken.fingerprint()
    said = []
    broken.corpus.fill(processes=1, say=said.append)
    assert any(line.startswith("continuing after") for line in said)
    assert broken.fingerprint() == whole.fingerprint()
    assert content(tmp_path / "broken") == content(tmp_path / "whole")


def content(folder):
    found = {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert len(found) > 10
    return found


class PartsHere(beam_parts.Parts):
    """Makes the parts in this process, the last lane first; `tests/run.sh lab seqio_tasks` makes them with Beam."""

    def make(self, asked, lanes, most, filters, arguments):
        pathlib.Path(self._folder).mkdir(exist_ok=True)
        for lane in reversed(lanes):
            beam_parts._write_lane(f"{self._folder}/.", asked, most, filters, tuple(lane))


def test_a_cache_of_parts_has_the_bytes_of_a_cache_of_processes(files, tmp_path, monkeypatch):
    monkeypatch.setattr(beam_parts, "Parts", PartsHere)
    beam = types.SimpleNamespace(arguments=lambda processes: [])
    for name, options in {"lines": {}, "prefix": {"inputs": True}, "random": {"epochs": 2}}.items():
        whole, parts = (make(name, tmp_path / f"{name}-{how}", **options) for how in ("whole", "parts"))
        whole.corpus.fill(processes=2)
        parts.corpus.fill(beam=beam)
        assert content(tmp_path / f"{name}-parts") == content(tmp_path / f"{name}-whole")
    task = make("fails_later", tmp_path / "fails")
    for _ in range(2):  # the part of the failure is made again, and others are kept
        with pytest.raises(UserError, match=r"task fails_later, train split, example 70, preprocessor fails "):
            task.corpus.fill(beam=beam)
        assert len(list((tmp_path / "fails").glob("parts-*/*-train-*.npz"))) == 10


def documents(task):
    """The texts of the examples for training, in order, of a task without inputs."""
    (cache,), vocabulary = task.corpus._opened, importlib.import_module(MODULE).PIECES
    folder, ends = cache.path + "/train", cache.about["splits"]["train"]["documents"]
    ids, ends = (
        token_cache.array(paths.resolve(folder), *each).read().result()
        for each in (("tokens", "uint16"), ("ends", "int64"))
    )
    return [vocabulary.decode(part.tolist()) for part in np.split(ids, ends[:-1])]


def test_filters_leave_out_the_same_examples_on_any_machine(files, tmp_path, monkeypatch):
    """The filtered cache has the unfiltered examples but those left out: on one machine, in parts, and interrupted."""
    monkeypatch.setattr(beam_parts, "Parts", PartsHere)
    monkeypatch.setattr(token_writer, "_COMMIT_TOKENS", 500)
    every = documents(filled("lines", tmp_path / "every"))
    (tmp_path / "set.jsonl").write_text(json.dumps({"question": max(every[20:40], key=len)}) + "\n")
    found = Filters((f"{tmp_path}/set.jsonl",), words=6, near_duplicates=0.6)
    excluded, seen = found.excluded(), found.seen()
    compared = [text for text in every if not excluded.shares_text(text)]
    repeats = seen.repeats(near_duplicates.signatures(compared))
    assert len(every) > len(compared) > len(compared) - repeats.sum() > 20

    whole, parts, broken = (make("lines", tmp_path / name) for name in ("whole", "parts", "broken"))
    whole.corpus.fill(processes=2, filters=found)
    assert documents(whole) == [text for text, is_repeat in zip(compared, repeats, strict=True) if not is_repeat]
    counts = {"shares_text": len(every) - len(compared), "near_duplicate": repeats.sum()}
    assert whole.corpus.left_out() == counts
    assert sum(read(whole).values()) == len(documents(whole))  # an epoch has all of them
    parts.corpus.fill(beam=types.SimpleNamespace(arguments=lambda processes: []), filters=found)
    with pytest.raises(Stopped):
        broken.corpus.fill(filters=found, report=lambda at: at.total("tokens") > 1200 and stopped())
    broken.corpus.fill(filters=found)
    assert content(tmp_path / "whole") == content(tmp_path / "parts") == content(tmp_path / "broken")

    make("lines", tmp_path / "whole").corpus.fill()  # a run takes what is there
    for other in (Filters(), dataclasses.replace(found, near_duplicates=0.7)):
        with pytest.raises(UserError, match=r"whole was begun with"):
            make("lines", tmp_path / "whole").corpus.fill(filters=other)
    with pytest.raises(UserError, match=r"random.*draw random numbers"):
        make("random", tmp_path / "random", epochs=2).corpus.fill(filters=found)
    pinned = dataclasses.replace(found, digest="of others")
    with pytest.raises(UserError, match="not those that the command began with"):
        pinned.excluded()


def test_a_text_is_compared_as_the_vocabulary_converts_it(files):
    """Inputs and targets, and what comes after an end of document; evaluation sets lose the same words."""
    module = importlib.import_module(MODULE)
    ids = np.array([*module.BYTES.encode("a question"), *module.BYTES.encode("one"), 1, *module.BYTES.encode("two")])
    assert seqio_pipeline._text(module.BYTES, ids, 10) == "a question\none\ntwo"


def test_filters_need_a_vocabulary_of_texts(files, tmp_path):
    (tmp_path / "set.jsonl").write_text(json.dumps({"question": "Which of these words are in both?"}) + "\n")
    for filters in (Filters((f"{tmp_path}/set.jsonl",), words=6), Filters(near_duplicates=0.6)):
        with pytest.raises(UserError, match="PassThroughVocabulary makes none of ids"):
            make("passed_on", tmp_path / "cache").corpus.fill(filters=filters)
        assert not (tmp_path / "cache").exists()


def test_a_worker_that_does_not_see_the_folder_of_the_command_is_an_error(tmp_path):
    with pytest.raises(UserError, match=r"does not see .*command-1, .*all workers share"):
        beam_parts._write_lane(f"{tmp_path}/command-1", None, 7, None, ("lines", "train", 0, 0, 1))
    assert not list(tmp_path.iterdir())


def test_apache_beam_is_named_where_it_is_missing(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"--runner FlinkRunner needs the package apache_beam.*tokenize\.md"):
        beam_parts.Beam("FlinkRunner")


def test_a_changed_source_is_named(files, tmp_path, monkeypatch):
    monkeypatch.setattr(token_writer, "_COMMIT_TOKENS", 500)
    task = make("lines", tmp_path / "cache")
    before = (files / "part-1.txt").read_bytes()
    with pytest.raises(Stopped):
        task.corpus.fill(report=lambda counts: (_ for _ in ()).throw(Stopped()) if counts.total("documents") else None)
    try:
        (files / "part-1.txt").write_bytes(before + b"more\n")
        with pytest.raises(UserError, match=r"part-1\.txt"):
            task.corpus.fill()
    finally:
        (files / "part-1.txt").write_bytes(before)


def test_a_cache_of_another_definition_is_an_error(files, tmp_path, monkeypatch):
    task = filled("prefix", tmp_path / "cache", inputs=True)
    for changed in (
        make("prefix", tmp_path / "cache", inputs=True, length=LENGTH - 1),
        make("several", tmp_path / "cache", inputs=True),
        make("prefix", tmp_path / "cache", inputs=True, epochs=2),
    ):
        (problem,) = changed.problems()
        assert all(words in problem for words in ("text.seqio.cache", " now "))
    monkeypatch.setattr(seqio_cache, "_module_hash", lambda module: None)  # a host without the module
    assert make("prefix", tmp_path / "cache", inputs=True).problems() == []
    assert task.problems() == []


def test_a_changed_module_is_read_again_and_compared(files, tmp_path, monkeypatch):
    """The file of the module differs: the cache is used if definition and first examples are the same."""
    import seqio

    def again():
        task = make("prefix", tmp_path / "cache", inputs=True)
        return task.problems(), task.describe()

    written = filled("prefix", tmp_path / "cache", inputs=True)
    hashes = map(str, itertools.count())
    monkeypatch.setattr(seqio_cache, "_module_hash", lambda module: next(hashes))
    problems, described = again()
    assert problems == []
    assert "whose module is now another: its first 64 examples are the same" in described
    task = seqio.TaskRegistry.get("prefix")
    found, file = written.corpus.saved, tmp_path / "cache" / seqio_cache.FILE
    of_another = {**found, "asked": found["asked"] | {"module": "another_module"}}
    file.write_text(json.dumps(of_another))
    assert again()[0] == []  # the same tasks
    file.write_text(json.dumps(of_another | {"tasks": {"prefix": {}}}))
    (problem,), _ = again()
    assert f"was written with the module another_module, not {MODULE}, and it has no record" in problem
    file.write_text(json.dumps(found))
    with monkeypatch.context() as patch:
        upper, *others = task.preprocessors

        def changed(dataset):
            return upper(dataset).map(lambda example: example | {"targets": example["inputs"]})

        patch.setitem(vars(task), "preprocessors", (changed, *others))
        (problem,), _ = again()
        assert all(words in problem for words in (MODULE, "was changed", "prefix has other first examples"))
    monkeypatch.setattr(
        seqio_cache, "_definition", lambda asked: written.corpus.saved | {"problems": [], "vocabulary": {}}
    )
    (problem,), _ = again()
    assert "its vocabulary is another" in problem


def test_a_changed_module_may_name_another_folder_of_its_files(files, tmp_path, monkeypatch):
    saved = filled("lines", tmp_path / "cache").corpus.saved
    names = [pathlib.Path(file).name for file in saved["tasks"]["lines"]["files"]]
    assert names == ["part-0.txt", "part-1.txt", "part-2.txt"]
    monkeypatch.setattr(seqio_cache, "_module_hash", lambda module: "another")
    for there, said in ((names, ""), ([*names[:2], "new.txt"], "lines has other files"), (names[:2], "other files")):
        about = saved["tasks"]["lines"] | {"files": [f"/moved/{name}" for name in there]}
        now = saved | {"problems": [], "tasks": {"lines": about}}
        monkeypatch.setattr(seqio_cache, "_definition", lambda asked, now=now: now)
        found = make("lines", tmp_path / "cache").problems()
        assert len(found) == bool(said)
        assert said in "".join(found)


def test_a_folder_of_something_else_is_an_error(files, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match=r"other files .*notes\.txt"):
        make("prefix", tmp_path, inputs=True).corpus.fill()
    with pytest.raises(UserError, match=r"notes\.txt"):
        make("prefix", tmp_path / "notes.txt", inputs=True).corpus.fill()
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize(
    ("name", "inputs", "words"),
    [
        ("prefixes", False, ("no seqio task or mixture 'prefixes'", "did you mean 'prefix'")),
        ("prefix", False, ("inputs_length is None", "['inputs', 'targets']")),
        ("lines", True, ("inputs_length is 24", "['targets']")),
        ("encoder", True, ("encoder has features", "labels")),
        ("continuous", False, ("feature targets", "float32", "expected int32")),
        ("two_vocabularies", True, ("different vocabularies",)),
        ("no_files", False, ("task no_files", "No file is found", "absent-*.txt")),
        ("no_validation", False, ("no split validation", "['train']")),
        ("all_empty", False, ("task all_empty", "no example in its train split: none of 60 has ids")),
        ("outside", False, ("task outside, train split, example 0", "expected 0 to 8", "another vocabulary")),
    ],
)
def test_wrong_tasks_are_found_before_a_run(files, tmp_path, name, inputs, words):
    task = make(name, tmp_path / "cache", inputs=inputs)
    problem = (task.problems() or task.example_problems())[0]
    assert all(word in problem for word in words), problem
    assert not (tmp_path / "cache").exists()


def test_a_preprocessor_that_fails_later_is_named_with_its_example(files, tmp_path):
    task = make("fails_later", tmp_path / "cache")
    assert [*task.problems(), *task.example_problems()] == []
    said = r"task fails_later, train split, example 70, preprocessor fails \(equal_tasks:\d+\): .*could not correctly"
    with pytest.raises(UserError, match=said):
        task.prepare("unused", is_host_zero=True)


def test_a_task_without_metrics_is_an_error_before_a_run(files, tmp_path, monkeypatch):
    """A written cache does not keep metrics from being added: then one process decides, which host 0 starts."""
    import seqio

    before, written = make("prefix", tmp_path / "none", inputs=True), filled("prefix", tmp_path / "cache", inputs=True)
    monkeypatch.setattr(seqio_cache, "_definition", None)  # no host of a run with a cache asks the module
    own = written.own_metrics(3)
    assert own == written.corpus.asked.measured(3)
    monkeypatch.undo()
    for asked in (lambda: before.own_metrics(3), own.questions):
        with pytest.raises(UserError, match="prefix has no metrics: expected metrics of predictions or scores"):
            asked()
    metric = types.SimpleNamespace(model_output_type=seqio.metrics.ModelOutputType.SCORE)
    monkeypatch.setitem(vars(seqio.TaskRegistry.get("prefix")), "metric_objs", [metric])
    monkeypatch.setattr(seqio_cache, "_module_hash", lambda module: "another")
    assert written.own_metrics(3) == written.corpus.asked.measured(3)
    assert written.problems() == []


@pytest.mark.parametrize("name", ["own_files", "own_tokenizer"])
def test_a_registered_task_of_this_workspace_has_the_segments_of_the_task_itself(files, tmp_path, name):
    import seqio

    options = {"length": LENGTH - INPUTS, "num_streams": 1}
    patterns = {"train": f"{files}/part-[12].jsonl", "validation": f"{files}/part-0.jsonl"}
    vocabulary = sys.modules[MODULE].BPE if name == "own_tokenizer" else None
    itself, task = text.files(**patterns, **options, vocabulary=vocabulary), filled(name, tmp_path / "cache")
    found = read(task)
    assert found == theirs(name, task.corpus.asked.lengths, seqio.LMFeatureConverter)
    wanted = read(itself)  # whose first input of each segment is the begin-of-text id, and seqio's is 0
    assert found == collections.Counter({((0, *ids[1:]), *rest): n for (ids, *rest), n in wanted.items()})
    assert make("with_library", tmp_path / "other").problems() == []


REPEATS = """
import seqio
from equal_tasks import features, source

seqio.TaskRegistry.add("prefix", source=source(), output_features=features("targets"))
"""


def test_a_registered_task_whose_files_are_for_training_and_validation_is_refused(files, tmp_path):
    with pytest.raises(UserError, match=r"part-0.jsonl' matches 1 file of the training data"):
        make("overlapping", tmp_path / "cache").prepare("unused", is_host_zero=True)


def test_a_cache_of_tokens_has_no_documents_to_register(files, tmp_path):
    from tasks.text import registered

    made = {"length": LENGTH, "num_streams": 1}
    for task in (text.tokens(cache=str(tmp_path), **made), make("own_chats", tmp_path / "cache", inputs=True)):
        with pytest.raises(UserError, match=r"own: expected text\.files, .* which has no documents"):
            registered.add("own", task)


def test_a_registered_task_of_conversations_has_each_answer_after_all_that_comes_before(files, tmp_path):
    import seqio

    task = filled("own_chats", tmp_path / "cache", inputs=True)
    found = read(task)
    assert found == theirs("own_chats", task.corpus.asked.lengths, seqio.PrefixLMFeatureConverter)
    own = sys.modules[MODULE].BPE
    itself = text.chats(train=f"{files}/chats.jsonl", length=LENGTH, num_streams=1, vocabulary=own)
    wanted, left_out = collections.Counter(), 0
    for line in itself.corpus.lines("train"):
        begins, targets, weights = chat_files.segment(line.chat(), own)
        ids = (*begins[:1].tolist(), *targets.tolist())
        for is_learned, places in itertools.groupby(range(len(targets)), (weights > 0).__getitem__):
            begin, *others = (place + 1 for place in places)
            end = [begin, *others][-1] + 1
            left_out += bool(is_learned and begin > INPUTS)
            if is_learned and begin <= INPUTS:
                row = ((0, *ids[: end - 1]), ids[:end], (0.0,) * begin + (1.0,) * (end - begin), tuple(range(end)))
                wanted[row] += 1
    assert found == wanted
    assert left_out > 3
    assert sum(found.values()) > 40


def test_a_module_that_cannot_be_imported_is_named(files):
    (files / "registers_twice.py").write_text(REPEATS)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(files))
        for module, said in (("no_such_module", "No module named"), ("registers_twice", "duplicate provider: prefix")):
            (problem,) = text.seqio(name="any", module=module, length=9, num_streams=1).problems()
            assert all(words in problem for words in (f"importing {module} fails", said))


def test_a_definition_with_a_problem_and_one_of_another_module_are_read_again(monkeypatch):
    """In one process, such as a notebook, the user mends the module; another process has the former one imported."""
    asked = make("mended", "unused").corpus.asked
    sound = [{"problems": [], "new": n} for n in range(3)]
    answers = iter([UserError("fails"), {"problems": ["no example"]}, *sound])
    hashes, closed = ["a"], []

    def definition(asked):
        if isinstance(found := next(answers), UserError):
            raise found
        return found

    processes = Inline()
    monkeypatch.setattr(processes, "close", lambda: closed.append(hashes[-1]))
    monkeypatch.setattr(seqio_pipeline, "PROCESSES", processes)
    monkeypatch.setattr(seqio_pipeline, "definition", definition)
    monkeypatch.setattr(seqio_cache, "_module_hash", lambda module: hashes[-1])
    monkeypatch.setattr(seqio_cache, "_definitions", {})
    with pytest.raises(UserError, match="fails"):
        seqio_cache._definition(asked)
    assert seqio_cache._definition(asked)["problems"] == ["no example"]
    assert closed == ["a", "a"]
    assert seqio_cache._definition(asked) is seqio_cache._definition(asked)
    for number, name in ((1, "b"), (2, "a")):  # a process that imported another module is not used again
        hashes.append(name)
        assert seqio_cache._definition(asked) is seqio_cache._definition(asked) is sound[number]
    assert closed == ["a", "a", "b", "a"]


def test_metrics_of_tasks_without_a_validation_split_do_not_count(files):
    name = "measured_without_validation"
    with pytest.raises(UserError, match=f"{name} has no metrics: expected .* of tasks with a validation split"):
        seqio_metrics.require_metrics(name, MODULE)


@pytest.mark.parametrize("name", ["needs_cache", "not_shuffled"])
def test_a_task_that_seqio_refuses_to_read_live_is_named(files, name):
    task = text.seqio(name=name, module=MODULE, length=LENGTH, num_streams=1, live=True)
    with pytest.raises(UserError, match=f"text.seqio.live = True: {name} cannot be read live: "):
        next(task.train(DataLayout(1, (0,), (0,)), seed=0))


def test_a_task_that_requires_the_cache_of_seqio_is_read_from_it(files, tmp_path):
    import seqio
    import tensorflow as tf

    folder = tmp_path / "needs_cache"
    folder.mkdir()
    for split, values in {"train": ([5, 6, 7], [8, 9]), "validation": ([5],)}.items():
        features = {"targets": {"dtype": "int32", "shape": [None]}}
        info = {"features": features, "num_shards": 1, "seqio_version": seqio.__version__}
        (folder / f"info.{split}.json").write_text(json.dumps(info))
        (folder / f"stats.{split}.json").write_text(json.dumps({"examples": len(values)}))
        with tf.io.TFRecordWriter(str(folder / f"{split}.tfrecord-00000-of-00001")) as writer:
            for ids in values:
                feature = tf.train.Feature(int64_list=tf.train.Int64List(value=ids))
                example = tf.train.Example(features=tf.train.Features(feature={"targets": feature}))
                writer.write(example.SerializeToString())
    (folder / "COMPLETED").touch()
    seqio.add_global_cache_dirs([str(tmp_path)])
    task = text.seqio(name="needs_cache", module=MODULE, length=16, num_streams=1, live=True)
    assert [*task.problems(), *task.example_problems()] == []
    row = next(task.train(DataLayout(1, (0,), (0,)), seed=0))["targets"][0]
    assert {5, 6, 7, 8, 9} <= set(row.tolist())


class Begun(vocabularies.Bytes):
    """Bytes, with another begin-of-text id."""

    bos_id = 7


def test_a_task_is_mixed_with_other_sources(files, tmp_path):
    options = {"length": 48, "num_streams": 2}
    own = make("long", tmp_path / "cache")
    library = text.python_source(**options)
    mixed = text.mixture(tasks=[library, own], weights=[1, 1])
    mixed.prepare("unused", is_host_zero=True)
    assert mixed.problems() == []
    batch = next(mixed.train(DataLayout(4, (0, 1, 2, 3), (0, 1, 2, 3)), seed=0))
    assert batch["segment_ids"].max(1).min() >= 1
    begun = text.mixture(tasks=[text.python_source(**options, vocabulary=Begun()), own], weights=[1, 1])
    rows = next(begun.train(DataLayout(4, (0, 1, 2, 3), (0, 1, 2, 3)), seed=0))["inputs"]
    assert set(rows[:, 0].tolist()) == {0, 7}  # each source begins rows with the id of its own vocabulary
    bpe = importlib.import_module(MODULE).BPE
    for name in ("hugging_face", "own_tokenizer"):  # tasks with the same vocabulary, of Renga
        cached = make(name, tmp_path / name, inputs=name == "hugging_face")
        others = text.python_source(length=cached.length, num_streams=2, vocabulary=bpe)
        assert text.mixture(tasks=[others, cached], weights=[1, 1]).problems() == []
    pieces = text.mixture(tasks=[library, make("lines", tmp_path / "other")], weights=[1, 1])
    (problem,) = pieces.problems()
    assert "different vocabularies" in problem


def test_a_vocabulary_is_read_without_seqio(files, tmp_path):
    import seqio

    for name in ("prefix", "several"):
        task = filled(name, tmp_path / name, inputs=True)
        vocabulary = seqio.TaskRegistry.get(name).output_features["targets"].vocabulary
        again = make(name, tmp_path / name, inputs=True).vocabulary
        assert again.size == vocabulary.vocab_size
        assert again.encode("some words") == vocabulary.encode("some words")
        assert again.decode([*again.encode("some words"), again.eos_id, 5]) == "some words"
        assert again.decode([again.size - 1]) is not None
        assert task.vocabulary.hash == again.hash


READS = f"""
import sys
from core.types import DataLayout
from tasks import text
options = dict(module="{MODULE}", inputs_length={INPUTS}, length={LENGTH}, num_streams=2)
task = text.seqio(name="prefix", cache=sys.argv[1], **options)
if __name__ == "__main__":
    assert task.problems() == []
    task.prepare("unused", is_host_zero=True)
    batch = next(task.train(DataLayout(2, (0, 1), (0, 1)), seed=0))
    next(task.evaluation(DataLayout(2, (0, 1), (0, 1))))
    loaded = {{name.split(".")[0] for name in sys.modules}}
    print(task.vocabulary.decode(batch["targets"][0])[:9], *sorted(loaded & {{"tensorflow", "seqio"}}))
"""


def test_real_processes_fill_the_cache_and_a_run_imports_neither_seqio_nor_tensorflow(files, tmp_path):
    (tmp_path / "reads.py").write_text(READS)
    where = f"{pathlib.Path(__file__).parent}:{environment.WORKSPACE}"
    for lines in (2, 1):
        done = subprocess.run(
            [sys.executable, str(tmp_path / "reads.py"), str(tmp_path / "cache")],
            env={**os.environ, "OWN_FILES": str(files), "PYTHONPATH": where},
            capture_output=True,
            text=True,
            cwd=tmp_path,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[-1] == "question:"
        assert len(done.stdout.splitlines()) == lines


def test_a_cache_is_written_to_a_bucket_and_read(files, tmp_path, bucket, monkeypatch):
    for key, value in bucket.environment.items():
        monkeypatch.setenv(key, value)
    layout = DataLayout(4, (0, 1, 2, 3), (0, 1, 2, 3))
    here, there = (filled("prefix", at, inputs=True) for at in (tmp_path / "cache", "gs://caches/prefix"))
    again = make("prefix", "gs://caches/prefix", inputs=True)
    assert again.problems() == []
    assert again.fingerprint() == there.fingerprint() == here.fingerprint()
    ours, theirs = (next(task.train(layout, seed=1)) for task in (here, again))
    assert all(np.array_equal(values, theirs[key]) for key, values in ours.items())
