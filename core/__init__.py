"""The training runtime and the narrow waists where models, strategies and data meet."""
