"""Runs: prepare, start, watch and score them."""
