"""A running step held against what was predicted of it: on a TPU only, since nothing else has its time.

The one idea: a prediction is a range, from all traffic hidden to none. A measurement that is outside it by more than a
quarter is worth a warning, once: the model of time, the machine or the configuration is not what somebody thinks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax

from core import slices
from core.slices import GIB
from launch.experiment import Experiment
from launch.plans import golden

TOLERANCE = 0.25
SIMULATED = "simulated: CPU devices play the chips, so step time, HBM and MFU are not measured"

FOLLOWS = "step time, HBM and MFU follow with every report"
UNRECORDED = "nothing: no record of this program; launch/run report {slice} EXPERIMENT.gin --compile says what it needs"


class Measured:
    """What is logged beside a step's metrics."""

    def __init__(
        self,
        experiment: Experiment,
        *,
        config_text: str,
        on_tpu: bool,
        warn: Callable[[str], None],
        hbm_bytes: Callable[[], int | None] | None = None,
    ):
        """Looks for a record of what this experiment costs.

        Args:
          experiment: what runs.
          config_text: its canonical configuration.
          on_tpu: whether the devices are the chips themselves.
          warn: gets a sentence where measured and predicted part; each kind of number once.
          hbm_bytes: the most that this host's first chip has used; None where that is not known.
        """
        self._flops = experiment.flops_per_step
        self._slice = slices.get(experiment.slice)
        self._on_tpu = on_tpu
        self._warn = warn
        self._hbm_bytes = hbm_bytes or peak_hbm_bytes
        self._record = golden.find(config_text, experiment)
        self._is_first = True
        self._warned: set[str] = set()

    def rows(self) -> dict[str, str]:
        """For the card of the run: what is predicted and measured of a step, or why nothing is."""
        predicted = golden.line(self._record) if self._record else UNRECORDED.format(slice=self._slice.name)
        return {"predicted": predicted, "measured": FOLLOWS if self._on_tpu else SIMULATED}

    def beside(self, values: Mapping[str, float]) -> dict[str, float]:
        """MFU, HBM and, where it is known, what was predicted; nothing off a TPU.

        Args:
          values: of the steps since the last line, `step_seconds` among them.

        Raises:
          ValueError: an MFU above 100 %.
        """
        if not self._on_tpu:
            return {}
        found = {}
        if self._flops:
            found["mfu"] = self._slice.mfu(self._flops, seconds=values["step_seconds"])
        if used := self._hbm_bytes():
            found["hbm_gib"] = used / GIB
        if self._record:
            found |= self._compare(values["step_seconds"], used)
        self._is_first = False
        return found

    def _compare(self, seconds: float, used: int | None) -> dict[str, float]:
        time, peak = self._record["predicted"]["step_seconds"], self._record["memory"]["peak_bytes"]
        if not self._is_first:  # the first line has the compilation in it
            self._judge("s per step", seconds, time["hidden"], time["exposed"])
            if used:
                self._judge("GiB of HBM", used / GIB, peak / GIB, peak / GIB)
        return {
            "predicted/step_seconds_hidden": time["hidden"],
            "predicted/step_seconds_exposed": time["exposed"],
            "predicted/hbm_gib": peak / GIB,
        }

    def _judge(self, unit: str, value: float, low: float, high: float) -> None:
        if low * (1 - TOLERANCE) <= value <= high * (1 + TOLERANCE) or unit in self._warned:
            return
        self._warned.add(unit)
        expected = f"{low:.3g}" if low == high else f"{low:.3g} to {high:.3g}"
        self._warn(
            f"measured {value:.3g} {unit}, predicted {expected} ({golden.label_of(self._record)}): more than "
            f"{TOLERANCE:.0%} apart. `launch/run golden --check` says whether the program is still the one recorded"
        )


def peak_hbm_bytes() -> int | None:
    """The most that this host's first chip has used so far; None where the runtime does not say."""
    stats: Mapping[str, Any] = jax.local_devices()[0].memory_stats() or {}
    return stats.get("peak_bytes_in_use")
