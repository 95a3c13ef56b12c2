"""Compares the numbers of runs: strategies with one device (agreement), and two variants of a run (bisect)."""
