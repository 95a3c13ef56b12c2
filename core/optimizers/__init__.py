"""Optimizers built on optax, with clipping, weight decay, frozen parameters and parameter averages."""

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
