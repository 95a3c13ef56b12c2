"""Saves, restores, verifies, compares and prunes the checkpoints of a run."""
