"""Golden records: their content, what counts as a change, and that they match the compiler."""

import json

import pytest

from core import slices, versions
from launch import environment, predictions, program_identity
from launch.config import loader
from launch.runs import smoke
from parallel import prediction
from parallel.planning import calibration, records
from tests.lab import __main__ as main
from tests.lab import golden, recorded_predictions

REHEARSED = ("own_text", "quickstart", "quickstart_phases", "trm-suite")  # their headers have no predictions
RECORDS = sorted(golden.files())


def loaded(path="gin/valkyrie_7b.gin", *bindings, slice_name=None):
    config = loader.load(path, bindings=bindings, slice_name=slice_name)
    return config.build(), config


def test_every_experiment_file_has_a_name():
    files = golden.files()
    assert files["valkyrie_7b"] == golden.Source("gin/valkyrie_7b.gin")
    assert files["trm-suite"] == golden.Source("gin/trm/suite.gin")
    assert "defaults" not in files
    assert all((environment.WORKSPACE / source.file).is_file() for source in files.values())


def test_adapters_are_recorded_for_two_slices():
    files = golden.files()
    assert files["ponder-gpt2"].load().build().slice == "v4-8"
    assert files["ponder-gpt2_v4_64"].load().build().slice == "v4-64"
    quick = files["ponder-quick_v4_64"]
    assert quick.title == "Predicted for v4-64 with BATCH_SIZE = 32"
    assert quick.load().build().batch_size == 32
    assert not {"ponder-adapter", "ponder-cached", "ponder-published"} & set(files)


@pytest.mark.parametrize(
    "binding",
    [
        "SEED = 7",
        "TOTAL_STEPS = 5000",
        "LEARNING_RATE = 1e-5",
        "DATA = 'x.txt'",
        "PROMPT = 'a'",
        "NUM_STREAMS = 16",
        "experiment.Experiment.non_finite = 'roll_back'",
        "settings.Logging.wandb_project = 'mine'",
        "settings.Logging.memory_profile_steps = (10,)",
        "settings.Logging.log_interval = 7",
        "experiment.Experiment.seed = 7",
        "settings.Checkpointing.keep_checkpoints = 7",
        "experiment.Experiment.total_steps = 7",
        "experiment.Experiment.gather_once = False",  # as it is
        "optimizers.warmup_cosine.peak = 1e-5",
        "optimizers.warmup_cosine.total_steps = 9000",
        "optimizers.adamw.learning_rate = @optimizers.warmup_linear()\noptimizers.warmup_linear.peak = 1.0\n"
        "optimizers.warmup_linear.warmup_steps = 1\noptimizers.warmup_linear.total_steps = 9",
        "strategies.fsdp.fsdp = -1",  # as it is: a plan's winner says every degree
    ],
)
def test_the_fingerprint_ignores_settings_without_effect_on_a_step(binding):
    assert program_identity.fingerprint(*loaded("gin/valkyrie_7b.gin", binding)) == program_identity.fingerprint(
        *loaded()
    )


@pytest.mark.parametrize(
    "binding",
    [
        "BATCH_SIZE = 64",
        "LENGTH = 1024",
        "ACCUM_STEPS = 2",
        "COMPUTE_DTYPE = 'float32'",
        "transformer.Transformer.remat = 'dots'",
        "include 'gin/strategies/hsdp.gin'",
        "include 'gin/optimizers/lion.gin'",
        "experiment.Experiment.gather_once = True",
        "optimizers.adamw.clip_norm = None",
        "experiment.Experiment.non_finite = 'skip'",
    ],
)
def test_the_fingerprint_covers_settings_that_change_a_step(binding):
    assert program_identity.fingerprint(*loaded("gin/valkyrie_7b.gin", binding)) != program_identity.fingerprint(
        *loaded()
    )


def test_another_slice_and_a_rehearsal_are_something_else():
    experiment, config = loaded()
    assert program_identity.fingerprint(*loaded(slice_name="v4-64")) != program_identity.fingerprint(experiment, config)
    assert program_identity.fingerprint(smoke.shrink(experiment), config) != program_identity.fingerprint(
        experiment, config
    )


def test_flops_of_a_step_by_hand():
    """One layer, 8 heads of 64 over 2 key heads: weights 512 (2 x 512 + 2 x 128 + 3 x 1024), head 512 x 1024."""
    sizes = {"num_layers": 1, "embed_dim": 512, "mlp_dim": 1024, "num_heads": 8, "num_kv_heads": 2, "vocab_size": 1024}
    bindings = [f"transformer.Transformer.{name} = {value}" for name, value in sizes.items()]
    experiment, _ = loaded("gin/valkyrie_7b.gin", *bindings, "LENGTH = 256")
    weights = 512 * (2 * 512 + 2 * 128 + 3 * 1024) + 512 * 1024
    attention = 2 * 2 * (256 * 256 / 2) * 512  # of a row: scores and values, a product of 256 x 256 x 512, half of it
    assert experiment.tokens_per_step == 32 * 256
    assert experiment.flops_per_step == 3 * (2 * weights * 32 * 256 + 32 * attention)


