"""`launch/run checkpoints` on intact, damaged and incomplete checkpoints."""

import re
import shutil

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from core.checkpoints import arrays, comparing, inspection, reading, steps, store
from core.files import paths
from core.hosts import exit_codes
from launch import __main__ as main

MESH = Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("fsdp", "tensor"))


def state_of(step, *, width=6):
    values = {
        "params": {"block/mlp": {"up": np.random.default_rng(step).normal(size=(8, width)).astype(np.float32)}},
        "average": (np.full((4, 2), step, jax.numpy.bfloat16),),
        "touched": np.arange(8) % 3 == 0,
        "step": np.int32(step),
    }
    specs = {2: PartitionSpec("fsdp", "tensor"), 1: PartitionSpec("tensor"), 0: PartitionSpec()}
    return jax.tree.map(lambda x: jax.device_put(x, NamedSharding(MESH, specs[np.ndim(x)])), values)


def write(run, *numbers, config="LR = 1\nSEED = 0", jax_version="1", **kind):
    checkpoints = store.Checkpoints(str(run / "checkpoints"), keep=9)
    meta = {"config": config, "git_revision": "abcdef", "versions": {"jax": jax_version}, "seed": 0}
    for step in numbers:
        checkpoints.save(step, state=state_of(step, **kind), data={"a": bytes([step]) * 9}, meta=meta)
    checkpoints.close()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    run = tmp_path_factory.mktemp("saved") / "run"
    write(run, 3, 7, 9)
    return run


@pytest.fixture
def run(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "run")


@pytest.fixture
def command(capsys):
    def call(*argv, code=0):
        assert main.main(["checkpoints", *map(str, argv)]) == code
        return capsys.readouterr()

    return call


def damage(folder, pattern, harm):
    for path in folder.glob(pattern):
        path.write_bytes(harm(path.read_bytes()))


def flip(content):
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 4]) + content[middle + 1 :]


def steps_of(run):
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def test_ls_has_a_line_for_every_folder(run, command):
    (run / "checkpoints" / "12").mkdir()
    (run / "checkpoints" / "damaged-8-1").mkdir()
    (run / "checkpoints" / "10.orbax-checkpoint-tmp").mkdir()
    damage(run / "checkpoints" / "7", "meta/metadata", lambda text: text.replace(b"SEED", b"SEND"))
    damage(run / "checkpoints" / "3", "_CHECKPOINT_METADATA", lambda text: text[:50])  # which only tells the time
    said = command("ls", run).out
    lines = {line.split()[0]: line for line in said.splitlines()}
    for step in ("3", "9"):
        assert lines[step].endswith("complete")
        assert "  4  " in lines[step]
        assert "abcdef" in lines[step]
        assert "KiB" in lines[step]
    assert "DAMAGED metadata: DamagedError" in lines["7"]
    assert lines["12"].endswith("not a checkpoint: parts are missing")
    assert lines["damaged-8-1"].endswith("set aside: its content differs from what was saved")
    assert lines["10.orbax-checkpoint-tmp"].endswith("a save in progress, or one that did not finish")


@pytest.mark.covers("C12")
def test_verify_names_the_damaged_parts(run, command):
    assert "step 9: intact (4 arrays" in command("verify", run).out
    damage(run / "checkpoints" / "7", "data/a.bin", flip)
    shutil.rmtree(run / "checkpoints" / "9" / "state" / "d")
    said = command("verify", run, code=exit_codes.FAILED).out
    assert "step 7: DAMAGED" in said
    assert "data: DamagedError: the position in a.bin is damaged" in said
    assert "step 9: DAMAGED" in said
    assert "state: the list of arrays cannot be read" in said
    assert "step 3: intact" in said
    assert "step 9" not in command("verify", run, "--step", 3).out


def test_verify_of_a_step_also_verifies_its_parameters_alone(run, command):
    shutil.copytree(run / "checkpoints" / "7", run / "params" / "7")
    assert command("verify", run, "--step", 7).out.count("step 7: intact") == 2
    damage(run / "params" / "7", "data/a.bin", flip)
    assert "step 7: DAMAGED" in command("verify", run, "--step", 7, code=exit_codes.FAILED).out


def test_a_step_that_is_removed_while_others_are_verified_is_not_damaged(run, monkeypatch, command):
    verify, folder = inspection.verify, paths.resolve(run) / "checkpoints"
    first, *_ = steps.complete(folder)

    def removing(step_folder):
        if (folder / str(first)).exists():
            steps.remove(folder / str(first))
        return verify(step_folder)

    monkeypatch.setattr(inspection, "verify", removing)
    assert command("verify", run).out.endswith(f"\nstep {first}: removed meanwhile\n")


@pytest.mark.covers("C12")
def test_a_flipped_bit_in_an_array_is_found_by_name(tmp_path):
    """Arrays of another step under the old metadata: every file is valid by itself."""
    write(tmp_path / "run", 3, 4)
    folders = [tmp_path / "run" / "checkpoints" / str(step) for step in (3, 4)]
    shutil.rmtree(folders[0] / "state")
    shutil.copytree(folders[1] / "state", folders[0] / "state")
    verdict = inspection.verify(store.paths.resolve(folders[0]))
    changed = ["average/0", "params/block/mlp/up", "step"]
    assert sorted(verdict.damaged) == [f"{name}: its content differs from what was saved" for name in changed]


