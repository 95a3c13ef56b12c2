"""The agreement command with README's model and strategy, and with wrong arguments."""

import re
import sys

import haiku as hk
import jax
import numpy as np
import pytest

from core import logical
from core.types import DataLayout
from launch import __main__ as cli
from launch import environment, program_identity, terminal
from launch.config import loader
from launch.verify import agreement
from models import agreement_subjects, losses
from parallel import mesh, strategies
from parallel.verify import agreement as parallel_agreement
from parallel.verify import recording
from parallel.verify.agreement import EXAMPLES, Difference, Example, StrategyRow, Subject, exceeding, tolerance
from tests.haiku_model import HaikuModel

OUTSIDE = environment.WORKSPACE / "tests" / "outside"
PICTURES = """
import itertools

import jax
from captions import Captioner, Squares
from jax.sharding import PartitionSpec as P


class Forgetful(Captioner):
    def _block(self, x, pixels):
        after = super()._block(x, pixels)
        if jax.sharding.get_abstract_mesh().empty:
            return after
        def share(x): return x * (jax.lax.axis_index("tensor") == 0)  # and no sum of the shares
        return jax.shard_map(share, in_specs=P(), out_specs=P(), axis_names={"tensor"}, check_vma=False)(after)


class Hasty(Captioner):
    def sums(self, batch, *, is_training):
        return batch["words"]


class Short(Squares):
    def train(self, layout, *, seed):
        return itertools.islice(super().train(layout, seed=seed), 1)


class Stored(Squares):
    def problems(self):
        return ["no folder '/nowhere'"]


class Rehearsed(Stored):
    def rehearsal(self):
        return Squares(3)
"""
EXPERIMENT = """
from __gin__ import dynamic_registration
import pictures
include 'tests/outside/captions.gin'
include 'gin/strategies/tensor.gin'
TASK = @pictures.Rehearsed()
pictures.Rehearsed.num_streams = 3
BATCH_SIZE = 12
"""


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
    """Images beside text, whose task lacks a folder and has a rehearsal."""
    monkeypatch.syspath_prepend(OUTSIDE)
    monkeypatch.delitem(sys.modules, "pictures", raising=False)  # of another test, in another folder
    (tmp_path / "pictures.py").write_text(PICTURES)
    (tmp_path / "pictures.gin").write_text(EXPERIMENT)
    return str(tmp_path / "pictures.gin")


def test_an_experiment_is_compared_on_batches_of_its_own_task(in_process, experiment, monkeypatch):
    given = {}

    def measure(subject, examples, data, *, bfloat16):
        given.update(subject=subject, examples=examples, data=data, bfloat16=bfloat16)
        return [row()]

    monkeypatch.setattr(agreement.agreement, "measure", measure)
    code, said = in_process("--experiment", experiment, "--gin", "SEED = 5", "--gin", "ACCUM_STEPS = 2", "--steps", "2")
    assert code == 0, said
    assert given["subject"].seed == 5
    assert given["subject"].options["accum_steps"] == 2
    assert type(given["subject"].model).__name__ == "Captioner"
    assert {name: example.slice for name, example in given["examples"].items()} == {"tensor": "v4-8"}
    assert given["bfloat16"]
    rows = len(given["data"][0]["pixels"])
    assert rows % (2 * 3) == 0  # microbatches and streams divide it
    rehearsal = sys.modules["captions"].Squares(3)
    stream = rehearsal.train(DataLayout(rows, tuple(range(rows)), tuple(range(rows))), seed=5)
    for batch in given["data"]:  # of the rehearsal, for the task's own folder does not exist
        jax.tree.map(np.testing.assert_array_equal, batch, next(stream))


@pytest.mark.slow
def test_a_model_that_forgets_a_sum_differs(in_process, experiment):
    forgets = ["--gin", "MODEL = @pictures.Forgetful()"]
    code, said = in_process("--experiment", experiment, *forgets, "--steps", "1", "--float32-only")
    assert code == 1
    assert re.search(r"differs: tensor, v4-8: gradients \['[^ ]+ \d{5,} ulp apart, tolerance \d+", said)


@pytest.mark.covers("R11")
@pytest.mark.slow
@pytest.mark.simulated(2)
def test_an_experiment_agrees_when_its_chips_are_shared_among_processes(in_process):
    captions = str(OUTSIDE / "captions.gin")
    code, said = in_process("--experiment", captions, "--steps", "1", "--float32-only", "--processes", "2")
    assert code == 0, said
    assert "params, 2 processes" in said


@pytest.mark.parametrize(
    ("bindings", "message"),
    [
        (
            ["TASK = @pictures.Short()", "pictures.Short.num_streams = 3"],
            "batches of Short ended after 1; 2 are needed",
        ),
        (["TASK = @pictures.Stored()", "pictures.Stored.num_streams = 3"], "no folder '/nowhere'"),
        (["MODEL = @pictures.Hasty()"], "in sums). A batch of this task has pixels uint8["),
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
        (["--gin", "SEED = 1"], "--gin, --slice and --own-optimizer are of an experiment, and none is given"),
        (
            ["--experiment", "a.gin", "--only", "fsdp", "--slice", "v4-8"],
            "--slice v4-8 is not valid with --only, whose strategies have slices of their own",
        ),
    ],
)
def test_incomparable_arrays_are_reported(in_process, arguments, message):
    code, said = in_process(*arguments)
    assert code == 2
    assert message in said