@pytest.mark.covers("L05")
def test_seven_billion_at_sixty_four_rows_reach_their_shares_of_the_peak():
    """Predicted for v4-32: 69 % with all traffic hidden and 57 % with none, in what a chip has."""
    found = golden.read("valkyrie_7b_64_rows")
    experiment, _ = loaded("gin/valkyrie_7b_64_rows.gin")
    assert (experiment.slice, experiment.tokens_per_step) == ("v4-32", 64 * 2048)
    assert found["predicted"]["mfu"]["hidden"] >= 0.69
    assert found["predicted"]["mfu"]["exposed"] >= 0.57
    assert found["memory"]["peak_bytes"] < slices.get("v4-32").chip.usable_hbm_bytes


def record(**changes):
    return {
        "fingerprint": "0" * 16,
        "slice": "v4-8",
        "memory": {"peak_bytes": 2**33},
        "predicted": {
            "step_seconds": {"hidden": 0.5, "scheduled": 0.6, "exposed": 0.8},
            "mfu": {"hidden": 0.61, "scheduled": 0.55, "exposed": 0.52},
        },
        "versions": versions.installed(versions.COMPILER),
        "warnings": [],
        **changes,
    }


@pytest.fixture
def known(monkeypatch):
    error = calibration.Error(30, 0.05, 0.1, 0.2, shortest=0.9, longest=1.25)
    monkeypatch.setattr(calibration, "known_error", lambda: error)


def test_a_record_reads_as_one_line(known):
    assert prediction.line(record()) == f"600 ms (540 to 750 ms) per step, 55 % MFU, 8 GiB ({calibration.label()})"


def test_a_change_is_a_diff_of_a_few_lines():
    after = record(memory={"peak_bytes": 2**34})
    assert golden.difference("x", record(), record()) == ""
    diff = golden.difference("x", record(), after)
    changed = [line for line in diff.splitlines() if line[0] in "+-"]
    assert changed[2:] == ['-  "peak_bytes": 8589934592', '+  "peak_bytes": 17179869184']


def test_headers_have_the_recorded_predictions(known):
    text = "# A model.\n# Predicted: something\n#   old, and older.\n# Run:      x\nSLICE = 'v4-8'\n"
    found = record(memory={"peak_bytes": 2**33, "usable_bytes": 2**35})
    assert golden.with_header(text, found).splitlines() == [
        "# A model.",
        "# Predicted: 600 ms (540 to 750 ms) per step, 55 % MFU, 8 GiB of 32 GiB a chip; not run on a TPU",
        f"#   ({calibration.label()}).",
        "# Run:      x",
        "SLICE = 'v4-8'",
    ]
    assert golden.with_header("# A model.\n", found) == "# A model.\n"
    assert "of 32 GiB a device; not" in golden.with_header(text, record(**found | {"slice": "tpu7x-128"}))
    both, title = "# Predicted: a\n# Predicted for v4-64: b\n#   c\n", "Predicted for v4-64"
    assert golden.with_header(both, found, title).startswith(f"# Predicted: a\n# {title}: 600 ms (540 to 750 ms)")


@pytest.fixture
def folder(monkeypatch, tmp_path):
    """An empty place for records, two experiments, and a compiler that takes no time."""
    monkeypatch.setattr(golden, "FOLDER", tmp_path)
    monkeypatch.setattr(predictions, "FILE", tmp_path / "predictions.txt")
    files = {name: golden.Source(f"gin/{name}.gin") for name in ("quickstart", "valkyrie_7b")}
    monkeypatch.setattr(golden, "files", lambda: files)
    monkeypatch.setattr(golden, "write_headers", lambda: None)
    compiled = []

    def compile_record(source):
        compiled.append(source.file)
        return record(fingerprint=program_identity.fingerprint(*loaded(source.file)))

    monkeypatch.setattr(golden, "compile_record", compile_record)
    return compiled


def test_recorded_experiments_are_compiled_again_only_on_request_or_change(folder, capsys):
    assert main.main(["golden"]) == 1
    assert main.main(["golden", "--write"]) == 0
    assert folder == ["gin/quickstart.gin", "gin/valkyrie_7b.gin"]
    assert main.main(["golden", "--write"]) == 0
    assert len(folder) == 2
    assert "2 of 2 already recorded" in capsys.readouterr().out
    assert main.main(["golden", "--write", "--again", "quickstart"]) == 0
    assert len(folder) == 3
    golden.write("valkyrie_7b", record(fingerprint="another"))
    assert main.main(["golden", "--write"]) == 0
    assert folder[3:] == ["gin/valkyrie_7b.gin"]
    golden.write("valkyrie_7b", golden.read("valkyrie_7b") | {"versions": {"libtpu": "0"}})
    assert main.main(["golden"]) == 1
    assert "recorded for another configuration or compiler" in capsys.readouterr().out


