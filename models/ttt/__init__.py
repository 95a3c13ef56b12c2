"""Layers with test-time training: weights that change while a row is read.

config.py      the settings of a layer: `TTTConfig`
inner_loop.py  the inner models and how they learn, in matrix products and token by token
layer.py       the parameters and projections around the inner loop
"""

from models.ttt.config import TTTConfig

__all__ = ["TTTConfig"]
