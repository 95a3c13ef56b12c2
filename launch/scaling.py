"""Scales the batch size to another slice, with the same rows per device: `--scale-from`.

Memory for sharded parameters, traffic and learning rates do not scale with it.
"""

import fractions
import math
from collections.abc import Sequence

from core import slices
from core.errors import UserError
from launch.config import loader
from launch.config.changes import Changes


def bindings(file: str, *, slice_name: str, scale_from: str, given: Sequence[str] = ()) -> list[str]:
    """Returns gin bindings that keep the number of rows per device on another slice.

    Args:
      file: the experiment file.
      slice_name: name of the slice of the run.
      scale_from: name of the slice that the batch size is for.
      given: the other bindings of the command line.

    Raises:
      UserError: the batch would not have a whole number of rows, or phases set batch sizes.
    """
    config = loader.load(file, bindings=given, slice_name=scale_from)
    experiment = config.build()
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
    statements = Changes(config, experiment.model).of_experiment("batch_size", str(rows))
    found = [*statements, *([f"NUM_STREAMS = {streams}"] if streams != experiment.task.num_streams else ())]
    try:
        scaled = loader.load(file, bindings=[*given, *found], slice_name=slice_name).build()
    except UserError as error:
        raise UserError(f"--scale-from {scale_from}, which sets {', '.join(found)}: {error}") from error
    if scaled.batch_size != rows:
        raise UserError(
            "--scale-from: the phase that PHASE names sets its batch size; scale it by hand, in a copy of the file"
        )
    if rows % (left := scaled.task.num_streams):
        raise UserError(
            f"--scale-from {scale_from}: {rows} rows on {slice_name} do not divide over the {left} streams of the "
            f"task, which NUM_STREAMS does not set: bind the task's own num_streams to {streams}"
        )
    return found
