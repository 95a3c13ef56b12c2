"""The agreement command, with README's model and strategy, and with wrong arguments."""

import re
import sys

import jax
import numpy as np
import pytest

from core.types import DataLayout
from launch import __main__ as cli
from launch import environment
from launch.verify import agreement
from models import agreement_subjects
from parallel import strategies
from parallel.agreement import EXAMPLES, Difference, Example, StrategyRow, Subject, Trajectory, exceeding

PICTURES = """
import dataclasses

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from core import logical
from core.batches import Field
from core.types import LossOutput

INIT = hk.initializers.RandomNormal(0.1)


@dataclasses.dataclass(frozen=True)
class Classifier:
    forgets: bool = False
    reads: str = "pixels"

    def init(self, rng, batch):
        return hk.transform(self._sums).init(rng, batch)

    def init_carry(self, batch):
        return ()

    def loss(self, params, carry, rng, batch, *, is_training):
        return carry, hk.transform(self._sums).apply(params, rng, batch)

    def _sums(self, batch):
        up = logical.param("up", (12, 32), ("embed", "mlp"), INIT)
        down = logical.param("down", (32, 5), ("mlp", "embed"), INIT)
        scores = self._product(jax.nn.gelu(batch[self.reads] @ up), down)
        picked = jnp.take_along_axis(jax.nn.log_softmax(scores), batch["label"][:, None], axis=1)
        return LossOutput(-picked.sum(), jnp.float32(picked.size), {})

    def _product(self, hidden, down):
        if not self.forgets or jax.sharding.get_abstract_mesh().empty:
            return hidden @ down
        specs = {"in_specs": (P(None, "tensor"), P("tensor", None)), "out_specs": P()}
        return jax.shard_map(jnp.matmul, **specs, axis_names={"tensor"}, check_vma=False)(hidden, down)


class Stream:
    def __init__(self, layout, seed, last):
        self.rows, self.rng, self.left = list(layout.rows), np.random.default_rng(seed), last
        self.batch_size = layout.batch_size

    def __next__(self):
        if not self.left:
            raise StopIteration
        self.left -= 1
        pixels = self.rng.normal(size=(self.batch_size, 12)).astype(np.float32)
        label = self.rng.integers(0, 5, self.batch_size, dtype=np.int32)
        return {"pixels": pixels[self.rows], "label": label[self.rows]}


class Pictures:
    num_streams, vocabulary = 3, None

    def __init__(self, last: int = 100, folder: str = ""):
        self.last, self.folder = last, folder

    def spec(self, batch_size):
        pixels = Field((batch_size, 12), np.float32, ("batch", None))
        return {"pixels": pixels, "label": Field((batch_size,), np.int32, ("batch",))}

    def prepare(self, run_dir, *, is_host_zero): ...

    def train(self, layout, *, seed):
        return Stream(layout, seed, self.last)

    def evaluation(self, layout):
        return Stream(layout, 1, 1)

    def problems(self):
        return [f"no folder {self.folder!r}"] if self.folder else []

    def describe(self):
        return "pictures"

    def fingerprint(self):
        return "1"


class Stored(Pictures):
    def rehearsal(self):
        return Pictures()
"""
EXPERIMENT = """
from __gin__ import dynamic_registration
import pictures
include 'gin/defaults.gin'
include 'gin/strategies/tensor.gin'
MODEL = @pictures.Classifier()
TASK = @pictures.Stored()
pictures.Stored.folder = '/nowhere'
BATCH_SIZE = 12
SLICE = 'v4-8'
"""


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """README's own files, where Python finds them."""
    readme = (environment.WORKSPACE / "README.md").read_text()
    for body in re.findall(r"^```(?:python|gin)\n(.*?)^```$", readme, re.MULTILINE | re.DOTALL):
        (tmp_path / body.splitlines()[0].removeprefix("# ")).write_text(body)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return str(tmp_path / "my_model.gin")


def measured(said, name):
    row = next(line.split() for line in said.splitlines() if line.strip().startswith(f"| {name} "))
    return row[3], [float(cell) for cell in row[5:] if "e" in cell]


