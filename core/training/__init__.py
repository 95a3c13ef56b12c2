"""The training loop and what hangs on it: hooks, batches on the devices ahead of time, profiles, recompilations."""
