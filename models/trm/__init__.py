"""The Tiny Recursive Model: a small network that is applied repeatedly to its own answer, and learns when to stop.

config.py      the hyperparameters
model.py       the model: `TRM`
net.py         the blocks, and the recursion over latents and answer
operations.py  products, gate and norm, with custom derivatives
weights.py     the parameters and their initialization
halting.py     the carry, in which rows continue or take a new puzzle; loss and metrics of one step
schedules.py   settings that change during training: exploration, and a curriculum of cycles
"""

from models.trm.halting import Carry
from models.trm.model import TRM
from models.trm.schedules import Curriculum, Linear

__all__ = ["TRM", "Carry", "Curriculum", "Linear"]
