"""Bits flipped in a checkpoint are detected, harmless, or reported with their file."""

import logging

import jax
import numpy as np
import pytest

from core.checkpoints import reading, store
from tests.lab import flips

STATE = {"w": jax.device_put(np.arange(600, dtype=np.float32))}
ABSTRACT = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), STATE)


@pytest.fixture
def checkpoints(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "RETRY_SECONDS", 0.0)
    opened = store.Checkpoints(str(tmp_path / "checkpoints"), keep=1)
    opened.save(3, state=STATE, data={"a": b"3" * 99}, meta={"seed": 3})
    opened.wait()
    yield opened
    opened.close()


def content(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_every_flip_is_refused_or_harmless(checkpoints, tmp_path):
    before = content(tmp_path)
    found = flips.flip_newest(checkpoints, tmp_path / "checkpoints", ABSTRACT, count=60, seed=0)
    assert (found.refused + found.harmless, found.wrong) == (60, ())
    assert min(found.refused, found.harmless) > 0
    assert content(tmp_path) == before
    assert logging.root.manager.disable == logging.NOTSET


def test_a_bit_flip_without_recovery_is_reported_and_the_next_is_tried(checkpoints, tmp_path, monkeypatch):
    restore, calls = checkpoints.restore, []

    def sometimes(step, abstract_state):
        calls.append(step)
        if len(calls) == 2:
            raise reading.UnreadableError("host 0: OSError: it says nothing")
        return restore(step, abstract_state)

    monkeypatch.setattr(checkpoints, "restore", sometimes)
    found = flips.flip_newest(checkpoints, tmp_path / "checkpoints", ABSTRACT, count=3, seed=0)
    assert len(calls) == 4
    (wrong,) = found.wrong
    assert wrong.endswith("no fall-back: host 0: OSError: it says nothing")
    assert "byte" in wrong


def test_an_unexpected_error_restores_files_and_logging(checkpoints, tmp_path, monkeypatch):
    before, calls = content(tmp_path), []
    restore = checkpoints.restore

    def once(step, abstract_state):
        calls.append(step)
        if len(calls) > 1:
            raise AssertionError("nobody expects it")
        return restore(step, abstract_state)

    monkeypatch.setattr(checkpoints, "restore", once)
    with pytest.raises(AssertionError, match="nobody expects it"):
        flips.flip_newest(checkpoints, tmp_path / "checkpoints", ABSTRACT, count=3, seed=0)
    assert content(tmp_path) == before
    assert logging.root.manager.disable == logging.NOTSET
