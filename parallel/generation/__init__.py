"""Generates tokens, with a KV cache if the model has one, and scores given continuations."""
