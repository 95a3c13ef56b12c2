"""The metrics of one candidate layout, from a compiled step or from arithmetic.

A `Range` has two values: that of the faster case, then that of the slower one.
"""

import dataclasses
from typing import Any

from core.slices import GIB, Slice
from parallel.planning import calibration
from parallel.planning.cost import StepTime

Range = tuple[float, float]


@dataclasses.dataclass(frozen=True)
class CandidateMetrics:
    """The metrics of a candidate.

    Attributes:
      name: such as `fsdp: fsdp 16, remat full`.
      flops: FLOPs of the model in a step, without recomputation; None if unknown.
      used_is_bound: whether the step may use less HBM than `used_bytes` at the peak.
      bubble: idle share of a pipeline's time, 0 to 1.
      compile_seconds: None if the metrics are from arithmetic.
      rows, tokens: of a step; `steps` is of the run.
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
    used_is_bound: bool = False

    def used(self, form: str) -> str:
        """Formats the GiB of HBM in use at the peak: `≤ 27.4` if it is a bound; `form` is such as `{:.1f}`."""
        return f"{'≤ ' if self.used_is_bound else ''}{form.format(self.used_bytes / GIB)}"

    @property
    def free_bytes(self) -> float:
        """Bytes of a chip's usable HBM that are free at the peak; may be negative."""
        return self.slice.chip.usable_hbm_bytes - self.used_bytes

    @property
    def step_seconds(self) -> Range:
        """Seconds per step."""
        if self.compile_seconds is None:
            return self.time.hidden, self.time.exposed
        return calibration.interval(self.time.scheduled)

    @property
    def scheduled_seconds(self) -> float | None:
        """Predicted seconds per step; None if the step was not compiled."""
        return None if self.compile_seconds is None else self.time.scheduled

    @property
    def tokens_per_second(self) -> Range:
        """Tokens per second of the whole slice."""
        fast, slow = self.step_seconds
        return self.tokens / fast, self.tokens / slow

    @property
    def mfu(self) -> Range | None:
        """Model FLOPs utilization; None without `flops`. It may be above 1 with products in int8 or FP8."""
        if not self.flops:
            return None
        fast, slow = (self.slice.share_of_peak(self.flops, seconds=seconds) for seconds in self.step_seconds)
        return fast, slow

    @property
    def hours(self) -> Range:
        """Hours of the whole run."""
        fast, slow = self.step_seconds
        return fast * self.steps / 3600, slow * self.steps / 3600

    def as_json(self) -> dict[str, Any]:
        """Returns figures of the candidate as JSON values."""
        names = (
            *("name", "rows", "used_bytes", "free_bytes", "step_seconds", "scheduled_seconds", "tokens_per_second"),
            *("mfu", "hours", "bubble", "compile_seconds", "is_as_written", "used_is_bound"),
        )
        return {name: getattr(self, name) for name in names} | {"time": self.time.as_json()}


def between(pair: Range, form: str, factor: float = 1) -> str:
    """Formats a range with the smaller number first, such as `0.61 – 0.94`.

    `form` is a format string such as `{:.2f}`; `factor` multiplies both numbers.
    """
    low, high = (form.format(value * factor) for value in sorted(pair))
    return low if low == high else f"{low} – {high}"
