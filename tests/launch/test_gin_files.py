"""Every strategy, optimizer and slice in gin/ fits Valkyrie-7B on the real topology; from shapes alone."""

import dataclasses
import re

import jax
import numpy as np
import pytest

import gin
from core import logical, slices
from core.batches import batch_shapes
from launch import environment
from launch.config import loader
from launch.experiment import Experiment
from models.decoder import transformer
from parallel import mesh
from parallel.compiled import report
from parallel.verify import agreement

GIN = environment.WORKSPACE / "gin"
AT = {"tensor": "v4-8", "multislice": "2xv4-32", "pipeline_data": "2xv4-32"}  # the others: v4-32
QUICK_PIPELINES = ("pipeline_fsdp",)  # all other strategies are bound in a second
OPTIMIZERS = {"adafactor": 0.1, "lion": 1.0, "muon": 1.1, "adam_atan2": 2.0}  # at most this much state, in parameters
_GIB = 2**30


def names(folder):
    return sorted(path.stem for path in (GIN / folder).glob("*.gin"))


def valkyrie(*included, at):
    bindings = [f"include 'gin/{path}.gin'" for path in included]
    return loader.load("gin/valkyrie_7b.gin", bindings=bindings, slice_name=at).build()


def test_valkyrie_7b_is_the_7b():
    assert valkyrie(at="v4-32").model == transformer.preset("7b", remat="projections")


@pytest.mark.covers("M15")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=[pytest.mark.slow] * (n.startswith("pipeline") and n not in QUICK_PIPELINES))
        for n in names("strategies")
    ],
)
def test_a_strategy_file_binds_a_table_that_fits(name):
    experiment = valkyrie(f"strategies/{name}", at=AT.get(name, "v4-32"))
    assert experiment.strategy.name == name
    program = experiment.bind(mesh.topology_devices(slices.get(experiment.slice)))
    assert program.partitioner.mesh.size == slices.get(experiment.slice).devices


def test_there_is_a_file_for_every_strategy_and_each_says_what_it_is():
    assert names("strategies") == sorted({example.strategy.name for example in agreement.EXAMPLES.values()})
    for folder in ("strategies", "optimizers"):
        for path in (GIN / folder).glob("*.gin"):
            assert path.read_text().startswith("# "), path


@pytest.mark.parametrize("name", sorted(set(names("optimizers")) - {"trm"}))  # which needs a table of puzzles
def test_an_optimizer_file_binds_an_optimizer_whose_state_is_as_small_as_promised(name):
    experiment = valkyrie(f"optimizers/{name}", at="v4-32")
    sizes = report.totals(experiment.bind(mesh.topology_devices(slices.get("v4-32"))))
    assert sizes.params / _GIB == pytest.approx(1.57, abs=0.01)
    assert sizes.opt_state <= OPTIMIZERS[name] * sizes.params + 2**20


@pytest.mark.parametrize("name", names("slices"))
def test_a_slice_file_names_a_slice(name):
    experiment = valkyrie("strategies/fsdp", f"slices/{name}", at=None)
    assert slices.get(experiment.slice).name == name.replace("_", "-")


EXPERIMENTS = [
    path.relative_to(environment.WORKSPACE).as_posix()
    for folder in ("", "long", "long/text", "long/positions", "published", "trm", "trm/exp02a")
    for path in sorted((GIN / folder).glob("*.gin"))
    if "\ninclude '" in path.read_text()
]


@pytest.mark.covers("L02")
@pytest.mark.parametrize("file", EXPERIMENTS)
def test_gin_alone_builds_the_same_object(file, monkeypatch):
    """What the loader gives to gin, after its checks and without what has no effect, is what gin reads in the files."""
    monkeypatch.chdir(environment.WORKSPACE)
    tiny = environment.WORKSPACE / "tests/models/fixtures" / ("images/llava" if "images" in file else "families/llama2")
    bindings = [f"FOLDER = '{tiny}'"] if file.startswith("gin/finetune") else []
    ours = loader.load(file, bindings=bindings).build()
    gin.clear_config()
    with gin.config.interactive_mode():
        gin.parse_config_files_and_bindings([file], bindings)
    assert without_addresses(gin.get_configurable(Experiment)()) == without_addresses(ours)


def without_addresses(built):
    return re.sub(r" at 0x[0-9a-f]+", "", repr(built))