def test_a_model_and_a_strategy_of_ones_own(launch, mine):
    strategy = ["--gin", "import my_strategies", "--gin", "STRATEGY = @my_strategies.tensor_only()"]
    said = launch("agreement", "--experiment", mine, *strategy, "--steps", "2", "--float32-only")
    slice_name, absolute = measured(said, "tensor_only")
    assert slice_name == "v4-8"
    assert len(absolute) == 4
    assert 0 < max(absolute) < 1e-4  # measured, not assumed: rounding, and nothing more
    assert "differs" not in said


@pytest.fixture
def in_process(monkeypatch, capsys):
    """Runs the command here; gives its exit code and what it said."""
    monkeypatch.setattr(sys, "path", [*sys.path])

    def run(*arguments):
        code = cli.main(["agreement", *arguments])
        said = capsys.readouterr()
        return code, said.out + said.err

    return run


@pytest.fixture
def experiment(tmp_path, monkeypatch):
    """An experiment whose batches hold no tokens, with a task that has a rehearsal."""
    monkeypatch.delitem(sys.modules, "pictures", raising=False)  # of another test, in another folder
    (tmp_path / "pictures.py").write_text(PICTURES)
    (tmp_path / "pictures.gin").write_text(EXPERIMENT)
    return str(tmp_path / "pictures.gin")


def test_an_experiment_is_compared_on_batches_of_its_own_task(in_process, experiment, monkeypatch):
    given = {}

    def measure(subject, examples, data, *, bfloat16):
        given.update(subject=subject, examples=examples, data=data, bfloat16=bfloat16)
        return [row()]

    monkeypatch.setattr(agreement, "measure", measure)
    code, said = in_process("--experiment", experiment, "--gin", "SEED = 5", "--gin", "ACCUM_STEPS = 2", "--steps", "2")
    assert code == 0, said
    assert given["subject"].seed == 5
    assert given["subject"].options["accum_steps"] == 2
    assert type(given["subject"].model).__name__ == "Classifier"
    assert {name: example.slice for name, example in given["examples"].items()} == {"tensor": "v4-8"}
    assert given["bfloat16"]
    rows = len(given["data"][0]["label"])
    assert rows % (2 * 3) == 0  # microbatches and streams divide it
    stream = sys.modules["pictures"].Stream(DataLayout(rows, tuple(range(rows)), tuple(range(rows))), 5, 2)
    for batch in given["data"]:  # of the rehearsal, for the task's own folder does not exist
        jax.tree.map(np.testing.assert_array_equal, batch, next(stream))


@pytest.mark.slow
def test_an_experiment_agrees_with_one_device_and_a_model_that_forgets_a_sum_differs(in_process, experiment):
    code, said = in_process("--experiment", experiment, "--steps", "2", "--float32-only")
    assert code == 0, said
    slice_name, absolute = measured(said, "tensor")
    assert slice_name == "v4-8"
    assert 0 < max(absolute) < 1e-5
    forgets = ["--gin", "pictures.Classifier.forgets = True"]
    code, said = in_process("--experiment", experiment, *forgets, "--steps", "1", "--float32-only")
    assert code == 1
    assert re.search(r"differs: tensor, v4-8: gradients \['~'\]\['\w+'\] \d{5,} ulp apart, tolerance \d+", said)


@pytest.mark.covers("R11")
@pytest.mark.simulated(2)
def test_an_experiment_agrees_when_its_chips_are_shared_among_processes(in_process, experiment):
    code, said = in_process("--experiment", experiment, "--steps", "1", "--float32-only", "--processes", "2")
    assert code == 0, said
    assert "params, 2 processes" in said


