"""Checkpoints are copied from a disk to another place: completely, verified, or not at all."""

import math
import os
import pathlib
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


def damage(place, step=9):
    state = pathlib.Path(place) / "checkpoints" / str(step) / "state"
    for file in state.rglob("d/*"):
        file.write_bytes(file.read_bytes()[:-1])


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
        assert list(steps.leftovers(paths.resolve(place) / "checkpoints")) == []  # they might be what fills the disk
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
    assert [folder.name for folder in (place / "checkpoints").iterdir()] == ["9"]


@pytest.mark.covers("C13")
def test_a_machine_without_the_checkpoints_gets_the_newest_back(run, tmp_path):
    place, fresh = str(tmp_path / "kept"), str(tmp_path / "fresh")
    copying.require_place(str(run), place, hosts=1)
    with copying.Copying(str(run), place, keep=2, say=print):
        pass
    copying.require_place(fresh, place, hosts=1)  # as a restart on another machine does
    said = []
    assert copying.Fetching(fresh, place, say=said.append).newest() == 9
    assert intact(fresh) == [9]
    assert copying.Fetching(fresh, place, say=said.append).newest() is None
    assert copying.Fetching(str(run), place, say=said.append).newest() is None
    assert said == []


@pytest.mark.covers("C13")
@pytest.mark.parametrize("place", ["disk", "bucket"])
def test_a_copy_has_the_vocabulary_and_the_small_files_of_models_and_gives_them_back(
    run, tmp_path, monkeypatch, request, place
):
    if place == "bucket":
        for name, value in request.getfixturevalue("bucket").environment.items():
            monkeypatch.setenv(name, value)
    place, fresh = paths.resolve("gs://bucket/kept" if place == "bucket" else tmp_path / "kept"), tmp_path / "fresh"
    copying.require_place(str(run), str(place), hosts=1)
    copier = copying.Copying(str(run), str(place), keep=2, say=print)
    for step in (9, 7):
        (run / "checkpoints" / str(step)).rename(run / str(step))
    copier.copy_newest()  # before there are such files
    assert copying.Fetching(str(tmp_path / "plain"), str(place), say=print).newest() == 3
    for step in (7, 9):
        (run / str(step)).rename(run / "checkpoints" / str(step))
    prepared = {
        "vocabulary/sentencepiece_300.model": b"pieces",
        "vocabulary/sentencepiece_300.sha256": b"1234",
        "published/copies.json": b"{}",
        "published/0/tokenizer.json": b"ids",
    }
    for name, content in prepared.items():
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_bytes(content)
    copying.Copying(str(run), str(place), keep=2, say=print).copy_newest()
    assert copying.Fetching(str(fresh), str(place), say=print).newest() == 9
    for folder in (place, fresh):
        assert {name: (folder / name).read_bytes() for name in prepared} == prepared


def test_the_vocabulary_is_there_before_the_first_step_and_a_copy_that_differs_is_no_copy(run, tmp_path, monkeypatch):
    (run / "vocabulary").mkdir()
    (run / "vocabulary" / "sentencepiece_300.model").write_bytes(b"pieces")
    place, copy = tmp_path / "kept", paths.copy_between

    def cutting(source, target):
        copy(source, target)
        if target.suffix == ".model":
            target.write_bytes(target.read_bytes()[:-1])

    copier = copying.Copying(str(run), str(place), keep=2, say=print)
    with monkeypatch.context() as patched:
        patched.setattr(paths, "copy_between", cutting)
        with pytest.raises(copying.CopyError, match=r"sentencepiece_300\.model differs"):
            copier.copy_newest()
    assert intact(place) == []
    copier.copy_newest()
    assert intact(place) == [9]
    assert (place / "vocabulary" / "sentencepiece_300.model").read_bytes() == b"pieces"


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
    assert copying.Fetching(fresh, place, say=said.append).newest() == 5
    assert copying.Fetching(fresh, place, say=said.append).best("validation/loss") == 2
    assert intact(fresh) == [2, 5]
    assert copying.Fetching(fresh, place, say=said.append).best("validation/loss") is None
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


