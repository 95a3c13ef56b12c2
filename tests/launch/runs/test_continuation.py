"""Whether a configuration continues a run: checks and starts agree, and a start that cannot changes nothing."""

import dataclasses
import functools
import pathlib
import re
import shutil
import types

import pytest

from core.checkpoints import best, steps
from core.errors import UnreachableError, UserError
from core.training import compilation, evaluation, hooks, metrics, scoring
from launch.check import preflight
from launch.config import differences, loader
from launch.experiments import evaluate, saved_run
from launch.hosts.cluster import Host
from launch.runs import continuation, prepared_run, train
from launch.session import Session

SMALL = (
    "TASK = @synthetic.random_tokens()",
    "NUM_STREAMS = 2",
    "BATCH_SIZE = 4",
    "TOTAL_STEPS = 6",
    "WARMUP_STEPS = 1",
    "LENGTH = 16",
    "VOCAB_SIZE = 11",
    "CHECKPOINT_INTERVAL = 3",
    "EVAL_BATCHES = 0",
    "LOG_INTERVAL = 1",
    "PROMPT = ''",
    "transformer.Transformer.num_layers = 1",
    "transformer.Transformer.embed_dim = 8",
    "transformer.Transformer.mlp_dim = 16",
)
FASTER = ("LEARNING_RATE = 0.25", "TOTAL_STEPS = 5")


LONGER = (
    "PHASES = (@longer/experiment.Phase(),)",
    "longer/experiment.Phase.after = 3",
    "longer/experiment.Phase.task = @longer/synthetic.random_tokens()",
    "longer/synthetic.random_tokens.vocab_size = 9",
)


def loaded(*more):
    return loader.load("gin/quickstart.gin", bindings=(*SMALL, *more), slice_name="v5e-1")


NOT_IN_A_STEP = ("EVAL_", "KEEP_BEST", "CHECKPOINT_INTERVAL", "settings.")  # settings that no step reads
_programs = {}


