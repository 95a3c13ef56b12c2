"""Attention: by plain products, with the splash kernel, with cuDNN, and around a ring of chips."""
