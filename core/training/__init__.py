"""The training loop, its hooks, prefetching of batches, profiles, and detection of recompilations."""