@pytest.mark.parametrize(
    ("bindings", "message"),
    [
        (
            ["TASK = @pictures.Pictures()", "pictures.Pictures.last = 1"],
            "batches of Pictures ended after 1; 2 are needed",
        ),
        (["TASK = @pictures.Pictures()", "pictures.Pictures.folder = '/nowhere'"], "no folder '/nowhere'"),
        (
            ["pictures.Classifier.reads = 'inputs'"],
            "in _sums). A batch of this task has pixels float32[",
        ),
    ],
)
def test_missing_parts_of_an_experiment_are_named(in_process, experiment, bindings, message):
    code, said = in_process("--experiment", experiment, "--steps", "2", *(a for b in bindings for a in ("--gin", b)))
    assert code == 2
    assert message in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "fdsp"], "--only: invalid choice: 'fdsp'"),
        (["--processes", "3", "--only", "fsdp"], "3 processes cannot share the 16 chips of v4-32 evenly; expected one"),
        (["--steps", "0"], "--steps: 0: expected a whole number, at least 1"),
        (["--slice", "v4-8"], "add --experiment EXPERIMENT.gin"),
        (["--gin", "SEED = 1"], "--gin and --slice change an experiment, and none is given"),
        (
            ["--experiment", "a.gin", "--only", "fsdp", "--slice", "v4-8"],
            "--slice v4-8 is for the experiment's own strategy",
        ),
    ],
)
def test_incomparable_arrays_are_reported(in_process, arguments, message):
    code, said = in_process(*arguments)
    assert code == 2
    assert message in said


def test_a_strategy_that_cannot_hold_the_model_fails_before_anything_runs(in_process):
    code, said = in_process("--model", "trm", "--only", "pipeline")
    assert code == 1
    assert "pipeline on v4-32 is refused: " in said


def test_devices_for_the_largest_slice():
    assert jax.device_count() == 16  # initializes them
    agreement._provide_devices(EXAMPLES.values())
    examples = {"own": Example("v4-64", strategies.fsdp())}
    with pytest.raises(ValueError, match=r"32 devices are needed, .*: set JAX_NUM_CPU_DEVICES=32"):
        agreement._provide_devices(examples.values())
    assert agreement.rows_for(EXAMPLES) == 16
    assert agreement.rows_for(examples) == 32


def row(**ulp):
    apart = {part: Difference(0.0, ulp.get(part, 0.0), "w") for part in Trajectory._fields}
    return StrategyRow("fsdp", "v4-32", apart, None, {2: apart})


def test_the_exit_code_says_whether_all_agree(in_process, monkeypatch):
    monkeypatch.setattr(agreement, "measure", lambda *_, **__: [row()])
    assert in_process("--only", "fsdp", "--float32-only")[0] == 0
    monkeypatch.setattr(agreement, "measure", lambda *_, **__: [row(params=80_000.0)])
    code, said = in_process("--only", "fsdp", "--float32-only")
    assert code == 1
    assert "differs: fsdp, v4-32: params w 80000 ulp apart" in said
    assert "differs: fsdp, 2 processes: params w 80000 ulp apart" in said


def agree_when_played(names, *, steps, processes, model=agreement_subjects.MODEL, options=()):
    examples = {name: EXAMPLES[name] for name in names}
    argv = [sys.executable, "-m", "launch", "agreement", "--steps", str(steps), *options]
    data = list(agreement_subjects.batches_for(model, steps=steps, rows=agreement.rows_for(examples)))
    found = agreement.measure_played(
        Subject(model, agreement_subjects.optimizer_of(model)), examples, data, processes=processes, command=argv
    )
    assert list(found) == list(names)
    for name, apart in found.items():
        assert not exceeding(name, apart)
        assert apart["gradients"].ulp > 0, name  # it was another computation


RECURSIVE = [name for name, example in EXAMPLES.items() if not example.strategy.pipeline]  # that can hold it


@pytest.mark.slow
@pytest.mark.covers("R11", "N12")
@pytest.mark.simulated(4)
@pytest.mark.parametrize(("processes", "steps", "names"), [(2, 3, ["fsdp", "fsdp_tensor"]), (4, 20, RECURSIVE)])
def test_no_number_of_the_recursive_model_depends_on_the_number_of_processes(processes, steps, names):
    model = agreement_subjects.MODELS["trm"]
    agree_when_played(names, steps=steps, processes=processes, model=model, options=("--model", "trm"))


@pytest.mark.slow
@pytest.mark.covers("R11")
@pytest.mark.simulated(4)
@pytest.mark.parametrize("processes", [2, 4])
def test_no_number_depends_on_the_number_of_processes(processes):
    """As `launch/run agreement --processes`, for all that it shows."""
    agree_when_played(list(EXAMPLES), steps=3, processes=processes)
