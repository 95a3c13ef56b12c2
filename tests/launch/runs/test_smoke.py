"""Every experiment file rehearses as its header says: on its slice or, if that is large, on a smaller one."""

import dataclasses
import math
import re
import shlex
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from core import slices
from core.batches import Field
from core.errors import UserError
from core.hosts import exit_codes
from core.types import LossOutput
from launch import __main__ as cli
from launch import environment
from launch.config import loader
from launch.runs import smoke, train
from parallel import strategies
from parallel.compiled import compiling
from tasks.sampled import SampledTask

ROOT = environment.WORKSPACE


NO_RUNS = ("defaults.gin", "finetune.gin", "finetune_chats.gin", "finetune_images.gin")  # the last three need a folder
ALIKE = (  # differ from valkyrie_7b or valkyrie_100b in sizes, slice, remat, ACCUM_STEPS and WARMUP_STEPS alone
    "valkyrie_128b.gin",
    "valkyrie_16b.gin",
    "valkyrie_7b_64_rows.gin",
    "valkyrie_7b_v4_64.gin",
)


def experiments():
    return sorted(path.name for path in (ROOT / "gin").glob("*.gin") if path.name not in NO_RUNS)


def rehearsal(experiment):
    """The slice and the flags of the command in an experiment's header, which names the experiment.

    With `--check smoke` if it has none.
    """
    text = (ROOT / "gin" / experiment).read_text()
    (command,) = re.findall(r"^# Rehearse: ((?:.*\\\n#)*.*)", text, re.MULTILINE)
    _, slice_name, path, *flags = shlex.split(command.replace("\\\n#", ""))
    assert path == f"gin/{experiment}"
    flags.remove("--simulate")
    return slice_name, flags if "smoke" in flags else [*flags, "--check", "smoke"]


@pytest.mark.parametrize("experiment", experiments())
def test_every_header_has_the_command_of_a_rehearsal(experiment):
    slice_name, flags = rehearsal(experiment)
    bindings = [flags[n + 1] for n, flag in enumerate(flags) if flag == "--gin"]
    loaded = loader.load(f"gin/{experiment}", bindings=bindings, slice_name=slice_name).build()
    spans = smoke.shrink_phases(loaded)  # raises UserError if the mesh does not fit in the slice
    assert {span.last_step - span.first_step for span in spans} == {smoke.STEPS}


@pytest.mark.slow
@pytest.mark.parametrize("experiment", [name for name in experiments() if name not in ALIKE])
def test_the_rehearsal_in_a_header_passes(launch, experiment, tmp_path):
    slice_name, flags = rehearsal(experiment)
    where = ["--slice", slice_name, "--run-dir", str(tmp_path)]
    said = launch("train", f"gin/{experiment}", *where, *flags, slice_name=slice_name, timeout=900)
    assert re.search("PASS .*20 steps; restored at step 10, 10 steps repeated bit for bit", said)


@pytest.mark.slow
def test_a_smoke_run_can_be_repeated(launch, tmp_path):
    where = ["--check", "smoke", "--run-dir", str(tmp_path), "--gin", "KEEP_CHECKPOINTS = 1"]
    for _ in range(2):
        said = launch("train", "gin/own_text.gin", *where, slice_name="v4-8")
        assert "PASS" in said
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.slow
@pytest.mark.simulated(4)
def test_valkyrie_7b_smokes_on_four_hosts(launch, tmp_path):
    said = launch("pod", "v4-32", "gin/valkyrie_7b.gin", "--simulate", "--check", "smoke", "--run-dir", str(tmp_path))
    assert "PASS  20 steps" in said


def test_a_smoke_run_of_other_steps_is_refused(tmp_path, capsys):
    words = ["--slice", "v4-8", "--run-dir", str(tmp_path / "run"), "--check", "smoke", "--steps", "2"]
    assert cli.main(["train", "gin/quickstart.gin", *words]) == exit_codes.USER_ERROR
    assert "--check and --steps exclude each other: a smoke run has 20 steps" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_the_phases_of_a_smoke_run_differ_as_those_of_the_experiment():
    whole = loader.load("gin/quickstart_phases.gin").build()
    spans = smoke.shrink_phases(whole)
    assert [(span.number, span.count, span.first_step, span.last_step) for span in spans] == [
        (1, 2, 0, 20),
        (2, 2, 20, 40),
    ]
    first, second = (span.experiment for span in spans)
    assert first.model == second.model
    assert first.batch_size == 2 * second.batch_size
    assert 2 * first.row_length == second.row_length
    assert {first.total_steps, second.total_steps} == {40}
    (only,) = smoke.shrink_phases(loader.load("gin/quickstart.gin").build())
    assert (only.last_step, only.experiment.total_steps) == (20, 20)


def test_a_model_of_few_positions_gets_as_many_as_the_rows_of_a_smoke_run_have():
    bindings = ["LENGTH = 64", "transformer.Transformer.max_positions = 64"]
    small = smoke.shrink(loader.load("gin/quickstart.gin", bindings=bindings).build())
    assert small.row_length == small.model.max_positions == smoke.LENGTH
    assert small.data_problems(prepared=False) == []


