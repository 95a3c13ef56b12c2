"""Checkpoints of a run: written by all hosts, complete or not there, and known by their content."""
