"""The Tiny Recursive Model: one small network, applied to its own answer until the answer is right.

config.py     sizes and choices, and whether they fit together
model.py      the model: `TRM`
weights.py    the parameters
net.py        the blocks, and the recursion over latent and answer
operations.py  products, gate and norm, with derivatives of their own
halting.py    the carry: which rows go on, which take a new puzzle; loss and metrics of one step
schedules.py  what changes while it trains: exploration, and a curriculum of cycles
"""

from models.trm.halting import Carry
from models.trm.model import TRM
from models.trm.schedules import Curriculum, Linear

__all__ = ["TRM", "Carry", "Curriculum", "Linear"]
