"""Optimizers built on optax, with gradient clipping, weight decay, frozen parameters and parameter averages.

schedules.py   learning rate by step, and the ranges of hyperparameters
base.py        `Optimizer`, the arguments that all rules share, any transformation of optax, logical axes of the state
stacks.py      whether a transformation of optax treats a layer of a stack as a parameter of its own
rules.py       adamw, adafactor, lion, muon, adam_atan2; averages of parameters; sign updates for rows of a table
"""

from core.optimizers.base import Optimizer, Rule, Transformation, as_optimizer, from_optax, state_axes
from core.optimizers.rules import adafactor, adam_atan2, adamw, averaged, lion, muon, with_table
from core.optimizers.schedules import Schedule, constant, joined, warmup_cosine, warmup_floor, warmup_linear

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
    "joined",
    "lion",
    "muon",
    "state_axes",
    "warmup_cosine",
    "warmup_floor",
    "warmup_linear",
    "with_table",
]
