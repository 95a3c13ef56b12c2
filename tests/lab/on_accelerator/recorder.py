"""The request that a step's process gets, and the file to which it writes one figure after another."""

import dataclasses
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from core.files import paths
from tests.lab.on_accelerator.report import Absent, Figure


@dataclasses.dataclass(frozen=True)
class Request:
    """The request that the process of a step gets.

    Attributes:
      slice: the devices of this machine, such as `h100:1`.
      is_rehearsal: whether sizes are small, for a CPU.
      work: a folder for runs, which is deleted at the end.
      out: the folder of the report.
      model: the folder of a published model; "" if none was given.
      python: of an environment with torch and transformers.
    """

    slice: str
    is_rehearsal: bool
    work: str
    out: str
    model: str = ""
    python: str = ""

    def sized(self, usual: Any, rehearsed: Any) -> Any:
        """Returns the size for an accelerator, or that of a rehearsal."""
        return rehearsed if self.is_rehearsal else usual


class Recorder:
    """Writes every figure at once, because the process may be ended at any time."""

    def __init__(self, file: Path):
        self._file = file
        self._figures: dict[str, Figure] = {}
        self._absent: dict[str, Absent] = {}

    def figure(self, what: str, value: float | str, unit: str = "", beside: str = "", ok: bool | None = None) -> None:
        """Records a figure, in place of an earlier one with this name; the arguments are fields of `Figure`."""
        self._figures[what] = Figure(what, value, unit, beside, ok)
        self._write()

    def absent(self, what: str, reason: str) -> None:
        """Records what cannot be measured on this device."""
        self._absent[what] = Absent(what, reason)
        self._write()

    def _write(self) -> None:
        rows = {"figures": self._figures, "absent": self._absent}
        found = {name: [row._asdict() for row in each.values()] for name, each in rows.items()}
        paths.write_text_atomically(self._file, json.dumps(found))


def seconds_of(call: Callable[[], Any], *, calls: int, turns: int = 5) -> float:
    """Returns the median seconds of a call to a device, of several turns in which `calls` are dispatched together.

    The first call, which compiles, is not counted. `call` returns arrays.
    """
    import jax  # not in the process of transformers

    jax.block_until_ready(call())
    found = []
    for _ in range(turns):
        begin = time.perf_counter()
        jax.block_until_ready([call() for _ in range(calls)])
        found.append((time.perf_counter() - begin) / calls)
    return statistics.median(found)
