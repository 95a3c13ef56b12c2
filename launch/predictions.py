"""Finds predictions of training steps, made from compiled programs; a run compares them with its measurements.

`predictions.json` ships with the package; `tests/run.sh lab golden --write` makes it from the records in
`tests/golden/`.
"""

import json
from pathlib import Path

from launch import program_identity
from launch.config import Settings
from launch.experiment import Experiment
from parallel.prediction import Prediction

FILE = Path(__file__).with_name("predictions.json")


def find(experiment: Experiment, settings: Settings) -> Prediction | None:
    """Returns a prediction for the same training step, possibly from another experiment; None if there is none."""
    return json.loads(FILE.read_text()).get(program_identity.fingerprint(experiment, settings))