@pytest.mark.parametrize(("model", "parameters"), [("trm", 5_028_866), ("trm_attention", 6_828_034)])
def test_the_recursive_model_of_a_9x9_sudoku(model, parameters):
    bindings = ["include 'gin/tasks/sudoku9.gin'", f"include 'gin/models/{model}.gin'"]
    bindings += ["trm.TRM.embed_dim = 512", "trm.TRM.prefix_length = 16"]
    experiment = loader.load("gin/trm/sudoku4.gin", bindings=bindings).build()
    program = experiment.bind(mesh.topology_devices(slices.get(experiment.slice)))
    state, moments = program.abstract_state, program.abstract_state.opt_state
    beside = ("puzzle_table", "h_init", "l_init")
    trained = sum(a.size for leaves in state.params.values() for name, a in leaves.items() if name not in beside)
    assert trained == parameters
    assert sum(a.size for a in jax.tree.leaves(moments) if a.ndim) == 3 * parameters  # two moments and the average
    assert experiment.optimizer.live == ("table",)


@pytest.mark.covers("N08")
def test_the_curriculum_of_lengths_and_its_steps():
    spans = loader.load("gin/long/curriculum.gin").build().spans()
    found = [(span.experiment.tokens_per_step, span.experiment.task.length) for span in spans]
    assert [length for _, length in found] == [2**n * 1024 for n in range(2, 7)]
    assert {tokens for tokens, _ in found} == {2**20}


@pytest.mark.parametrize(
    ("binding", "says"),
    [
        ("transformer.preset.keeps_states = False", "the model carries nothing from one chunk of a row to the next"),
        ("TASK = @text.files()", "task is of type TextTask, whose rows are complete, so that no state would be kept"),
        (
            "experiment.Experiment.non_finite = 'skip'",
            "one that is left out would continue from the state of other tokens; expected 'stop'",
        ),
        ("experiment.Experiment.non_finite = 'roll_back'", "non_finite = 'roll_back', and task is of type"),
    ],
)
def test_chunks_of_rows_and_kept_states_need_one_another(binding, says):
    with pytest.raises(ValueError, match=says):
        loader.load("gin/long/chunks.gin", bindings=[binding]).build()


def test_chunks_of_rows_suit_any_model_with_a_carry():
    experiment = loader.load("gin/long/chunks.gin").build()

    class Carries(type(experiment.model)):
        def init_carry(self, batch):
            return np.zeros(batch["inputs"].shape[0])

    settings = {f.name: getattr(experiment.model, f.name) for f in dataclasses.fields(experiment.model)}
    model = Carries(**{**settings, "keeps_states": False})
    assert dataclasses.replace(experiment, model=model).model is model


def params_of(experiment):
    example = batch_shapes(experiment.task.spec(experiment.batch_size))
    return logical.abstract_init(experiment.model.init, jax.random.key(experiment.seed), example)[0]


COMPARED = [f"{folder}/{name}" for folder in ("long/text", "long/positions") for name in names(folder)]
MIXED = ("long/text/hybrid", "long/positions/window_ttt")  # have the layers of the others


@pytest.mark.parametrize(
    "file", [pytest.param(file, marks=[pytest.mark.slow] * (file not in MIXED)) for file in COMPARED]
)
def test_a_model_that_is_compared_on_real_text_fits_its_slice(file):
    experiment = loader.load(f"gin/{file}.gin").build()
    experiment.bind(mesh.topology_devices(slices.get(experiment.slice)))


@pytest.mark.covers("N08", "N09")
@pytest.mark.parametrize("folder", ["long/text", "long/positions"])
def test_the_models_that_are_compared_on_real_text_have_equally_many_parameters(folder):
    """Sizes differ by less than 1 %, and no two files have the same layers."""
    experiments = [loader.load(f"gin/{folder}/{name}.gin").build() for name in names(folder)]
    sizes = [sum(a.size for a in jax.tree.leaves(params_of(experiment))) for experiment in experiments]
    assert max(sizes) < 1.01 * min(sizes), dict(zip(names(folder), sizes, strict=True))
    if folder == "long/positions":  # and as many FLOPs, within one step
        flops = [e.total_steps * e.flops_per_step for e in experiments]
        assert max(flops) - min(flops) < max(e.flops_per_step for e in experiments)
    assert len({(e.model.num_layers, e.model.mixer, e.model.feed_forward) for e in experiments}) == len(experiments)