@pytest.fixture(autouse=True, scope="module")
def compiled_once(kept_programs):
    """Runs share compiled programs, and those whose steps are the same share traced ones (`prepared`)."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("JAX_COMPILATION_CACHE_DIR", kept_programs)
        yield
    _programs.clear()


def prepared(experiment, *, config, run_dir, last_step):
    """A prepared run, with the program of an earlier one if their steps are the same."""
    told = {"config": config, "revision": "", "run_dir": str(run_dir), "last_step": last_step}
    run = prepared_run.prepare_run(experiment, **told, host=Host(0, 1, True))
    steps_read = [line for line in config.text.splitlines() if not line.startswith(NOT_IN_A_STEP)]
    program = _programs.setdefault(("\n".join(steps_read), run.span.number), run.program)
    return dataclasses.replace(run, program=program)


def start(run_dir, *more, last_step=6):
    config = loaded(*more)
    return Session(prepared(config.build(), config=config, run_dir=run_dir, last_step=last_step)).run()


def checked(run_dir, *more):
    found = preflight.check(
        "gin/quickstart.gin", bindings=(*SMALL, *more), slice_name="v5e-1", run_dir=str(run_dir), hosts="simulated"
    )
    return {finding.name: finding for finding in found.findings}["checkpoint"]


def written(run_dir):
    """The content of every file of the run that a start writes, but its lock and compiled programs."""
    files = sorted(path for path in pathlib.Path(run_dir).rglob("*") if path.is_file())
    return {path: path.read_bytes() for path in files if not {"compiled", "lock.json", ".shared"} & set(path.parts)}


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """A run of 6 steps that ended after its third."""
    folder = tmp_path_factory.mktemp("run")
    start(folder, last_step=3)
    return folder


@pytest.mark.parametrize(
    ("more", "says"),
    [
        # test_a_run_that_has_ended_says_so_and_is_not_taken_for_another is quick, and compares each of these settings
        pytest.param(("NUM_STREAMS = 4",), "NUM_STREAMS = 4, was 2", marks=pytest.mark.slow),
        (("BATCH_SIZE = 8",), "BATCH_SIZE = 8, was 4"),
        pytest.param(("LENGTH = 32",), "LENGTH = 32, was 16", marks=pytest.mark.slow),
        pytest.param(("SEED = 1",), "SEED = 1, was 0", marks=pytest.mark.slow),
        (("VOCAB_SIZE = 12",), r"the vocabulary is another one \(hash \w{8}, was \w{8}\)"),
        (("TASK = @text.python_source()", "VOCAB_SIZE = 259"), "now:  text.python_source: "),
        (
            ("OPTIMIZER = @optimizers.lion()", "optimizers.lion.learning_rate = @optimizers.warmup_cosine()"),
            "opt_state/",
        ),
    ],
)
def test_a_start_that_cannot_continue_changes_nothing_and_the_check_says_so(run_dir, more, says):
    before = written(run_dir)
    with pytest.raises(UserError, match=says):
        start(run_dir, *more)
    assert written(run_dir) == before
    found = checked(run_dir, *more)
    assert not found.ok
    assert re.search(says, found.detail)


def test_other_data_of_the_same_form_are_named(run_dir):
    newest = continuation.newest(str(run_dir))
    span = loaded().build().spans()[0]
    then, now = newest.described.meta, {**newest.described.meta, "data": "1", "data_source": "b.txt"}
    (problem,) = continuation.data_problems(3, then, now, span=span)
    assert "now:  b.txt" in problem
    assert not continuation.data_problems(3, then, now, span=span._replace(first_step=3))


def test_a_checkpoint_without_a_record_of_the_order_is_compared_in_what_it_has(run_dir):
    newest = continuation.newest(str(run_dir))
    span = loaded().build().spans()[0]
    old = {name: value for name, value in newest.described.meta.items() if name != continuation.ORDER}
    assert continuation.data_problems(3, old, newest.described.meta, span=span) == []
    assert continuation.data_problems(3, {**old, "seed": 4}, newest.described.meta, span=span) == ["SEED = 0, was 4"]


def test_a_resumed_start_lists_the_settings_that_differ(run_dir, tmp_path, capsys):
    found = checked(run_dir, *FASTER)
    assert (found.ok, found.is_note) == (True, True)
    for words in ("a start continues from step 3", "LEARNING_RATE = 0.25, was ", "TOTAL_STEPS = 5, was 6"):
        assert words in found.detail
    assert not checked(run_dir).is_note
    shutil.copytree(run_dir, tmp_path, dirs_exist_ok=True)
    start(tmp_path, *FASTER, last_step=5)
    said = "2 settings differ from the checkpoint of step 3:\n  LEARNING_RATE = 0.25, was "
    assert said in capsys.readouterr().out
    assert said.replace("\n", "\\n") in (tmp_path / "metrics.jsonl").read_text()
    # What belongs to a step is read with the settings of that step.
    for step, total in ((3, 6), (5, 5)):
        assert saved_run.read_step(str(tmp_path), step=step).config.build().total_steps == total
    assert saved_run.read_step(str(tmp_path), step=None).config.build().total_steps == 5


def test_a_run_that_has_ended_says_so_and_is_not_taken_for_another(run_dir, capsys):
    def ended(*more, steps=3):
        config = loaded(*more)
        return continuation.has_ended(str(run_dir), config.text, config.build().spans(), steps=steps)

    for options, named in (({}, "--steps"), ({"steps": 2}, "--steps")):
        assert ended(**options)
        said = capsys.readouterr().out
        for words in (f"{run_dir} has the checkpoint of step 3", f"raise {named}", f"launch/run evaluate {run_dir}"):
            assert words in said
    with pytest.raises(UserError, match=r"LEARNING_RATE = 0\.25, was") as error:
        ended(*FASTER)
    assert "another --run-dir for a new run, or raise --steps" in str(error.value)
    with pytest.raises(UserError, match="or raise TOTAL_STEPS to train"):
        ended("TOTAL_STEPS = 3", steps=9)
    for setting in ("BATCH_SIZE = 8", "SEED = 1", "LENGTH = 32", "NUM_STREAMS = 4"):
        with pytest.raises(UserError, match=re.escape(setting)) as error:
            ended(setting)
        assert "raise" not in str(error.value)  # which would be the next error
    assert not ended(*FASTER, steps=4)
    assert not continuation.has_ended(f"{run_dir}/none", "", loaded().build().spans(), steps=None)


EVALUATED = ("EVAL_BATCHES = 1", "EVAL_INTERVAL = 3")
OFTEN = ("EVAL_BATCHES = 1", "EVAL_INTERVAL = 2", "CHECKPOINT_INTERVAL = 2")


def evaluated(run_dir):
    return [step for step, values in metrics.read(str(run_dir)).by_step.items() if "validation/loss" in values]


def test_a_run_that_ended_in_its_last_evaluation_evaluates_at_its_next_start(tmp_path, monkeypatch):
    def ended(*more):
        config = loaded(*EVALUATED, *more)
        return continuation.has_ended(str(tmp_path), config.text, config.build().spans(), steps=None)

    original, allowed = evaluation.Evaluate.at_boundary, [3]

    def failing(hook, step, state):
        if step not in allowed:
            raise OSError("no such file")
        original(hook, step, state)

    with monkeypatch.context() as patched:
        patched.setattr(evaluation.Evaluate, "at_boundary", failing)
        with pytest.raises(OSError, match="no such file"):
            start(tmp_path, *EVALUATED)
    assert (steps.complete(tmp_path / "checkpoints")[-1], evaluated(tmp_path)) == (6, [3])
    assert not ended()
    assert not ended("LEARNING_RATE = 1e-4")
    assert checked(tmp_path, *EVALUATED, "TOTAL_STEPS = 6").detail == "a start evaluates step 6"
    assert start(tmp_path, *EVALUATED)["validation/loss"] > 0
    assert evaluated(tmp_path) == [3, 6]
    assert ended()
    with pytest.raises(UserError, match="nothing would be trained"):
        ended("LEARNING_RATE = 1e-4")


def fail_first_evaluation(monkeypatch):
    """Makes the first evaluation fail; returns a list that gets the step of each."""
    original, asked = evaluation.Evaluate.at_boundary, []

    def once(hook, step, state):
        asked.append(step)
        if len(asked) == 1:
            raise OSError("no such file")
        original(hook, step, state)

    monkeypatch.setattr(evaluation.Evaluate, "at_boundary", once)
    return asked


def test_validation_data_that_cannot_be_read_end_a_run_before_its_first_step(tmp_path, monkeypatch):
    def failing(batches):
        raise OSError("no such file")

    monkeypatch.setattr(evaluation.FirstBatches, "__iter__", failing)
    with pytest.raises(OSError, match="no such file"):
        start(tmp_path, *EVALUATED)
    assert not metrics.read(str(tmp_path)).by_step
    assert not steps.complete(tmp_path / "checkpoints")


def test_an_evaluation_that_was_interrupted_is_made_before_training_continues(tmp_path, monkeypatch):
    asked = fail_first_evaluation(monkeypatch)
    with pytest.raises(OSError, match="no such file"):
        start(tmp_path, *OFTEN)
    start(tmp_path, *OFTEN, last_step=4)
    assert asked == [2, 2, 4]
    assert evaluated(tmp_path) == [2, 4]
    start(tmp_path, *OFTEN)
    assert asked == [2, 2, 4, 6]  # that of step 4 is recorded


@pytest.mark.parametrize(
    ("keep_best", "order"), [("", ["save", "evaluate"]), ("validation/loss", ["evaluate", "save"])]
)
def test_a_save_waits_for_an_evaluation_only_if_it_contains_its_scores(tmp_path, monkeypatch, keep_best, order):
    found = []
    for name, kind in (("save", hooks.Save), ("evaluate", evaluation.Evaluate)):

        def noted(hook, step, state, name=name, original=kind.at_boundary):
            found.append(name)
            original(hook, step, state)

        monkeypatch.setattr(kind, "at_boundary", noted)
    start(tmp_path, *EVALUATED, f"KEEP_BEST = '{keep_best}'", last_step=3)
    assert found == order


def test_hosts_meet_before_everything_that_they_do_together(tmp_path, monkeypatch):
    met, original = [], hooks.Meet.at_boundary

    def noted(hook, step, state):
        met.append((step, [name for name, purpose in hook._purposes.items() if purpose.needs_state(step)]))
        original(hook, step, state)

    monkeypatch.setattr(hooks.Meet, "at_boundary", noted)
    config = loaded(*EVALUATED, "settings.Checkpointing.params_checkpoint_interval = 2")
    run = prepared(config.build(), config=config, run_dir=tmp_path, last_step=4)
    Session(dataclasses.replace(run, host=Host(0, 2, True))).run()
    assert met == [
        (2, ["checkpoint of the parameters"]),
        (3, ["checkpoint", "evaluation"]),
        (4, ["checkpoint", "checkpoint of the parameters", "evaluation"]),
    ]
    of_parameters, whole = (steps.complete(tmp_path / name) for name in ("params", "checkpoints"))
    assert (of_parameters, whole) == ([2, 4], [3, 4])


def test_the_best_checkpoint_can_be_one_whose_evaluation_failed_at_first(tmp_path, monkeypatch):
    asked, keeping = fail_first_evaluation(monkeypatch), "KEEP_BEST = 'validation/loss'"
    with pytest.raises(OSError, match="no such file"):
        start(tmp_path, *EVALUATED, keeping)
    assert steps.find_best(tmp_path / "checkpoints") is None
    start(tmp_path, *EVALUATED, keeping)
    assert asked == [3, 3, 6]
    losses = dict(metrics.read(str(tmp_path)).curve("validation/loss"))
    scored = best.values(steps.described_steps(tmp_path / "checkpoints"), best.parse("validation/loss"))
    assert scored == losses
    assert sorted(scored) == [3, 6]


def start_phases(run_dir, *, last_step):
    config = loaded(*EVALUATED, *LONGER)
    prepare = functools.partial(prepared, config=config, run_dir=run_dir, last_step=last_step)
    return train.run_phases(config.build().spans(), prepare, str(run_dir), last_step=last_step, lock=None)


def test_the_evaluation_at_the_end_of_a_phase_is_made_before_the_next_phase(tmp_path, monkeypatch):
    asked = fail_first_evaluation(monkeypatch)
    with pytest.raises(OSError, match="no such file"):
        start_phases(tmp_path, last_step=6)
    start_phases(tmp_path, last_step=6)
    assert asked == [3, 3, 6]
    assert evaluated(tmp_path) == [3, 6]


def test_an_evaluation_at_the_end_of_a_phase_that_is_to_be_the_last_is_made_once(tmp_path, monkeypatch):
    asked = fail_first_evaluation(monkeypatch)
    with pytest.raises(OSError, match="no such file"):
        start_phases(tmp_path, last_step=3)
    assert start_phases(tmp_path, last_step=3)
    assert asked == [3, 3]


def test_a_second_call_at_the_end_of_a_phase_returns_its_evaluation(tmp_path, capsys):
    first, again = (start_phases(tmp_path, last_step=3) for _ in range(2))
    assert first == again
    assert first["validation/loss"] > 0
    assert "\nstep 3 is done; its evaluation follows\n" in f"\n{capsys.readouterr().out}"


@pytest.mark.parametrize("kind", [UnreachableError, PermissionError])
def test_checkpoints_that_cannot_be_read_end_a_start_and_not_a_check_from_elsewhere(run_dir, monkeypatch, kind):
    def fail(folder):
        raise kind("503")

    monkeypatch.setattr(steps, "read", fail)
    error = UserError if kind is PermissionError else kind
    config = loaded()
    about = (str(run_dir), config.text, config.build().spans())
    with pytest.raises(error, match="503"):
        continuation.has_ended(*about, steps=None)
    with pytest.raises(error, match="503"):
        start(run_dir)
    assert not continuation.has_ended(*about, steps=None, is_elsewhere=True)
    assert not checked(run_dir).ok
    found = preflight._checkpoint("", config, config.build(), None, str(run_dir), "shipped to")
    assert (found.ok, found.is_note) == (True, True)


def test_a_run_in_the_directory_of_an_earlier_version_is_named(run_dir, monkeypatch, tmp_path):
    monkeypatch.setenv("RENGA_RUN_ROOT", str(tmp_path))
    now, former = f"{tmp_path}/quickstart-v5e-1", f"{tmp_path}/gin/quickstart"
    about = ("gin/quickstart.gin", "v5e-1")
    continuation.require_not_moved(now, *about)
    shutil.copytree(run_dir, former)
    with pytest.raises(UserError, match=f"Give --run-dir {former} to continue"):
        continuation.require_not_moved(now, *about)
    found = checked(now)
    assert not found.ok
    assert f"--run-dir {former} " in found.detail
    continuation.require_not_moved(f"{tmp_path}/mine", *about)  # a directory that was named
    shutil.copytree(run_dir, now)
    continuation.require_not_moved(now, *about)


def test_the_newest_checkpoint_is_the_newest_that_is_intact(tmp_path):
    assert continuation.newest(str(tmp_path)) is None
    start(tmp_path)
    about = tmp_path / steps.FOLDER / "6" / steps.PART / "metadata"
    about.write_text(about.read_text().replace('"seed": 0', '"seed": 1'))
    assert continuation.newest(str(tmp_path)).step == 3
    about = tmp_path / steps.FOLDER / "3" / steps.PART / "metadata"
    about.write_text("{")
    assert continuation.newest(str(tmp_path)) is None
    found = checked(tmp_path)
    assert (found.ok, found.detail) == (
        False,
        "none of 2 is intact; launch/run checkpoints verify RUN lists what is damaged",
    )


def test_differences_of_configurations():
    before = "from tasks import text\nA = 1\nB = 'x'\ntext.files.length = %A\n"
    after = "from tasks import text\nA = 1\nC = 0.5\ntext.files.length = 2\n"
    told = list(map(str, differences.between(before, after)))
    assert told == ["B is not bound, was 'x'", "C = 0.5, was not bound", "text.files.length = 2, was %A"]
    described = "# An experiment of Python objects\n# batch_size = {}\n"
    (one,) = differences.between(described.format(8), described.format(16))
    assert str(one) == "batch_size = 16, was 8"


def test_a_parameter_that_is_bound_to_a_macro_of_another_value_is_a_difference():
    before = loaded("SEED = 7").text
    after = before + "block_sparse.BlockSparse.seed = %SEED\n"
    (one,) = differences.between(before, after)
    assert str(one) == "block_sparse.BlockSparse.seed = %SEED, was not bound"
    assert not differences.is_same(before, after)
    assert differences.is_same(loaded().text, loaded().text + "block_sparse.BlockSparse.seed = %SEED\n")


def test_settings_that_nothing_reads_have_no_value_in_a_difference():
    rate = ["optimizers.adamw.learning_rate = @optimizers.constant()", "optimizers.constant.value = 1e-4"]
    found = {one.name: str(one) for one in differences.between(loaded().text, loaded(*rate).text)}
    assert found["LEARNING_RATE"].startswith("LEARNING_RATE is not bound, was ")


def test_a_text_saved_before_there_was_a_macro_has_its_declared_value():
    now = loaded().text
    before = "".join(line for line in now.splitlines(keepends=True) if "KEEP_BEST" not in line)
    assert before != now
    assert differences.between(before, now) == []
    assert differences.is_same(before, now)
    (one,) = differences.between(before, loaded("KEEP_BEST = 'validation/loss'").text)
    assert str(one) == "KEEP_BEST = 'validation/loss', was not bound"
    assert not differences.is_same(before, loaded("KEEP_BEST = 'validation/loss'").text)


def test_the_phase_of_a_step_decides_which_data_it_was_trained_on(tmp_path):
    start(tmp_path, *LONGER, last_step=3)
    config = loaded(*LONGER, "EVAL_BATCHES = 1")
    spans = config.build().spans()
    assert [continuation.phase_of(spans, step).number for step in (0, 1, 3, 4, 6, 7)] == [1, 1, 1, 2, 2, 2]
    assert [continuation.phase_after(spans, step).number for step in (0, 1, 3, 4, 6, 7)] == [1, 1, 2, 2, 2, 2]
    for span, is_same in zip(spans, (True, False), strict=True):  # step 3 evaluated on the rows of either phase
        run = prepared(span._replace(count=1), config=config, run_dir=tmp_path, last_step=6)
        asked = scoring.select(span.experiment.task, batch_size=4, eval_batches=1, rows=None)
        results, _ = evaluate.score(run, asked, all_steps=True)
        assert results.checkpoints[0]["same_data_as_in_training"] == is_same


def test_a_cache_has_what_was_compiled_before_this_process(tmp_path):
    compilation.use_cache(str(tmp_path / "programs"))
    (tmp_path / "programs").mkdir(exist_ok=True)
    (tmp_path / "programs" / "x-cache").write_bytes(b"")
    assert compilation.cached_programs(str(tmp_path / "programs")) == 1
    assert compilation.found_at_start(str(tmp_path / "programs")) == 0


def test_a_full_disk_is_an_error_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: types.SimpleNamespace(free=1000))
    (tmp_path / "run").mkdir()
    with pytest.raises(UserError, match="a checkpoint of this run takes up to"):
        start(tmp_path / "run")
    assert not list((tmp_path / "run").glob("checkpoints/*"))
    assert not (tmp_path / "run" / "config.gin").exists()
    found = preflight.check(
        "gin/quickstart.gin", bindings=SMALL, slice_name="v5e-1", run_dir=str(tmp_path / "run"), hosts="simulated"
    )
    assert not {finding.name: finding for finding in found.findings}["disk"].ok
