"""Predictions of training steps, from their compiled programs: a run compares them with what it measures.

`predictions.json` ships with the package. It has an entry for each golden record of `tests/golden/`, which
`tests/run.sh lab golden --write` keeps up to date.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from core.files import paths
from launch import program_identity
from launch.config import Settings
from launch.experiment import Experiment
from parallel.planning.prediction import Prediction

FILE = Path(__file__).with_name("predictions.json")


def find(experiment: Experiment, settings: Settings) -> Prediction | None:
    """Returns a prediction for the same training step, possibly from another experiment; None if there is none."""
    return json.loads(FILE.read_text()).get(program_identity.fingerprint(experiment, settings))


def write(records: Iterable[dict[str, Any]]) -> None:
    """Writes the predictions of golden records; of records of the same training step, the first counts."""
    found: dict[str, Any] = {}
    for record in records:
        found.setdefault(record["fingerprint"], _of(record))
    lines = (f"{json.dumps(name)}: {json.dumps(entry, sort_keys=True)}" for name, entry in sorted(found.items()))
    paths.write_text_atomically(paths.resolve(FILE), "{\n" + ",\n".join(lines) + "\n}\n")


def _of(record: dict[str, Any]) -> dict[str, Any]:
    return {
        "memory": {"peak_bytes": record["memory"]["peak_bytes"]},
        "predicted": {name: record["predicted"][name] for name in ("step_seconds", "mfu")},
        "versions": {"libtpu": record["versions"]["libtpu"]},
    }
