"""Compiles programs for a slice, and reads memory, traffic and costs from the results."""