def test_a_check_prints_what_changed_and_fails(folder, capsys):
    main.main(["golden", "--write"])
    assert main.main(["golden", "--check"]) == 0
    golden.write("quickstart", golden.read("quickstart") | {"memory": {"peak_bytes": 1}})
    capsys.readouterr()
    assert main.main(["golden", "--check"]) == 1
    said = capsys.readouterr().out
    assert '-  "peak_bytes": 1\n' in said
    assert said.endswith("different: quickstart\n")
    assert golden.read("quickstart")["memory"] == {"peak_bytes": 1}  # a check writes nothing


def test_wrong_arguments_are_refused(folder, capsys):
    assert main.main(["golden", "--write", "quickstar"]) == 2
    assert "no experiment quickstar: there are quickstart, valkyrie_7b" in capsys.readouterr().err
    assert main.main(["golden", "--again"]) == 2


def test_a_run_finds_the_record_that_is_its_own(folder):
    main.main(["golden", "--write"])
    experiment, config = loaded("gin/valkyrie_7b.gin", "SEED = 3")
    assert predictions.find(experiment, config)["memory"] == {"peak_bytes": record()["memory"]["peak_bytes"]}
    assert predictions.find(*loaded("gin/valkyrie_7b.gin", "BATCH_SIZE = 64")) is None


def test_the_product_has_the_predictions_of_all_committed_records(tmp_path, monkeypatch):
    """A wheel has no tests/golden/."""
    committed = predictions.FILE.read_text()
    monkeypatch.setattr(predictions, "FILE", tmp_path / "predictions.json")
    recorded_predictions.write(json.loads(file.read_text()) for file in sorted(golden.FOLDER.glob("*.json")))
    assert predictions.FILE.read_text() == committed, "tests/run.sh lab golden --write"
    assert "predictions.json" in (environment.WORKSPACE / "setup.py").read_text()


@pytest.mark.covers("L05")
@pytest.mark.parametrize("name", RECORDS)
def test_a_committed_record_is_of_the_experiment_as_it_is(name, pinned_compiler):
    found = golden.read(name)
    assert found is not None, f"tests/run.sh lab golden --write {name}"
    source = golden.files()[name]
    config = source.load()
    fingerprint = program_identity.fingerprint(config.build(), config)
    assert (found["versions"], found["fingerprint"]) == (pinned_compiler, fingerprint), (
        f"tests/run.sh lab golden --write {name}"
    )
    assert golden.path(name).read_text() == records.text_of(found)
    assert found["memory"]["peak_bytes"] <= found["memory"]["usable_bytes"]
    assert not found["predicted"]["unpriced"]
    text = (environment.WORKSPACE / found["experiment"]).read_text()
    assert golden.with_header(text, found, source.title) == text  # what its header says is what is recorded
    assert f"# {source.title}:" in text or name in REHEARSED


def check_compiled(name):
    """Compiles an experiment: to its record with the pinned compiler, to no worse figures with a newer one.

    At most 0.5 % more memory and cycles: libtpu 0.0.50.1 needed 4 % less to 0.4 % more than 0.0.42.1 in 8 experiments.
    """
    found, now = golden.read(name), golden.compile_record(golden.files()[name])
    if now["versions"] == found["versions"]:
        assert golden.difference(name, found, now) == ""
        return
    for key in ("fingerprint", "flops_per_step", "wire_bytes_by_axes"):
        assert now[key] == found[key]
    assert now["memory"]["peak_bytes"] <= 1.005 * found["memory"]["peak_bytes"]
    assert now["cycles"]["total"] <= 1.005 * found["cycles"]["total"]
    assert not now["predicted"]["unpriced"]


@pytest.mark.covers("X04")
@pytest.mark.compiled("v4-16")
def test_quickstart_compiles_to_its_record():
    check_compiled("quickstart")


# Two that compile in a minute or two; `tests/run.sh lab golden --check` compiles all.
COMPILED = ("ponder-quick_v4_64", "valkyrie_7b")


@pytest.mark.slow
@pytest.mark.compiled("v4-32", "v4-64")
@pytest.mark.parametrize("name", COMPILED)
def test_experiments_compile_to_what_is_recorded(name):
    check_compiled(name)


@pytest.mark.slow  # test_quickstart_compiles_to_its_record is quick, and compares this too
@pytest.mark.parametrize("name", golden.files())
def test_the_code_still_makes_the_recorded_program(name, pinned_compiler):
    record, found = golden.read(name), golden.traced(golden.files()[name])
    assert found["fingerprint"] == record["fingerprint"]
    if versions.installed(versions.COMPILER) == pinned_compiler:  # another JAX may trace the same code differently
        assert found["program"] == record["program"]
