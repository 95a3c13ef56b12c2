"""Scales an experiment's batch size to another slice, so that each device keeps its number of rows: `--scale-from`.

A trial on a smaller slice then has about the same arithmetic per device. Memory for sharded parameters, traffic between
chips, and learning rates that were chosen for the larger batch do not carry over.
"""

import fractions
import math
from collections.abc import Sequence

from core import slices
from core.errors import UserError
from launch.config import loader


def bindings(file: str, *, slice_name: str, scale_from: str, given: Sequence[str] = ()) -> list[str]:
    """Returns gin bindings that give each device of `slice_name` as many rows as a device of `scale_from` has.

    The number of data streams is kept if it divides the new batch size; otherwise it becomes the greatest common
    divisor of the two.

    Args:
      file: the experiment file.
      slice_name: name of the slice of the run.
      scale_from: name of the slice that the experiment's BATCH_SIZE is for.
      given: the other bindings of the command line.

    Raises:
      UserError: the batch would not have a whole number of rows, phases have batch sizes of their own, or the
        configuration has a mistake.
    """
    experiment = loader.load(file, bindings=given, slice_name=scale_from).build()
    if any(phase.batch_size for phase in experiment.phases):
        raise UserError(f"--scale-from: PHASES of {file} set batch sizes; scale them by hand, in a copy of the file")
    share = fractions.Fraction(slices.get(slice_name).devices, slices.get(scale_from).devices)
    rows = experiment.batch_size * share
    if rows.denominator > 1:
        raise UserError(
            f"--scale-from {scale_from}: BATCH_SIZE = {experiment.batch_size} on {slices.get(scale_from).devices} "
            f"devices is {float(rows):g} rows on {slices.get(slice_name).devices}; expected whole rows: give --gin "
            f'"BATCH_SIZE = N" with a multiple of {share.denominator}'
        )
    streams = math.gcd(experiment.task.num_streams, int(rows))
    return [f"BATCH_SIZE = {rows}", f"NUM_STREAMS = {streams}"]
