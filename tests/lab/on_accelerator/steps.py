"""The steps of a measurement, in order of value, with their limits."""

from collections.abc import Sequence
from typing import NamedTuple

from tests.lab.on_accelerator.report import DONE, Report


class Step(NamedTuple):
    """One step, which a process of its own measures: a crash, or memory that JAX keeps, ends with it.

    Attributes:
      code: `module:function` in this folder.
      seconds: its limit on an accelerator.
      least: seconds with which it is worth starting.
      what: what it measures.
      shows: rows of tests/capabilities.toml that it shows to hold on the device if it ends without a failed check.
    """

    code: str
    seconds: int
    least: int
    what: str
    shows: tuple[str, ...] = ()


STEPS = {
    "facts": Step("facts:measure", 60, 15, "device, versions, peaks of matrix products, bandwidth of a copy", ("R12",)),
    "agreement": Step("agreement:measure", 90, 20, "training steps of small models, compared with the CPU", ("T01",)),
    "quickstart": Step(
        "runs:quickstart", 120, 40, "a whole run by launch/pod.sh local, to its sample", ("R06", "T06", "T17", "N13")
    ),
    "training": Step(
        "runs:training", 240, 90, "a decoder with 1.1 billion parameters", ("T02", "C05", "O01", "O03", "O08")
    ),
    "attention": Step("attention:measure", 100, 30, "flash attention, compared with plain products", ("T08",)),
    "transformers": Step("peer:training", 180, 60, "the same decoder by transformers with torch.compile"),
    "generation": Step("generation:measure", 120, 40, "new tokens of that decoder, beside transformers", ("N13",)),
    "sudoku": Step("runs:sudoku", 180, 60, "300 steps of the recursive model on Sudoku 4x4", ("N12",)),
    "published": Step("runs:published", 120, 40, "a published model, tuned", ("C16",)),
}


def order(report: Report, names: Sequence[str]) -> list[str]:
    """Returns the steps that are left: those that never began, then those that began and did not end."""
    left = [name for name in names if report.status(name) != DONE]
    return sorted(left, key=lambda name: report.status(name) is not None)  # keeps the order of value
