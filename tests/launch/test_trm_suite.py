"""The 67 experiments of gin/trm: their differences, their headers, and that every binding has an effect."""

import dataclasses
import functools
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from core import slices
from core.parameters import ParamSpec
from launch import environment
from launch.config import loader
from launch.experiments import results, suites
from parallel import mesh

TRM = environment.WORKSPACE / "gin" / "trm"
COUNTS = {"exp01": 6, "exp02a": 6, "exp02b": 5, "exp03": 5, "exp04a": 6, "exp04b": 5, "exp05": 6, "exp06": 6}
COUNTS |= {"exp07": 3, "exp08": 5, "exp09": 5, "exp10": 5, "contrib01": 2, "contrib02": 2}
BASELINES = {"exp01c", "exp02a_03", "exp02b_03", "exp03b", "exp04a_1000", "exp04b_1000", "exp05_d", "exp06_c", "exp07b"}
BASELINES |= {"exp08d", "exp09a", "exp10b", "contrib01_baseline", "contrib02_baseline"}
RUN_HERE = "learning"
RECIPES = ("sudoku", "maze", "arc1", "arc2")
HEADER = re.compile(
    r"# ([\d,]+) parameters(.*?); ([\d,]+) steps of ([\d,]+) rows, ([\d.]+) GFLOP a row, ([\d.]+) EFLOP"
)
PARAMS = {
    "~": {"puzzle_table": jnp.ones((4, 3)), "halt_bias": jnp.ones(2), "h_init": jnp.ones(3)},
    "layers/block": {"down": jnp.ones((2, 3))},
}

SPECS = {
    "~": {
        "puzzle_table": ParamSpec(("puzzles", None), kind="table"),
        "halt_bias": ParamSpec((None,)),
        "h_init": ParamSpec(("embed",), trainable=False),
    },
    "layers/block": {"down": ParamSpec((None, "embed"), stacked=1)},
}


@pytest.fixture(scope="module")
def suite():
    return {e.name: e for e in suites.load(suites.files("all"), check_data=False)}


@pytest.fixture(scope="module")
def beside():
    entries = suites.load([*suites.files("control"), *suites.files("original")], check_data=False)
    return {e.id: e for e in entries}


@pytest.fixture(scope="module")
def recipes():
    return {name: loader.load(f"gin/trm/{name}.gin").build() for name in RECIPES}


def update_of(optimizer):
    """The traced program of one update."""
    optimizer = optimizer.bound(SPECS)

    def update(state, params):
        return optimizer.update(params, state, params, {"puzzle_table": jnp.array([1, 2])})

    return str(jax.make_jaxpr(update)(optimizer.init(PARAMS), PARAMS))


@functools.cache
def program_of(model):
    """The traced program of a start, a step and an evaluation."""
    tokens = jax.ShapeDtypeStruct((2, 81), "int32")
    batch = {"inputs": tokens, "labels": tokens, "puzzle_ids": jax.ShapeDtypeStruct((2,), "int32")}

    def run(rng, batch):
        params, carry = model.init(rng, batch), model.init_carry(batch)
        return model.loss(params, carry, rng, batch), model.evaluate(params, rng, batch)

    return re.sub("0x[0-9a-f]+", "", str(jax.make_jaxpr(run)(jax.random.key(0), batch)))


def changed(model, base):
    """Fields of a model that are not the base's."""
    names = [field.name for field in dataclasses.fields(model)]
    return [name for name in names if getattr(model, name) != getattr(base, name)]


def test_67_experiments_of_which_54_are_distinct(suite):
    assert len(suite) == 67
    groups = [entry.group for entry in suite.values()]
    assert {group: groups.count(group) for group in groups} == COUNTS
    distinct = [entry for entry in suite.values() if not entry.same_as]
    assert len(distinct) == len({entry.text for entry in suite.values()}) == 54
    same = {name for name, entry in suite.items() if entry.text == suite["exp01c"].text}
    assert same == BASELINES


