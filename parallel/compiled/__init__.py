"""Compiles programs for a slice, and reads their memory, traffic and costs from the HLO."""
