"""A run that is ready to start: what `launch.training.ready` makes, and all that trains or evaluates takes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from launch.experiment import Experiment
from launch.host import Host
from parallel.partitioner import Program


@dataclasses.dataclass(frozen=True)
class Run:
    """A run that is ready to start.

    Attributes:
      experiment: what to train.
      program: its steps on this slice.
      host: this process among its peers.
      run_dir: shared by all hosts.
      meta: what is kept beside every checkpoint.
      last_step: where to stop.
    """

    experiment: Experiment
    program: Program
    host: Host
    run_dir: str
    meta: Mapping[str, Any]
    last_step: int

    @property
    def checkpoint_dir(self) -> str:
        """Where the checkpoints are."""
        return f"{self.run_dir}/checkpoints"
