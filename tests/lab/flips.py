"""Flips single bits in the files of a checkpoint and checks that nothing else than what was saved is restored."""

import logging
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from core.checkpoints.reading import Misfit, UnreadableError
from core.checkpoints.steps import DamagedError
from core.checkpoints.store import Checkpoints
from launch.config import loader


class Flips(NamedTuple):
    """Results of flipping bits.

    Attributes:
      refused: how often the damage was detected.
      harmless: how often everything was restored as it was saved.
      wrong: failures: files from which something else was restored silently, or that caused an error that is not
        reported as damage, so that a run would not have fallen back to an earlier step.
    """

    refused: int
    harmless: int
    wrong: tuple[str, ...]


def flip(run_dir: Path, *, experiment: str, slice_name: str, bindings: Sequence[str], count: int, seed: int) -> Flips:
    """Flips one bit at a time in the files of the newest step of a run, and flips it back.

    Args:
      run_dir: of a run that has ended.
      experiment: experiment file of the run.
      slice_name: slice of the run; this process must have as many devices.
      bindings: of the run.
      count: number of flips.
      seed: chooses the bits.
    """
    program = loader.load(experiment, bindings=bindings, slice_name=slice_name).build().bind(jax.devices())
    checkpoints = Checkpoints(str(run_dir / "checkpoints"), keep=1, read_only=True)
    try:
        return flip_newest(checkpoints, run_dir / "checkpoints", program.abstract_state, count=count, seed=seed)
    finally:
        checkpoints.close()


def flip_newest(checkpoints: Checkpoints, folder: Path, abstract_state: Any, *, count: int, seed: int) -> Flips:
    """As `flip`, with open checkpoints; logging is off meanwhile.

    Args:
      checkpoints: of a run that has ended.
      folder: of the checkpoints.
      abstract_state: what to restore.
      count: number of flips.
      seed: chooses the bits.
    """
    step = checkpoints.latest_step()
    saved = checkpoints.restore(step, abstract_state)
    files = sorted(p for p in (folder / str(step)).rglob("*") if p.is_file() and p.stat().st_size)
    chance = random.Random(seed)
    refused, harmless, wrong = 0, 0, []
    disabled = logging.root.manager.disable
    logging.disable()  # threads that read in the background log every damage
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
                wrong.append(f"{file.name}: byte {at}, bit {bit}: no fall-back: {error}")
            except (DamagedError, Misfit, ValueError):
                refused += 1
            finally:
                file.write_bytes(whole)
    finally:
        logging.disable(disabled)
    return Flips(refused, harmless, tuple(wrong))


def _same(one: Any, other: Any) -> bool:
    """Returns whether arrays, streams and description are equal, bit for bit."""
    if one[1:] != other[1:]:
        return False
    pairs = zip(jax.tree.leaves(one[0]), jax.tree.leaves(other[0]), strict=True)
    return all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs)
