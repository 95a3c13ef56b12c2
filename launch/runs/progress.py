"""Prints progress: one line per report, and what a long wait is for."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping

from core import units
from core.health import phase
from core.training.compilation import Totals
from core.training.host_metrics import Slowest
from launch.hosts.cluster import Host

WAITS = {  # phases that may take long, as a person reads them
    phase.OPENING: "setting up the run",
    phase.PREPARING: "preparing the data",
    phase.RESTORING: "initializing or restoring the state",
    phase.COMPILING: "compiling the training step",
    phase.EVALUATING: "evaluating",
    phase.SAVING: "saving a checkpoint",
    phase.ENDING: "finishing the run",
}
_LOOK_SECONDS = 0.5
_FIRST_SECONDS = 10  # then at every further 10 s of the first minute, then once a minute

BY_STEP = re.compile(r"_step_\d+$")  # a mean by step of a recursion


class Progress:
    """Prints a line per report on host 0; the others say where they begin.

    step   100/200  loss 2.1034  1.21 s/step  3,385 tokens/s  ETA 2:01
    """

    def __init__(self, last_step: int, *, host: Host, unit: str):
        self._last_step = last_step
        self._unit = unit
        self._host = host
        self._has_reported = False

    def start(self, step: int) -> None:
        """Prints where this host starts; host 0 also says if nothing is left to train."""
        if not self._host.is_zero:
            print(f"{self._host.name}: from step {step} to {self._last_step}", flush=True)
        if step >= self._last_step:
            self._print(
                f"step {step} of {self._last_step} is already done: raise TOTAL_STEPS, or use another --run-dir"
            )

    def compiled(self, totals: Totals) -> None:
        """Prints how many programs were compiled for the first step, and how many came from the cache."""
        self._print(
            f"compiled {units.counted(totals.programs - totals.found, 'program')} and read {totals.found} "
            f"that were kept, in {units.seconds(totals.seconds)}"
        )

    def line(self, step: int, values: Mapping[str, float], *, slowest: Slowest | None = None) -> None:
        """One finished interval of training, and the host that made the others wait in it, if one did."""
        if step == self._last_step or not self._has_reported:  # the first report is of a step that also compiled
            eta = ""
        else:
            eta = f"  ETA {units.clock((self._last_step - step) * values['step_seconds'])}"
        self._has_reported = True
        waiting = values["input_wait_seconds"]
        starved = f"  waits {waiting:.2f} s for data" if waiting > 0.1 * values["step_seconds"] else ""
        if slowest is not None:
            starved += f"  waits {slowest.seconds:.2f} s for host {slowest.host}"
        mfu = f"  {100 * values['mfu']:.1f} % MFU" if "mfu" in values else ""
        self._print(
            f"step {step:>6}/{self._last_step}  loss {values['loss']:.4f}  {values['step_seconds']:.3g} s/step  "
            f"{values['tokens_per_second']:,.0f} {self._unit}s/s{mfu}{eta}{starved}"
        )

    def warning(self, text: str) -> None:
        """Something that somebody should look at."""
        self._print(f"warning: {text}")

    def note(self, text: str) -> None:
        """A line of its own."""
        self._print(text)

    def validation(self, step: int, values: Mapping[str, float]) -> None:
        """One evaluation; of a mean by step of a recursion (`…_step_07`) only the curve's end, which has no number."""
        shown, _ = curves_apart(values)
        means = "  ".join(f"{name.removeprefix('validation/')} {value:.4f}" for name, value in shown.items())
        self._print(f"step {step:>6}/{self._last_step}  validation: {means}")

    def _print(self, text: str) -> None:
        if self._host.is_zero:
            print(text, flush=True)


def _print(line: str) -> None:
    print(line, flush=True)


class Waiting:
    """Prints from a thread what a long wait is for: `compiling the training step, 0:20`.

    It reads the phase that the run is in from `core.health.phase`.
    """

    def __init__(
        self,
        say: Callable[[str], None] = _print,
        *,
        place: Callable[[], phase.Place] = phase.place,
        compile_seconds: float | None = None,
    ):
        """Prints with `say`; `compile_seconds` is how long a plan took to compile the training step."""
        self._say = say
        self._place = place
        self._compile_seconds = compile_seconds
        self._phase, self._due = "", _FIRST_SECONDS
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="progress", daemon=True)

    def __enter__(self) -> Waiting:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def look(self) -> None:
        """Prints the phase and its time if a line is due."""
        place = self._place()
        if place.phase != self._phase or place.seconds < _FIRST_SECONDS:
            self._phase, self._due = place.phase, _FIRST_SECONDS
        if place.phase not in WAITS or place.seconds < self._due:
            return
        while self._due <= place.seconds:
            self._due += 10 if self._due < 60 else 60
        planned = self._compile_seconds if place.phase == phase.COMPILING else None
        known = f" (compiled in {units.clock(planned)} for the recorded plan)" if planned else ""
        self._say(f"{WAITS[place.phase]}, {units.clock(place.seconds)}{known}")

    def _watch(self) -> None:
        while not self._ended.wait(_LOOK_SECONDS):
            self.look()


def curves_apart(means: Mapping[str, float]) -> tuple[dict[str, float], dict[str, list[float]]]:
    """Means without a step of recursion, and those by step: `exact_accuracy_step_01`, … under `exact_accuracy`."""
    plain = {name: value for name, value in means.items() if not BY_STEP.search(name)}
    curves: dict[str, list[float]] = {}
    for name, value in sorted(means.items()):
        if name not in plain:
            curves.setdefault(BY_STEP.sub("", name), []).append(value)
    return plain, curves