@pytest.mark.part("trm")
def test_a_strategy_that_cannot_hold_the_model_fails_before_anything_runs(in_process):
    code, said = in_process("--model", "trm", "--only", "pipeline")
    assert code == 1
    assert "pipeline on v4-32 is refused: " in said
    assert "3 steps of Adam-atan2 with sign updates of the puzzle table" in " ".join(said.split())


def test_the_optimizer_of_an_experiment_is_named_by_its_statements():
    named = program_identity.optimizer_text(loader.load("gin/quickstart.gin"))
    assert "OPTIMIZER = @optimizers.adamw()" in named
    assert "LEARNING_RATE = " in named


def test_devices_for_the_largest_slice():
    assert jax.device_count() == 16  # initializes them
    mesh.provide_cpu_devices(16)
    examples = {"own": Example("v4-64", strategies.fsdp())}
    with pytest.raises(ValueError, match=r"32 devices are needed, .*: set JAX_NUM_CPU_DEVICES=32"):
        mesh.provide_cpu_devices(32)
    assert agreement.rows_for(EXAMPLES) == 16
    assert agreement.rows_for(examples) == 32


def row(**ulp):
    apart = {part: Difference(0.0, ulp.get(part, 0.0), "w") for part in tolerance("fsdp")}
    return StrategyRow("fsdp", "v4-32", apart, None, {2: apart})


def test_the_exit_code_says_whether_all_agree(in_process, monkeypatch):
    monkeypatch.setattr(agreement.agreement, "measure", lambda *_, **__: [row()])
    code, said = in_process("--only", "fsdp", "--float32-only")
    assert (code, said.splitlines()[-1]) == (0, "AGREES with one device, within the tolerances: 1 strategy")
    monkeypatch.setattr(agreement.agreement, "measure", lambda *_, **__: [row(params=80_000.0)])
    code, said = in_process("--only", "fsdp", "--float32-only")
    assert code == 1
    assert "differs: fsdp, v4-32: params w 80000 ulp apart" in said
    assert "differs: fsdp, 2 processes: params w 80000 ulp apart" in said
    assert said.splitlines()[-1] == "DIFFERS from one device: fsdp, of 1 strategy"
    monkeypatch.setattr(agreement.agreement, "measure", lambda *_, **__: [row()._replace(refused="it has no axes")])
    code, said = in_process("--only", "fsdp", "--float32-only")
    assert (code, said.splitlines()[-1]) == (1, "NOT COMPARED: fsdp does not support the model")


def test_no_figure_is_cut_on_a_narrow_terminal(in_process, monkeypatch):
    monkeypatch.setattr(agreement.agreement, "measure", lambda *_, **__: [row()])
    monkeypatch.setattr(terminal, "width", lambda *_: 60)
    _, said = in_process("--only", "fsdp", "--float32-only")
    assert "| fsdp " in said
    assert "…" not in said


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


def test_what_a_process_saves_is_compared_in_every_dtype(tmp_path):
    """Frozen parameters are in bfloat16, which a file of numpy does not know."""
    arrays = [np.array(jax.numpy.full(3, 1.25, dtype)) for dtype in ("bfloat16", "float8_e4m3fn", "float32", "int32")]
    np.savez(tmp_path / "a.npz", *map(recording.storable, arrays))
    with np.load(tmp_path / "a.npz") as leaves:
        found = [leaves[key] for key in leaves.files]
    assert parallel_agreement.difference(found, arrays).absolute == 0


class Bigram(HaikuModel):
    """A table of next tokens, which compiles fast."""

    vocab_size = 16

    def _loss(self, batch):
        table = logical.param("table", (16, 16), ("embed", "vocab"), hk.initializers.RandomNormal())
        return losses.cross_entropy(table[batch["inputs"]], batch["targets"], batch["weights"], vocab_size=16)


def test_processes_that_a_signal_ended_end_the_command_with_its_code(monkeypatch):
    monkeypatch.setattr(agreement.simulate, "run", lambda *args, **options: 130)
    with pytest.raises(SystemExit) as ended:
        agree_when_played(["fsdp"], steps=1, processes=2, model=Bigram())
    assert ended.value.code == 130


@pytest.mark.slow
@pytest.mark.covers("R11", "N12")
@pytest.mark.simulated(4)
@pytest.mark.parametrize(
    ("processes", "steps", "names"),
    [(2, 2, ["data_parallel", "sequence_tensor"]), (4, 5, ["fsdp_tensor", "multislice"])],
)
def test_no_number_of_the_recursive_model_depends_on_the_number_of_processes(processes, steps, names):
    """With four processes, until rows are halted by the limit and get other puzzles.

    The next test compares a decoder under every strategy.
    """
    model = agreement_subjects.MODELS["trm"]
    agree_when_played(names, steps=steps, processes=processes, model=model, options=("--model", "trm"))


@pytest.mark.slow
@pytest.mark.covers("M06", "M07", "M08", "M09", "M10", "M13", "R11")
@pytest.mark.simulated(2)
def test_no_number_of_any_strategy_depends_on_the_number_of_processes():
    agree_when_played(list(EXAMPLES), steps=3, processes=2)


@pytest.mark.slow
@pytest.mark.covers("R11")
@pytest.mark.simulated(4)
def test_numbers_of_four_processes_are_those_of_one():
    """For strategies of most kinds; the test above compares all with two processes."""
    names = ["fsdp_tensor", "context_ring", "multislice", "experts", "pipeline_fsdp_tensor"]
    agree_when_played(names, steps=3, processes=4)