@pytest.mark.slow
def test_distinct_experiment_files_are_distinct_runs(suite):
    """54 different combinations of traced model, traced optimizer, data and sizes."""
    runs = [entry.experiment for entry in suite.values()]
    programs = {
        (program_of(r.model), r.task.asked, r.batch_size, r.total_steps, r.seed, update_of(r.optimizer)) for r in runs
    }
    assert len(programs) == 54


@pytest.mark.slow
def test_no_field_of_a_model_is_idle(suite, beside):
    """Each field that an experiment changes changes the program, whatever else it changes."""
    base = suite["exp01c"].experiment.model
    assert program_of(dataclasses.replace(base, num_heads=4)) == program_of(base)  # an mlp has none: this would be seen
    for name, entry in (suite | beside).items():
        model = entry.experiment.model
        for field in changed(model, base):
            back = dataclasses.replace(model, **{field: getattr(base, field)})
            assert program_of(back) != program_of(model), (name, field)


def test_optimizers_are_those_of_their_experiments(suite):
    def names(which):
        return update_of(suite[which].experiment.optimizer)

    assert "atan2" in names("exp09a")
    for name, b2 in (("exp09b", 0.95), ("exp09c", 0.99), ("exp09d", 0.999)):
        assert "atan2" not in names(name)
        optimizer = suite[name].experiment.optimizer.bound(SPECS)
        _, new = optimizer.update(PARAMS, optimizer.init(PARAMS), PARAMS, {"puzzle_table": jnp.array([1])})
        second = [leaf for leaf in jax.tree.leaves(new) if leaf.shape == (2, 3)]
        assert any(np.allclose(leaf, 1 - b2, rtol=1e-4) for leaf in second), name
    lion, adam = (
        len(jax.tree.leaves(suite[n].experiment.optimizer.bound(SPECS).init(PARAMS))) for n in ("exp09e", "exp09b")
    )
    assert lion < adam  # one moment in place of two
    assert suite["exp08a"].experiment.optimizer.averages is None
    assert suite["exp08b"].experiment.optimizer.averages is not None


@pytest.mark.parametrize(
    ("name", "first", "last"),
    [
        ("exp10a", 3e-5, 3e-5),
        ("exp10b", 1e-4, 1e-4),
        ("exp10c", 3e-4, 3e-4),
        ("exp10d", 1e-4, 1e-5),
        ("exp10e", 1e-4, 1e-6),
        ("exp06_d", 1.4142e-4, 1.4142e-4),
    ],
)
def test_rates(suite, name, first, last):
    run = suite[name].experiment
    rate = [float(run.optimizer.learning_rate(jnp.int32(s))) for s in (0, 1999, run.total_steps - 1)]
    warmup = 1000 if name == "exp06_d" else 2000
    assert rate[0] == pytest.approx(first / warmup, rel=1e-4)
    assert rate[1] == pytest.approx(first, rel=1e-2)
    assert rate[2] == pytest.approx(last, rel=1e-2)


@pytest.mark.covers("N12")
def test_parameters_depth_and_compute(suite):
    def told(group, value):
        return [value(entry) for entry in suite.values() if entry.group == group]

    def parameters(entry):
        return results.trained_parameters(entry.experiment)

    by_width = told("exp01", parameters)
    assert by_width[2] == 5_028_866
    assert [round(n / 1e6, 2) for n in by_width] == [1.48, 2.67, 5.03, 9.75, 17.62, 38.08]
    assert [round(n / 1e6, 1) for n in told("exp03", parameters)] == [2.5, 5.0, 7.5, 10.0, 15.1]
    assert told("exp03", lambda e: results.depth(e.experiment.model)) == [39, 42, 45, 48, 54]
    giga = {g: told(g, lambda e: e.experiment.model.flops_per_row(81) / 1e9) for g in ("exp02a", "exp02b")}
    np.testing.assert_allclose(giga["exp02a"], [18.3, 30.5, 42.7, 54.9, 67.1, 79.3], atol=0.1)
    np.testing.assert_allclose(giga["exp02b"], [25.6, 34.2, 42.7, 51.3, 59.8], atol=0.1)


