"""Compares numerical results: of strategies and one device (agreement), and of two variants of a run (bisect)."""
