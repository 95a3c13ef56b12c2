"""Runs the training loop with its hooks, prefetches batches, writes profiles, and detects recompilations."""
