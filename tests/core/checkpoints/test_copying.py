"""Checkpoints are copied from a disk to another place: completely, verified, or not at all."""

import os
import shutil

import jax
import numpy as np
import pytest

from core.checkpoints import best, copying, inspection, steps, store
from core.errors import UserError
from core.files import paths


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    run = tmp_path_factory.mktemp("saved") / "run"
    checkpoints = store.Checkpoints(str(run / "checkpoints"), keep=9)
    for step in (3, 7, 9):
        state = {"params": {"w": jax.device_put(np.arange(1000.0) + step)}}
        checkpoints.save(step, state=state, data={"a": bytes([step])}, meta={})
    checkpoints.close()
    return run


@pytest.fixture
def run(saved, tmp_path):
    return paths.resolve(shutil.copytree(saved, tmp_path / "run"))


def intact(place):
    folder = paths.resolve(place) / "checkpoints"
    found = steps.complete(folder)
    assert not [step for step in found if inspection.verify(folder / str(step)).damaged]
    return found


@pytest.mark.covers("C13")
def test_the_newest_step_is_copied_and_the_latest_are_kept(run, tmp_path):
    said, place = [], str(tmp_path / "kept")
    copier = copying.Copying(str(run), place, keep=2, say=said.append)
    (run / "config.gin").write_text("LR = 1")
    for step in (9, 7):  # they appear one after the other
        (run / "checkpoints" / str(step)).rename(run / str(step))
    copier.copy_newest()
    assert intact(place) == [3]
    for step in (7, 9):
        (run / str(step)).rename(run / "checkpoints" / str(step))
        copier.copy_newest()
        copier.copy_newest()
    assert intact(place) == [7, 9]
    assert (tmp_path / "kept" / "config.gin").read_text() == "LR = 1"  # so that the place is a run for other commands
    assert len(said) == 3
    assert said[2].startswith("checkpoint 9: ")
    assert f"copied to {place}/checkpoints and compared, in " in said[2]


@pytest.mark.covers("C13")
def test_an_interrupted_or_damaged_copy_is_no_step_and_is_made_again(run, tmp_path, monkeypatch, capsys):
    place, copy = tmp_path / "kept", paths.copy_between
    copied = []

    def full_disk(source, target):
        if len(copied) == 3:
            raise OSError(28, "No space left on device")
        copied.append(source)
        copy(source, target)

    with monkeypatch.context() as patched:
        patched.setattr(paths, "copy_between", full_disk)
        with pytest.raises(OSError, match="No space"):
            copying.copy_step(run / "checkpoints" / "9", paths.resolve(place) / "checkpoints" / "9")
        assert (place / "checkpoints" / "9").exists()
        said = []
        with copying.Copying(str(run), str(place), keep=2, say=said.append):
            pass
    assert intact(place) == []
    assert said == [f"warning: the newest checkpoint of {run}/checkpoints was not copied to {place}/checkpoints"]
    assert "could not be written (OSError: [Errno 28] No space left on device)" in capsys.readouterr().out

    def flipping(source, target):
        copy(source, target)
        if "/d/" in os.fspath(target):
            content = target.read_bytes()
            target.write_bytes(bytes([content[0] ^ 1]) + content[1:])

    with monkeypatch.context() as patched:
        patched.setattr(paths, "copy_between", flipping)
        with pytest.raises(copying.CopyError, match=r"differs from .* after it was copied"):
            copying.copy_step(run / "checkpoints" / "9", paths.resolve(place) / "checkpoints" / "9")
    assert intact(place) == []
    with copying.Copying(str(run), str(place), keep=2, say=said.append):
        pass
    assert intact(place) == [9]


@pytest.mark.covers("C13")
def test_a_machine_without_the_checkpoints_gets_the_newest_back(run, tmp_path):
    place, fresh = str(tmp_path / "kept"), str(tmp_path / "fresh")
    copying.require_place(str(run), place, hosts=1)
    with copying.Copying(str(run), place, keep=2, say=print):
        pass
    copying.require_place(fresh, place, hosts=1)  # as a restart on another machine does
    said = []
    assert copying.fetch_newest(fresh, place, say=said.append) == 9
    assert intact(fresh) == [9]
    assert copying.fetch_newest(fresh, place, say=said.append) is None
    assert copying.fetch_newest(str(run), place, say=said.append) is None
    assert said == []


def save_evaluated(run, losses, *, after=lambda: None):
    checkpoints = store.Checkpoints(str(run / "checkpoints"), keep=2, keep_best="validation/loss")
    for step, loss in losses.items():
        meta = best.described("validation/loss", {"validation/loss": loss})
        state = {"params": {"w": jax.device_put(np.arange(9.0) + step)}}
        checkpoints.save(step, state=state, data={"a": b"1"}, meta=meta)
        checkpoints.wait()
        after()
    checkpoints.close()


@pytest.mark.covers("C13")
def test_the_best_step_is_kept_in_the_copy_as_in_the_run_and_copied_back(tmp_path):
    run, place, said = tmp_path / "run", str(tmp_path / "kept"), []
    copier = copying.Copying(str(run), place, keep=2, keep_best="validation/loss", say=said.append)
    save_evaluated(run, {1: 3.0, 2: 1.0, 3: 2.0, 4: 2.5, 5: 2.2}, after=copier.copy_newest)
    assert intact(run) == intact(place) == [2, 4, 5]
    assert steps.best_of(place) == 2
    assert len(said) == 5
    fresh = str(tmp_path / "fresh")
    assert copying.fetch_newest(fresh, place, say=said.append) == 5
    assert copying.fetch_best(fresh, place, "validation/loss", say=said.append) == 2
    assert intact(fresh) == [2, 5]
    assert copying.fetch_best(fresh, place, "validation/loss", say=said.append) is None
    save_evaluated(run, {6: 0.5, 7: 0.7}, after=copier.copy_newest)
    assert intact(place) == [6, 7]


