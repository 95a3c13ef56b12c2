"""Requesting profiles from a run that is training, and printing profiles on the terminal."""