def test_a_score_that_was_added_to_a_step_after_its_copy_is_copied_too(tmp_path):
    run, place = tmp_path / "run", str(tmp_path / "kept")
    save_evaluated(run, {1: 3.0, 2: math.nan})
    copier = copying.Copying(str(run), place, keep=2, keep_best="validation/loss", say=print)
    copier.copy_newest()
    assert steps.best_of(place) == 1
    scores = best.described("validation/loss", {"validation/loss": 1.0})
    steps.write_scores(paths.resolve(run) / "checkpoints" / "2", scores)
    copier.copy_newest()
    assert steps.best_of(place) == 2
    save_evaluated(run, {3: 2.0, 4: 2.5}, after=copier.copy_newest)
    assert intact(place) == [2, 3, 4]
    assert copying.Fetching(str(tmp_path / "fresh"), place, say=print).best("validation/loss") == 2
    assert steps.best_of(str(tmp_path / "fresh")) == 2


def test_a_damaged_copy_of_the_best_step_is_passed_over(tmp_path):
    run, place, said = tmp_path / "run", tmp_path / "kept", []
    copier = copying.Copying(str(run), str(place), keep=3, keep_best="validation/loss", say=print)
    save_evaluated(run, {1: 3.0, 2: 1.0, 3: 2.0, 4: 2.5, 5: 2.2}, after=copier.copy_newest)
    damaged = max((place / "checkpoints" / "2" / "state").rglob("d/*"), key=lambda file: file.stat().st_size)
    damaged.write_bytes(damaged.read_bytes()[:-1])
    fresh = str(tmp_path / "fresh")
    fetching = copying.Fetching(fresh, str(place), say=said.append)
    assert fetching.newest() == 5
    assert fetching.best("validation/loss") == 3
    assert [line.splitlines()[0].split(" (")[0] for line in said] == [f"warning: in {place}, step 2: DAMAGED"]
    assert intact(fresh) == [3, 5]


def test_a_damaged_copy_that_is_the_newest_and_the_best_is_copied_and_read_once(tmp_path):
    run, place, said = tmp_path / "run", tmp_path / "kept", []
    copier = copying.Copying(str(run), str(place), keep=2, keep_best="validation/loss", say=print)
    save_evaluated(run, {1: 3.0, 2: 1.0}, after=copier.copy_newest)
    damaged = max((place / "checkpoints" / "2" / "state").rglob("d/*"), key=lambda file: file.stat().st_size)
    damaged.write_bytes(damaged.read_bytes()[:-1])
    fetching = copying.Fetching(str(tmp_path / "fresh"), str(place), say=said.append)
    assert (fetching.newest(), fetching.best("validation/loss")) == (1, None)
    assert len(said) == 1


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
    assert copying.Fetching(str(fresh), str(place), say=said.append).newest() == 7
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


def test_an_intact_copy_takes_the_place_of_a_damaged_step(run, tmp_path):
    """Otherwise training would go back a step, and then remove the copy as one that it could not use."""
    place, said = tmp_path / "kept", []
    copying.Copying(str(run), str(place), keep=2, say=print).copy_newest()
    fetching = copying.Fetching(str(run), str(place), say=said.append)
    folder = str(run / "checkpoints")
    layout = {"params": {"w": jax.ShapeDtypeStruct((1000,), np.float32, sharding=jax.device_put(0.0).sharding)}}
    for _ in range(2):
        damage(run)
        step, state, *_ = store.Checkpoints(folder, keep=9).restore_newest(layout, fetch=fetching.in_place_of)
        assert (step, float(state["params"]["w"][0])) == (9, 9.0)
    assert len(said) == 2
    assert steps.complete(run / "checkpoints") == [3, 7, 9]
    assert len([left for left in steps.leftovers(run / "checkpoints") if left.what == "damaged"]) == 2
    damage(run)
    damage(place)
    assert store.Checkpoints(folder, keep=9).restore_newest(layout, fetch=fetching.in_place_of)[0] == 7


def test_a_copy_is_fetched_over_what_is_left_of_a_step(tmp_path):
    """A best step whose description is cut is not among those that the run describes, nor a step without its mark."""
    run, place = tmp_path / "run", str(tmp_path / "kept")
    copier = copying.Copying(str(run), place, keep=2, keep_best="validation/loss", say=print)
    save_evaluated(run, {1: 3.0, 2: 1.0, 3: 2.0}, after=copier.copy_newest)
    own = run / "checkpoints"
    described = own / "2" / "meta" / "metadata"
    described.write_bytes(described.read_bytes()[:-3])
    assert copying.Fetching(str(run), place, say=print).best("validation/loss") == 2
    (own / "3" / "_CHECKPOINT_METADATA").unlink()
    assert copying.Fetching(str(run), place, say=print).newest() == 3
    assert intact(run) == [2, 3]
    assert sorted(folder.name.rpartition("-")[0] for folder in own.iterdir() if "-" in folder.name) == [
        "damaged-2",
        "damaged-3",
    ]


