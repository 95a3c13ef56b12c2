"""One bit flipped in a checkpoint's files, again and again: is anything restored that is not what was saved?"""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from core.checkpoints.description import DamagedError
from core.checkpoints.leaves import Misfit
from core.checkpoints.reading import UnreadableError
from core.checkpoints.store import Checkpoints
from launch import configuration


class Flips(NamedTuple):
    """What came of flipping bits.

    Attributes:
      refused: how often the step was found to be damaged.
      harmless: how often all was read as it was saved.
      wrong: what must not be: files of which something else was read without a word, or that could not be read in a way
        that proves no damage, so that no run would have fallen back.
    """

    refused: int
    harmless: int
    wrong: tuple[str, ...]


def flip(run_dir: Path, *, experiment: str, slice_name: str, bindings: Sequence[str], count: int, seed: int) -> Flips:
    """Flips one bit at a time in the files of the newest step of a run, and flips it back.

    Args:
      run_dir: of a run that has ended.
      experiment: its file.
      slice_name: its slice, whose chips this process must have as devices.
      bindings: of the run.
      count: how many bits.
      seed: which ones.
    """
    program = configuration.load(experiment, bindings=bindings, slice_name=slice_name).build().bind(jax.devices())
    checkpoints = Checkpoints(str(run_dir / "checkpoints"), keep=1, read_only=True)
    try:
        return flip_newest(checkpoints, run_dir / "checkpoints", program.abstract_state, count=count, seed=seed)
    finally:
        checkpoints.close()


def flip_newest(checkpoints: Checkpoints, folder: Path, abstract_state: Any, *, count: int, seed: int) -> Flips:
    """As `flip`, of the newest step of checkpoints that are open; says nothing of each damage meanwhile.

    Args:
      checkpoints: of a run that has ended.
      folder: where they are.
      abstract_state: what to restore.
      count: how many bits.
      seed: which ones.
    """
    step = checkpoints.latest_step()
    saved = checkpoints.restore(step, abstract_state)
    files = sorted(p for p in (folder / str(step)).rglob("*") if p.is_file() and p.stat().st_size)
    chance = random.Random(seed)
    refused, harmless, wrong = 0, 0, []
    disabled = logging.root.manager.disable
    logging.disable()  # what reads in the background says of every damage
    try:
        for _ in range(count):
            file = chance.choice(files)
            whole = file.read_bytes()
            at, bit = chance.randrange(len(whole)), chance.randrange(8)
            file.write_bytes(whole[:at] + bytes([whole[at] ^ (1 << bit)]) + whole[at + 1 :])
            try:
                same = _same(saved, checkpoints.restore(step, abstract_state))
                harmless += same
                wrong += [] if same else [f"{file.name}: byte {at}, bit {bit}"]
            except UnreadableError as error:
                wrong.append(f"{file.name}: byte {at}, bit {bit}: not fallen back: {error}")
            except (DamagedError, Misfit, ValueError):
                refused += 1
            finally:
                file.write_bytes(whole)
    finally:
        logging.disable(disabled)
    return Flips(refused, harmless, tuple(wrong))


def _same(one: Any, other: Any) -> bool:
    """Bit for bit: arrays, streams and description."""
    if one[1:] != other[1:]:
        return False
    pairs = zip(jax.tree.leaves(one[0]), jax.tree.leaves(other[0]), strict=True)
    return all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs)
