"""Old spellings in files, flags and saved configurations: what they become, and that texts in both compare as equal."""

from pathlib import Path

import pytest

from launch.config import ConfigError, differences, loader, moved
from launch.config.statements import render
from launch.config.trust import Trust
from tasks import text

SAVED = Path(__file__).parent / "saved"  # of runs, as the first release wrote them; they are never written again
FILES = {
    "quickstart": "gin/quickstart.gin",
    "valkyrie": "gin/valkyrie_7b.gin",
    "trm": "gin/trm/sudoku.gin",
    "ponder": "gin/ponder/quick.gin",
    "arrcoc": "gin/arrcoc/v5p_8.gin",
    "hybrid": "gin/long/text/hybrid.gin",
    "experts": "include 'gin/models/quickstart_experts.gin'",
    "ttt": "include 'gin/models/quickstart_ttt.gin'",
}


EARLIER = [  # in the quickstart when the configurations were saved
    "BATCH_SIZE = 32",
    "LEARNING_RATE = 4e-3",
    "WARMUP_STEPS = 20",
    "transformer.Transformer.num_layers = 4",
]
LATER = {"experiment.Experiment.simulation_xla_flags"}  # a setting that they lack


def load_file(name):
    """Loads a file, or the quickstart with one that it includes."""
    if FILES[name] == "gin/quickstart.gin":
        return loader.load(FILES[name], bindings=EARLIER)
    is_file = FILES[name].endswith(".gin")
    return loader.load(FILES[name]) if is_file else loader.load("gin/quickstart.gin", bindings=[FILES[name], *EARLIER])


def load_saved(text):
    return loader.load("config.gin", text=text, trust=Trust())


@pytest.mark.parametrize("name", FILES)
def test_a_saved_configuration_loads_builds_and_equals_that_of_its_file(name):
    saved, now = (SAVED / f"{name}.gin").read_text(), load_file(name)
    assert {one.name for one in differences.between(saved, now.text)} <= LATER
    assert differences.is_same(saved, now.text, ignoring=LATER)
    loaded = load_saved(saved)
    assert (loaded.notes, loaded.slice) == ((), now.slice)
    assert differences.is_same(loaded.text, now.text, ignoring=LATER)
    assert type(loaded.build()) is type(now.build())


def test_settings_of_an_experiment_that_moved_into_groups():
    old = ["experiment.Experiment.log_interval = 7", "experiment.Experiment.watchdog = 'report'"]
    new = ["settings.Logging.log_interval = 7", "settings.Health.watchdog = 'report'"]
    before, after = (loader.load("gin/quickstart.gin", bindings=bindings) for bindings in (old, new))
    assert before.text == after.text
    assert ["write settings." in note for note in before.notes] == [True, True]
    assert after.notes == ()
    built = load_saved((SAVED / "quickstart.gin").read_text() + "\n".join(old[1:])).build()
    assert (built.health.watchdog, built.logging.log_interval) == ("report", 10)
    with pytest.raises(ConfigError) as error:
        loader.load("gin/quickstart.gin", bindings=["experiment.Experiment.log_interval = 0"]).build()
    assert [p.place for p in error.value.problems] == ["--gin #1"]


def test_renamed_fields():
    old = [
        "experiment.Experiment.silent_limit_seconds = 30.0",
        "settings.Health.compare_interval = 7",
        "settings.Checkpointing.persistent_directory = '/mirror'",
        "include 'gin/models/quickstart_experts.gin'",
        "experts.Experts.number = 6",
        "experts.Experts.capacity = 1.5",
        "experts.Experts.balance = 0.25",
    ]
    loaded = loader.load("gin/quickstart.gin", bindings=old)
    assert len(loaded.notes) == 6
    built = loaded.build()
    assert (built.health.heartbeat_timeout_seconds, built.health.replica_check_interval) == (30.0, 7)
    assert built.checkpointing.checkpoint_mirror == "/mirror"
    experts = built.model.feed_forward
    assert (experts.num_experts, experts.capacity_factor, experts.load_balance_coef) == (6, 1.5, 0.25)


