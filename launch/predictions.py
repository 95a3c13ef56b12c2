"""Finds predictions of training steps, made from compiled programs.

`tests/run.sh lab golden --write` makes `predictions.json` from the records in `tests/golden/`.
"""

import json
from pathlib import Path

from launch import program_identity
from launch.config import Settings
from launch.experiment import Experiment
from parallel.prediction import Prediction

FILE = Path(__file__).with_name("predictions.json")


def find(experiment: Experiment, settings: Settings) -> Prediction | None:
    """Returns a prediction for the same training step; None if there is none."""
    return json.loads(FILE.read_text()).get(program_identity.fingerprint(experiment, settings))