def test_damaged_steps_keep_their_names_if_no_copy_is_intact(run, tmp_path):
    """Otherwise the next start would find no checkpoint, and begin anew."""
    place = tmp_path / "kept"
    copying.Copying(str(run), str(place), keep=2, say=print).copy_newest()
    fetching = copying.Fetching(str(run), str(place), say=print)
    layout = {"params": {"w": jax.ShapeDtypeStruct((1000,), np.float32, sharding=jax.device_put(0.0).sharding)}}
    for step in (3, 7, 9):
        damage(run, step)
    damage(place)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"no checkpoint in .* can be restored, and none was renamed"):
            store.Checkpoints(str(run / "checkpoints"), keep=9).restore_newest(layout, fetch=fetching.in_place_of)
        assert steps.complete(run / "checkpoints") == [3, 7, 9]
    assert not (run / "fetched").exists()


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


def test_a_fetch_that_was_interrupted_leaves_no_step_without_the_files_that_it_needs(run, tmp_path, monkeypatch):
    place, fresh = tmp_path / "kept", tmp_path / "fresh"
    (run / "vocabulary").mkdir()
    (run / "vocabulary" / "a.model").write_text("words")
    copying.require_place(str(run), str(place), hosts=1)
    with copying.Copying(str(run), str(place), keep=2, say=print):
        pass

    def interrupted(source, target):
        if "vocabulary" in os.fspath(target):
            raise KeyboardInterrupt
        return copy(source, target)

    copy = paths.copy_between
    with monkeypatch.context() as patched:
        patched.setattr(paths, "copy_between", interrupted)
        with pytest.raises(KeyboardInterrupt):
            copying.Fetching(str(fresh), str(place), say=print).newest()
    assert intact(fresh) == []
    assert copying.Fetching(str(fresh), str(place), say=print).newest() == 9
    assert (fresh / "vocabulary" / "a.model").read_text() == "words"


def test_a_step_that_is_gone_is_not_copied_and_its_copy_stays(run, tmp_path):
    copying.copy_step(run / "checkpoints" / "9", kept := paths.resolve(tmp_path) / "kept" / "9")
    with pytest.raises(FileNotFoundError, match="was removed before it was copied"):
        copying.copy_step(run / "gone", kept)
    assert steps.is_complete(kept)


def test_two_runs_cannot_share_a_place(run, saved, tmp_path):
    place = str(tmp_path / "kept")
    copying.require_place(str(run), place, hosts=1)
    copying.require_place(str(run), place, hosts=1)  # again, at a restart
    another = shutil.copytree(saved, tmp_path / "another")
    with pytest.raises(UserError, match=r"was taken by another run than .*another, which has copied no .*/kept/run_id"):
        copying.require_place(str(another), place, hosts=1)
    shutil.copytree(saved / "checkpoints", tmp_path / "kept" / "checkpoints")
    with pytest.raises(UserError, match=r"has checkpoints of another run than .*another: give another place"):
        copying.require_place(str(another), place, hosts=1)
    begun = tmp_path / "begun"  # its first start ended before its first checkpoint
    copying.require_place(str(begun), str(tmp_path / "elsewhere"), hosts=1)
    copying.require_place(str(begun), place, hosts=1)
    assert (begun / "run_id").read_text() == (run / "run_id").read_text()
    for run_dir in ("gs://bucket/run", place):
        with pytest.raises(UserError, match="copied from a local run directory to another place"):
            copying.require_place(run_dir, place, hosts=1)


def test_the_checkpoints_of_a_run_that_was_never_a_copy_are_not_touched(run, saved, tmp_path):
    """Unless the run has none of its own: then it continues from them."""
    place = shutil.copytree(saved, tmp_path / "another")
    for refuses in (copying.check_place, copying.require_place):
        with pytest.raises(UserError, match=r"no file run_id, .*run: give a place without checkpoints, or"):
            refuses(str(run), str(place), hosts=1)
    assert intact(place) == [3, 7, 9]
    assert not (place / "run_id").exists()
    copying.require_place(str(tmp_path / "empty"), str(place), hosts=1)
    assert copying.Fetching(str(tmp_path / "empty"), str(place), say=print).newest() == 9
    copying.require_place(str(tmp_path / "empty"), str(place), hosts=1)  # again, at a restart