def test_steps(suite, beside, recipes):
    """Visits x puzzles / batch; data scaling and batches as corrected, and as they were."""
    steps = {name: entry.experiment.total_steps for name, entry in suite.items()}
    assert {n for name, n in steps.items() if not name.startswith("exp06")} == {8138} == {int(50_000 * 1000 / 6144)}
    by_batch = [entry.experiment for entry in suite.values() if entry.group == "exp06"]
    assert [run.total_steps for run in by_batch] == [32552, 16276, 8138, 4069, 2034, 1017]
    for run in by_batch:
        assert run.total_steps == int(50_000 * 1000 / run.batch_size)
        rates = np.asarray(run.optimizer.learning_rate(jnp.arange(10_000)))
        warm = int(np.argmax(rates == rates.max())) + 1
        assert warm * run.batch_size == 12_288_000
        assert rates[-1] == pytest.approx(1e-4 * (run.batch_size / 6144) ** 0.5, rel=1e-4)
    original = {e.name: e.experiment for e in beside.values() if e.group == "original" and "04a" in e.name}
    assert {name: run.total_steps for name, run in original.items()} == {
        f"exp04a_{n}": int(50_000 * n / 6144) for n in (100, 250, 500, 2000, 5000)
    }
    assert [original[f"exp04a_{n}"].total_steps for n in (100, 5000)] == [813, 40690]
    assert {name: run.total_steps for name, run in recipes.items()} == {
        "sudoku": 65104,
        "maze": 65104,
        "arc1": 519270,
        "arc2": 725651,
    }


def test_data(suite):
    asked = {name: tuple(entry.experiment.task.asked) for name, entry in suite.items()}
    assert asked["exp04a_250"] == (250, 1000)
    assert asked["exp04b_0010"] == (1000, 10)
    assert set(asked.values()) - {asked[n] for n in asked if n.startswith("exp04")} == set()
    assert results.evaluated_on(suite["exp01a"].experiment) == "at most 8,192 held-out puzzles, seed 0"


def test_contributions_change_the_model(suite):
    assert suite["contrib01_curriculum"].experiment.model.curriculum.total_steps == 8138
    fades = suite["contrib02_adaptive"].experiment.model.exploration
    assert [float(fades.at(jnp.int32(s))) for s in (0, 8138)] == pytest.approx([0.3, 0.05])


def test_controls_are_the_reference_code_and_originals_are_others(suite, beside):
    reference = loader.load("gin/trm/sudoku.gin")
    assert beside["control/paper_mlp"].text == reference.text
    attention = beside["control/paper_attention"].experiment
    assert results.trained_parameters(attention) == 6_828_034
    assert results.trained_parameters(dataclasses.replace(attention, frozen=("*",))) == 0
    assert (attention.batch_size, attention.model.l_cycles) == (768, 6)
    assert not {e.text for e in beside.values()} & {e.text for e in suite.values()}
    assert len({e.text for e in beside.values()}) == len(beside) == 14


def test_recipes_have_the_values_of_the_reference_code(recipes):
    for name, run in recipes.items():
        assert run.batch_size == 768
        assert run.optimizer.averages is not None
        assert float(run.optimizer.learning_rate(2000)) == pytest.approx(1e-4)
        assert (run.model.h_cycles, run.model.l_cycles) == ((3, 6) if name == "sudoku" else (3, 4))
        assert results.trained_parameters(run) == {
            "sudoku": 5_028_866,
            "maze": 6_822_914,
        }.get(name, 6_829_058)
    assert [recipes[n].model.num_puzzles for n in ("arc1", "arc2")] == [960 * 1001 + 1, 1280 * 1001 + 1]
    text = loader.load("gin/trm/arc1.gin").text
    assert "table/optimizers.warmup_floor.peak = 0.01" in text
    assert "optimizers.with_table.weight_decay = 0.1" in text


