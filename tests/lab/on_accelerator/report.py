"""The report of a measurement: one JSON file that is written after every figure, so that an interruption loses none.

{"device": {...}, "rehearsal": false, "steps": {"facts": {"status": "done", "figures": [...], "absent": [...]}}}
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from core.errors import UserError
from core.files import foreign_json, paths

FILE = "report.json"
RUNNING, DONE, FAILED, TIMED_OUT = "running", "done", "failed", "timed out"
HEADINGS = ("step", "measured", "value", "beside it", "ok")


class Figure(NamedTuple):
    """One measured value.

    Attributes:
      what: what was measured.
      value: a number, or a text such as a version.
      unit: of a number.
      beside: what it is compared with, as text.
      ok: whether a check passed; None: it is no check.
    """

    what: str
    value: float | str
    unit: str = ""
    beside: str = ""
    ok: bool | None = None


class Absent(NamedTuple):
    """A measurement that this device does not allow, with the reason."""

    what: str
    reason: str


class Report:
    """The file of a folder, and what it holds.

    Attributes:
      device: what was measured: platform, kind, slice, versions.
      is_rehearsal: whether a CPU took the part of the accelerator.
      steps: results by step.
    """

    def __init__(self, file: Path, device: Mapping[str, Any], *, is_rehearsal: bool, steps: dict[str, Any]):
        self._file, self.device, self.is_rehearsal, self.steps = file, dict(device), is_rehearsal, steps

    @classmethod
    def read(cls, file: Path) -> "Report":
        """Reads a report. Raises UserError if there is none, or the file is something else."""
        if not file.is_file():
            raise UserError(f"{file}: there is no such report; tests/run.sh lab accelerator --out DIR writes one")
        try:
            found = foreign_json.load_object(file.read_bytes(), {"device": dict, "rehearsal": bool, "steps": dict})
        except foreign_json.MalformedError as error:
            raise UserError(f"{file} is not a report of tests/run.sh lab accelerator: {error}") from error
        return cls(file, found["device"], is_rehearsal=found["rehearsal"], steps=found["steps"])

    @classmethod
    def opened(cls, folder: Path, device: Mapping[str, Any], *, is_rehearsal: bool) -> "Report":
        """Returns the report in a folder, to go on with it, or a new one.

        Raises:
          UserError: the folder has the report of another device, or of a rehearsal that this is not.
        """
        file = folder / FILE
        if not file.exists():
            return cls(file, device, is_rehearsal=is_rehearsal, steps={})
        found = cls.read(file)
        mine, theirs = ((d.get("slice"), r) for d, r in ((device, is_rehearsal), (found.device, found.is_rehearsal)))
        if mine != theirs:
            kinds = [f"{name}{' (a rehearsal)' if r else ''}" for name, r in (theirs, mine)]
            raise UserError(f"{file} is the report of {kinds[0]}, and this is {kinds[1]}: give another --out")
        found.device |= device
        return found

    def update(self, step: str, **fields: Any) -> None:
        """Sets fields of a step, and writes the file."""
        self.steps[step] = {**self.steps.get(step, {}), **fields}
        self.save()

    def save(self) -> None:
        """Writes the file atomically."""
        found = {"device": self.device, "rehearsal": self.is_rehearsal, "steps": self.steps}
        paths.write_text_atomically(self._file, json.dumps(found, indent=1) + "\n")

    def status(self, step: str) -> str | None:
        """Returns the status of a step; None if it never began."""
        return self.steps.get(step, {}).get("status")

    def figures(self, step: str) -> list[Figure]:
        """Returns the figures of a step."""
        return [Figure(**row) for row in self.steps.get(step, {}).get("figures", ())]

    def absent(self, step: str) -> list[Absent]:
        """Returns what a step could not measure."""
        return [Absent(**row) for row in self.steps.get(step, {}).get("absent", ())]

    def shown_by(self, step: str) -> bool:
        """Returns whether a step ended, measured something, and no check in it failed."""
        figures = self.figures(step)
        return self.status(step) == DONE and bool(figures) and all(figure.ok is not False for figure in figures)

    def rows(self, names: Sequence[str]) -> list[list[str]]:
        """Returns the rows of the table, under HEADINGS: the figures of every step, in this order."""
        return [row for name in names for row in self._rows_of(name)]

    def _rows_of(self, name: str) -> Iterable[list[str]]:
        for figure in self.figures(name):
            yield [name, figure.what, _valued(figure), figure.beside, _YES[figure.ok]]
        for what, reason in self.absent(name):
            yield [name, what, "not on this device", reason, ""]
        if (status := self.status(name)) != DONE:
            error = self.steps.get(name, {}).get("error", "")
            last = error.strip().splitlines()[-1:] or [""]
            yield [
                name,
                "all of it" if not self.figures(name) else "the rest",
                status or "not begun",
                last[0][:100],
                "",
            ]


_YES = {None: "", True: "yes", False: "NO"}


def _valued(figure: Figure) -> str:
    if isinstance(figure.value, str):
        return figure.value
    number = f"{figure.value:,.0f}" if abs(figure.value) >= 1000 else f"{figure.value:.3g}"
    return f"{number} {figure.unit}".strip()
