"""Optimizers from optax and of our own, with what training adds: clipping, decay masks, frozen groups, averages.

schedules.py   learning rate by step
rules.py       adamw, adafactor, lion, muon, adam_atan2
base.py        `Optimizer`, and what all of them share: learning_rate, weight_decay, clip_norm, no_decay, frozen
layout.py      named axes of the state
"""

from core.optimizers.average import averaged
from core.optimizers.base import CONSTANTS, NORMS, Optimizer
from core.optimizers.layout import state_axes
from core.optimizers.rules import MATRICES, adafactor, adam_atan2, adamw, lion, muon
from core.optimizers.schedules import Schedule, constant, warmup_cosine, warmup_floor, warmup_linear
from core.optimizers.table import with_table

__all__ = [
    "CONSTANTS",
    "MATRICES",
    "NORMS",
    "Optimizer",
    "Schedule",
    "adafactor",
    "adam_atan2",
    "adamw",
    "averaged",
    "constant",
    "lion",
    "muon",
    "state_axes",
    "warmup_cosine",
    "warmup_floor",
    "warmup_linear",
    "with_table",
]