def test_chunks_of_different_length_in_phases_are_shrunk_together():
    bindings = ["PHASES = (@long/experiment.Phase(),)", "long/experiment.Phase.after = 1000"]
    bindings += ["from launch import experiment", "long/experiment.Phase.task = @long/chunked.rows()"]
    bindings += ["long/chunked.rows.length = 8192", "chunked.rows.task = @text.files()", "DATA = 'x'"]
    whole = loader.load("gin/long/chunks.gin", bindings=bindings).build()
    first, second = (span.experiment for span in smoke.shrink_phases(whole))
    assert 2 * first.row_length == second.row_length
    assert second.task.whole.spec(16)["inputs"].shape[1] == 2 * second.row_length


def test_pieces_of_a_row_have_the_length_that_the_kernel_needs():
    bindings = ["include 'gin/strategies/context.gin'", "transformer.Transformer.attention = 'splash'", "LENGTH = 512"]
    whole = loader.load("gin/quickstart.gin", bindings=bindings, slice_name="v4-8").build()
    small = smoke.shrink(whole)
    assert small.row_length == 4 * smoke.LENGTH
    small.bind(compiling.devices_of(slices.get("v4-8")))  # raises UserError if a length does not fit


@pytest.mark.parametrize("loss", [0.25, math.nan])
def test_a_loss_that_a_restore_changes_fails_the_smoke_run(loss):
    first = {9: 1.0, 10: 0.75, 11: 0.5}
    smoke._require_equal(first, {10: 0.75, 11: 0.5}, restored=9)
    with pytest.raises(RuntimeError, match=f"step 11 has loss 0.5, after a restore from step 9 {loss}"):
        smoke._require_equal(first, {10: 0.75, 11: loss}, restored=9)


class Points:
    """A task that cannot be made smaller."""

    num_streams = 2

    def spec(self, rows):
        return {"x": Field((rows, 3), np.float32, ("batch", None)), "n": Field((rows,), np.int32, ("batch",))}

    def problems(self):
        return ()


class Linear:
    """A model of points; with `together`, the loss of a row depends on the others."""

    def __init__(self, together):
        self.together = together

    def init(self, rng, batch):
        return {"~": {"w": jnp.ones(3)}}

    def init_carry(self, batch):
        return ()

    def loss(self, params, carry, rng, batch, *, is_training):
        found = batch["x"] @ params["~"]["w"]
        found = found - jnp.mean(found) if self.together else found
        return carry, LossOutput(jnp.sum(found**2), jnp.float32(found.size), {})


def test_the_rows_of_a_task_that_cannot_be_made_smaller_are_compared_too():
    def compared(*, together):
        strategy = strategies.data_parallel()
        return smoke.require_divisible_rows(
            SimpleNamespace(model=Linear(together), task=Points(), strategy=strategy, accum_steps=2, row_length=1)
        )

    assert compared(together=False)
    with pytest.raises(UserError, match="couples_rows"):
        compared(together=True)


def test_a_start_that_nobody_checked_refuses_rows_that_its_loss_couples(tmp_path, capsys):
    def start(task):
        strategy = strategies.data_parallel()
        coupled = SimpleNamespace(model=Linear(True), task=task, strategy=strategy, accum_steps=2, row_length=1)
        span = SimpleNamespace(experiment=coupled, last_step=1, first_step=0)
        prepared = lambda span: SimpleNamespace(experiment=coupled)  # noqa: E731
        train.run_phases([span], prepared, str(tmp_path), last_step=1, lock=None)

    with pytest.raises(UserError, match="couples_rows"):
        start(Points())
    with pytest.raises(AttributeError, match=r"'types\.SimpleNamespace' object has no attribute"):  # of the session
        start(None)
    assert "note: it could not be tried whether the loss allows a step to divide its rows" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


@dataclasses.dataclass(frozen=True)
class Drawn(SampledTask):
    """A user's task, which has more streams than the check compares rows."""

    num_streams: int = 16

    def spec(self, batch_size):
        return {"x": Field((batch_size, 3), np.float32, ("batch", None))}

    def row(self, rng, *, is_training):
        return {"x": rng.normal(size=3).astype(np.float32)}


def test_rows_are_drawn_from_a_task_with_any_number_of_streams():
    for num_streams in (1, 6, 16):
        found = smoke._random_batch(Drawn(num_streams), model=object())
        assert found["x"].shape == (smoke._ROWS, 3)
        assert len(np.unique(found["x"])) == found["x"].size


def test_random_rows_of_a_task_have_its_shapes_and_kinds_of_values():
    found = smoke._random_batch(Points(), model=object())
    shapes = {name: (field.shape, field.dtype) for name, field in Points().spec(smoke._ROWS).items()}
    assert {name: (values.shape, values.dtype) for name, values in found.items()} == shapes
    assert np.unique(found["x"]).size == found["x"].size  # no two are alike
    assert set(np.unique(found["n"])) <= {0, 1}


@pytest.mark.slow
def test_a_smoke_run_crosses_the_boundaries_of_phases(launch, tmp_path):
    where = ["--check", "smoke", "--run-dir", str(tmp_path)]
    said = launch("train", "gin/quickstart_phases.gin", *where, slice_name="v4-16")
    for words in ("phase 1 of 2: steps 1 to 20", "PASS  phase 1 of 2, 20 steps; restored at step 10", "phase 2 of 2"):
        assert words in said
    assert "PASS  phase 2 of 2, 20 steps; continued from the checkpoint of step 20; restored at step 30" in said