def test_fingerprints_of_blocks_equal_those_of_the_devices(saved):
    folder = store.paths.resolve(saved / "checkpoints" / "7")
    found = arrays.Arrays(folder)
    want = reading.fingerprints(reading.by_name(state_of(7)))
    assert {name: found.number(name) for name in want} == want
    assert len(list(found.blocks("params/block/mlp/up"))) == 8  # one a device
    wide = np.random.default_rng(0).integers(0, 2**63, size=(5, 3))
    with jax.enable_x64(True):
        want = reading.fingerprints({"x": jax.device_put(wide)})["x"]
    parts = [reading.fingerprint_of_block(wide[i : i + 2], origin=(i, 0), shape=wide.shape) for i in (0, 2, 4)]
    assert sum(parts) % 2**32 == want


def test_diff_says_what_changed_and_by_how_much(run, tmp_path, command):
    write(tmp_path / "other", 7, config="LR = 2\nSEED = 0", jax_version="2", width=10)
    said = command("diff", f"{run}@7", tmp_path / "other", code=exit_codes.FAILED).out
    for words in (
        "-LR = 1\n  +LR = 2",
        "versions: jax: 1 -> 2",
        "params/block/mlp/up: float32[8, 6] -> float32[8, 10]",
    ):
        assert words in said
    assert "SEED" not in said
    said = command("diff", f"{run}@3", run, code=exit_codes.FAILED).out
    assert "arrays of the same shape and dtype: 1 equal, 3 different" in said
    assert "relative difference 2.00e+00, largest 6, 8 of 8 elements differ  average/0" in said
    assert "relative difference" not in command("diff", f"{run}@3", run, "--no-values", code=exit_codes.FAILED).out
    assert "no difference" in command("diff", f"{run}@7", f"{run}@7").out


def test_diff_counts_elements_that_are_not_finite_separately(tmp_path):
    folder = tmp_path / "checkpoints"
    checkpoints = store.Checkpoints(str(folder), keep=9)
    for step, values in (
        (1, [np.nan, 3, 4, np.inf, 0]),
        (2, [np.nan, 3, 5, np.inf, np.nan]),
        (3, [np.nan, 3, 5, 7, 0]),
    ):
        checkpoints.save(step, state={"w": jax.device_put(np.float32(values))}, data={}, meta={})
    checkpoints.close()
    one, two, three = (store.paths.resolve(folder / str(step)) for step in (1, 2, 3))
    (_, said) = comparing.compare(one, two)
    assert said == "  relative difference 2.00e-01, largest 1, 2 of 5 elements differ (1 of them NaN or infinite)  w"
    (_, said) = comparing.compare(one, three)
    assert said == "  relative difference 2.00e-01, largest 1, 2 of 5 elements differ (1 of them NaN or infinite)  w"
    (_, said) = comparing.compare(two, three)
    assert said == "  relative difference 0.00e+00, largest 0, 2 of 5 elements differ (2 of them NaN or infinite)  w"


@pytest.mark.covers("C12")
@pytest.mark.parametrize("name", ["state/array_metadatas/process_0", "state/_sharding", "state/_METADATA"])
def test_prune_keeps_the_checkpoints_that_a_restore_reads(run, command, name):
    """Files that a restore does not read change neither the verification nor the restore."""
    damage(run / "checkpoints" / "9", name, lambda text: text[:100])
    assert "step 9: intact" in command("prune", run, "--keep", 1).out
    layout = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state_of(9))
    checkpoints = store.Checkpoints(str(run / "checkpoints"), keep=9)
    assert checkpoints.restore_newest(layout)[0] == 9
    checkpoints.close()


def test_prune_keeps_the_latest_and_the_newest_intact_one(run, command):
    (run / "checkpoints" / "damaged-8-1").mkdir()
    said = command("prune", run, "--keep", 2, "--dry-run").out
    assert "keeps 7, 9" in said
    assert f"would remove {run}/checkpoints/3" in said
    assert steps_of(run) == ["3", "7", "9", "damaged-8-1"]
    for step in (7, 9):
        damage(run / "checkpoints" / str(step), "data/a.bin", flip)
    said = command("prune", run, "--keep", 1).out
    assert "step 9: DAMAGED" in said
    assert "keeps 3, 9" in said
    assert steps_of(run) == ["3", "9", "damaged-8-1"]
    assert "keeps 3, 9" in command("prune", run, "--keep", 2, "--set-aside").out
    assert steps_of(run) == ["3", "9"]
    damage(run / "checkpoints" / "3", "data/a.bin", flip)
    assert "is intact: nothing is removed" in command("prune", run, "--keep", 1, code=2).err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("ls", "nowhere"), r"the run 'nowhere' does not exist \(expected"),
        (("ls", "{run}/checkpoints/9"), "has no checkpoints"),
        (("verify", "{run}", "--step", "4"), "no complete checkpoint of step 4 in .*; existing steps: 3, 7, 9"),
        (("diff", "{run}@x", "{run}"), "expected RUN, RUN@STEP"),
        (("diff", "{run}@8", "{run}"), "no complete checkpoint of step 8"),
        (("prune", "{run}", "--keep", "0"), "--keep: 0: expected a whole number, at least 1"),
    ],
)
def test_invalid_arguments_are_refused(run, command, words, says):
    said = command(*(word.format(run=run) for word in words), code=exit_codes.USER_ERROR).err
    assert re.search(says, said), said
