"""Layers with test-time training: weights that change while a row is read.

config.py      the settings of a layer: `TTTConfig`
inner_loop.py  the inner models and how they learn, in matrix products and token by token
layer.py       the parameters and projections around the inner loop
mixer.py       the layer as the mixer of a decoder's layers
adapter.py     a frozen decoder with one such layer after its final norm, read in chunks: `AdaptedDecoder`
gates.py       rules that decide, chunk by chunk, whether the layer is used
evaluation.py  compares gates on the chunks of an evaluation
"""

from models.ttt.config import TTTConfig

__all__ = ["TTTConfig"]
