"""Layers with test-time training: weights that change while a row is read."""

from models.ttt.config import TTTConfig

__all__ = ["TTTConfig"]