def test_files_that_include_a_shipped_task_may_use_its_constructor():
    """`gin/tasks/python_source.gin` names the registered task; before, it bound the constructor."""
    phases = [
        "PHASES = (@long/experiment.Phase(),)",
        "long/experiment.Phase.after = 100",
        "long/experiment.Phase.task = @long/text.python_source()",
        "long/text.python_source.length = 512",
        "text.python_source.num_streams = 4",
    ]
    loaded = loader.load("gin/quickstart.gin", bindings=phases)
    assert sum("write" in note and "text.seqio" in note for note in loaded.notes) == 3
    task, longer = loaded.build().task, loaded.build().phases[0].task
    assert (task.length, task.num_streams, longer.length, longer.num_streams) == (128, 4, 512, 4)
    assert task.corpus == longer.corpus == text.python_source(length=512, num_streams=4).corpus
    mixed = ["TASK = @text.mixture()", "text.mixture.tasks = (@text.python_source(), @own/text.seqio())"]
    mixed += ["text.mixture.weights = (1, 1)", "own/text.seqio.name = 'any'", "own/text.seqio.module = 'own_tasks'"]
    first, second = loader.load("gin/quickstart.gin", bindings=mixed).build().task.corpus.sources
    assert first == text.python_source(length=128, num_streams=8).corpus
    assert second.asked.name == "any"


def optimizer(old, bindings):
    """An old value of a choice, with a parameter of the same constructor, becomes two statements."""
    if not isinstance(old.value, str):
        return None
    settings = [f"core.optimizers.adamw.b1 = {render(b.value)}" for b in bindings if b.parameter == "share"]
    return [f"launch.experiment.Experiment.optimizer = @core.optimizers.{old.value}()", *settings]


@pytest.fixture
def table(monkeypatch):
    """A table in which today's names are the new ones of others."""
    names = {
        "core.rules": "core.optimizers",
        "models.layered": "models.decoder.transformer",
        "models.layered.Decoder": "models.decoder.transformer.Transformer",
        "models.decoder.transformer.Transformer.depth": "models.decoder.transformer.Transformer.num_layers",
        "launch.experiment.Experiment.rule": "launch.experiment.Experiment.optimizer",
        "BATCH": "BATCH_SIZE",
    }
    values = {"launch.experiment.Experiment.optimizer": optimizer}
    former = {"launch.experiment.Experiment.share": lambda old, bindings: []}  # `optimizer` says it
    monkeypatch.setattr(moved, "TABLE", moved.Table(names, values, former))


HEAD = """\
from __gin__ import dynamic_registration
from launch import experiment
from models import layered
from core import rules
include 'gin/defaults.gin'
include 'gin/strategies/data_parallel.gin'
include 'gin/models/quickstart.gin'
MODEL = @layered.Decoder()
"""


@pytest.fixture
def write(tmp_path, monkeypatch, table):
    monkeypatch.chdir(tmp_path)

    def write(*lines):
        (tmp_path / "mine.gin").write_text("\n".join([HEAD, *lines, ""]))
        return "mine.gin"

    return write


def values(config):
    return {b.name: b.value for b in config.bindings}


def test_old_names_of_modules_constructors_parameters_and_macros(write):
    file = write("layered.Decoder.depth = 3", "BATCH = 16", "rules.adamw.b1 = 0.8")
    config = loader.load(file, bindings=["layered.Decoder.mlp_dim = 64", "experiment.Experiment.accum_steps = 2"])
    found = values(config)
    assert found["transformer.Transformer.num_layers"] == 3
    assert found["transformer.Transformer.mlp_dim"] == 64
    assert (found["BATCH_SIZE"], found["optimizers.adamw.b1"]) == (16, 0.8)
    assert "layered" not in config.imports
    assert "rules" not in config.imports
    assert config.build().model.num_layers == 3
    of_file, of_flag = config.notes
    assert "mine.gin:10: write layered.Transformer.num_layers for layered.Decoder.depth" in of_file
    assert "mine.gin:11: write BATCH_SIZE for BATCH" in of_file
    assert "mine.gin:12" not in of_file  # whose module's import changes
    assert "mine.gin:4: write from core import optimizers as rules for from core import rules" in of_file
    assert "--gin #1: write transformer.Transformer.mlp_dim for layered.Decoder.mlp_dim" in of_flag


