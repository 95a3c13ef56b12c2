"""The Tiny Recursive Model: a small network that is applied repeatedly to its own answer, and learns when to stop."""

from models.trm.halting import Carry
from models.trm.model import TRM
from models.trm.schedules import Curriculum, Linear

__all__ = ["TRM", "Carry", "Curriculum", "Linear"]