def every_file():
    """What is for a slice."""
    inside = [path for path in sorted(TRM.rglob("*.gin")) if path.parent not in (TRM, TRM / RUN_HERE)]
    return inside + [TRM / f"{n}.gin" for n in RECIPES]


def test_each_run_of_the_ablation_omits_one_part():
    runs = {path.stem: loader.load(str(path)).build() for path in (TRM / RUN_HERE).glob("*.gin")}
    assert sorted(runs) == ["full", "last_calls", "no_average", "softmax"]
    whole = runs["full"]
    assert dataclasses.replace(runs["last_calls"].model, gradient="last_cycle") == whole.model
    assert dataclasses.replace(runs["softmax"].model, probabilities="stablemax") == whole.model
    assert (runs["no_average"].model, runs["no_average"].optimizer.averages) == (whole.model, None)
    assert whole.optimizer.averages is not None
    recipe = loader.load("gin/trm/sudoku4.gin").build()
    assert (recipe.model, recipe.total_steps) == (whole.model, whole.total_steps)
    page = (TRM / RUN_HERE / "README.md").read_text()
    assert f"{results.trained_parameters(whole):,} parameters" in page
    assert f"launch/run suite {RUN_HERE} --simulate" in page
    assert all(f"]({name}.gin)" in page for name in runs)


def test_headers_are_right(suite, beside, recipes):
    """The figures are recomputed; the commands name this file, its group and its slice."""
    runs = {pathlib.Path(entry.path): entry.experiment for entry in (*suite.values(), *beside.values())}
    runs |= {(TRM / f"{name}.gin").resolve(): run for name, run in recipes.items()}
    for path in every_file():
        text, where = path.read_text(), path.relative_to(environment.WORKSPACE).as_posix()
        run = runs[path.resolve()]
        total = run.model.training_flops(run.task.length, rows=run.batch_size, steps=run.total_steps)
        found = HEADER.search(text)
        assert found, where
        parameters, _, steps, batch, per_row, exa = found.groups()
        assert parameters == f"{results.trained_parameters(run):,}", where
        assert (steps, batch) == (f"{run.total_steps:,}", f"{run.batch_size:,}"), where
        assert per_row == f"{total / run.total_steps / run.batch_size / 1e9:.1f}", where
        assert exa == f"{total / 1e18:.2f}", where
        assert "Not run." in text, where
        assert re.search(rf"launch/pod\.sh {run.slice} {re.escape(where)} ", text), where
        if path.parent != TRM:
            slice_name = " --slice v4-64" if path.parent.name == "control" else ""
            assert f"launch/run suite {path.parent.name}{slice_name} --run-root gs://BUCKET/runs --gin" in text, where
            assert len(text.splitlines()) <= 20, where


@pytest.mark.covers("E01")
def test_every_group_explains_itself():
    for group in set(suites.groups()) - {RUN_HERE}:
        page = (TRM / group / "README.md").read_text()
        for part in ("Hypothesis", "What varies", "Expected, and why", "Success", "How to read it", "Command"):
            assert f"**{part}" in page, (group, part)
        assert f"launch/run suite {group} " in page
        assert f"gs://BUCKET/runs/{group}/" in page
        for path in (TRM / group).glob("*.gin"):
            assert f"[{path.stem}]({path.name})" in page, path
    for page in TRM.rglob("README.md"):
        for target in re.findall(r"\]\((?!http)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page} links to {target}"


def chips(run):
    return mesh.topology_devices(slices.get(run.slice))


def test_recipes_fit_their_slices(recipes):
    for name in ("sudoku", "arc2"):
        program = recipes[name].bind(chips(recipes[name]))
        table = program.abstract_state.params["~"]["puzzle_table"]
        split = 32 if name == "arc2" else 1
        assert table.sharding.shard_shape(table.shape)[0] == table.shape[0] // split


@pytest.mark.slow
@pytest.mark.parametrize("path", every_file(), ids=lambda path: pathlib.Path(path).stem)
def test_every_experiment_fits_its_slice(path):
    run = loader.load(str(path)).build()
    run.bind(chips(run))
