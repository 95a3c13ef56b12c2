"""How far predictions are from what others measured, said beside every predicted figure by one function.

`published.json` has training runs whose speed on TPUs is public, and what the model of time says of the same sizes on
the same slices (`gin/published/`, filled in by `launch/run golden --write`). The one idea: what is compared is tokens
per second. A published MFU counts FLOPs its own way (attention whole, or causal); the time does not depend on that.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from core import versions

FILE = Path(__file__).parent / "published.json"
README = Path(__file__).parent / "README.md"
BOUNDS = ("hidden", "scheduled", "exposed")
_BEGIN, _END = "<!-- published: written by launch/run golden --write -->", "<!-- end -->"

Row = Mapping[str, Any]


def label(*, libtpu: str | None = None) -> str:
    """`compiled by libtpu 0.0.42.1, uncalibrated, spread 0.9 to 1.5 of published`.

    Args:
      libtpu: version that compiled what is predicted; None: the one installed.
    """
    version = libtpu or versions.version("libtpu")
    found = spread(rows())
    said = f"spread {found[0]:.2f} to {found[1]:.2f} of published" if found else "spread not known"
    return f"compiled by libtpu {version}, uncalibrated, {said}"


def rows() -> list[dict[str, Any]]:
    """The published runs, with `predicted` where they have been compiled."""
    return json.loads(FILE.read_text())


def spread(published: Sequence[Row]) -> tuple[float, float] | None:
    """Predicted over published speed: the least with no traffic hidden, the most with all of it; None without any."""
    found = [ratios(row) for row in published if "predicted" in row]
    return (min(r["exposed"] for r in found), max(r["hidden"] for r in found)) if found else None


def ratios(row: Row) -> dict[str, float]:
    """Predicted over published tokens per second, by bound."""
    return {b: row["predicted"][b] / row["tokens_per_second_per_chip"] for b in BOUNDS}


def with_predictions(published: Sequence[Row], predicted: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The published runs with what is predicted of them by name, in tokens per second and chip; others as they were."""
    return [
        {**row, "predicted": dict(predicted[row["name"]])} if row["name"] in predicted else dict(row)
        for row in published
    ]


def table(published: Sequence[Row]) -> str:
    """A row for each published run, as Markdown."""
    lines = [
        "| run | slice | published | tokens/s per chip | predicted: hidden | as scheduled | exposed | over published |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in published:
        cells = [row["of"], row["slice"], row["printed"], f"{row['tokens_per_second_per_chip']:,}"]
        if "predicted" in row:
            cells += [f"{row['predicted'][b]:,.0f}" for b in BOUNDS]
            cells.append(" / ".join(f"{ratio:.2f}" for ratio in ratios(row).values()))
        else:
            cells += ["–"] * 4
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def write(published: Sequence[Row]) -> None:
    """Keeps the rows, and their table in README.md."""
    FILE.write_text(json.dumps(list(published), indent=1) + "\n")
    before, _, rest = README.read_text().partition(_BEGIN)
    _, _, after = rest.partition(_END)
    README.write_text(f"{before}{_BEGIN}\n\n{table(published)}\n\n{label()}\n\n{_END}{after}")
