"""The training runtime, and the interfaces through which models, strategies and data meet."""
