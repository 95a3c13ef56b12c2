"""Records are found by the inputs of a program and by nothing else."""

import dataclasses
import json
import sys
import uuid

import pytest

from core import versions
from launch import phases, program_identity, settings
from launch.config import loader
from launch.experiment import Experiment
from launch.plan import search
from models.decoder import transformer
from parallel import strategies
from parallel.planning import records
from tasks import synthetic

BINDINGS = {
    "TOTAL_STEPS = 7000": True,
    "LEARNING_RATE = 1e-5": True,
    "LOG_INTERVAL = 3": True,
    "PROMPT = 'x'": True,
    "BATCH_SIZE = 64": False,
    "LENGTH = 256": False,
    "transformer.Transformer.remat = 'full'": False,
    "STRATEGY = @strategies.data_parallel()": False,
    "include 'gin/optimizers/lion.gin'": False,
    "optimizers.adamw.b1 = 0.8": False,
}


@pytest.mark.parametrize(("binding", "same"), BINDINGS.items())
def test_records_are_named_by_the_inputs_of_the_program_only(question, binding, same):
    other = search.ask(question.path, slice_name=question.slice.name, bindings=[binding])
    texts = [program_identity.program_text(q.experiment, q.config) for q in (question, other)]
    assert (texts[0] == texts[1]) is same


# Every field of an experiment with another value, and whether the program of a step is another with it.
FIELDS = {
    "slice": ("v4-16", True),
    "strategy": (strategies.data_parallel(), True),
    "model": (transformer.preset("125m"), True),
    "task": (synthetic.random_tokens(vocab_size=32000, length=64, num_streams=16), True),
    "batch_size": (64, True),
    "accum_steps": (2, True),
    "gather_once": (True, True),
    "compiler_options": ({"xla_enable_async_all_gather": False}, True),
    "simulation_xla_flags": ("--xla_cpu_multi_thread_eigen=false", False),
    "non_finite": ("skip", True),
    "total_steps": (7, False),
    "phases": ((phases.Phase(after=5, batch_size=64),), False),
    "phase": (1, False),
    "max_epochs": (1.0, False),
    "checkpoint_mirror": ("gs://bucket/checkpoints", False),
    "statistics_interval": (10, False),
    "params_checkpoint_interval": (7, False),
    "keep_params_checkpoints": (7, False),
    "seed": (5, False),
    "log_interval": (3, False),
    "eval_interval": (3, False),
    "eval_batches": (3, False),
    "metric_examples": (3, False),
    "checkpoint_interval": (3, False),
    "keep_checkpoints": (7, False),
    "keep_best": ("validation/loss", False),
    "profile_steps": ((4,), False),
    "memory_profile_steps": ((4,), False),
    "prompt": ("x", False),
    "wandb_project": ("x", False),
    "step_limit_seconds": (3.0, False),
    "heartbeat_timeout_seconds": (3.0, False),
    "apart_limit_seconds": (3.0, False),
    "save_limit_seconds": (3.0, False),
    "watchdog": ("report", False),
    "compile_limit_seconds": (1e6, False),
    "replica_check_interval": (7, False),
    "init_from": ("runs/first", False),
    "init_patterns": (("layers",), False),
    "init_renames": ({"decoder/*": "layers/*"}, False),
    "init_layers": ({"layers/*": (0, 0, 1, None)}, False),
    "frozen": (("embedding",), True),
    "frozen_dtype": ("float32", False),  # alone: there is nothing that it is the dtype of
}


def test_every_field_of_an_experiment_is_known_to_make_a_program_or_not():
    """A new field costs something or it does not: its row above says which. The optimizer counts as it is written."""
    fields = {field.name for field in dataclasses.fields(Experiment)} - settings.GROUPS.keys()
    assert {*FIELDS, "optimizer"} == fields | settings.HOMES.keys()


@pytest.mark.parametrize("field", FIELDS)
def test_records_and_fingerprints_ignore_settings_without_effect_on_a_step(question, field):
    value, costs = FIELDS[field]
    other = dataclasses.replace(question.experiment, **settings.grouped({field: value}, question.experiment))
    texts = [program_identity.program_text(e, question.config) for e in (question.experiment, other)]
    assert (texts[0] != texts[1]) is costs
    prints = [program_identity.fingerprint(e, question.config) for e in (question.experiment, other)]
    assert (prints[0] != prints[1]) is costs


