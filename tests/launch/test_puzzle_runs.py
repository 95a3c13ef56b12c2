"""Requirements of puzzle runs: a large enough table, and a small dataset for smoke runs."""

import pytest

from core import slices
from launch.config import loader
from launch.runs import smoke
from parallel import mesh

TRM = (
    "from models import trm",
    "MODEL = @trm.TRM()",
    "trm.TRM.vocab_size = %VOCAB_SIZE",
    "STRATEGY = @strategies.data_parallel()",
)


def experiment(task, *bindings):
    every = (f"include 'gin/tasks/{task}.gin'", *TRM, "BATCH_SIZE = 32", "PROMPT = ''", *bindings)
    return loader.load("gin/quickstart.gin", bindings=every).build()


def test_a_table_too_small_for_the_data_is_refused(tmp_path):
    from tasks.puzzles import writing

    with writing.dataset(str(tmp_path / "set"), vocab_size=12, seq_len=900, about={}) as out:
        out.identifiers += ["a", "b", "c"]
        for split in (out.train, out.test):
            split.add_group(*[[[1] * 900]] * 2, identifiers=[3])
    data = f"DATA = '{tmp_path / 'set'}'"
    run = experiment("arc", data)
    assert run.data_problems(prepared=False) == []
    assert run.data_problems(prepared=True) == [
        "the model has num_puzzles 1, but the data has 4 puzzle identifiers: set its num_puzzles = 4 (more is allowed)"
    ]
    assert experiment("arc", data, "trm.TRM.num_puzzles = 5").data_problems(prepared=True) == []


@pytest.mark.parametrize(("task", "length"), [("sudoku4", 16), ("maze", 900), ("arc", 900)])
def test_every_kind_of_puzzle_binds_to_a_slice_and_rehearses_without_files(task, length):
    run = experiment(task)
    chips = mesh.topology_devices(slices.get("v4-16"))
    assert run.bind(chips).spec["labels"].shape == (32, length)
    small = smoke.shrink(run)
    assert small.data_problems(prepared=False) == []
    assert small.bind(chips).spec["inputs"].shape == (8, length)


def test_binding_refuses_a_carry_with_microbatches():
    run = experiment("sudoku4", "ACCUM_STEPS = 2")
    with pytest.raises(ValueError, match="accum_steps = 2: a model whose carry belongs to the rows of a batch cannot"):
        run.bind(mesh.topology_devices(slices.get("v4-16")))
