"""Attention by plain products, splash, cuDNN, and around a ring."""
