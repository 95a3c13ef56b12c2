"""Compares the steps of a run with what was predicted from its compiled program.

A prediction is the time of a step, with an interval from errors for published steps, and the peak HBM.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax

from core import units
from core.errors import UserError
from core.slices import GIB, Slice

TOLERANCE = 0.25
SIMULATED = "simulated: CPU devices play the chips, so step time, HBM and MFU are not measured"
FOLLOWS = "step time, HBM and MFU follow with every report"
UNRECORDED = (
    "nothing: this program is not recorded; launch/run report {slice} EXPERIMENT.gin --compile says what it needs"
)
Prediction = Mapping[str, Any]


def line(record: Prediction) -> str:
    """Formats a prediction, such as `1.1 s (0.99 to 1.2 s) per step, 55 % MFU, 18.4 GiB (compiled by libtpu …)`."""
    return f"{figures(record)} ({label(record)})"


def figures(record: Prediction) -> str:
    """Formats predicted time, MFU (if known) and peak memory."""
    mfu = record["predicted"]["mfu"]
    share = f"{units.significant(100 * mfu['scheduled'], 2)} % MFU, " if mfu else ""
    low, seconds, high = between(record)
    memory = f"{'at most ' if _is_bound(record) else ''}{units.size(record['memory']['peak_bytes'])}"
    return f"{units.seconds(seconds)} ({units.seconds_between(low, high)}) per step, {share}{memory}"


def _is_bound(record: Prediction) -> bool:
    return record["memory"].get("peak_is_bound", False)


def between(record: Prediction) -> tuple[float, float, float]:
    """Returns the seconds of a step: the least expected, the predicted, and the most expected."""
    from parallel.planning import calibration  # a run without a recorded prediction needs none of planning

    seconds = record["predicted"]["step_seconds"]["scheduled"]
    low, high = calibration.interval(seconds)
    return low, seconds, high


def label(record: Prediction) -> str:
    """Returns a prediction's label, with the compiler's version."""
    from parallel.planning import calibration

    return calibration.label(libtpu=record["versions"]["libtpu"])


class PredictionCheck:
    """Computes MFU, HBM and predictions for reports, and warns of differences."""

    def __init__(
        self,
        record: Prediction | None,
        *,
        slice_: Slice,
        flops: float | None,
        is_measured: bool,
        warn: Callable[[str], None],
    ):
        """Compares with a record of the compiled program; None: nothing is predicted.

        `flops`: FLOPs of the model in a step; None: there is no MFU. `is_measured`: False if the devices simulate the
        slice.
        """
        self._record, self._slice, self._flops = record, slice_, flops
        self._peak = slice_.peak_flops
        if is_measured and flops and not self._peak:
            from parallel.planning import device_peak

            self._peak = device_peak.of_cpus(slice_)
        self._is_measured = is_measured
        self._warn = warn
        self._is_first = True
        self._warned: set[str] = set()

    def rows(self) -> dict[str, str]:
        """Returns rows of the run summary, by name."""
        if not self._slice.is_tpu:
            return {"measured": FOLLOWS if self._is_measured else SIMULATED}
        predicted = line(self._record) if self._record else UNRECORDED.format(slice=self._slice.name)
        return {"predicted": predicted, "measured": FOLLOWS if self._is_measured else SIMULATED}

    def metrics(self, values: Mapping[str, float], *, flops: float | None = None) -> dict[str, float]:
        """Returns `mfu` (0 to 1), `hbm_gib` and predictions, as far as known; {} in a simulation.

        `values`: metrics since the last report, with `step_seconds`. `flops`: of this step; None: as given before.
        """
        if not self._is_measured:
            return {}
        found: dict[str, float] = {}
        seconds, used = values["step_seconds"], peak_hbm_bytes()
        if flops := flops or self._flops:
            try:
                found["mfu"] = self._slice.mfu(flops, seconds=seconds, peak_flops=self._peak)
            except UserError as error:  # a wrong figure must not end the run
                self._warn_once("mfu", f"the MFU is not reported: {error}")
        if used:
            found["hbm_gib"] = used / GIB
        if self._record:
            (low, predicted, high), peak = between(self._record), self._record["memory"]["peak_bytes"] / GIB
            found["predicted/step_seconds"] = predicted
            found["predicted/hbm_gib"] = peak
            if not self._is_first:  # the first report includes compilation
                self._check("s per step", seconds, low, high, label(self._record))
                if used:
                    least = 0.0 if _is_bound(self._record) else peak
                    self._check("GiB of HBM", used / GIB, least, peak, label(self._record))
        self._is_first = False
        return found

    def _check(self, unit: str, value: float, low: float, high: float, about: str) -> None:
        if low * (1 - TOLERANCE) <= value <= high * (1 + TOLERANCE):
            return
        expected = f"{low:.3g}" if low == high else f"{low:.3g} to {high:.3g}"
        self._warn_once(
            unit,
            f"measured {value:.3g} {unit}, predicted {expected} ({about}): more than {TOLERANCE:.0%} apart. "
            "`tests/run.sh lab golden --check` says whether the program is still the recorded one",
        )

    def _warn_once(self, metric: str, sentence: str) -> None:
        if metric not in self._warned:
            self._warned.add(metric)
            self._warn(sentence)


def peak_hbm_bytes() -> int | None:
    """Returns the peak bytes of HBM in use on this host's first device; None if unknown."""
    stats: Mapping[str, Any] = jax.local_devices()[0].memory_stats() or {}
    return stats.get("peak_bytes_in_use")
