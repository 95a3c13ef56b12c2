"""Writes what the product has of golden records: the predictions that runs compare, and those of published runs."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from core.files import paths
from launch import predictions
from launch.environment import WORKSPACE
from parallel.planning import calibration
from parallel.planning.calibration import BOUNDS, PublishedRun, ratios

README = WORKSPACE / "docs" / "results" / "prediction-error.md"
_BEGIN, _END = "<!-- published: written by tests/run.sh lab golden --write -->", "<!-- end -->"


def write(records: Iterable[dict[str, Any]]) -> None:
    """Writes the predictions of golden records; of records of the same training step, the first counts."""
    found: dict[str, Any] = {}
    for record in records:
        found.setdefault(record["fingerprint"], _of(record))
    lines = (f"{json.dumps(name)}: {json.dumps(entry, sort_keys=True)}" for name, entry in sorted(found.items()))
    paths.write_text_atomically(paths.resolve(predictions.FILE), "{\n" + ",\n".join(lines) + "\n}\n")


def _of(record: dict[str, Any]) -> dict[str, Any]:
    return {
        "memory": {"peak_bytes": record["memory"]["peak_bytes"]},
        "predicted": {name: record["predicted"][name] for name in ("step_seconds", "mfu")},
        "versions": {"libtpu": record["versions"]["libtpu"]},
    }


def table(published: Sequence[PublishedRun]) -> str:
    """Returns the runs as a Markdown table."""
    lines = [
        "| run | slice | published | tokens/s per chip | predicted: hidden | as scheduled | exposed | over published |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in published:
        cells = [row["of"], row["slice"], row["printed"], f"{row['tokens_per_second_per_chip']:,}"]
        if "predicted" in row:
            cells += [f"{row['predicted'][bound]:,.0f}" for bound in BOUNDS]
            cells.append(" / ".join(f"{ratio:.2f}" for ratio in ratios(row)))
        else:
            cells += ["–"] * 4
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def write_published(predicted: Mapping[str, Mapping[str, Any]]) -> None:
    """Writes predictions, by name in tokens per second per chip, to published.json and the table of README.md."""
    rows = calibration.rows()
    published = [row | {"predicted": predicted[row["name"]]} if row["name"] in predicted else row for row in rows]
    calibration.FILE.write_text(json.dumps(published, indent=1) + "\n")
    before, _, rest = README.read_text().partition(_BEGIN)
    _, _, after = rest.partition(_END)
    README.write_text(f"{before}{_BEGIN}\n\n{table(published)}\n\n{calibration.label()}\n\n{_END}{after}")