def test_a_flag_needs_no_import_of_a_former_module(write):
    config = loader.load("gin/quickstart.gin", bindings=["layered.Decoder.depth = 3"])
    assert values(config)["transformer.Transformer.num_layers"] == 3


def test_old_and_new_spelling_override_one_another(write):
    file = write("transformer.Transformer.num_layers = 3", "from models.decoder import transformer")
    assert loader.load(file, bindings=["layered.Decoder.depth = 4"]).build().model.num_layers == 4
    with pytest.raises(ConfigError, match="given twice") as error:
        loader.load(write("layered.Decoder.depth = 3", "layered.Decoder.num_layers = 4"))
    assert [p.place for p in error.value.problems] == ["mine.gin:11"]


def test_old_values_become_statements(write):
    config = loader.load(write("experiment.Experiment.rule = 'adamw'", "experiment.Experiment.share = 0.7"))
    assert values(config)["optimizers.adamw.b1"] == 0.7
    (note,) = config.notes
    assert "mine.gin:11: remove experiment.Experiment.share = 0.7" in note
    assert "experiment.Experiment.optimizer = @rules.adamw(); " in note
    assert " for experiment.Experiment.rule = 'adamw'" in note


def test_an_old_value_of_a_macro(write):
    config = loader.load(write("rules.lion.learning_rate = @rules.warmup_cosine()", "OPTIMIZER = 'lion'"))
    assert render(values(config)["OPTIMIZER"]) == "@optimizers.lion()"


def test_mistakes_in_old_spelling_have_their_place(write):
    with pytest.raises(ConfigError) as error:
        loader.load(write("layered.Decoder.depth = 'three'", "layered.Decodr.depth = 3"))
    assert [p.place for p in error.value.problems] == ["mine.gin:10", "mine.gin:11"]


def test_saved_texts_in_old_and_new_spelling_are_equal(write):
    new = loader.load("gin/quickstart.gin").text
    old = new.replace("from models.decoder import transformer", "from models import layered")
    old = old.replace("transformer.Transformer.", "layered.Decoder.").replace("@transformer.T", "@layered.Decoder.T")
    old = old.replace("@layered.Decoder.Transformer", "@layered.Decoder").replace("num_layers", "depth")
    old = old.replace("import optimizers", "import rules").replace("optimizers.", "rules.")
    assert old.count("layered") > 3
    assert differences.is_same(old, new)
    assert differences.between(old, new) == []
    assert differences.among([old, new]) == [{}, {}]
    loaded = load_saved(old)
    assert (loaded.text, loaded.notes) == (new, ())  # the user cannot change what a run saved


def test_no_new_name_begins_with_an_old_one():
    names = moved.TABLE.names
    assert not [new for new in names.values() if any(f"{new}.".startswith(f"{old}.") for old in names)]


def test_a_module_of_the_users_that_imports_a_moved_one_is_told_its_new_name(tmp_path):
    (tmp_path / "old_mixer.py").write_text("from models.parts import Part\n")
    (tmp_path / "own.gin").write_text("import old_mixer\ninclude 'gin/quickstart.gin'\n")
    with pytest.raises(ConfigError) as error:
        loader.load(str(tmp_path / "own.gin"))
    assert [p.fix for p in error.value.problems] == ["import models.decoder.parts, as that module is called now"]


def test_a_note_names_the_imports_that_a_new_spelling_needs_once_and_no_others(tmp_path):
    head = "from __gin__ import dynamic_registration\nfrom launch import experiment\ninclude 'gin/quickstart.gin'\n"
    old = "experiment.Experiment.log_interval = 7\nexperiment.Experiment.watchdog = 'report'\n"
    (tmp_path / "old.gin").write_text(head + old)
    (note,) = loader.load(str(tmp_path / "old.gin")).notes
    first, second = (line for line in note.splitlines() if "write" in line)
    assert first.partition("; add ")[2] == "from launch import settings"
    assert "; add " not in second