OWN = """
import optax
from core import optimizers
from models.decoder import transformer

class Mine(transformer.Transformer):
    pass

def sgd(*, momentum: float = 0.9, inner: float = 0.0, learning_rate) -> optimizers.Optimizer:
    return optimizers.Optimizer(lambda specs: optax.sgd(1e-3, momentum=momentum), learning_rate)

def factor(*, by: float = 1.0) -> float:
    return by
"""
OWN_GIN = """
from __gin__ import dynamic_registration
from core import optimizers
from models.decoder import transformer
import {module}

include 'gin/quickstart.gin'

MODEL = @{module}.Mine()
{sizes}
OPTIMIZER = @{module}.sgd()
{module}.sgd.learning_rate = @optimizers.warmup_cosine()
{module}.sgd.inner = @in/{module}.factor()
in/{module}.factor.by = 2.0
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """`own(*bindings) -> program_text` of an experiment with a model and an optimizer of its own; and their file."""
    module = f"own_{uuid.uuid4().hex[:8]}"
    source, file = tmp_path / f"{module}.py", tmp_path / "own.gin"
    source.write_text(OWN)
    loaded = loader.load("gin/quickstart.gin").text.splitlines()
    sizes = [line.replace("transformer.Transformer", f"{module}.Mine") for line in loaded if "mer.Transformer." in line]
    file.write_text(OWN_GIN.format(module=module, sizes="\n".join(sizes)))
    monkeypatch.syspath_prepend(tmp_path)

    def text(*bindings):
        config = loader.load(str(file), bindings=[b.replace("own.", f"{module}.") for b in bindings])
        return program_identity.program_text(config.build(), config)

    yield text, source
    sys.modules.pop(module, None)


def test_a_module_of_one_s_own_that_is_edited_makes_another_program(own):
    text, source = own
    before = text()
    assert text() == before
    source.write_text(OWN + "# edited\n")
    assert text() != before


def test_ours_and_what_is_installed_is_not_among_modules_of_one_s_own(question, own):
    assert "own modules" not in program_identity.program_text(question.experiment, question.config)
    assert list(json.loads(own[0]())["own modules"]) == [own[1].stem]


@pytest.mark.parametrize("binding", ["own.sgd.momentum = 0.5", "in/own.factor.by = 3.0"])
def test_arguments_of_an_optimizer_of_one_s_own_count(own, binding):
    text, _ = own
    assert text(binding) != text()
    assert text("LEARNING_RATE = 0.5") == text()


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "{}", '{"status": "compiled"}', '{"status": "compiled", "time": {"x": 1}}']
)
def test_an_unreadable_record_is_reported_once_and_treated_as_missing(options, cache, capsys, content):
    one = next(t for t in options if not t.reason)
    file = cache.path(one.text)
    file.parent.mkdir(parents=True)
    file.write_text(content)
    assert cache.find(one.text) is cache.find(one.text) is None
    said = capsys.readouterr().err
    assert said.count(f"warning: {file} is not a valid record") == 1
    assert "treated as missing" in said


def test_failed_records_are_not_committed(tmp_path, options, compiled_as):
    first, second = [one for one in options if not one.reason][:2]
    failed = records.Record(records.FAILED, reason="no luck")
    records.commit(tmp_path / "x.json", iter([(first.text, compiled_as(first)), (second.text, failed)]))
    assert list(json.loads((tmp_path / "x.json").read_text())["records"]) == [records.record_key(first.text)]


def test_other_names_of_a_slice_are_the_same_program(question):
    for alias in ("1xv4-8", "v4-8"):
        asked = search.ask(question.path, slice_name=alias)
        assert asked.experiment.slice == "v4-8"
        assert program_identity.layout_text(asked.experiment) == program_identity.layout_text(question.experiment)


def test_another_slice_is_another_program(question):
    other = search.ask(question.path, slice_name="v4-16")
    assert program_identity.program_text(other.experiment, other.config) != program_identity.program_text(
        question.experiment, question.config
    )


def test_a_record_is_what_was_written(options, compiled_as, cache, keep):
    one = next(t for t in options if not t.reason)
    record = compiled_as(one)
    assert cache.find(one.text) is None
    keep(one.text, record)
    assert cache.find(one.text) == record
    assert [p.name.startswith(".") for p in cache.folder.iterdir()] == [False]


def test_records_of_other_versions_and_sources_are_not_found(options, compiled_as, cache, keep, monkeypatch):
    one = next(t for t in options if not t.reason)
    keep(one.text, compiled_as(one))
    with monkeypatch.context() as patched:
        patched.setattr(versions, "installed", lambda packages: {"libtpu": "0"})
        assert cache.find(one.text) is None
    monkeypatch.setattr(records, "sources_digest", lambda: "other")
    assert cache.find(one.text) is None


def test_committed_records_are_found_for_all_sources(options, compiled_as, tmp_path, monkeypatch):
    one = next(t for t in options if not t.reason)
    record = compiled_as(one)
    records.commit(tmp_path / "small.json", iter([(one.text, record)]))
    monkeypatch.setattr(records, "sources_digest", lambda: "other")
    monkeypatch.setattr(records, "COMMITTED", tmp_path)
    store = records.Store(tmp_path / "mine")
    assert store.find(one.text) == dataclasses.replace(record, is_committed=True)
    assert set(json.loads((tmp_path / "small.json").read_text())) == {"records"}


def test_a_compiled_step_above_the_usable_memory_does_not_fit(options, compiled_as):
    made = dataclasses.replace(compiled_as(options[0]), needed_bytes=95.5 * 2**30)
    assert made.within(96 * 2**30) is made
    refused = made.within(95 * 2**30)
    assert (refused.status, refused.time) == (records.TOO_MUCH, None)
    assert refused.reason == "needs 95.50GiB of 95.00GiB, though it compiled"


def test_a_candidate_that_does_not_fit_is_recorded_with_its_need():
    record = records.Record(records.TOO_MUCH, reason="needs 75.31GiB of 30.75GiB", needed_bytes=75.31 * 2**30)
    again = records.from_json(json.loads(json.dumps(record.as_json())))
    assert again == record
    assert again.needed_bytes / 2**30 == pytest.approx(75.31)


def test_an_optimizer_that_a_macro_of_one_s_own_names_counts(question):
    def text(rule):
        given = ["import optax", "experiment.Experiment.optimizer = %RULE", f"RULE = @optax.{rule}()"]
        given += ["from launch import experiment", f"optax.{rule}.learning_rate = 1e-3"]
        return program_identity.program_text(question.experiment, loader.load(question.path, bindings=given))

    assert text("adam") != text("sgd")


def test_a_macro_of_one_s_own_that_the_optimizer_takes_counts(question):
    def text(first):
        given = [f"DECAY = {first}", "optimizers.adamw.b1 = %DECAY"]
        return program_identity.program_text(question.experiment, loader.load(question.path, bindings=given))

    assert text(0.8) != text(0.7)
    assert '"DECAY = 0.8"' in text(0.8)


@pytest.mark.parametrize(
    ("name", "value", "same"),
    [
        ("LIBTPU_INIT_ARGS", "--xla_tpu_scoped_vmem_limit_kib=65536", False),
        ("XLA_FLAGS", "--xla_cpu_x=1 --xla_disable_hlo_passes=fusion", False),
        ("XLA_FLAGS", "--xla_backend_optimization_level=1 --xla_cpu_x=1 --xla_gpu_x=1 --xla_dump_to=/tmp/x", True),
        ("XLA_FLAGS", "--xla_force_host_platform_device_count=8", True),
        ("LIBTPU_INIT_ARGS", " ", True),
        ("LIBTPU_INIT_ARGS", " --xla_tpu_use_enhanced_launch_barrier=true", True),  # as JAX sets it on TPU hosts
    ],
)
def test_records_are_named_by_the_flags_that_the_compiler_of_the_slice_reads(question, monkeypatch, name, value, same):
    def found():
        texts = program_identity.program_text, program_identity.fingerprint
        return [program_identity.layout_text(question.experiment)] + [
            text(question.experiment, question.config) for text in texts
        ]

    for variable in ("XLA_FLAGS", "LIBTPU_INIT_ARGS"):
        monkeypatch.delenv(variable, raising=False)
    before = found()
    monkeypatch.setenv(name, value)
    assert [text == other for text, other in zip(before, found(), strict=True)] == [same] * 3
