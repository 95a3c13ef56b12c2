"""The metrics of one candidate layout, from a compiled step or from arithmetic.

A `Range` has two values, the faster first. Of a compiled step they are the interval of `planning.calibration`; of
arithmetic, the times with all traffic hidden behind computation and with none hidden.
"""

import dataclasses
from typing import Any

from core.slices import Slice
from parallel.planning import calibration
from parallel.planning.cost import StepTime

Range = tuple[float, float]


@dataclasses.dataclass(frozen=True)
class CandidateMetrics:
    """The metrics of a candidate.

    Attributes:
      slice: the slice to train on.
      name: name of the candidate.
      rows: rows of a global batch.
      tokens: tokens of a global batch.
      steps: steps of the whole run.
      flops: FLOPs of the model in a step, without recomputation; None if the model does not count them.
      used_bytes: bytes of a chip's HBM in use at the peak.
      time: time of a step.
      bubble: idle share of a pipeline's time, 0 to 1.
      compile_seconds: time to compile; None if `time` and `used_bytes` are estimated by arithmetic.
      is_as_written: whether the candidate is the experiment as written.
    """

    slice: Slice
    name: str
    rows: int
    tokens: int
    steps: int
    flops: float | None
    used_bytes: float
    time: StepTime
    bubble: float
    compile_seconds: float | None
    is_as_written: bool

    @property
    def free_bytes(self) -> float:
        """Bytes of a chip's HBM that are free at the peak."""
        return self.slice.chip.usable_hbm_bytes - self.used_bytes

    @property
    def step_seconds(self) -> Range:
        """Seconds per step: the least and the most that are expected."""
        if self.compile_seconds is None:
            return self.time.hidden, self.time.exposed
        return calibration.interval(self.time.scheduled)

    @property
    def scheduled_seconds(self) -> float | None:
        """Predicted seconds per step, with the traffic hidden that the compiler overlapped; None if not compiled."""
        return None if self.compile_seconds is None else self.time.scheduled

    @property
    def tokens_per_second(self) -> Range:
        """Tokens per second of the whole slice: the most and the least that are expected."""
        fast, slow = self.step_seconds
        return self.tokens / fast, self.tokens / slow

    @property
    def mfu(self) -> Range | None:
        """Model FLOPs utilization, 0 to 1, the largest first; None if the model does not count its FLOPs."""
        if not self.flops:
            return None
        fast, slow = (self.slice.mfu(self.flops, seconds=seconds) for seconds in self.step_seconds)
        return fast, slow

    @property
    def hours(self) -> Range:
        """Hours of the whole run: the least and the most that are expected."""
        fast, slow = self.step_seconds
        return fast * self.steps / 3600, slow * self.steps / 3600

    def as_json(self) -> dict[str, Any]:
        """Returns all metrics as JSON values."""
        names = (
            *("name", "rows", "used_bytes", "free_bytes", "step_seconds", "scheduled_seconds", "tokens_per_second"),
            *("mfu", "hours", "bubble", "compile_seconds", "is_as_written"),
        )
        return {name: getattr(self, name) for name in names} | {"time": self.time.as_json()}


def between(pair: Range, form: str, factor: float = 1) -> str:
    """Formats a range, smaller number first: `0.61 – 0.94`, or one number if both are equal."""
    low, high = (form.format(value * factor) for value in sorted(pair))
    return low if low == high else f"{low} – {high}"