def test_a_best_step_that_was_passed_over_is_copied_later(tmp_path):
    """Several steps were saved between two copies, or the metric was not asked for before."""
    run, place = tmp_path / "run", str(tmp_path / "kept")
    save_evaluated(run, {1: 3.0, 2: 1.0, 3: 2.0, 4: 2.5, 5: 2.2})
    copying.Copying(str(run), place, keep=2, say=print).copy_newest()
    assert intact(place) == [5]
    copying.Copying(str(run), place, keep=2, keep_best="validation/loss", say=print).copy_newest()
    assert intact(place) == [2, 5]


def test_a_damaged_copy_of_the_best_step_is_passed_over(tmp_path):
    run, place, said = tmp_path / "run", tmp_path / "kept", []
    copier = copying.Copying(str(run), str(place), keep=3, keep_best="validation/loss", say=print)
    save_evaluated(run, {1: 3.0, 2: 1.0, 3: 2.0, 4: 2.5, 5: 2.2}, after=copier.copy_newest)
    damaged = max((place / "checkpoints" / "2" / "state").rglob("d/*"), key=lambda file: file.stat().st_size)
    damaged.write_bytes(damaged.read_bytes()[:-1])
    fresh = str(tmp_path / "fresh")
    assert copying.fetch_newest(fresh, str(place), say=said.append) == 5
    assert copying.fetch_best(fresh, str(place), "validation/loss", say=said.append) == 3
    assert [line.splitlines()[0].split(" (")[0] for line in said] == [f"warning: in {place}, step 2: DAMAGED"]
    assert intact(fresh) == [3, 5]


@pytest.mark.covers("C13")
def test_a_damaged_copy_is_passed_over_and_replaced_when_its_step_is_saved_again(run, tmp_path):
    """A machine without checkpoints gets the newest intact one, and nothing damaged stays behind."""
    place, fresh, said = tmp_path / "kept", tmp_path / "fresh", []
    copier = copying.Copying(str(run), str(place), keep=2, say=said.append)
    (run / "checkpoints" / "9").rename(run / "9")
    copier.copy_newest()
    (run / "9").rename(run / "checkpoints" / "9")
    copier.copy_newest()
    damaged = max((place / "checkpoints" / "9" / "state").rglob("d/*"), key=lambda file: file.stat().st_size)
    damaged.write_bytes(damaged.read_bytes()[: damaged.stat().st_size // 2])
    said.clear()
    assert copying.fetch_newest(str(fresh), str(place), say=said.append) == 7
    assert [line.splitlines()[0].split(" (")[0] for line in said] == [f"warning: in {place}, step 9: DAMAGED"]
    assert [folder.name for folder in (fresh / "checkpoints").iterdir()] == ["7"]

    copying.Copying(str(run), str(place), keep=2, say=said.append).copy_newest()
    assert inspection.verify(paths.resolve(place) / "checkpoints" / "9").damaged  # it is the same save
    state = {"params": {"w": jax.device_put(np.arange(1000.0))}}
    steps.remove(run / "checkpoints" / "9")
    again = store.Checkpoints(str(run / "checkpoints"), keep=9)
    again.save(9, state=state, data={"a": b"9"}, meta={})
    again.close()
    copier.copy_newest()
    assert intact(place) == [7, 9]


def test_a_damaged_copy_of_a_later_step_is_not_kept_in_place_of_a_good_one(run, tmp_path):
    place = tmp_path / "kept"
    copying.Copying(str(run), str(place), keep=1, say=print).copy_newest()
    left = place / "checkpoints" / "3.orbax-checkpoint-tmp-1"  # by an interrupted removal
    left.mkdir()
    for step in ("7", "9"):  # which the run could not use
        steps.remove(run / "checkpoints" / step)
    with copying.Copying(str(run), str(place), keep=1, say=print):
        pass
    assert sorted(folder.name for folder in (place / "checkpoints").iterdir()) == ["3"]


def test_a_step_whose_removal_was_interrupted_is_removed_at_the_next_start(run, monkeypatch):
    folder = run / "checkpoints"

    def interrupted(self):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(type(folder), "rmtree", interrupted)
        with pytest.raises(KeyboardInterrupt):
            steps.remove(folder / "7")
    assert steps.complete(folder) == [3, 9]
    assert [left.what for left in steps.leftovers(folder)] == ["unfinished"]
    steps.clear(folder)
    assert sorted(path.name for path in folder.iterdir()) == ["3", "9"]


def test_two_runs_cannot_share_a_place(run, saved, tmp_path):
    place = str(tmp_path / "kept")
    copying.require_place(str(run), place, hosts=1)
    copying.require_place(str(run), place, hosts=1)  # again, at a restart
    another = shutil.copytree(saved, tmp_path / "another")
    with pytest.raises(UserError, match=r"has checkpoints of another run than .*another: give another place"):
        copying.require_place(str(another), place, hosts=1)
    for run_dir in ("gs://bucket/run", place):
        with pytest.raises(UserError, match="copied from a local run directory to another place"):
            copying.require_place(run_dir, place, hosts=1)
