"""Runs an experiment on this host: prepares it, trains, and prints and writes its progress."""
