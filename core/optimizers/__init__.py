"""Optimizers built on optax, with gradient clipping, weight decay, frozen parameters and parameter averages.

schedules.py   learning rate by step
rules.py       adamw, adafactor, lion, muon, adam_atan2
base.py        `Optimizer`, and the shared arguments: learning_rate, weight_decay, clip_norm, no_decay, frozen
average.py     exponential moving average of the parameters
table.py       sign updates for the touched rows of an embedding table
external.py    any transformation of optax, or of your own, as an `Optimizer`
layout.py      logical axes of the state
"""

from core.optimizers.average import averaged
from core.optimizers.base import Optimizer, Rule
from core.optimizers.external import Transformation, as_optimizer, from_optax
from core.optimizers.layout import state_axes
from core.optimizers.rules import adafactor, adam_atan2, adamw, lion, muon
from core.optimizers.schedules import Schedule, constant, warmup_cosine, warmup_floor, warmup_linear
from core.optimizers.table import with_table

__all__ = [
    "Optimizer",
    "Rule",
    "Schedule",
    "Transformation",
    "adafactor",
    "adam_atan2",
    "adamw",
    "as_optimizer",
    "averaged",
    "constant",
    "from_optax",
    "lion",
    "muon",
    "state_axes",
    "warmup_cosine",
    "warmup_floor",
    "warmup_linear",
    "with_table",
]
